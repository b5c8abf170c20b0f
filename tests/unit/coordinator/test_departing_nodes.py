"""The machine, the node's agent and operators are told which nodes leave or are kept out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from elastic.coordinator.connected_agents import ConnectedAgents, ConnectedNode
from elastic.coordinator.leadership import lead
from elastic.coordinator.node_registry import DepartingNodes, Exclusions
from elastic.core.coordinator import events as ev
from elastic.core.membership import Failure, FailureKind
from elastic.core.quarantine import NodeFailures
from elastic.errors import ConfigurationError, TransientError
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from tests.unit.coordinator.agents import Diary, agent, kinds, sent
from tests.unit.store.failing_store import Clock, FailingStore

TOKEN = "0123456789abcdef"
KILLED = Failure(worker="n1-1", kind=FailureKind.SIGNAL)
RAISED = Failure(worker="n1-1", kind=FailureKind.EXCEPTION)


class Place:
    """Nodes n1, n2 and n3 are connected; the second failure of a node quarantines it."""

    def __init__(self, store: MemoryStore, exclusions: Exclusions) -> None:
        self.store = store
        self.nodes = ConnectedAgents()
        self.diary = Diary()
        self.posted: list[ev.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._steps = itertools.count()
        self.departing = DepartingNodes(
            self.nodes,
            exclusions,
            NodeFailures(2, 60.0),
            self.diary.journal,
            post=self.posted.append,
            start=self._start,
        )
        for name in ("n1", "n2", "n3"):
            self.connect(name)

    def connect(self, name: str, machine: str = "", token: str = TOKEN) -> ConnectedNode:
        _, node = self.nodes.arrive(agent(name, token, machine=machine))
        self.departing.arrived(node)
        return node

    def lose(self, *names: str) -> None:
        """Lose these nodes with their agents; the group goes on without them."""
        lost = [self.node(name) for name in names]
        for node in lost:
            self.nodes.leave(node.stream)
        self.departing.members_lost(node.node for node in lost)

    def worker_failed(self, node: ConnectedNode, failure: Failure) -> None:
        """It fails after a step in which no other one has failed."""
        self.departing.worker_failed(node, failure, step=next(self._steps))

    def node(self, name: str) -> ConnectedNode:
        node = self.nodes.by_name(name)
        assert node is not None
        return node

    async def states(self) -> dict[str, str]:
        """Wait for the tasks that were started, and return the nodes' states."""
        await asyncio.gather(*self._tasks)
        return {status.node: status.state for status in self.departing.statuses()}

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))


@pytest.fixture
def store() -> FailingStore:
    return FailingStore(Clock())


@pytest.fixture
async def place(store: FailingStore) -> Place:
    leadership = await lead(store, job="job", candidate="c")
    return Place(store, Exclusions(store, job="job", guard=leadership.guard))


async def test_a_drained_nodes_agent_is_told_at_once_and_when_the_node_is_out(place: Place) -> None:
    said = await place.departing.drain("n1", "a new disk")
    assert said == "the workers of n1 leave at the next step boundary"
    assert place.posted == [ev.NodeLeaving(node=place.node("n1").node, reason="a new disk")]
    assert kinds(place.node("n1").stream) == ["drain"]
    place.departing.left_group(place.node("n1"))
    (message,) = sent(place.node("n1").stream)
    assert message.drained.reason == ("a new disk; `elastic nodes --clear n1` lets it come back")
    assert await place.states() == {"n1": "drained", "n2": "ready", "n3": "ready"}
    assert place.diary.names() == ["node_drained", "node_left_group"]


@pytest.mark.parametrize("name", ["", "a/../b", "n1@0123", "n 1", "n" * 300, "\x1b[2J"])
async def test_an_invalid_node_name_is_refused(place: Place, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a valid node name; expected .*letters"):
        await place.departing.drain(name, "")
    with pytest.raises(ConfigurationError, match=r"is not a valid node name; expected .*letters"):
        await place.departing.clear(name)
    assert place.diary.names() == []


async def test_a_node_drained_before_it_came_is_told_when_it_connects(place: Place) -> None:
    said = await place.departing.drain("n4", "")
    assert said == "no node n4 is connected now; it will be kept out when it connects"
    assert (await place.states())["n4"] == "drained"
    node = place.connect("n4")
    assert kinds(node.stream) == ["drain"]
    assert place.posted == [ev.NodeLeaving(node=node.node, reason="drained by an operator")]


async def test_a_drain_is_called_off_by_clearing_the_node(place: Place) -> None:
    await place.departing.drain("n1", "")
    assert await place.departing.clear("n1") == "n1 may take part again"
    drain, called_off = sent(place.node("n1").stream)
    assert (drain.drain.called_off, called_off.drain.called_off) == (False, True)
    assert place.posted[-1] == ev.NodeWelcomed(node=place.node("n1").node)
    assert (await place.states())["n1"] == "ready"
    assert await place.departing.clear("n1") == "n1 was neither drained nor in quarantine"


async def test_a_node_that_asks_to_leave_is_let_go_and_may_come_back(place: Place) -> None:
    node = place.node("n1")
    for _ in range(2):
        place.departing.leave_requested(node, "SIGTERM")
    assert place.diary.of("node_leaving") == [{"node": "n1", "reason": "SIGTERM"}]
    assert (await place.states())["n1"] == "leaving"
    place.departing.left_group(node)
    (message,) = sent(node.stream)
    assert message.drained.reason == "SIGTERM"
    place.departing.gone(node.node)
    assert (await place.states())["n1"] == "ready"


async def test_failures_of_workers_quarantine_a_node_whose_agent_stays(place: Place) -> None:
    node = place.node("n1")
    for failure in (KILLED, RAISED, RAISED, KILLED):
        place.worker_failed(node, failure)
    assert (await place.states())["n1"] == "quarantined"
    assert place.diary.of("node_quarantined") == [
        {"node": "n1", "machine": "", "reason": "2 failures within 60 s"}
    ]
    place.departing.left_group(node)
    assert kinds(node.stream) == []


async def test_a_quarantined_node_whose_agent_is_told_to_leave_is_let_go(place: Place) -> None:
    node = place.node("n1")
    for _ in range(2):
        place.worker_failed(node, KILLED)
    await place.states()
    place.departing.left_group(node)
    place.departing.leave_requested(node, "SIGTERM")
    assert place.posted[-1] == ev.NodeLeaving(node=node.node, reason="SIGTERM")
    place.departing.left_group(node)  # the machine tells of it again
    assert kinds(node.stream) == ["drained"]


@pytest.mark.parametrize("way", ["refuses", "loses"])
async def test_a_quarantine_is_stored_when_the_store_answers_again(
    place: Place, store: FailingStore, way: str
) -> None:
    getattr(store, way)["put"] = 3
    for _ in range(2):
        place.worker_failed(place.node("n1"), KILLED)
    assert kinds(place.node("n1").stream) == []
    assert place.diary.names() == ["node_quarantined"]
    assert (await place.states())["n1"] == "quarantined"
    assert place.diary.names() == ["node_quarantined"]
    assert [entry.key for entry in await store.list(JobKeys("job").quarantined)] == [
        JobKeys("job").quarantine("n1")
    ]


async def test_a_quarantine_that_is_cleared_before_it_could_be_stored_is_not_stored(
    place: Place, store: FailingStore
) -> None:
    store.refuses["put"] = 1
    for _ in range(2):
        place.worker_failed(place.node("n1"), KILLED)
    await asyncio.sleep(0)
    assert await place.departing.clear("n1") == "n1 may take part again"
    assert (await place.states())["n1"] == "ready"
    assert list(await store.list(JobKeys("job").quarantined)) == []


async def test_a_drain_that_the_store_refuses_changes_nothing_and_can_be_repeated(
    place: Place, store: FailingStore
) -> None:
    store.refuses["put"] = 2
    for _ in range(2):
        with pytest.raises(TransientError):
            await place.departing.drain("n1", "")
    assert (await place.states())["n1"] == "ready"
    assert (place.posted, place.diary.names()) == ([], [])
    assert kinds(place.node("n1").stream) == []
    await place.departing.drain("n1", "")
    assert (await place.states())["n1"] == "drained"
    assert place.diary.names() == ["node_drained"]


async def test_a_node_that_is_lost_repeatedly_is_quarantined(place: Place) -> None:
    for _ in range(2):
        place.lose("n1")
        place.connect("n1")
    assert (await place.states())["n1"] == "quarantined"


@pytest.mark.parametrize("why", ["several at once", "agents are there", "it was leaving"])
async def test_losses_that_are_not_a_nodes_fault_do_not_count(place: Place, why: str) -> None:
    for _ in range(3):
        if why == "several at once":
            place.lose("n1", "n2")
            place.connect("n2")
        elif why == "agents are there":
            place.departing.members_lost([place.node("n1").node])
            continue
        else:
            place.departing.leave_requested(place.node("n1"), "SIGTERM")
            place.lose("n1")
        place.connect("n1")
    assert "quarantined" not in (await place.states()).values()


async def test_a_node_is_not_quarantined_if_all_other_nodes_are_drained(place: Place) -> None:
    for name in ("n2", "n3"):
        place.lose(name)
        await place.departing.drain(name, "")
        place.connect(name)
    for _ in range(3):
        place.worker_failed(place.node("n1"), KILLED)
    assert (await place.states())["n1"] == "ready"


async def test_the_last_remaining_node_is_not_quarantined(place: Place) -> None:
    for name in ("n1", "n2", "n3"):
        for _ in range(3):
            place.worker_failed(place.node(name), KILLED)
        await place.states()
    states = await place.states()
    assert states == {"n1": "quarantined", "n2": "quarantined", "n3": "ready"}


async def test_a_node_that_its_peers_do_not_reach_says_so_until_it_takes_part(place: Place) -> None:
    n1, n2 = place.node("n1"), place.node("n2")
    place.departing.left_out({n1.node: "node n2 does not reach node n1 at h:1", n2.node: "-"})
    assert await place.states() == {"n1": "unreachable", "n2": "unreachable", "n3": "ready"}
    assert place.departing.statuses()[0].reason == "node n2 does not reach node n1 at h:1"
    assert len(list(place.departing.room())) == 3  # their workers should train
    place.departing.takes_part([n1.node])
    assert "tried again" in await place.departing.clear("n2")
    assert set((await place.states()).values()) == {"ready"}
    assert place.departing.statuses()[0].reason == ""
