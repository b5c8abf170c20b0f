"""A network of hosts in miniature: a router in a namespace of its own, and a cable to each host.

`ip` does everything inside of namespaces that nobody else knows, so two networks may have the same
addresses, and nothing changes in the machine's own network. The router forwards between the hosts'
subnets. A rule of the type "blackhole" makes it lose packets from one host to another: it drops
them without an ICMP message or a reset. A cut is a batch of such rules, so all of it happens within
about a millisecond. Neighbours (MAC addresses) are fixed, because otherwise a host whose cable is
cut would notice after four seconds that nobody answers its ARP requests.

The kernel needs namespaces, veth and policy routing, but neither `tc` with its netem or actions nor
iptables nor bridges. There are no delays, because not every kernel can make them.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.hosts.host import Host
from tests.hosts.namespaces import FILES, Namespace, ip, new_run_name, sweep

_NAME = r"(?!lo$)[a-z0-9-]{1,15}"  # also names the router's interface to the host

# Both ports of a TCP connection are of the range from which the kernel chooses.
_CHOSEN = "ipproto tcp sport 32768-60999 dport 32768-60999"


class Network:
    """A router, and its hosts by name in the given order."""

    def __init__(self, run: str, names: Iterable[str]) -> None:
        self.files = FILES / run
        self.router = Namespace(f"{run}-router")
        self._hosts = {
            name: Host(self, name, number, Namespace(f"{run}-host-{name}"))
            for number, name in enumerate(names, 1)
        }
        assert all(re.fullmatch(_NAME, name) for name in self._hosts), names
        self._dropped: set[tuple[Host, Host]] = set()
        self._filtered: set[tuple[Host, Host]] = set()

    @property
    def hosts(self) -> list[Host]:
        return list(self._hosts.values())

    def host(self, name: str) -> Host:
        return self._hosts[name]

    # ---- faults

    def cut(self, *group: Host) -> None:
        """Lose all packets between these hosts and the others, both ways. Silent.

        Within the group, and among the others, nothing changes.
        """
        others = [host for host in self.hosts if host not in group]
        inside_out = {(host, other) for host in group for other in others}
        self.drop(inside_out | {(other, host) for host, other in inside_out})

    def drop(self, pairs: Iterable[tuple[Host, Host]]) -> None:
        """Lose packets from the first to the second host of each pair. Silent."""
        self._set_dropped(self._dropped | set(pairs))

    def close_ports(self, pairs: Iterable[tuple[Host, Host]]) -> None:
        """Lose what goes from the first to the second host of each pair over TCP connections to
        ports that the kernel chose. Silent, like a firewall that lets only given ports through."""
        self._set_filtered(self._filtered | set(pairs))

    def heal(self, *hosts: Host) -> None:
        """Undo all network faults of these hosts, or of all: cuts, drops, closed ports, links
        down."""
        healed = hosts or self.hosts
        for host in healed:
            if host.is_on:
                host.interface_up()
                host.link_up()
        self._set_dropped({pair for pair in self._dropped if not set(pair) & set(healed)})
        self._set_filtered({pair for pair in self._filtered if not set(pair) & set(healed)})

    def _set_dropped(self, pairs: set[tuple[Host, Host]]) -> None:
        added = [f"rule add {_rule(*pair)}" for pair in pairs - self._dropped]
        removed = [f"rule delete {_rule(*pair)}" for pair in self._dropped - pairs]
        ip(self.router, *added, *removed)
        self._dropped = pairs

    def _set_filtered(self, pairs: set[tuple[Host, Host]]) -> None:
        added = [f"rule add {_rule(*pair)} {_CHOSEN}" for pair in pairs - self._filtered]
        removed = [f"rule delete {_rule(*pair)} {_CHOSEN}" for pair in self._filtered - pairs]
        ip(self.router, *added, *removed)
        self._filtered = pairs

    # ---- from the beginning to the end

    def make(self) -> None:
        self.files.mkdir()
        self.router.make()
        # Packets without a route are dropped silently: those to a host whose link is down.
        ip(self.router, "link set dev lo up", "route add blackhole default")
        forward = Path("/proc/sys/net/ipv4/ip_forward")
        self.router.inside(lambda: forward.write_text("1"))
        for host in self.hosts:
            host.files.mkdir(mode=0o700)
            host.power_on()

    def close(self) -> None:
        """Remove everything, even if a part of this fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.files, ignore_errors=True)
            stack.callback(self.router.delete)
            for host in self.hosts:
                stack.callback(host.close)


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """A running network whose hosts have these names. Raises Unavailable if it cannot be made.

    Nothing is left of it afterwards. If this process is killed, the next network sweeps it up.
    """
    sweep()
    with contextlib.closing(Network(new_run_name(), names)) as made:
        made.make()
        yield made


def _rule(source: Host, destination: Host) -> str:
    return f"blackhole iif {source.name} to {destination.subnet}"
