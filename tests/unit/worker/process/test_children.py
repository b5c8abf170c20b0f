"""Children of a worker hold none of its sockets and do not outlive it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time

import pytest

from elastic.worker.process.children import die_with_parent, keep_from_children
from tests.unit.worker.together import Seat, in_processes
from tests.waiting import eventually


def forked(child: int, holds: socket.socket) -> bool:
    """In a forked child: tell through the pipe whether the socket is still open, then wait."""
    try:
        os.fstat(holds.fileno())
        os.write(child, b"open")
    except OSError:
        os.write(child, b"closed")
    time.sleep(30)
    os._exit(0)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, within_s: float = 5.0) -> None:
    eventually(lambda: not is_running(pid), f"process {pid} has outlived its parent", within_s)


@pytest.mark.parametrize("kept", [True, False])
@in_processes(1)
def test_forked_children_close_descriptors_kept_from_them(seat: Seat, kept: bool) -> None:
    del seat
    one, two = socket.socketpair()
    keep_from_children(lambda: [one.fileno(), 100000] if kept else [])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        forked(write, one)
    assert os.read(read, 10) == (b"closed" if kept else b"open")
    one.close()
    # The other end notices this process's end only if no child holds a copy.
    assert bool(select.select([two], [], [], 0.05)[0]) is kept
    os.kill(pid, signal.SIGKILL)


@in_processes(1)
def test_a_child_dies_with_its_parent(seat: Seat) -> None:
    """The parent is killed, so it cannot end the child itself."""
    del seat
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        kept, _ = socket.socketpair()
        keep_from_children(lambda: [kept.fileno()])
        child = os.fork()
        if child == 0:
            forked(write, kept)
        os.write(write, b"%8d" % child)
        time.sleep(30)
        os._exit(0)
    heard = b""
    while len(heard) < len("closed") + 8:
        heard += os.read(read, 100)
    child = int(heard.replace(b"closed", b""))
    assert is_running(child)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until_gone(child)


@in_processes(1)
def test_a_child_forked_by_another_thread_lives_as_long_as_the_process(seat: Seat) -> None:
    """The kernel would send the parent-death signal when the forking thread ends."""
    del seat
    kept, _ = socket.socketpair()
    keep_from_children(lambda: [kept.fileno()])
    read, write = os.pipe()
    pids = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            signal_at_parents_end = ctypes.c_int(-1)
            ctypes.CDLL(None).prctl(2, ctypes.byref(signal_at_parents_end))
            os.write(write, b"%d" % signal_at_parents_end.value)
            time.sleep(30)
            os._exit(0)
        pids.append(pid)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert os.read(read, 10) == b"0"
    assert is_running(pids[0])
    os.kill(pids[0], signal.SIGKILL)


@in_processes(1)
def test_a_child_whose_parent_has_died_already_dies_at_once(seat: Seat) -> None:
    del seat
    pid = os.fork()
    if pid == 0:
        die_with_parent(os.getppid() + 1)  # as if another had been the parent
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
