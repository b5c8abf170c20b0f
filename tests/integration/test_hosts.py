"""The harness of tests/hosts: its hosts, links and processes behave as it says, and none is left.

The tests open sockets of their own on the hosts; these see what processes there would see.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster, Member, etcd_cluster
from tests.hosts import Host, Network, ability, namespaces, network, require_hosts
from tests.job_process import ROOT, CommandProcess, is_alive
from tests.waiting import eventually

DEADLINE_S = 30.0
SCRIPTS = Path(__file__).parent / "scripts"
wait_until = functools.partial(eventually, deadline_s=DEADLINE_S)
Pair = tuple[socket.socket, socket.socket]
# Leaves its parent, ignores SIGTERM and SIGHUP, and forks for ever.
RESTLESS = "trap '' TERM HUP; (setsid sh -c 'while :; do sleep 0.01 & wait; done') & echo up; wait"


@pytest.fixture(autouse=True)
def _able() -> None:
    require_hosts()


@pytest.fixture
def net() -> Iterator[Network]:
    with network("a", "b", "c") as net:
        yield net


@contextlib.contextmanager
def connected(source: Host, to: Host) -> Iterator[Pair]:
    """Yield both ends of a TCP connection."""
    with to.open_socket() as listener:
        listener.bind((to.address, 0))
        listener.listen()
        near = source.connect(to.address, listener.getsockname()[1], DEADLINE_S)
        listener.settimeout(DEADLINE_S)
        far, (address, _) = listener.accept()
        far.settimeout(DEADLINE_S)
        with near, far:
            assert address == source.address
            yield near, far


@contextlib.contextmanager
def datagrams(host: Host) -> Iterator[socket.socket]:
    with host.open_socket(socket.SOCK_DGRAM) as sock:
        sock.bind((host.address, 7777))
        sock.settimeout(DEADLINE_S)
        yield sock


def arrives(pair: Pair) -> bool:
    """Whether data that is sent now arrives, in both directions."""
    near, far = pair
    near.sendall(b"ping")
    far.sendall(b"pong")
    return far.recv(4) == b"ping" and near.recv(4) == b"pong"


def is_quiet(sock: socket.socket, for_s: float = 0.3) -> bool:
    """Whether nothing arrives: no data, no end, no error."""
    sock.settimeout(for_s)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(DEADLINE_S)
    return False


def restless(host: Host) -> CommandProcess:
    process = host.start("sh", "-c", RESTLESS)
    process.wait_for(lambda: process.output, "its first line")
    return process


def names() -> list[str]:
    return [path.name for path in namespaces.NAMED.glob("el-*")]


# ---- hosts


def test_a_host_has_an_address_a_loopback_and_a_name_of_its_own(net: Network) -> None:
    a, b = net.host("a"), net.host("b")
    assert a.address != b.address
    assert a.run("uname", "-n").stdout == "a\n"
    assert Path(a.run("sh", "-c", "echo $XDG_RUNTIME_DIR").stdout.strip()).is_dir()
    with connected(a, b) as pair:
        assert arrives(pair)
    with a.open_socket() as listener:
        listener.bind(("127.0.0.1", 7777))
        listener.listen()
        with a.connect("127.0.0.1", 7777, DEADLINE_S), pytest.raises(ConnectionRefusedError):
            b.connect("127.0.0.1", 7777, DEADLINE_S)


def test_two_networks_are_isolated_from_each_other() -> None:
    with network("a") as one, network("a") as other:
        assert one.host("a").address == other.host("a").address
        with datagrams(one.host("a")) as sock, datagrams(other.host("a")):
            sock.sendto(b"1", (other.host("a").address, 7777))
            assert sock.recv(1) == b"1"


def test_the_world_outside_is_unreachable_at_once(net: Network) -> None:
    with pytest.raises(OSError, match="Network is unreachable"):
        net.host("a").connect("192.0.2.1", 53, DEADLINE_S)


def test_a_process_reports_its_events_messages_and_output(net: Network) -> None:
    says = """echo '{"event": "up", "n": 1}' >&2; echo words >&2; echo '{}' >&2; echo out"""
    process = net.host("a").start("sh", "-c", says)
    assert process.wait() == 0
    assert process.wait_for_event("up")["n"] == 1
    assert (process.messages, process.output) == (["words", "{}"], ["out"])


def test_gloo_works_from_host_to_host(net: Network) -> None:
    a, b = net.host("a"), net.host("b")
    script = [sys.executable, SCRIPTS / "all_reduce.py"]
    processes = [
        host.start(*script, str(rank), a.address, "eth0") for rank, host in enumerate((a, b))
    ]
    for process in processes:
        assert process.wait() == 0, process.story()
        assert process.output == ["3.0"]


# ---- links


# After four seconds a host knows that nobody answers its ARP requests, if it sends any.
@pytest.mark.parametrize(("how", "silent_s"), [("cut", 0.3), ("link", 5.0)], ids=["cut", "link"])
def test_a_cut_is_silent_and_all_arrives_after_it(net: Network, how: str, silent_s: float) -> None:
    a, b, c = net.hosts
    with connected(a, b) as cut, connected(b, c) as whole:
        if how == "cut":
            net.cut(a)
        else:
            a.link_down()
        with pytest.raises(TimeoutError):
            a.connect(b.address, 1, silent_s)
        with pytest.raises(TimeoutError):
            b.connect(a.address, 1, 0.3)
        assert arrives(whole)
        cut[0].sendall(b"ping")
        cut[1].sendall(b"pong")
        assert is_quiet(cut[0])
        assert is_quiet(cut[1])
        a.heal()
        assert cut[1].recv(4) == b"ping"
        assert cut[0].recv(4) == b"pong"


def test_a_cut_keeps_connections_within_a_side(net: Network) -> None:
    a, b, c = net.hosts
    with connected(a, b) as within, connected(b, c) as across:
        net.cut(a, b)
        across[0].sendall(b"ping")
        assert arrives(within)
        assert is_quiet(across[1])
        net.heal()
        assert across[1].recv(4) == b"ping"


@pytest.mark.parametrize("of", ["sender", "receiver", "pair"])
def test_packets_are_lost_one_way_only(net: Network, of: str) -> None:
    a, b, c = net.hosts
    with datagrams(a) as from_a, datagrams(b) as from_b, datagrams(c) as from_c:
        if of == "sender":
            a.drop_outgoing()
        elif of == "receiver":
            b.drop_incoming()
        else:
            a.drop_outgoing(b)
        for _ in range(10):
            from_a.sendto(b"lost", (b.address, 7777))
        from_b.sendto(b"other way", (a.address, 7777))
        assert from_a.recv(99) == b"other way"
        if of == "pair":
            from_a.sendto(b"elsewhere", (c.address, 7777))
            assert from_c.recv(99) == b"elsewhere"
        net.heal()
        from_a.sendto(b"healed", (b.address, 7777))
        assert from_b.recv(99) == b"healed"


def test_a_host_notices_that_its_interface_is_down(net: Network) -> None:
    a, b, _ = net.hosts
    with connected(a, b) as pair:
        a.interface_down()
        with pytest.raises(OSError, match="Network is unreachable"):
            a.connect(b.address, 1, DEADLINE_S)
        a.interface_up()
        assert arrives(pair)


# ---- processes


def test_kill_all_kills_every_process_of_a_host_and_no_others(net: Network) -> None:
    a, b, _ = net.hosts
    killed, spared = restless(a), restless(b)
    assert len(a.processes()) >= 2
    a.kill_all()
    assert a.processes() == []
    assert killed.wait() == -signal.SIGKILL
    assert is_alive(spared.process.pid)
    assert len(b.processes()) >= 2


def test_kill_all_kills_a_process_that_has_just_been_started(net: Network) -> None:
    for _ in range(5):
        process = net.host("a").start("sleep", "1000")
        net.host("a").kill_all()
        assert process.wait() == -signal.SIGKILL


def test_a_frozen_host_does_nothing_until_it_is_thawed(net: Network) -> None:
    host = net.host("a")
    process = host.start("sh", "-c", "while :; do echo tick; sleep 0.01; done")
    process.wait_for(lambda: process.output, "a tick")
    host.freeze()
    said = len(process.output)
    assert not process_says_more(process, said + 5, for_s=0.3)  # some were on their way
    host.thaw()
    process.wait_for(lambda: len(process.output) > said + 10, "more ticks")


SPAWNS = """
import os, sys
os.mkfifo(sys.argv[1])
redirected = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]  # waits for a writer
child = os.posix_spawn("/bin/echo", ["echo", "spawned"], os.environ, file_actions=redirected)
os.waitpid(child, 0)
"""


def test_freeze_and_thaw_work_while_a_process_waits_for_its_child_to_exec(net: Network) -> None:
    host = net.host("a")
    fifo = host.files / "fifo"
    process = host.start(sys.executable, "-c", SPAWNS, fifo)
    wait_until(lambda: len(host.processes()) == 2, "its child")
    host.freeze()
    host.thaw()
    fifo.write_text("")
    assert process.wait() == 0
    assert process.output == ["spawned"]


def process_says_more(process: CommandProcess, than: int, for_s: float) -> bool:
    with contextlib.suppress(AssertionError):
        process.wait_for(lambda: len(process.output) > than, "more", for_s)
    return len(process.output) > than


@contextlib.contextmanager
def served(host: Host, client: Host) -> Iterator[socket.socket]:
    """Yield a client's connection to a process on a host."""
    script = "import socket; s = socket.create_server(('', 7777)); print('up', flush=True)"
    script += "; kept = s.accept(); print('accepted', flush=True); s.accept()"
    process = host.start(sys.executable, "-c", script)
    process.wait_for(lambda: "up" in process.output, "the listener")
    with client.connect(host.address, 7777, DEADLINE_S) as sock:
        process.wait_for(lambda: "accepted" in process.output, "the connection")
        yield sock


def test_peers_notice_killed_processes_but_not_a_loss_of_power(net: Network) -> None:
    a, b, _ = net.hosts
    with served(a, b) as sock:
        a.kill_all()
        assert sock.recv(1) == b""
    with served(a, b) as sock:
        a.power_off()
        assert a.processes() == []
        sock.sendall(b"ping")
        assert is_quiet(sock)
        a.power_on()
        with pytest.raises(ConnectionResetError):  # a new kernel does not know the connection
            sock.recv(1)
    with served(a, b):
        pass


# ---- etcd on three hosts


@pytest.fixture
def cluster(net: Network) -> Iterator[EtcdCluster]:
    with etcd_cluster(machines=net.hosts) as cluster:
        yield cluster


def host_of(member: Member) -> Host:
    assert isinstance(member.machine, Host)
    return member.machine


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
def test_etcd_goes_on_without_a_minority(cluster: EtcdCluster, net: Network, leader: bool) -> None:
    lost = next(m for m in cluster.members if m.is_leader() is leader)
    others = [m for m in cluster.members if m is not lost]
    net.cut(host_of(lost))
    wait_until(lambda: any(m.is_leader() for m in others), "a leader of the others")
    cluster.ctl("put", "a", "1", machine=others[0].machine)
    wait_until(lambda: not lost.is_healthy(), "the minority to be without a leader")
    net.heal()
    cluster.wait_healthy(lost)
    read = cluster.ctl("get", "a", "--print-value-only", machine=lost.machine)
    assert read == "1\n"


def test_etcd_keeps_its_data_while_a_majority_is_stopped(cluster: EtcdCluster) -> None:
    cluster.ctl("put", "a", "1")
    left, *stopped = cluster.members
    cluster.stop(*stopped)
    wait_until(lambda: not left.is_healthy(), "the last one to be without a leader")
    for member in stopped:
        cluster.launch(member)
    cluster.wait_healthy(*cluster.members)
    assert cluster.ctl("get", "a", "--print-value-only") == "1\n"


# ---- what is left


def test_nothing_is_left_when_a_test_fails() -> None:
    links = subprocess.run(["ip", "link"], capture_output=True, check=True).stdout

    def fail() -> None:
        with network("a", "b") as net:
            made.append(net)
            restless(net.host("a"))
            net.host("b").power_off()
            raise ZeroDivisionError

    made: list[Network] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    (net,) = made
    assert not any(name.startswith(net.files.name) for name in names())
    assert not net.files.exists()
    assert subprocess.run(["ip", "link"], capture_output=True, check=True).stdout == links


KILLED = """
import os, signal
from tests.hosts import network
from tests.integration.test_hosts import restless

with network("a") as net:
    restless(net.host("a"))
    print(net.files, *net.host("a").processes(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_sweeps_what_a_killed_one_left() -> None:
    with network("a") as concurrent:
        done = subprocess.run(
            [sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        directory, *inside = done.stdout.split()
        assert len(inside) >= 2
        namespaces.sweep()
        assert not any(name.startswith(Path(directory).name) for name in names())
        assert not Path(directory).exists()
        wait_until(lambda: not any(is_alive(int(p)) for p in inside), "processes to be gone")
        assert concurrent.host("a").run("true").returncode == 0


@pytest.mark.parametrize("ci", ["true", ""])
def test_require_hosts_skips_on_an_unable_machine_but_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    ability.missing_requirement.cache_clear()
    outcome = pytest.fail.Exception if ci else pytest.skip.Exception
    try:
        with pytest.raises(outcome, match="run the tests as root"):
            require_hosts()
    finally:
        ability.missing_requirement.cache_clear()
