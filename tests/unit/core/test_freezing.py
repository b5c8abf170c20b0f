"""Where operations queue, all freeze their groups before anybody aborts one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.membership import Member, WorkerStatus
from elastic.core.worker.machine import AbortGroup, FreezeGroup, ReportStatus, Worker
from tests.unit.core.cluster_views import FINISHED, JOINING, READY, TRAINING, generation, status
from tests.unit.core.test_coordinator import killed
from tests.unit.core.test_coordinator_of_many_nodes import Job, adopted, reported, running

FIRST = generation(1, "a0", "b0")
SETTLED = generation(2, "a0")
FREEZES = replace(SETTLED, provisional=True)


def trains(worker: str, number: int = 1, **fields: object) -> WorkerStatus:
    return status(worker, TRAINING, number, queues=True, **fields)


def queued(*workers: str, **policy: object) -> Job:
    """Generation 1 of these workers trains."""
    job = running(*workers, **policy)
    job.tell(*(reported(trains(w)) for w in workers))
    return job


def settled(job: Job) -> list[int]:
    return [e.generation.number for e in job.told(fx.SettleGeneration)]  # type: ignore[attr-defined]


def counts_from(job: Job) -> dict[str, int]:
    return {m.worker: m.counts_from for m in job.formed[-1].members if m.counts_from}


# ---- the worker


def training() -> Worker:
    worker = Worker("a0")
    worker.attached()
    worker.assigned(0)
    worker.prepared("a:1", queues=True)
    worker.generation_announced(FIRST)
    worker.join_began(FIRST)
    worker.joined(FIRST, 5)
    return worker


def test_a_worker_freezes_its_group_before_it_acknowledges_and_aborts_it_once_settled() -> None:
    worker = training()
    effects = worker.generation_announced(FREEZES)
    assert [type(e) for e in effects] == [FreezeGroup, ReportStatus]
    assert worker.status.acknowledged == 2
    assert worker.generation_announced(SETTLED) == [AbortGroup(generation=1)]


def test_a_worker_that_has_left_a_frozen_group_aborts_it_and_joins_only_once_settled() -> None:
    worker = training()
    worker.generation_announced(FREEZES)
    assert worker.must_leave(5)
    worker.group_left(5)
    assert worker.joinable() is None
    assert worker.generation_announced(SETTLED) == [AbortGroup(generation=1)]
    assert worker.joinable() is SETTLED


@pytest.mark.parametrize(("from_", "has_state"), [(0, True), (1, True), (2, False)])
def test_a_state_does_not_count_if_it_is_of_an_earlier_group_than_the_leader_trusts(
    from_: int, has_state: bool
) -> None:
    worker = training()
    me = Member(worker="a0", node="a", slot=0, endpoint="a0:1", counts_from=from_)
    later = replace(generation(3, "a0"), members=(me,))
    worker.generation_announced(later)
    worker.group_left(5)
    worker.join_began(later)
    assert worker.status.has_state is has_state
    assert worker.is_tainted is not has_state
    worker.group_broke(5, "reset")
    worker.generation_announced(generation(4, "a0"))
    worker.join_began(generation(4, "a0"))
    assert worker.is_tainted is not has_state  # until it has another one
    worker.joined(generation(4, "a0"), 4)
    assert not worker.is_tainted
    assert worker.status.has_state


# ---- the leader


def test_members_abort_when_all_who_could_take_garbage_have_acknowledged() -> None:
    job = queued("a0", "b0", "c0")
    assert job.tell(killed("c0")) == ["a0", "b0"]
    assert job.formed[-1].freezes
    job.report(trains("a0", acknowledged=2))
    assert settled(job) == []
    job.report(trains("b0", acknowledged=2))
    assert settled(job) == [2]
    assert job.machine.current == replace(job.formed[-1], provisional=False)


def test_a_gloo_group_is_left_without_a_second_announcement() -> None:
    job = running("a0", "b0")
    job.tell(killed("b0"))
    assert not job.formed[-1].provisional
    job.report(status("a0", TRAINING, 1, acknowledged=2))
    assert settled(job) == []


def test_a_worker_beside_the_next_group_is_awaited_if_it_may_be_in_an_earlier_one() -> None:
    job = queued("a0", "b0", "c0", max_workers=3)
    job.tell(killed("c0"))
    job.report(status("a1", READY, queues=True), trains("a0", acknowledged=2), node="a")
    job.report(trains("b0", acknowledged=2))
    assert settled(job) == []
    job.report(
        status("a1", READY, queues=True, acknowledged=2), trains("a0", acknowledged=2), node="a"
    )
    assert settled(job) == [2]


def test_a_member_that_does_not_acknowledge_is_left_out() -> None:
    job = queued("a0", "b0", "c0")
    job.tell(killed("c0"))
    job.report(trains("a0", acknowledged=2))
    assert job.tell(ev.TimerFired(), after_s=11.0) == ["a0"]
    assert settled(job) == []
    job.report(trains("a0", acknowledged=3))
    assert settled(job) == [3]


def test_a_dissolved_group_is_aborted_when_all_workers_in_contact_are_frozen() -> None:
    job = queued("a0", "b0", "c0", min_workers=3, agent_grace_s=0.0)
    assert job.tell(killed("c0")) == []
    assert job.formed[-1].freezes
    assert set(job.formed[-1].frozen) == {"a0", "b0"}
    job.report(trains("a0", acknowledged=2))
    assert settled(job) == []
    job.report(trains("b0", acknowledged=2))
    assert settled(job) == [2]


def test_a_dissolved_group_dissolves_again_without_a_frozen_worker_that_falls_silent() -> None:
    job = queued("a0", "b0", "c0", min_workers=3, agent_grace_s=1.0)
    job.tell(killed("c0"))
    job.report(trains("a0", acknowledged=2))
    job.tell(ev.NodeLost(node="b"))
    assert settled(job) == []
    assert job.tell(ev.TimerFired(), after_s=2.0) == []
    assert job.formed[-1].frozen == ("a0",)


def test_an_unplanned_change_follows_if_a_member_leaves_before_a_planned_one() -> None:
    """The settled form "leave at once" would let members abort while others may still train."""
    job = queued("a0", "b0")
    assert job.report(status("c0", READY, queues=True)) == ["a0", "b0", "c0"]
    assert job.formed[-1].leave_after is not None
    job.report(status("a0", READY, 1, acknowledged=2, queues=True, broken=True, detail="reset"))
    assert settled(job) == []
    job.tell(ev.TimerFired())
    assert job.formed[-1].number == 3
    assert job.formed[-1].freezes


def cut_off() -> Job:
    """b0 was out of contact when a0 and c0 were frozen and left generation 1."""
    job = queued("a0", "b0", "c0", agent_grace_s=0.5)
    job.tell(ev.NodeLost(node="b"), after_s=0.1)
    assert job.tell(ev.TimerFired()) == ["a0", "c0"]
    job.report(trains("a0", acknowledged=2))
    job.report(trains("c0", acknowledged=2))
    assert settled(job) == [2]
    return job


def test_the_step_of_a_worker_that_was_not_frozen_does_not_count_when_it_comes_back() -> None:
    job = cut_off()
    job.report(trains("b0", committed=9), after_s=0.1)
    assert job.tell(killed("c0"), after_s=0.1) == ["a0"]
    job.report(trains("a0", acknowledged=3))
    job.report(status("b0", READY, 1, acknowledged=3, committed=9, queues=True))
    job.report(status("a0", JOINING, 3, queues=True))
    assert sorted(job.report(trains("a0", 3)) or []) == ["a0", "b0"]
    assert counts_from(job) == {"b0": 3}


def test_a_new_leader_trusts_the_members_of_the_newest_group_alone() -> None:
    frozen = generation(5, "a0", "c0", provisional=True)
    job = adopted(frozen, agent_grace_s=0.5)
    job.tell(reported(trains("a0", 4, acknowledged=5)), reported(trains("c0", 4, acknowledged=5)))
    assert settled(job) == [5]
    job.report(status("b0", READY, 4, acknowledged=5, committed=9, queues=True))
    assert job.tell(killed("c0")) == ["a0"]
    job.report(trains("a0", 5, acknowledged=6))
    job.report(status("b0", READY, 4, acknowledged=6, committed=9, queues=True))
    assert settled(job) == [6]
    assert sorted(job.report(trains("a0", 6)) or []) == ["a0", "b0"]
    assert counts_from(job) == {"b0": 6}


@pytest.mark.parametrize(("last", "trusted"), [(("b0",), True), ((), False)])
def test_a_new_leader_knows_who_was_to_freeze_in_a_dissolved_group(
    last: tuple[str, ...], trusted: bool
) -> None:
    job = adopted(generation(5, provisional=True, frozen=last), agent_grace_s=0.5)
    job.report(status("b0", READY, 4, acknowledged=5, committed=9, queues=True))
    assert job.tell(ev.TimerFired(), after_s=20.0) == ["b0"]
    assert (counts_from(job) == {}) is trusted


def test_the_state_of_a_worker_that_trained_alone_counts() -> None:
    """Nobody could have fed it garbage."""
    job = adopted(generation(5, provisional=True), generation(4, "b0"), agent_grace_s=0.5)
    job.tell(ev.TimerFired(), after_s=20.0)
    job.report(status("b0", FINISHED, 4, acknowledged=5, committed=9, queues=True))
    assert job.told(fx.EndJob)


def test_a_generation_says_which_of_its_forms_freezes() -> None:
    planned = generation(2, "a0", leave_after=3, provisional=True)
    assert [g.freezes for g in (FREEZES, SETTLED, planned)] == [True, False, False]
    assert SETTLED.is_news_after(FREEZES)
    assert not FREEZES.is_news_after(SETTLED)
