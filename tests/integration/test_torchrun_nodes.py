"""`elastic torchrun` does with several nodes what the installed torchrun does."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.running import Place
from tests.integration.test_torchrun import (
    OURS,
    THEIRS,
    Ended,
    Launcher,
    assert_same,
)
from tests.waiting import eventually

_DEADLINE_S = 120.0
_LONG = pytest.mark.long
QUICK_CALL = ["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]


def free_port() -> int:
    """A port that was free just now, and so were those that follow from it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1]) - 2000


class Nodes:
    """The launchers of a job on several nodes, ours or theirs, which share this machine."""

    def __init__(self, module: str, place: Place, directory: Path) -> None:
        self.scripts = directory / "scripts"
        self.scripts.mkdir(parents=True)
        self._new: Callable[[int], Launcher] = lambda number: Launcher(
            module, place, directory / str(number), self.scripts
        )
        self.launchers: list[Launcher] = []
        self.port = free_port()

    def start(self, options: Sequence[str], action: str, **environment: str) -> Launcher:
        """Start another node. PORT in the options stands for the job's port."""
        launcher = self._new(len(self.launchers))
        self.launchers.append(launcher)
        ported = [option.replace("PORT", str(self.port)) for option in options]
        launcher.start(ported, action, **environment)
        return launcher

    def await_file(self, pattern: str, count: int = 1) -> None:
        def there() -> bool:
            return len(list(self.scripts.glob(pattern))) >= count

        eventually(there, deadline_s=_DEADLINE_S)

    def is_hosted(self) -> bool:
        """Whether something listens at the job's port."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def enough(self) -> None:
        (self.scripts / "enough").touch()

    def end(self) -> list[Ended]:
        return [launcher.end() for launcher in self.launchers]

    def kill(self) -> None:
        for launcher in self.launchers:
            if launcher.process is not None and launcher.process.poll() is None:
                launcher.process.kill()
                launcher.process.wait()


@pytest.fixture
def both(place: Place, tmp_path: Path) -> Iterator[tuple[Nodes, Nodes]]:
    pair = Nodes(OURS, place, tmp_path / OURS), Nodes(THEIRS, place, tmp_path / THEIRS)
    yield pair
    for nodes in pair:
        nodes.kill()


def c10d(nnodes: str = "2", *others: str) -> list[str]:
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:PORT", "--rdzv-id=several"]
    return [f"--nnodes={nnodes}", *place, *others]


def codes(ended: Sequence[Ended]) -> list[int]:
    return [one.code for one in ended]


ADDRESS = {"MASTER_ADDR": "127.0.0.1"}


def test_two_nodes_meet_with_c10d(both: tuple[Nodes, Nodes]) -> None:
    for nodes in both:
        for _ in range(2):
            nodes.start(c10d("2", "--nproc-per-node=2"), "reduces")
    ours, theirs = (nodes.end() for nodes in both)
    assert codes(ours) == codes(theirs) == [0, 0], ours[0].err + ours[1].err
    assert ours[0].out.count("sum 6") == ours[1].out.count("sum 6") == 2
    assert ours[0].seen.keys() == {"0-0", "1-0", "2-0", "3-0"}
    assert_same(ours[0], theirs[0], ADDRESS)


@pytest.mark.parametrize("order", [pytest.param((0, 1), marks=_LONG), (1, 0)])
def test_two_nodes_meet_with_static_ranks(
    both: tuple[Nodes, Nodes], order: tuple[int, ...]
) -> None:
    for nodes in both:
        for rank in order:
            nodes.start(["--nnodes=2", f"--node-rank={rank}", "--master-port=PORT"], "reduces")
    ours, theirs = (nodes.end() for nodes in both)
    assert codes(ours) == codes(theirs) == [0, 0], ours[0].err + ours[1].err
    assert_same(ours[0], theirs[0], {"MASTER_PORT": str(both[0].port)})
    assert "trusted" not in ours[0].err  # nothing leaves this machine


@_LONG
def test_a_failure_on_one_node_ends_all(both: tuple[Nodes, Nodes]) -> None:
    for nodes in both:
        for _ in range(2):
            nodes.start(c10d(), "breaks")
    ours, theirs = (nodes.end() for nodes in both)
    assert codes(ours) == codes(theirs) == [1, 1]
    for ended in ours:
        root = ended.err.rpartition("Root Cause")[2]
        assert re.search(r"exitcode  : (4|1) ", root), ended.err
    assert any("exitcode  : 4 " in ended.err.rpartition("Root Cause")[2] for ended in ours)


@_LONG
def test_all_nodes_restart_together(both: tuple[Nodes, Nodes]) -> None:
    """Ours alone: the second rendezvous of torch 2.13 with c10d fails with both on one machine."""
    nodes = both[0]
    nodes.enough()
    for _ in range(2):
        nodes.start(c10d("2", "--max-restarts=1"), "breaks")
    ended = nodes.end()
    assert codes(ended) == [0, 0], ended[0].err + ended[1].err
    assert ended[0].seen.keys() == {"0-0", "1-0", "0-1", "1-1"}


@_LONG
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_leaves_ends_a_job_without_restarts(
    both: tuple[Nodes, Nodes], victim: int
) -> None:
    """victim 0 hosts the coordinator, or torchrun's store."""
    ends = [signalled(nodes, victim, signal.SIGTERM) for nodes in both]
    assert codes(ends[0]) == codes(ends[1]) == [1, 1], ends[0][1 - victim].err


@_LONG
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_killed_ends_a_job_without_restarts(
    both: tuple[Nodes, Nodes], victim: int
) -> None:
    """torchrun's scripts would go on without their launcher."""
    ended = signalled(both[0], victim, signal.SIGKILL)
    assert codes(ended)[1 - victim] == 1, ended[1 - victim].err


def signalled(nodes: Nodes, victim: int, number: signal.Signals) -> list[Ended]:
    """Send the signal to one of two launchers once their scripts train."""
    for rank in (0, 1):
        nodes.start(["--nnodes=2", f"--node-rank={rank}", "--master-port=PORT"], "trains")
    nodes.await_file("*-0-2.trains", 2)
    process = nodes.launchers[victim].process
    assert process is not None
    process.send_signal(number)
    return nodes.end()


@_LONG
def test_a_node_that_comes_late_joins(both: tuple[Nodes, Nodes]) -> None:
    """Ours alone, as above."""
    nodes = both[0]
    nodes.start(c10d("1:2", *QUICK_CALL), "trains")
    nodes.await_file("0-*-1.trains")
    nodes.start(c10d("1:2", *QUICK_CALL), "trains")
    nodes.await_file("*-2.trains", 2)
    nodes.enough()
    ended = nodes.end()
    assert codes(ended) == [0, 0], ended[0].err + ended[1].err


@_LONG
def test_a_job_goes_on_without_a_lost_node_if_the_others_are_enough(
    both: tuple[Nodes, Nodes],
) -> None:
    """Ours alone, as above."""
    nodes, options = both[0], c10d("1:2", "--max-restarts=2")
    first = nodes.start([*options, "--rdzv-conf=last_call_timeout=1,is_host=true"], "trains")
    nodes.await_file("0-*-1.trains")
    second = nodes.start([*options, "--rdzv-conf=is_host=false"], "trains")
    nodes.await_file("*-2.trains", 2)
    assert second.process is not None
    for old in nodes.scripts.glob("*-1.trains"):
        old.unlink()
    second.process.kill()
    nodes.await_file("*-1.trains")
    nodes.enough()
    assert first.end().code == 0


@_LONG
def test_too_few_nodes_end_after_the_join_timeout(both: tuple[Nodes, Nodes]) -> None:
    for nodes in both:
        nodes.start(c10d("2", "--rdzv-conf=join_timeout=5"), "ends")
    ours, theirs = (nodes.end() for nodes in both)
    assert codes(ours) == codes(theirs) == [1]
    assert re.search(r"only \d of at least 2 workers .* within 5 s", ours[0].err), ours[0].err


@_LONG
def test_a_coordinator_that_is_not_there_ends_a_node_after_the_join_timeout(
    both: tuple[Nodes, Nodes],
) -> None:
    """The endpoint is a name that does not exist. Here, torchrun's own limit is read_timeout."""
    endpoint = "--rdzv-endpoint=no-such-host.invalid:PORT"
    for nodes in both:
        conf = "--rdzv-conf=join_timeout=4,read_timeout=4"
        nodes.start([*c10d("2"), endpoint, conf], "ends")
    ours, theirs = (nodes.end() for nodes in both)
    assert codes(ours) == codes(theirs) == [1]
    told = r"no coordinator has answered at no-such-host.invalid:\d+ .* within 4 s: start"
    assert re.search(told, ours[0].err), ours[0].err


@_LONG
def test_nodes_that_differ_are_refused_with_the_difference(both: tuple[Nodes, Nodes]) -> None:
    nodes = both[0]
    first = nodes.start(c10d(), "ends")
    eventually(nodes.is_hosted, deadline_s=_DEADLINE_S)  # else the next launcher may be first
    for different in ("--nnodes=3", "--rdzv-id=another", "--nproc-per-node=2", "--max-restarts=1"):
        second = nodes.start([*c10d(), different], "ends").end()
        assert second.code == 83
        assert different.replace("=", " ") in second.err
    nodes.start(c10d(), "ends")
    assert nodes.launchers[-1].end().code == first.end().code == 0


@_LONG
def test_a_taken_port_of_the_coordinator_is_named(both: tuple[Nodes, Nodes]) -> None:
    nodes = both[0]
    options = ["--nnodes=2", "--node-rank=0", "--master-port=PORT"]
    with socket.create_server(("127.0.0.1", nodes.port + 1000)):
        (ended,) = [nodes.start(options, "ends").end()]
    assert ended.code == 78
    told = f"is in use by another process (port {nodes.port} of --master-port + 1000), where all"
    assert told in ended.err
