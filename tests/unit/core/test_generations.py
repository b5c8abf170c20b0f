"""Which groups may train still, and which group may follow them (P1)."""

from __future__ import annotations

import pytest

from elastic.core.coordinator.generations import Lineage
from elastic.core.coordinator.view import Sighting
from elastic.core.membership import WorkerStatus
from tests.unit.core.cluster_views import (
    FINISHED,
    JOINING,
    READY,
    TRAINING,
    generation,
    member,
    status,
)


def after() -> Lineage:
    """Generation 3 of a0 and b0 exists."""
    lineage = Lineage()
    lineage.exists(generation(3, "a0", "b0"))
    return lineage


def sighting(s: WorkerStatus, silent_since: float | None = None) -> dict[str, Sighting]:
    return {s.worker: Sighting(node=s.worker[0], status=s, silent_since=silent_since)}


def test_before_the_first_group_anybody_may_form_one() -> None:
    lineage = Lineage()
    assert lineage.allows(["a0"])
    assert lineage.members() == []


def test_while_a_group_may_train_the_next_one_takes_a_member_of_it_along() -> None:
    lineage = after()
    assert lineage.allows(["a0", "c0"])
    assert not lineage.allows(["c0"])
    assert lineage.allows([])
    assert lineage.members() == [member("a0"), member("b0")]


def test_a_member_of_every_group_is_needed() -> None:
    lineage = after()
    lineage.exists(generation(4, "b0", "c0"))
    assert not lineage.allows(["a0"])
    assert not lineage.allows(["c0"])
    assert lineage.allows(["b0"])
    assert lineage.allows(["a0", "c0"])
    assert lineage.may_train == (generation(3, "a0", "b0"), generation(4, "b0", "c0"))


def test_a_generation_without_members_is_no_group() -> None:
    lineage = Lineage()
    lineage.exists(generation(3))
    assert lineage.allows(["c0"])
    assert lineage.may_train == ()


@pytest.mark.parametrize("gone", ["a0", "b0"])
def test_a_group_that_has_lost_a_member_for_certain_trains_no_more(gone: str) -> None:
    lineage = after()
    lineage.ended(["c0"])
    assert not lineage.allows(["c0"])
    lineage.ended([gone])
    assert lineage.allows(["c0"])
    lineage = after()
    lineage.node_gone("c")
    assert not lineage.allows(["c0"])
    lineage.node_gone(gone[0])
    assert lineage.allows(["c0"])


@pytest.mark.parametrize(
    ("seen", "trains"),
    [
        (status("a0", TRAINING, 3), True),
        (status("a0", JOINING, 3), True),
        (status("a0", READY, 2), True),
        (status("a0", TRAINING, 2), True),
        (status("a0", READY, 0), True),
        (status("a0", READY, 3), False),
        (status("a0", FINISHED, 3), False),
        (status("a0", FINISHED, 2), False),  # it never joins another
        (status("a0", JOINING, 4), False),
        (status("a0", TRAINING, 4), False),
        (status("c0", TRAINING, 4), True),
    ],
)
def test_what_a_member_reports_of_itself(seen: WorkerStatus, trains: bool) -> None:
    lineage = after()
    lineage.seen(sighting(seen))
    assert lineage.allows(["d0"]) is not trains


@pytest.mark.parametrize(("heard", "may_join"), [(0, True), (3, True), (4, False)])
def test_a_member_that_has_not_come_joins_only_the_newest_it_has_heard_of(
    heard: int, may_join: bool
) -> None:
    lineage = after()
    lineage.seen(sighting(status("a0", READY, 0, heard=heard)))
    assert lineage.allows(["d0"]) is not may_join


def test_what_a_node_out_of_contact_said_last_proves_nothing() -> None:
    lineage = after()
    lineage.seen(sighting(status("a0", READY, 3), silent_since=1.0))
    assert not lineage.allows(["c0"])


def test_a_node_that_reports_without_a_member_shows_its_end() -> None:
    lineage = after()
    lineage.reported("a", ["a0", "a1"])
    lineage.reported("c", [])
    assert not lineage.allows(["c0"])
    lineage.reported("a", ["a1"])
    assert lineage.allows(["c0"])


def test_who_joins_a_group_without_any_state_is_in_the_way_of_another() -> None:
    lineage = after()
    joins = sighting(status("a0", JOINING, 3, took_part=False))
    assert lineage.in_the_way(["c0"], joins) == {"a0"}
    assert lineage.in_the_way(["b0", "c0"], joins) == frozenset()
    assert lineage.in_the_way(["c0"], {}) == frozenset()


@pytest.mark.parametrize(
    "seen",
    [
        sighting(status("a0", JOINING, 3)),  # it holds the state
        sighting(status("a0", TRAINING, 3)),
        sighting(status("a0", JOINING, 2, took_part=False)),  # it has not come yet
        sighting(status("a0", JOINING, 3, took_part=False), silent_since=1.0),
    ],
)
def test_who_is_not_in_the_way(seen: dict[str, Sighting]) -> None:
    assert after().in_the_way(["c0"], seen) == frozenset()
