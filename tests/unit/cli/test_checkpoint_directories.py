"""The directories that commands take for checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import open_directory
from elastic.cli import compose, files
from elastic.errors import ConfigurationError
from tests.unit.checkpoint.manifests import make_manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    catalog.commit(open_directory(str(tmp_path)), make_manifest(80, 1, []))
    return tmp_path


def test_no_command_takes_the_directory_of_one_checkpoint(saved: Path) -> None:
    one = saved / "step-000000080"
    refusal = f"{one} is a checkpoint of step 80; give its parent directory, {saved}"
    for refused in (
        lambda: compose.checkpoint_directory(str(one)),
        lambda: files.list_checkpoints(str(one), output="json"),
        lambda: files.verify_checkpoints(str(one), step=None, output="json"),
        lambda: files.verify_checkpoints(str(one), step=80, output="json"),
    ):
        with pytest.raises(ConfigurationError) as told:
            refused()
        assert str(told.value) == refusal
    assert [path.name for path in one.iterdir()] == ["manifest.json"]


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "nope"
    for refused in (
        lambda: files.list_checkpoints(str(missing), output="table"),
        lambda: files.verify_checkpoints(str(missing), step=None, output="table"),
        lambda: files.verify_checkpoints(f"file://{missing}", step=80, output="table"),
    ):
        with pytest.raises(ConfigurationError, match=f"{missing} does not exist"):
            refused()
    assert not missing.exists()


@pytest.mark.parametrize("step", [None, 80])
def test_a_verification_of_nothing_is_no_success(
    tmp_path: Path, step: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step-000000080").mkdir()  # not committed
    for url in (str(tmp_path), "memory://nothing/here"):
        with pytest.raises(ConfigurationError, match=f"no committed checkpoint in {url};"):
            files.verify_checkpoints(url, step=step, output="json")
    assert capsys.readouterr().out == ""
    files.list_checkpoints(str(tmp_path), output="table")
    assert capsys.readouterr().out.splitlines() == [
        f"no committed checkpoint in {tmp_path}",
        "step 80: unfinished, not a checkpoint; the next prune removes it",
    ]


def test_intact_checkpoints_are_a_success(saved: Path) -> None:
    assert files.verify_checkpoints(str(saved), step=None, output="table") == 0
    assert files.verify_checkpoints(str(saved), step=80, output="table") == 0
