"""What the coordinator knows of generations: which groups may still train and which may follow
them (P1), which failures count when all workers restart, and which checkpoints are whole.
"""

from __future__ import annotations

import pytest

from elastic.core.coordinator.decisions import Form
from elastic.core.coordinator.generations import CheckpointTracker, Lineage, PastGenerations
from elastic.core.coordinator.view import ObservedWorker
from elastic.core.membership import ChangeReason, Failure, FailureKind, WorkerStatus
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
    """The lineage once generation 3 of a0 and b0 exists."""
    lineage = Lineage()
    lineage.exists(generation(3, "a0", "b0"))
    return lineage


def observed(s: WorkerStatus, since: float | None = None) -> dict[str, ObservedWorker]:
    return {s.worker: ObservedWorker(node=s.worker[0], status=s, out_of_contact_since=since)}


def test_any_worker_may_form_the_first_group() -> None:
    lineage = Lineage()
    assert lineage.allows(["a0"])
    assert lineage.members() == []


def test_a_new_group_must_include_a_member_of_a_group_that_may_train() -> None:
    lineage = after()
    assert lineage.allows(["a0", "c0"])
    assert not lineage.allows(["c0"])
    assert lineage.allows([])
    assert lineage.members() == [member("a0"), member("b0")]


def test_a_new_group_must_include_a_member_of_each_group_that_may_train() -> None:
    lineage = after()
    lineage.exists(generation(4, "b0", "c0"))
    assert not lineage.allows(["a0"])
    assert not lineage.allows(["c0"])
    assert lineage.allows(["b0"])
    assert lineage.allows(["a0", "c0"])
    assert lineage.may_train == (generation(3, "a0", "b0"), generation(4, "b0", "c0"))


def test_a_generation_without_members_cannot_train() -> None:
    lineage = Lineage()
    lineage.exists(generation(3))
    assert lineage.allows(["c0"])
    assert lineage.may_train == ()


@pytest.mark.parametrize("gone", ["a0", "b0"])
def test_a_group_that_has_certainly_lost_a_member_can_no_longer_train(gone: str) -> None:
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
        (status("a0", FINISHED, 2), False),  # a finished worker joins no other group
        (status("a0", JOINING, 4), False),
        (status("a0", TRAINING, 4), False),
        (status("c0", TRAINING, 4), True),
    ],
)
def test_a_group_may_train_until_a_member_has_left_it(seen: WorkerStatus, trains: bool) -> None:
    lineage = after()
    lineage.seen(observed(seen))
    assert lineage.allows(["d0"]) is not trains


@pytest.mark.parametrize(("acknowledged", "may_join"), [(0, True), (3, True), (4, False)])
def test_a_member_that_acknowledged_a_later_generation_cannot_join_an_earlier_one(
    acknowledged: int, may_join: bool
) -> None:
    lineage = after()
    lineage.seen(observed(status("a0", READY, 0, acknowledged=acknowledged)))
    assert lineage.allows(["d0"]) is not may_join


def test_the_last_report_of_a_node_out_of_contact_does_not_show_that_a_group_stopped() -> None:
    lineage = after()
    lineage.seen(observed(status("a0", READY, 3), since=1.0))
    assert not lineage.allows(["c0"])


def test_a_member_that_is_missing_from_its_nodes_report_has_ended() -> None:
    lineage = after()
    lineage.reported("a", ["a0", "a1"])
    lineage.reported("c", [])
    assert not lineage.allows(["c0"])
    lineage.reported("a", ["a1"])
    assert lineage.allows(["c0"])


def test_a_worker_that_joins_without_state_is_in_the_way_of_a_group_without_its_members() -> None:
    lineage = after()
    joins = observed(status("a0", JOINING, 3, has_state=False))
    assert lineage.blocking_joiners(["c0"], joins) == {"a0"}
    assert lineage.blocking_joiners(["b0", "c0"], joins) == frozenset()
    assert lineage.blocking_joiners(["c0"], {}) == frozenset()


@pytest.mark.parametrize(
    "seen",
    [
        observed(status("a0", JOINING, 3)),  # it holds the state
        observed(status("a0", TRAINING, 3)),
        observed(status("a0", JOINING, 2, has_state=False)),  # it has not begun to join
        observed(status("a0", JOINING, 3, has_state=False), since=1.0),
    ],
)
def test_holders_and_those_not_joining_are_not_in_the_way(seen: dict[str, ObservedWorker]) -> None:
    assert after().blocking_joiners(["c0"], seen) == frozenset()


FORMS = Form(members=(member("a0"),), reason=ChangeReason.STARTED)
DISSOLVES = Form(members=(), reason=ChangeReason.MEMBER_LOST)


def past(*generations: tuple[str, ...]) -> PastGenerations:
    found = PastGenerations()
    for number, workers in enumerate(generations, 1):
        found.remember(generation(number, *workers))
    return found


def failed(worker: str, kind: FailureKind = FailureKind.EXCEPTION) -> Failure:
    return Failure(worker=worker, kind=kind)


def test_only_the_first_failure_in_a_group_counts() -> None:
    found = past(("a0", "b0"))
    assert found.is_unexplained_failure(failed("b0"))
    assert not found.is_unexplained_failure(failed("a0")), "it failed of that"
    found.remember(generation(2))
    found.remember(generation(3, "a1", "b1"))
    assert found.is_unexplained_failure(failed("a1"))


def test_a_failure_of_a_member_of_a_dissolved_group_does_not_count() -> None:
    assert not past(("a0", "b0"), ()).is_unexplained_failure(failed("a0"))


def test_failures_of_non_members_and_of_members_that_never_arrived_count() -> None:
    found = past(("a0", "b0"), ())
    assert found.is_unexplained_failure(failed("c0"))
    assert found.is_unexplained_failure(failed("a0", FailureKind.LEFT_OUT))


def test_every_group_after_the_first_counts_as_a_restart() -> None:
    assert PastGenerations().restart_count(FORMS) == 0
    found = past(("a0",))
    assert found.restart_count(DISSOLVES) == 0
    found.remember(generation(2, restart_count=0))
    assert found.restart_count(FORMS) == 1
    found.remember(generation(3, "a1", restart_count=1))
    assert found.restart_count(DISSOLVES) == 1


def test_only_the_last_16_generations_are_remembered() -> None:
    found = past(*[(f"a{n}",) for n in range(20)])
    assert found.get(4) is None
    assert found.get(5) is not None
    assert found.past_members() == {f"a{n}" for n in range(4, 20)}
    assert [m.worker for m in found.last_members()] == ["a19"]


PAIR, NEXT = generation(3, "a0", "b0"), generation(4, "a0", "c0")


def test_a_checkpoint_is_whole_only_once_its_last_part_is_written() -> None:
    tracker = CheckpointTracker()
    assert not tracker.written(PAIR, 10, 0, 2)
    assert not tracker.written(PAIR, 10, 0, 2)  # reported twice
    assert tracker.written(PAIR, 10, 1, 2)


def test_parts_of_two_generations_do_not_make_a_whole_checkpoint() -> None:
    tracker = CheckpointTracker()
    assert not tracker.written(PAIR, 10, 0, 2)
    assert not tracker.written(NEXT, 10, 1, 2)


def test_a_part_with_an_impossible_index_or_count_is_ignored() -> None:
    tracker = CheckpointTracker()
    assert not tracker.written(PAIR, 10, 0, 1)
    assert not tracker.written(PAIR, 10, 2, 2)
    assert tracker.lost("a0") == []


def test_a_save_is_abandoned_when_a_worker_is_lost_before_it_has_written_its_part() -> None:
    tracker = CheckpointTracker()
    tracker.written(PAIR, 10, 0, 2)
    assert tracker.lost("a0") == []
    assert tracker.lost("b0") == [(10, 3)]
    assert tracker.abandoned
    assert tracker.lost("b0") == []


def test_a_whole_checkpoint_clears_the_mark_that_a_save_was_abandoned() -> None:
    tracker = CheckpointTracker()
    tracker.written(PAIR, 10, 0, 2)
    tracker.lost("b0")
    tracker.written(NEXT, 12, 0, 2)
    assert tracker.written(NEXT, 12, 1, 2)
    assert not tracker.abandoned


def test_a_part_that_is_reported_again_does_not_reopen_a_whole_save() -> None:
    tracker = CheckpointTracker()
    tracker.written(PAIR, 10, 0, 2)
    assert tracker.written(PAIR, 10, 1, 2)
    assert not tracker.written(PAIR, 10, 0, 2)
    assert tracker.lost("b0") == []
    assert not tracker.abandoned


def test_an_abandoned_save_that_members_were_not_told_of_can_still_be_completed() -> None:
    tracker = CheckpointTracker(gives_up_on_loss=False)
    tracker.written(PAIR, 10, 0, 2)
    assert tracker.abandon(["b0"]) == []
    assert tracker.abandoned
    assert tracker.written(PAIR, 10, 1, 2)
    assert not tracker.abandoned
