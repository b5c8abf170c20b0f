"""One host in miniature: its address, its processes, its link, and their faults."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.namespaces import Namespace, ip
from tests.job_process import DEADLINE_S, DIE_WITH_PARENT, WITHOUT_COMPILER, CommandProcess

if TYPE_CHECKING:
    from tests.hosts.network import Network

NETWORK = "10.77.0.0/16"  # everything else, such as name servers, is unreachable without a wait
# The shell sets the host's name, as seen by uname and gethostname, and becomes the command.
_NAMED = ("unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"')


class Host:
    """A host with its own address, lo and host name, and the machine's files, users and pids.

    It has a /24 of its own, and a cable to the router, which forwards to all other hosts.
    """

    def __init__(self, network: Network, name: str, number: int, namespace: Namespace) -> None:
        self.name = name
        self.address = f"10.77.{number}.1"
        self.subnet = f"10.77.{number}.0/24"
        self.gateway = f"10.77.{number}.254"
        self._mac = f"02:00:00:77:{number:02x}:01"
        self._gateway_mac = f"02:00:00:77:{number:02x}:fe"
        self.files = network.files / name
        """For sockets and logs; the processes' XDG_RUNTIME_DIR."""
        self.namespace = namespace
        self._network = network
        self._started: list[CommandProcess] = []

    # ---- processes

    def start(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> CommandProcess:
        """Start a process on this host. Its output is collected as it comes."""
        process = CommandProcess(
            self.command(*arguments), environment={**self.environment, **(environment or {})}
        )
        self._started.append(process)
        return process

    def elastic(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> CommandProcess:
        """Start one of `elastic`'s commands. Ask it for JSON to read its events."""
        return self.start(sys.executable, "-m", "elastic.cli", *arguments, environment=environment)

    def run(
        self, *arguments: str | Path, deadline_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env={**os.environ, **self.environment},
        )

    def command(self, *arguments: str | Path) -> list[str]:
        """A command line for subprocess; the process keeps its pid, and dies with the thread that
        starts it."""
        return [*DIE_WITH_PARENT, *self.namespace.command(*_NAMED, self.name, *arguments)]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **WITHOUT_COMPILER,
            "XDG_RUNTIME_DIR": str(self.files),
            "OMP_NUM_THREADS": "1",
        }

    def processes(self) -> list[int]:
        """All processes that live here, whatever started them."""
        return self.namespace.processes()

    def kill_all(self) -> None:
        """Kill all processes at once. The kernel lives and resets their connections."""
        self.namespace.kill_all(p.process.pid for p in self._started if p.process.poll() is None)

    def freeze(self) -> None:
        """Stop all processes with SIGSTOP; the kernel still acknowledges what arrives."""
        self.namespace.freeze()

    def thaw(self) -> None:
        self.namespace.thaw()

    def power_off(self) -> None:
        """End all processes and the kernel without a packet to anybody. Files stay."""
        self.freeze()
        ip(self._network.router, f"link delete dev {self.name}")
        self.kill_all()
        self.namespace.delete()

    def power_on(self) -> None:
        """Start a new kernel without processes, which knows no connection of the one before."""
        self.namespace.make()
        ip(
            self._network.router,
            f"link add name {self.name} address {self._gateway_mac} type veth"
            f" peer name eth0 address {self._mac} netns {self.namespace.name}",
            f"link set dev {self.name} addrgenmode none",
            f"address add {self.gateway}/24 dev {self.name}",
        )
        ip(
            self.namespace,
            "link set dev lo up",
            "link set dev eth0 addrgenmode none",
            f"address add {self.address}/24 dev eth0",
        )
        self.interface_up()
        self.link_up()

    @property
    def is_on(self) -> bool:
        return self.namespace.path.exists()

    def close(self) -> None:
        try:
            self.kill_all()
            for process in self._started:
                process.close()
        finally:
            self.namespace.delete()

    # ---- this test's own sockets on the host

    def open_socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A new socket of this process, which is none of the host's: `kill_all` leaves it open."""
        return self.namespace.open_socket(kind)

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        sock = self.open_socket()
        sock.settimeout(timeout_s)
        try:
            sock.connect((address, port))
        except OSError:
            sock.close()
            raise
        return sock

    # ---- faults, which last until they are healed. Silent: no sender gets an error

    def drop_outgoing(self, *to: Host) -> None:
        """Lose what this host sends, to all or to some. Silent."""
        self._network.drop((self, other) for other in to or self._others())

    def drop_incoming(self, *source: Host) -> None:
        """Lose what all or some send to this host. Silent."""
        self._network.drop((other, self) for other in source or self._others())

    def link_down(self) -> None:
        """Pull the cable at the router's end: the host's interface has no carrier. Silent."""
        ip(self._network.router, f"link set dev {self.name} down")

    def link_up(self) -> None:
        neighbour = f"neighbour replace {self.address} lladdr {self._mac} nud permanent"
        device = f"dev {self.name}"
        ip(self._network.router, f"link set {device} up", f"{neighbour} {device}")

    def interface_down(self) -> None:
        """Switch the interface off on the host itself. Its senders get an error: no route."""
        ip(self.namespace, "link set dev eth0 down")

    def interface_up(self) -> None:
        neighbour = f"neighbour replace {self.gateway} lladdr {self._gateway_mac} nud permanent"
        ip(
            self.namespace,
            "link set dev eth0 up",
            f"route replace {NETWORK} via {self.gateway}",
            f"{neighbour} dev eth0",
        )

    def heal(self) -> None:
        self._network.heal(self)

    def _others(self) -> list[Host]:
        return [host for host in self._network.hosts if host is not self]
