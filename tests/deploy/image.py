"""Builds the image of deploy/image with buildah, and runs it with crun.

The base image is a Debian root instead of one from a registry; torch is the one that pip finds
here. `python -m tests.deploy.image` builds the image and prints its size and the memory of its
processes. Needs root, buildah, crun and debootstrap.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "image" / "Containerfile"
STRANGER = 54321
"""A user without an entry in passwd(5)."""
_TOOLS = ("buildah", "crun", "debootstrap")
_BUILD_S = 900.0
_OF_PIP = ("cert", "find-links", "index-url", "proxy", "trusted-host")
# crun refuses cgroups in hybrid mode, which the machine may have.
_ALONE = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec"
_NO_CAPABILITIES: dict[str, list[str]] = {
    kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
}


def missing_requirement() -> str:
    """Return what is missing to build and run images here, for people; "" if nothing is."""
    if os.geteuid() != 0:
        return "buildah's chroot isolation needs root"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"no `{tool}` in PATH: apt-get install {' '.join(_TOOLS)}"
    return ""


class Builder:
    """Builds images and keeps them in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pip = directory / "pip.conf"
        self._seen = _pip_configuration(self._pip)

    def make_base(self) -> None:
        """Make a small Debian with Python, as localhost/base."""
        base = self._directory / "base"
        packages = "python3,python3-venv,ca-certificates"
        _run("debootstrap", "--variant=minbase", f"--include={packages}", _debian(), str(base))
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(base), "/")
        self.buildah("commit", "--quiet", container, "localhost/base")
        self.buildah("rm", container)
        shutil.rmtree(base)

    def build(self, name: str, **arguments: str) -> subprocess.CompletedProcess[str]:
        """Build the Containerfile with these build arguments, as localhost/NAME."""
        volumes = [f"--volume={path}:{path}:ro" for path in self._seen]
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        return _called(
            *self._command("bud", "--isolation=chroot", "--layers", "--pull-never", *volumes),
            f"--volume={self._pip}:/etc/pip.conf:ro",
            "--build-arg=PYTHON_IMAGE=localhost/base",
            *given,
            f"--file={CONTAINERFILE}",
            f"--tag=localhost/{name}",
            str(ROOT),
        )

    def image(self, name: str) -> Image:
        """Return a built image, with its root mounted."""
        inspected = json.loads(self.buildah("inspect", "--type=image", f"localhost/{name}"))
        container = self.buildah("from", "--pull-never", f"localhost/{name}").strip()
        root = Path(self.buildah("mount", container).strip())
        return Image(root=root, config=inspected["OCIv1"]["config"])

    def buildah(self, *arguments: str) -> str:
        """Run buildah; return its output, or raise RuntimeError with its messages if it fails."""
        return _output(*self._command(*arguments))

    def _command(self, *arguments: str) -> list[str]:
        places = [f"--root={self._directory}/storage", f"--runroot={self._directory}/run"]
        return ["buildah", *places, "--storage-driver=overlay", *arguments]

    def close(self) -> None:
        """Unmount and remove all containers."""
        self.buildah("umount", "--all")
        self.buildah("rm", "--all")


@dataclass(frozen=True)
class Image:
    """An image: the path of its root, and `config` as in OCI's image specification."""

    root: Path
    config: Mapping[str, Any]


class Container:
    """A process of an image, with what `restricted` pods get: no capabilities, no new privileges, a
    read-only root, /tmp in memory, a user without passwd(5) entry, no network but loopback."""

    def __init__(
        self, image: Image, directory: Path, arguments: Sequence[str], seen: Mapping[str, Path]
    ) -> None:
        self._directory = directory
        directory.mkdir()
        binds = [_mount(at, "bind", str(path), "bind", "ro") for at, path in seen.items()]
        # A runtime cannot make mount points in a read-only root.
        for at in seen:
            (image.root / at.lstrip("/")).mkdir(exist_ok=True)
        process = {
            "user": {"uid": STRANGER, "gid": STRANGER},
            "args": [*image.config["Entrypoint"], *arguments],
            "env": image.config["Env"],
            "cwd": image.config["WorkingDir"],
            "noNewPrivileges": True,
            "capabilities": _NO_CAPABILITIES,
        }
        spec = {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": str(image.root), "readonly": True},
            "hostname": "pod",
            "mounts": [
                _mount("/proc", "proc", "proc"),
                _mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755", "size=64m"),
                _mount("/dev/shm", "tmpfs", "shm", "nosuid", "nodev", "mode=1777", "size=256m"),
                _mount("/tmp", "tmpfs", "tmpfs", "nosuid", "nodev", "mode=1777"),
                *binds,
            ],
            "linux": {
                "namespaces": [{"type": t} for t in ("pid", "network", "ipc", "uts", "mount")]
            },
        }
        (directory / "config.json").write_text(json.dumps(spec))
        state, self._pid_file = directory / "state", directory / "pid"
        crun = f"crun --root {state} --cgroup-manager=disabled"
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("unshare", "--mount", "sh", "-c"),
                    f"{_ALONE} {crun} run --pid-file {self._pid_file} --bundle {directory} it",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(timeout_s)

    def wait_for(self, words: str, timeout_s: float) -> None:
        """Wait until the output contains `words`."""
        deadline = time.monotonic() + timeout_s
        while words not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The pid of its first process, as seen outside the container."""
        return int(self._pid_file.read_text())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the first process."""
        os.kill(self.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait(30.0)


@contextmanager
def builder() -> Iterator[Builder]:
    """Yield a builder that has a base image, in a temporary directory."""
    with (
        tempfile.TemporaryDirectory(prefix="image-", ignore_cleanup_errors=True) as directory,
        contextlib.closing(Builder(Path(directory))) as one,
    ):
        one.make_base()
        yield one


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def _pip_configuration(path: Path) -> list[Path]:
    """Write to `path` where pip finds packages here; return the directories that it names."""
    printed = _output(sys.executable, "-m", "pip", "config", "list")
    settings = dict(re.findall(r"[\w:]+\.\.?([\w-]+)='(.*)'", printed))
    found = {name: settings[name] for name in _OF_PIP if name in settings}
    configuration = configparser.RawConfigParser()
    configuration["global"] = found
    with path.open("w") as file:
        configuration.write(file)
    named = [Path(word) for word in " ".join(found.values()).split() if word.startswith("/")]
    return sorted({p if p.is_dir() else p.parent for p in named if p.exists()})


def _debian() -> str:
    version = Path("/etc/os-release").read_text()
    found = re.search(r"VERSION_CODENAME=(\w+)", version)
    return found[1] if found else "bookworm"


def _called(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)


def _run(*command: str) -> None:
    _output(*command)


def _output(*command: str) -> str:
    done = _called(*command)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _memory(pid: int) -> dict[str, tuple[int, int]]:
    """Return (resident, unique) MiB of each process of the container, by its pid and title."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns" / "pid") != namespace:
                continue
            title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            rows = (path / "smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        figures = {row.split()[0].rstrip(":"): int(row.split()[1]) >> 10 for row in rows}
        unique = figures["Private_Clean"] + figures["Private_Dirty"]
        found[f"{path.name} {title}"] = (figures["Rss"], unique)
    return found


def main() -> None:
    if missing := missing_requirement():
        sys.exit(missing)
    scripts = ROOT / "tests" / "integration" / "scripts"
    with builder() as one:
        done = one.build("elastic", VARIANT="cpu")
        if done.returncode != 0:
            sys.exit(done.stderr[-3000:])
        image = one.image("elastic")
        print(_output("du", "-sh", str(image.root)).split()[0], "the root of the image")
        for name in ("torch", "elastic"):
            (path,) = image.root.glob(f"opt/elastic/lib/python*/site-packages/{name}")
            print(_output("du", "-sh", str(path)).split()[0], name)
        with tempfile.TemporaryDirectory() as directory:
            arguments = ("run", "--nproc-per-node", "2", "/in/steady.py", "--epochs", "100000")
            with contextlib.closing(
                Container(image, Path(directory) / "it", arguments, {"/in": scripts})
            ) as container:
                container.wait_for("step 500", 120.0)
                for title, (resident, unique) in sorted(_memory(container.pid).items()):
                    print(f"{resident:6} MiB resident, {unique:6} MiB unique: {title}")


if __name__ == "__main__":
    main()
