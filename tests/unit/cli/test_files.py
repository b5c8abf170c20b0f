"""`elastic files` in the repository; tests/deploy/test_packages.py tests the installed command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic.cli.files import carried_files
from elastic.errors import ConfigurationError

ROOT = Path(__file__).parents[3]


def listed(capsys: pytest.CaptureFixture[str], pattern: str | None = None) -> list[str]:
    carried_files(pattern, to=None, output="json")
    return [row["file"] for row in json.loads(capsys.readouterr().out)]


def test_files_that_documents_name_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = set(listed(capsys))
    assert "deploy/systemd/elastic-agent@.service" in found
    assert "deploy/prometheus/elastic.rules.yml" in found
    assert "helm/elastic/Chart.yaml" in found
    assert "protos/elastic/v1/control.proto" in found
    assert {"docs/DOCTOR.md", "README.md", "CHANGELOG.md"} <= found
    assert not any("__pycache__" in name or "build.py" in name for name in found)


@pytest.mark.parametrize("pattern", ["deploy/systemd", "deploy/systemd/", "*/systemd/*"])
def test_folder_or_pattern_selects_files(capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    found = listed(capsys, pattern)
    assert found == sorted(f"deploy/systemd/{n}" for n in os.listdir(ROOT / "deploy" / "systemd"))


def test_copies_are_identical_and_scripts_stay_executable(tmp_path: Path) -> None:
    carried_files("deploy/systemd", to=tmp_path / "out", output="table")
    for source in (ROOT / "deploy" / "systemd").iterdir():
        copy = tmp_path / "out" / "deploy" / "systemd" / source.name
        assert copy.read_bytes() == source.read_bytes()
        assert os.access(copy, os.X_OK) == (source.name == "elastic-preemption-watch")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    carried_files("docs/DOCTOR.md", to=tmp_path, output="table")
    mine = tmp_path / "docs" / "DOCTOR.md"
    mine.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"DOCTOR\.md would be overwritten"):
        carried_files("docs", to=tmp_path, output="table")
    assert [path.name for path in tmp_path.rglob("*.md")] == ["DOCTOR.md"]
    assert mine.read_text() == "mine"


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'unit'"):
        carried_files("unit", to=None, output="table")
