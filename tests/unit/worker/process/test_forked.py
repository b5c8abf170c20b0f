"""A forked worker's output is redirected before anything can go wrong."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from elastic.runtime.training_lease import TrainingLease
from elastic.v1 import local_pb2 as pb
from elastic.worker.process import zygote


class Os:
    """The os module without the calls that would change this process."""

    def __init__(self) -> None:
        self.replaced: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def dup2(self, _: int, descriptor: int) -> None:
        self.replaced.append(descriptor)

    def setpgid(self, *_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Os:
    made = Os()
    monkeypatch.setattr(zygote, "os", made)
    return made


def test_output_is_redirected_before_anything_can_go_wrong(system: Os) -> None:
    output = os.memfd_create("output")
    request = pb.SpawnRequest(worker="w")
    with pytest.raises(PermissionError):
        zygote.become_worker(request, os.getppid(), TrainingLease.unlimited(), output)
    assert system.replaced == [1, 2, 0]
