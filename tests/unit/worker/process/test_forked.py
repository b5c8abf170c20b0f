"""A forked worker's output goes to its log before anything can go wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
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


def test_output_is_redirected_before_anything_can_go_wrong(system: Os, tmp_path: Path) -> None:
    request = pb.SpawnRequest(worker="w", log_path=str(tmp_path / "w.log"))
    with pytest.raises(PermissionError):
        zygote.become_worker(request, os.getppid(), TrainingLease.unlimited())
    assert system.replaced == [1, 2, 0]


def test_a_worker_whose_log_cannot_be_opened_says_so_and_goes_on(
    system: Os, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    log = tmp_path / "file" / "logs" / "w.log"
    zygote._redirect_output(str(log))
    assert system.replaced == [0]
    assert capsys.readouterr().err == f"the log {log} cannot be opened: Not a directory\n"


def test_a_log_directory_that_was_removed_is_made_again(system: Os, tmp_path: Path) -> None:
    log = tmp_path / "gone" / "w.log"
    zygote._redirect_output(str(log))
    assert system.replaced == [1, 2, 0]
    assert log.exists()
