"""Runs a real slurmctld and several slurmd on loopback, in a directory of their own.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. The machine's own Slurm is not
touched: configuration, key, sockets and logs are in the directory, and ports are free ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.etcd_cluster import free_ports
from tests.job_process import DIE_WITH_PARENT
from tests.waiting import eventually

_TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
DEADLINE_S = 120.0
_CONFIGURATION = """\
# cred_expire is also how long a requeued job waits.
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
JobRequeue=1
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0
"""


def missing_requirement() -> str:
    """Return what is missing to run a cluster here, for people; "" if nothing is."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"no `{tool}` in PATH: apt-get install {package}"
    return ""


class SlurmCluster:
    """A cluster of the nodes n0, n1, ... on this machine."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.nodes = [f"n{i}" for i in range(size)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        port, *ports = free_ports(1 + len(self.nodes))
        host = os.uname().nodename
        same = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN"
        lines = [
            f"NodeName={node} Port={own} {same}"
            for node, own in zip(self.nodes, ports, strict=True)
        ]
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.directory / name).mkdir()
        text = _CONFIGURATION.format(
            host=host, directory=self.directory, port=port, nodes="\n".join(lines)
        )
        (self.directory / "slurm.conf").write_text(text)
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munge += [f"--socket={self.directory}/munge.socket", f"--pid-file={self.directory}/m.pid"]
        munge += [f"--log-file={self.directory}/munge.log", f"--seed-file={self.directory}/seed"]
        self._start("munged", munge)
        self.wait_for(lambda: (self.directory / "munge.socket").exists(), "munge's socket")
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self._states() == {"idle"}, "all nodes to be idle")

    def start_node(self, node: str) -> None:
        self._start(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once: its slurmd, its job steps and their processes."""
        mine = self._of_node(node)
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._processes.pop(node).wait()

    def submit(self, *arguments: str | Path, environment: dict[str, str]) -> str:
        return self.run("sbatch", "--parsable", *arguments, environment=environment).strip()

    def run(self, *command: str | Path, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [*map(str, command)],
            cwd=self.directory,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.story()
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints."""
        shown = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(pair.partition("=")[::2] for pair in shown)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        eventually(condition, lambda: f"no {what}\n{self.story()}", DEADLINE_S, every_s=0.2)

    def story(self) -> str:
        """Return the output of jobs and daemons, for a failing test."""
        logs = [*self.directory.glob("*.out"), *self.directory.glob("slurm*.log")]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)

    def close(self) -> None:
        """Cancel all jobs, then end the daemons and what is left of the jobs."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["scancel", "--user=root"], env=self.environment, check=False, timeout=20
            )
        for pid in self._of_cluster():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.kill()
            process.wait()

    def processes_of_jobs(self) -> list[int]:
        """Return the pids of processes that jobs have started and that still run."""
        return [
            pid for pid, env in _environments() if self._mark in env and b"SLURM_JOB_ID=" in env
        ]

    @property
    def _mark(self) -> bytes:
        return f"SLURM_CONF={self.directory}/slurm.conf".encode()

    def _of_cluster(self) -> list[int]:
        daemons = {process.pid for process in self._processes.values()}
        return [pid for pid, env in _environments() if self._mark in env and pid not in daemons]

    def _of_node(self, node: str) -> list[int]:
        name = f"SLURMD_NODENAME={node}".encode()
        own = self._processes[node].pid
        jobs = [pid for pid, env in _environments() if self._mark in env and name in env]
        return [own, *_below(own), *jobs]

    def _states(self) -> set[str]:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found = done.stdout.split()
        return set(found) if len(found) == len(self.nodes) else {"missing"}

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.directory / f"{name}.txt").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*DIE_WITH_PARENT, *command], env=self.environment, stdout=log, stderr=log
            )


def _environments() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield int(path.name), (path / "environ").read_bytes()


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _below(child)


@contextlib.contextmanager
def slurm_cluster(directory: Path, size: int = 3) -> Iterator[SlurmCluster]:
    """Yield a running cluster; end its daemons and jobs afterwards."""
    with contextlib.closing(SlurmCluster(directory, size)) as cluster:
        cluster.start()
        yield cluster
