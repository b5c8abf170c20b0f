"""Quarantines, drains and failures belong to a machine, under any node name."""

from __future__ import annotations

import json

import pytest

from elastic.coordinator.node_registry import DRAINED, QUARANTINED
from elastic.core.coordinator import events as ev
from elastic.core.membership import Failure, FailureKind
from elastic.errors import ConfigurationError
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from tests.unit.coordinator.agents import kinds
from tests.unit.coordinator.test_departing_nodes import Place
from tests.unit.coordinator.test_exclusions import elected

KILLED = Failure(worker="pod-0-1", kind=FailureKind.SIGNAL)
KEYS = JobKeys("job")


@pytest.fixture
async def place() -> Place:
    """Node pod-0 is on the machine "bad"; n1, n2 and n3 do not say which machine they are on."""
    store = MemoryStore()
    place = Place(store, await elected(store))
    place.connect("pod-0", "bad", "aaaaaaaa")
    return place


async def quarantined(place: Place) -> None:
    for _ in range(2):
        place.worker_failed(place.node("pod-0"), KILLED)
    assert (await place.states())["pod-0"] == QUARANTINED
    (told,) = place.diary.of("node_quarantined")
    assert (told["node"], told["machine"]) == ("pod-0", "bad")


async def test_another_machine_with_a_quarantined_nodes_name_is_admitted(place: Place) -> None:
    await quarantined(place)
    place.nodes.leave(place.node("pod-0").stream)
    replacement = place.connect("pod-0", "good", "bbbbbbbb")
    assert ev.NodeLeaving(node=replacement.node, reason="2 failures within 60 s") not in (
        place.posted
    )
    rows = {(s.node, s.machine): (s.state, s.failures) for s in place.departing.statuses()}
    assert rows["pod-0", "good"] == ("ready", 0)
    assert rows["pod-0", "bad"][0] == QUARANTINED


async def test_a_quarantined_machine_is_kept_out_under_another_node_name(place: Place) -> None:
    await quarantined(place)
    place.nodes.leave(place.node("pod-0").stream)
    again = place.connect("pod-7", "bad", "cccccccc")
    assert place.posted[-1] == ev.NodeLeaving(node=again.node, reason="2 failures within 60 s")
    assert (await place.states())["pod-7"] == QUARANTINED


async def test_failures_of_a_machine_add_up_under_all_of_its_node_names(place: Place) -> None:
    place.worker_failed(place.node("pod-0"), KILLED)
    place.nodes.leave(place.node("pod-0").stream)
    place.connect("pod-0", "good", "bbbbbbbb")
    place.worker_failed(place.node("pod-0"), KILLED)
    assert (await place.states())["pod-0"] == "ready"
    place.connect("pod-7", "bad", "cccccccc")
    place.worker_failed(place.node("pod-7"), KILLED)
    assert await place.states() == {
        "n1": "ready",
        "n2": "ready",
        "n3": "ready",
        "pod-0": "ready",
        "pod-7": QUARANTINED,
    }


async def test_a_lost_node_counts_against_the_machine_that_it_had_registered(place: Place) -> None:
    """This holds under a leader that has never had a connection to the node, too."""
    for _ in range(2):
        place.departing.registered("pod-9@dddddddd", "worn")
        place.departing.members_lost(["pod-9@dddddddd"])
    await place.states()
    assert [(t["node"], t["machine"]) for t in place.diary.of("node_quarantined")] == [
        ("pod-9", "worn")
    ]
    place.connect("pod-1", "worn", "eeeeeeee")
    assert (await place.states())["pod-1"] == QUARANTINED


@pytest.mark.parametrize("name", ["bad", "pod-0"])
async def test_a_quarantine_is_cleared_by_the_machine_or_node_name(place: Place, name: str) -> None:
    await quarantined(place)
    assert await place.departing.clear(name) == f"{name} may take part again"
    assert (await place.states())["pod-0"] == "ready"
    assert place.diary.of("node_cleared") == [
        {
            "node": "pod-0",
            "machine": "bad",
            "state": QUARANTINED,
            "reason": "cleared by an operator",
        }
    ]
    place.worker_failed(place.node("pod-0"), KILLED)
    assert (await place.states())["pod-0"] == "ready"


async def test_clearing_a_name_of_several_machines_requires_a_machines_name(place: Place) -> None:
    await place.departing.drain("pod-0", "")
    place.nodes.leave(place.node("pod-0").stream)
    place.connect("pod-0", "other", "bbbbbbbb")
    await place.departing.drain("pod-0", "")
    with pytest.raises(ConfigurationError, match=r"\(bad, other\); clear one of them"):
        await place.departing.clear("pod-0")
    assert await place.departing.clear("bad") == "bad may take part again"
    assert (await place.states())["pod-0"] == DRAINED


async def test_a_node_that_shares_its_machine_is_drained_by_the_machines_name(place: Place) -> None:
    place.connect("pod-1", "bad", "bbbbbbbb")
    with pytest.raises(ConfigurationError, match="shares machine bad with pod-1"):
        await place.departing.drain("pod-0", "")
    assert (await place.states())["pod-0"] == "ready"
    said = await place.departing.drain("bad", "")
    assert said == ("the workers of pod-0 and pod-1 (machine bad) leave at the next step boundary")
    assert kinds(place.node("pod-1").stream) == ["drain"]
    states = await place.states()
    assert (states["pod-0"], states["pod-1"]) == (DRAINED, DRAINED)


async def test_draining_a_node_that_was_just_lost_drains_its_machine(place: Place) -> None:
    place.nodes.leave(place.node("pod-0").stream)
    said = await place.departing.drain("pod-0", "")
    assert said == "no machine bad is connected now; it will be kept out when it connects"
    place.connect("pod-0", "good", "bbbbbbbb")
    place.connect("pod-7", "bad", "cccccccc")
    states = {(s.node, s.machine): s.state for s in place.departing.statuses()}
    assert states["pod-0", "good"] == "ready"
    assert states["pod-7", "bad"] == DRAINED


async def test_repeating_a_drain_keeps_no_other_machine_out(place: Place) -> None:
    node = place.node("pod-0").node
    await place.departing.drain("pod-0", "")
    place.nodes.leave(place.node("pod-0").stream)
    place.departing.gone(node)
    said = await place.departing.drain("pod-0", "")
    assert said == "pod-0 is drained already; `elastic nodes --clear bad` lets it come back"
    place.connect("pod-0", "good", "bbbbbbbb")
    states = {(s.node, s.machine): s.state for s in place.departing.statuses()}
    assert states["pod-0", "good"] == "ready"
    assert states["pod-0", "bad"] == DRAINED


async def test_draining_a_quarantined_node_that_is_gone_drains_its_machine(place: Place) -> None:
    await quarantined(place)
    node = place.node("pod-0").node
    place.nodes.leave(place.node("pod-0").stream)
    place.departing.gone(node)
    said = await place.departing.drain("pod-0", "")
    assert said == "no machine bad is connected now; it will be kept out when it connects"
    states = {(s.node, s.machine): s.state for s in place.departing.statuses()}
    assert states == {**states, ("pod-0", "bad"): DRAINED}


async def test_a_drained_name_keeps_out_any_node_or_machine_of_this_name(place: Place) -> None:
    await place.departing.drain("later", "")
    place.connect("later", "m1", "bbbbbbbb")
    place.connect("pod-5", "later", "cccccccc")
    states = await place.states()
    assert (states["later"], states["pod-5"]) == (DRAINED, DRAINED)
    await place.departing.clear("later")
    states = await place.states()
    assert (states["later"], states["pod-5"]) == ("ready", "ready")


async def test_the_next_leader_knows_which_machine_is_quarantined(place: Place) -> None:
    await quarantined(place)
    after = await elected(place.store)
    found = after.of("bad", "pod-7")
    assert found is not None
    assert (found.state, found.machine, found.node) == (QUARANTINED, "bad", "pod-0")
    assert after.of("good", "pod-0") is None
    assert after.named("pod-0") == after.named("bad") == ["bad"]


async def test_a_quarantine_stored_by_an_older_version_keeps_the_name_out() -> None:
    store = MemoryStore()
    older = json.dumps({"reason": "3 failures", "since_unix_s": 1.75e9}).encode()
    await store.put(KEYS.quarantine("n1"), older)
    found = await elected(store)
    for machine, node in (("any", "n1"), ("n1", "any")):
        exclusion = found.of(machine, node)
        assert exclusion is not None
        assert (exclusion.reason, exclusion.machine) == ("3 failures", "")
    assert found.of("any", "other") is None
