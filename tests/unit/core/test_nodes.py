"""Nodes: what is known of them and their workers, and when a leaving node is not needed."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.coordinator.nodes import Departures, Nodes
from elastic.core.membership import WorkerPhase
from tests.unit.core.cluster_views import JOINING, READY, TRAINING, generation, status

PAIR = generation(3, "a0", "b0")


def trained_by(*names: str) -> Nodes:
    """Each worker trains in generation 3, on a node with two slots."""
    nodes = Nodes()
    for name in names:
        nodes.reported(name[0], 2, [status(name, TRAINING, 3)])
    return nodes


def test_a_report_replaces_the_one_before_and_returns_the_missing_workers() -> None:
    nodes = Nodes()
    assert nodes.reported("a", 2, [status("a0", READY), status("a1", READY)]) == frozenset()
    assert nodes.reported("a", 3, [status("a1", TRAINING, 1), status("a2", READY)]) == {"a0"}
    assert set(nodes.workers()) == {"a1", "a2"}
    assert nodes.workers()["a1"].status.phase is TRAINING
    assert nodes.slots == 3
    assert nodes.home_of("a2") == "a"
    assert nodes.workers_of("elsewhere") == ()


def test_a_failed_worker_stays_gone_until_its_node_reports_without_it() -> None:
    nodes = trained_by("a0")
    assert nodes.failed("a", "a0") == {"a0"}
    assert nodes.failed("a", "a0") == frozenset()
    assert nodes.failed("elsewhere", "a0") == frozenset()
    assert nodes.reported("a", 2, [status("a0", TRAINING, 3)]) == frozenset()
    assert nodes.workers() == {}
    nodes.reported("a", 2, [])
    nodes.reported("a", 2, [status("a0", READY)])
    assert set(nodes.workers()) == {"a0"}


def test_holders_of_the_state_on_a_silent_node_left_behind_are_kept_without_its_slots() -> None:
    nodes = trained_by("a0", "b0")
    nodes.lost_contact("a", 5.0)
    nodes.lost_contact("a", 9.0)
    nodes.lost_contact("elsewhere", 9.0)
    assert nodes.is_out_of_contact("a")
    assert not nodes.is_out_of_contact("b")
    assert nodes.is_out_of_contact("elsewhere")
    assert {w: s.out_of_contact_since for w, s in nodes.workers().items()} == {
        "a0": 9.0,
        "b0": None,
    }
    assert nodes.slots == 4
    assert nodes.leave_behind_out_of_contact() == {"a0"}
    assert {w: s.left_behind for w, s in nodes.workers().items()} == {"a0": True, "b0": False}
    assert nodes.slots == 2
    assert nodes.leave_behind_out_of_contact() == frozenset()
    nodes.reported("a", 2, [status("a0", READY, 3)])
    assert not nodes.workers()["a0"].left_behind
    assert nodes.slots == 4


def test_a_silent_node_without_the_state_is_lost_when_it_is_left_behind() -> None:
    nodes = trained_by("b0")
    nodes.reported("a", 2, [status("a0", READY)])
    nodes.lost_contact("a", 5.0)
    assert nodes.leave_behind_out_of_contact() == {"a0"}
    assert set(nodes.workers()) == {"b0"}


def test_a_silent_node_that_reports_again_is_in_contact() -> None:
    nodes = trained_by("a0")
    nodes.lost_contact("a", 5.0)
    assert nodes.reported("a", 2, [status("a0", TRAINING, 3)]) == frozenset()
    assert not nodes.is_out_of_contact("a")
    nodes.lost_contact("a", 7.0)
    assert nodes.workers()["a0"].out_of_contact_since == 7.0


def test_the_grace_of_all_nodes_restarts_when_the_first_comes_back_after_an_outage() -> None:
    nodes = trained_by("a0", "b0")
    nodes.lost_contact("a", 5.0)
    nodes.lost_contact("b", 5.0)
    nodes.reported("a", 2, [status("a0", TRAINING, 3)], 60.0)
    assert {w: s.out_of_contact_since for w, s in nodes.workers().items()} == {
        "a0": None,
        "b0": 60.0,
    }


def test_the_grace_restarts_after_an_outage_even_if_the_first_node_back_is_not_known() -> None:
    nodes = trained_by("a0", "b0")
    nodes.lost_contact("a", 5.0)
    nodes.lost_contact("b", 5.0)
    nodes.reported("c", 1, [status("c0", READY)], 60.0)
    assert [nodes.workers()[w].out_of_contact_since for w in ("a0", "b0", "c0")] == [
        60.0,
        60.0,
        None,
    ]


def test_the_grace_does_not_restart_if_one_node_stayed_in_contact() -> None:
    nodes = trained_by("a0", "b0", "c0")
    nodes.lost_contact("a", 5.0)
    nodes.lost_contact("b", 5.0)
    nodes.reported("a", 2, [status("a0", TRAINING, 3)], 60.0)
    assert nodes.workers()["b0"].out_of_contact_since == 5.0


def test_a_lost_node_is_lost_with_its_workers() -> None:
    nodes = trained_by("a0", "b0")
    assert nodes.lost("a") == {"a0"}
    assert nodes.lost("a") == frozenset()
    assert nodes.slots == 2


def test_members_of_a_generation_are_presumed_to_train_out_of_contact() -> None:
    nodes = Nodes()
    nodes.presumed(generation(3, "a0", "a1", "b0"), TRAINING, 9.0)
    assert nodes.slots == 3
    for observed in nodes.workers().values():
        s = observed.status
        assert observed.out_of_contact_since == 9.0
        assert (s.phase, s.generation, s.acknowledged, s.has_state) == (TRAINING, 3, 3, True)
    assert nodes.workers()["a1"].as_member() == generation(3, "a1").members[0]
    assert nodes.reported("a", 4, [status("a1", TRAINING, 3)]) == {"a0"}
    assert nodes.slots == 5


def test_newcomers_of_a_provisional_generation_are_presumed_ready_without_state() -> None:
    nodes = Nodes()
    nodes.presumed(PAIR, TRAINING, 9.0)
    nodes.presumed(generation(4, "a0", "b0", "c0"), WorkerPhase.READY, 9.0)
    phases = {w: (s.status.phase, s.status.has_state) for w, s in nodes.workers().items()}
    assert phases == {"a0": (TRAINING, True), "b0": (TRAINING, True), "c0": (READY, False)}
    assert nodes.slots == 3


def test_nodes_that_leave_do_not_count_until_they_are_welcomed_again() -> None:
    nodes = trained_by("a0", "b0")
    nodes.left("a")
    assert nodes.slots == 2
    assert nodes.leaving == {"a"}
    assert {w: s.on_leaving_node for w, s in nodes.workers().items()} == {"a0": True, "b0": False}
    assert not nodes.all_leave()
    nodes.left("b")
    assert nodes.all_leave()
    nodes.welcomed("a")
    assert not nodes.all_leave()
    nodes.welcomed("never left")


def test_a_node_that_leaves_before_any_has_reported_does_not_count_as_all() -> None:
    nodes = Nodes()
    nodes.left("a")
    assert not nodes.all_leave()


def test_a_departure_is_complete_once_the_nodes_workers_are_out_of_all_groups() -> None:
    nodes, departures = trained_by("a0", "b0"), Departures()
    assert departures.completed(nodes, PAIR) == []
    nodes.left("a")
    assert departures.completed(nodes, PAIR) == []
    alone = generation(4, "b0")
    assert departures.completed(nodes, alone) == []  # on its way out
    nodes.reported("a", 2, [status("a0", JOINING, 3)])
    assert departures.completed(nodes, alone) == []
    nodes.reported("a", 2, [status("a0", READY, 3)])
    assert departures.completed(nodes, alone) == []  # a0 may have joined another since
    nodes.reported("a", 2, [status("a0", READY, 3, acknowledged=4)])
    assert departures.completed(nodes, generation(5, "a0", "b0")) == []
    assert departures.completed(nodes, alone, PAIR) == []  # the new group is not in place
    assert departures.completed(nodes, alone) == []  # b0 may be stuck, and a step behind
    nodes.reported("b", 2, [status("b0", TRAINING, 4)])
    assert departures.completed(nodes, alone) == ["a"]
    assert departures.completed(nodes, alone) == []


def test_a_node_that_holds_the_state_stays_while_nobody_else_does() -> None:
    nodes, departures, nobody = trained_by("a0", "b0"), Departures(), generation(4)
    nodes.left("a")
    nodes.reported("a", 2, [status("a0", READY, 3, acknowledged=4, committed=8)])
    assert departures.completed(nodes, nobody) == []
    nodes.reported("b", 2, [status("b0", READY, 3, acknowledged=4, committed=7)])
    assert departures.completed(nodes, nobody) == []
    nodes.reported("b", 2, [status("b0", READY, 3, acknowledged=4, committed=8)])
    nodes.lost_contact("b", 0.0)
    assert departures.completed(nodes, nobody) == []
    nodes.reported("b", 2, [status("b0", READY, 3, acknowledged=4, committed=8)])
    assert departures.completed(nodes, nobody) == ["a"]


def test_a_node_that_holds_the_state_stays_while_its_heirs_are_out_of_contact() -> None:
    nodes, departures, others = Nodes(), Departures(), generation(4, "b0")
    nodes.presumed(others, TRAINING, 0.0)
    nodes.left("a")
    nodes.reported("a", 2, [status("a0", READY, 3, acknowledged=4, committed=8)])
    assert departures.completed(nodes, others) == []
    nodes.reported("b", 2, [status("b0", JOINING, 4, has_state=False)])
    assert departures.completed(nodes, others) == []
    nodes.reported("b", 2, [status("b0", TRAINING, 4)])
    assert departures.completed(nodes, others) == ["a"]


def test_a_node_that_holds_the_state_is_needed_while_there_is_no_group() -> None:
    nodes, nobody = trained_by("a0", "b0"), generation(4)
    nodes.reported("a", 2, [status("a0", READY, 3)])
    nodes.reported("c", 1, [status("c0", READY)])
    assert nodes.is_needed("a", [nobody])
    assert nodes.is_needed("a", [PAIR, None])
    assert nodes.is_needed("c", [generation(3, "c0"), nobody])
    assert not nodes.is_needed("c", [nobody])
    assert not nodes.is_needed("a", [generation(4, "b0")])


def test_a_member_that_may_have_got_the_state_is_needed_once_its_group_is_dissolved() -> None:
    nodes = Nodes()
    nodes.reported("a", 1, [status("a0", READY)])
    nobody = generation(4)
    assert nodes.is_needed("a", [nobody], PAIR.members)
    assert not nodes.is_needed("a", [nobody])
    nodes.reported("a", 1, [replace(status("a0", READY), acknowledged=4)])
    assert not nodes.is_needed("a", [nobody], PAIR.members)


def test_a_node_out_of_contact_has_not_left() -> None:
    nodes, departures = Nodes(), Departures()
    nodes.left("a")
    assert departures.completed(nodes, None) == []
    nodes.reported("a", 2, [])
    nodes.lost_contact("a", 1.0)
    assert departures.completed(nodes, None) == []
    nodes.reported("a", 2, [])
    assert departures.completed(nodes, None) == ["a"]


def test_drained_is_resent_when_a_node_repeats_its_leave_or_leaves_again() -> None:
    nodes, departures = Nodes(), Departures()
    nodes.reported("a", 2, [])
    nodes.left("a")
    assert departures.completed(nodes, None) == ["a"]
    departures.forget("a")
    assert departures.completed(nodes, None) == ["a"]
    nodes.welcomed("a")
    assert departures.completed(nodes, None) == []
    nodes.left("a")
    assert departures.completed(nodes, None) == ["a"]
