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
