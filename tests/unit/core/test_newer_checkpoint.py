"""A member comes back with less than the checkpoint of a group that went on without it."""

from __future__ import annotations

import pytest

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.membership import WorkerStatus
from tests.unit.core.cluster_views import JOINING, READY, status
from tests.unit.core.test_coordinator_of_many_nodes import Job, killed, running, trains

SAVED_AT = 9


def lost_after_it_saved() -> Job:
    """b0 has gone on without a0 in generation 2, and has saved step 9."""
    job = running("a0", "b0", agent_grace_s=0.0)
    assert job.tell(ev.NodeLost(node="a")) == ["b0"]
    job.report(trains("b0", 2, committed=5, trained_in=2))
    job.tell(ev.ShardReported(worker="b0", generation=2, step=SAVED_AT, index=0, count=1))
    assert job.told(fx.CommitCheckpoint) == [fx.CommitCheckpoint(generation=2, step=SAVED_AT)]
    return job


def replaced(job: Job) -> list[str]:
    return [e.worker for e in job.told(fx.ReplaceWorker)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("held", [4, SAVED_AT])  # as many steps may be different ones
def test_a_holder_that_is_behind_the_newest_checkpoint_is_replaced_by_a_fresh_worker(
    held: int,
) -> None:
    job = lost_after_it_saved()
    job.tell(ev.CheckpointCommitted(generation=2, step=SAVED_AT))
    job.tell(killed("b0"), ev.NodeGone(node="b"))
    assert job.report(status("a0", READY, 1, acknowledged=3, committed=held, trained_in=1)) is None
    assert replaced(job) == ["a0"]
    job.tell(killed("a0"))
    assert job.report(status("a1", READY, acknowledged=3)) == ["a1"]


@pytest.mark.parametrize(
    "holder",
    [
        # a0 has more: the last step of the group that it was cut off from.
        status("a0", READY, 1, acknowledged=3, committed=SAVED_AT + 1, trained_in=1),
        # The group of a0 went back further on purpose, for example from a damaged checkpoint.
        status("a0", READY, 3, acknowledged=3, committed=4, trained_in=3),
        # a0 tried to join a later group, and has more.
        status("a0", READY, 3, acknowledged=3, committed=SAVED_AT + 1, trained_in=1),
        # An earlier version of elastic does not report in which generation it has trained.
        status("a0", READY, 1, acknowledged=3, committed=4),
    ],
)
def test_holders_that_are_not_behind_the_checkpoint_train_on(holder: WorkerStatus) -> None:
    job = lost_after_it_saved()
    job.tell(ev.CheckpointCommitted(generation=2, step=SAVED_AT))
    job.tell(killed("b0"), ev.NodeGone(node="b"))
    assert job.report(holder) == ["a0"]


def test_a_member_that_only_tried_to_join_a_later_group_is_behind_and_replaced() -> None:
    job = lost_after_it_saved()
    job.tell(ev.CheckpointCommitted(generation=2, step=SAVED_AT))
    newcomer = status("a0", READY, 1, acknowledged=2, committed=4, trained_in=1)
    assert job.report(newcomer) == ["b0", "a0"]  # planned, and b0 dies before it
    job.report(status("a0", JOINING, 3, acknowledged=3, committed=4, trained_in=1))
    job.tell(killed("b0"), ev.NodeGone(node="b"))
    assert replaced(job) == ["a0"]


def test_a_checkpoint_that_is_not_known_to_be_whole_replaces_no_holder() -> None:
    job = lost_after_it_saved()
    job.tell(killed("b0"), ev.NodeGone(node="b"))
    assert job.report(status("a0", READY, 1, acknowledged=3, committed=4, trained_in=1)) == ["a0"]
