"""sdist, wheel and .deb are reproducible and complete, and work without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "deploy" / "packages" / "build.py"
DEPENDENCIES = sysconfig.get_path("purelib")  # its .pth files are not read, so it has no elastic


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, BUILD, "--out", out, cwd=ROOT)
    return out


def only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def names(files: Sequence[Path]) -> list[str]:
    return sorted(path.name for path in files)


def test_a_second_build_has_the_same_bytes(built: Path, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        run(sys.executable, BUILD, "--out", tmp_path / "again", cwd=tmp_path, TZ="Asia/Tokyo")
    finally:
        os.umask(old)
    first, second = sorted(built.iterdir()), sorted((tmp_path / "again").iterdir())
    assert names(first) == names(second)
    assert len(first) == 3
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_an_installed_package_trains_and_extracts_its_files_without_the_repository(
    built: Path, tmp_path: Path, pattern: str
) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--disable-pip-version-check", "--no-build-isolation"]
    run(*pip, only(built, pattern), cwd=tmp_path, PYTHONPATH=DEPENDENCIES)
    elastic = home / "bin" / "elastic"

    def at_work(*arguments: str | Path) -> str:
        return run(elastic, *arguments, cwd=tmp_path, PYTHONPATH=DEPENDENCIES)

    assert at_work("--version").startswith("elastic ")
    at_work("files", "--to", tmp_path / "out")
    carried = ("CHANGELOG.md", "README.md", "deploy", "docs", "helm", "protos")
    tracked = run("git", "ls-files", *carried, cwd=ROOT).splitlines()
    expected = {name for name in tracked if not name.startswith("deploy/packages")}
    copies = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {str(path.relative_to(tmp_path / "out")) for path in copies} == expected
    for name in expected:
        assert (tmp_path / "out" / name).read_bytes() == (ROOT / name).read_bytes(), name
    for name in ("steady.py", "toy.py"):
        shutil.copy(ROOT / "tests" / "integration" / "scripts" / name, tmp_path)
    job = ["--nproc-per-node", "2", "--log-dir", tmp_path / "logs", tmp_path / "steady.py"]
    at_work("run", *job, "--epochs", "1")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")
def test_the_deb_carries_the_units_and_the_wheel(built: Path, tmp_path: Path) -> None:
    deb = only(built, "*.deb")
    run("dpkg-deb", "--extract", deb, tmp_path / "root", cwd=tmp_path)
    root = tmp_path / "root"
    units = root / "usr" / "lib" / "systemd" / "system"
    sources = ROOT / "deploy" / "systemd"
    assert names([*units.iterdir()]) == names([*sources.glob("*.service")])
    for unit in units.iterdir():
        assert unit.read_bytes() == (sources / unit.name).read_bytes()
    wheel = only(built, "*.whl")
    assert (root / "usr" / "share" / "elastic" / wheel.name).read_bytes() == wheel.read_bytes()
    assert os.access(root / "usr" / "bin" / "elastic-preemption-watch", os.X_OK)
    assert wheel.name in (root / "usr" / "share" / "doc" / "elastic" / "README").read_text()
    shown = run("dpkg-deb", "--contents", deb, cwd=tmp_path)
    assert {line.split()[1] for line in shown.splitlines()} == {"root/root"}


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("dpkg") is None, reason="needs root and dpkg")
def test_the_deb_can_be_installed_and_removed(built: Path, tmp_path: Path) -> None:
    """Uses an overlay of this machine's root, where no systemd runs."""
    script = tmp_path / "try"
    script.write_text(
        "set -e\n"
        f"mount -t tmpfs tmpfs {tmp_path}/over\n"
        f"mkdir {tmp_path}/over/up {tmp_path}/over/work {tmp_path}/over/root\n"
        f"mount -t overlay overlay {tmp_path}/over/root -o "
        f"lowerdir=/,upperdir={tmp_path}/over/up,workdir={tmp_path}/over/work\n"
        f"cp {only(built, '*.deb')} {tmp_path}/over/root/elastic.deb\n"
        f"exec chroot {tmp_path}/over/root sh -ec '"
        "dpkg --force-depends -i /elastic.deb; "
        "test -f /usr/lib/systemd/system/elastic-agent@.service; id elastic; "
        "dpkg -r elastic; test ! -e /usr/lib/systemd/system/elastic-agent@.service'\n"
    )
    (tmp_path / "over").mkdir()
    said = run("unshare", "--mount", "sh", script, cwd=tmp_path)
    assert "uid=" in said
