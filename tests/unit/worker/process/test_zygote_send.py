"""The zygote hangs up on an agent after a failed send, so that it does not wait for the event."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from elastic.runtime.training_lease import TrainingLease
from elastic.v1 import local_pb2 as pb
from elastic.worker.process.zygote import _Zygote


class _OutOfBuffers(socket.socket):
    def sendall(self, *_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The zygote's end, which cannot send, and the agent's end."""
    ours, theirs = socket.socketpair()
    with _OutOfBuffers(fileno=ours.detach()) as sending, theirs:
        theirs.settimeout(30)
        yield sending, theirs


def test_a_failed_send_hangs_up_on_the_agent_and_keeps_the_exit_for_the_next_one(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        zygote = _Zygote(listener, TrainingLease.unlimited(), grace_s=1.0)
        zygote._agent = ends[0]
        zygote._send(pb.ZygoteEvent(spawned=pb.Spawned(worker="w", pid=1)))
        assert ends[1].recv(1) == b""
        exited = pb.ZygoteEvent(exited=pb.Exited(worker="w", pid=1))
        zygote._send(exited)
        assert zygote._undelivered == [exited]
        zygote._log_writer.close()
