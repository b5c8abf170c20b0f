"""Builds sdist, wheel and .deb in dist/, with equal bytes for equal commits: `make packages`.

It needs setuptools as in pyproject.toml, git, and dpkg-deb for the .deb.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = """\
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
UNITS = ROOT / "deploy" / "systemd"
CONTROL = """\
Package: elastic
Version: {version}
Architecture: all
Maintainer: elastic maintainers <root@localhost>
Section: science
Priority: optional
Depends: python3 (>= 3.10), python3-venv, systemd (>= 252)
Description: keeps one data-parallel PyTorch job training while machines come and go
 Units for coordinators and agents, and the wheel that they run. torch is not part of it:
 /usr/share/doc/elastic/README says how to install both to /opt/elastic.
"""
README = """\
The units run /opt/elastic/bin/elastic. To install it there, with the build of torch that fits this
machine's GPUs, or with the build that pip chooses:

    python3 -m venv /opt/elastic
    /opt/elastic/bin/pip install /usr/share/elastic/{wheel}

After an upgrade of this package run the second command again, restart the coordinators one after
the other, then the agents (systemctl restart 'elastic-agent@*'): workers go on training.
`/opt/elastic/bin/elastic files` lists charts, alert rules and more.
"""
POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    systemd-sysusers elastic.conf || true
    if [ -d /run/systemd/system ]; then
        systemd-tmpfiles --create elastic.conf || true
        systemctl daemon-reload || true
    fi
    if [ ! -x /opt/elastic/bin/elastic ]; then
        echo "elastic: the units need /opt/elastic: see /usr/share/doc/elastic/README" >&2
    fi
fi
"""
PRERM = """\
#!/bin/sh
set -e
# Only on removal: during an upgrade, jobs go on training.
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl stop 'elastic-agent@*.service' 'elastic-coordinator@*.service' || true
fi
"""
POSTRM = """\
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
fi
"""


def main() -> None:
    """Build the packages from the tracked files as they are in the working tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-deb", action="store_true")
    options = parser.parse_args()
    os.umask(0o022)
    epoch = _output("git", "log", "-1", "--format=%ct").strip()
    os.environ["SOURCE_DATE_EPOCH"] = epoch
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        clean = Path(name) / "source"
        _copy_of_sources(clean, int(epoch))
        made = Path(name) / "made"
        sdist = options.out / _built("build_sdist", clean, made)
        _pack_again(made / sdist.name, sdist, int(epoch))
        with tarfile.open(sdist) as tar:
            tar.extractall(name, filter="data")
        source = Path(name) / sdist.name.removesuffix(".tar.gz")
        wheel = options.out / _built("build_wheel", source, options.out)
        print(sdist, wheel, sep="\n")
        if not options.no_deb:
            print(_deb(Path(name) / "deb", wheel, options.out, int(epoch)))


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _copy_of_sources(target: Path, epoch: int) -> None:
    """Copy only tracked files, with one time and plain modes: this machine does not matter."""
    for name in _output("git", "ls-files", "-z").split("\0"):
        source, copy = ROOT / name, target / name
        if name and source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
            os.utime(copy, (epoch, epoch))


def _built(what: str, source: Path, target: Path) -> str:
    """Have setuptools build into `target`; return the name of the file."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", SETUPTOOLS, what, str(target.absolute())]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return done.stdout.splitlines()[-1]


def _pack_again(made: Path, target: Path, epoch: int) -> None:
    """Pack the sdist again, without this machine's times and users that setuptools puts in."""
    packed = io.BytesIO()
    with tarfile.open(made) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())


def _deb(root: Path, wheel: Path, out: Path, epoch: int) -> Path:
    """Build the .deb. dpkg-deb uses SOURCE_DATE_EPOCH only for its own times, so set the files'."""
    version = wheel.name.split("-")[1]
    placed = {
        **{f"usr/lib/systemd/system/{one.name}": one for one in UNITS.glob("*.service")},
        "usr/lib/sysusers.d/elastic.conf": UNITS / "elastic.sysusers.conf",
        "usr/lib/tmpfiles.d/elastic.conf": UNITS / "elastic.tmpfiles.conf",
        "usr/share/elastic/doctor.conf": UNITS / "doctor.conf",
        f"usr/share/elastic/{wheel.name}": wheel,
        "usr/bin/elastic-preemption-watch": UNITS / "elastic-preemption-watch",
    }
    for name, source in placed.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if name.startswith("usr/bin") else 0o644)
    written = {
        "DEBIAN/control": CONTROL.format(version=version),
        "DEBIAN/postinst": POSTINST,
        "DEBIAN/prerm": PRERM,
        "DEBIAN/postrm": POSTRM,
        "usr/share/doc/elastic/README": README.format(wheel=wheel.name),
    }
    for name, text in written.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755 if text.startswith("#!") else 0o644)
    (root / "etc" / "elastic").mkdir(parents=True)
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (epoch, epoch))
    target = out / f"elastic_{version}_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(target)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target


if __name__ == "__main__":
    main()
