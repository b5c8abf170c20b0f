"""The locked versions satisfy the project's requirements; an audit says what it did not check."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
IMAGE, ALL = ROOT / "deploy" / "image" / "locked.txt", ROOT / "deploy" / "locked.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def script(name: str) -> ModuleType:
    """Load a script of deploy, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned(path: Path) -> dict[str, str]:
    """The versions by name; every line must have a hash and nothing else."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", x) for x in lines]
    assert all(found), lines
    return {match[1]: match[2] for match in found if match is not None}


@pytest.mark.parametrize(
    ("path", "extras"), [(IMAGE, ["tensorboard", "s3"]), (ALL, ["dev", "s3", "examples"])]
)
def test_locked_versions_satisfy_the_requirements(path: Path, extras: list[str]) -> None:
    """If this fails, run: make locked"""
    versions = pinned(path)
    for text in [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]:
        asked = Requirement(text)
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        if name not in ("torch", "elastic-ddp") and (
            asked.marker is None or asked.marker.evaluate()
        ):
            assert asked.specifier.contains(versions[name], prereleases=True), text
    assert pinned(IMAGE).items() <= pinned(ALL).items()


def test_a_report_of_the_resolver_becomes_lines_without_torch() -> None:
    def package(name: str, version: str, digest: str | None = "0") -> dict[str, Any]:
        info = {"archive_info": {"hashes": {"sha256": digest}}} if digest else {"dir_info": {}}
        return {"metadata": {"name": name, "version": version}, "download_info": info}

    packages = [package("Typing_Ext", "2"), package("torch", "2"), package("nvidia-nccl-cu13", "1")]
    report = {"install": [*packages, package("elastic", "0", None), package("a", "1")]}
    lines = script("locked").locked(report, ["a==3 --hash=sha256:3"])
    assert lines == ["a==3 --hash=sha256:3", "typing-ext==2 --hash=sha256:0"]


def test_an_audit_that_could_not_check_a_package_does_not_pass() -> None:
    judge = script("audit").verdict
    good = {"name": "a", "version": "1", "vulns": []}
    skipped = {"name": "b", "skip_reason": "not found"}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    assert judge({"dependencies": [good]}) == (0, ["checked: 1 packages"])
    code, lines = judge({"dependencies": [good, skipped]})
    assert (code, "not checked: 1 of 2 packages" in lines[0]) == (75, True)
    code, lines = judge({"dependencies": [bad, skipped]})
    assert (code, lines[0]) == (1, "c 2: CVE-1, fixed in 3")
