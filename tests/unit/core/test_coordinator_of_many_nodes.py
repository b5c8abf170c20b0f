"""The coordinator with nodes that fall silent, end, leave, or trained under an earlier leader."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.phases import JobPhase
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.membership import (
    Failure,
    FailureKind,
    Generation,
    NodeId,
    Purpose,
    WorkerStatus,
)
from tests.unit.core.cluster_views import FINISHED, JOINING, READY, TRAINING, generation, status
from tests.unit.core.test_coordinator import killed

POLICY = FormationPolicy(
    min_workers=1,
    max_workers=3,
    agent_grace_s=10.0,
    probe_interval_s=0.2,
    join_debounce_s=0.0,
    planned_interval_s=0.0,
)
PAIR = generation(5, "a0", "b0")
BREAKS = {"broken": True, "detail": "reset"}


def settings(**policy: object) -> CoordinatorSettings:
    return CoordinatorSettings(
        incarnation="x",
        formation=replace(POLICY, **policy),  # type: ignore[arg-type]
        planned_notice_s=0.0,
    )


class Job:
    """Feeds events to a machine, by default one second apart, and completes each write to the
    store at once, or leaves that to the test."""

    def __init__(self, machine: Coordinator) -> None:
        self.machine = machine
        self.writes_at_once = True
        self.now = 0.0
        self.formed: list[Generation] = []
        self.effects: list[fx.Effect] = []

    def tell(self, *events: ev.Event, after_s: float = 1.0) -> list[str] | None:
        """Return the members of the newest generation that the events lead to; None without one."""
        self.now += after_s
        before, self.effects = len(self.formed), []
        for event in events:
            self._handle(event)
        if len(self.formed) == before:
            return None
        return [m.worker for m in self.formed[-1].members]

    def report(
        self, *workers: WorkerStatus, node: NodeId = "", after_s: float = 1.0
    ) -> list[str] | None:
        """Report the workers of one node: `node`, or that of the first worker."""
        return self.tell(reported(*workers, node=node), after_s=after_s)

    def told(self, kind: type) -> list[fx.Effect]:
        return [e for e in self.effects if isinstance(e, kind)]

    def wakes_at(self) -> float | None:
        (timer,) = [e for e in self.effects if isinstance(e, fx.SetTimer)][-1:]
        return timer.at

    def _handle(self, event: ev.Event) -> None:
        for effect in self.machine.handle(event, self.now):
            self.effects.append(effect)
            if isinstance(effect, fx.PersistGeneration):
                self.formed.append(effect.generation)
                if self.writes_at_once:
                    self._handle(ev.GenerationPersisted(number=effect.generation.number))


def reported(*workers: WorkerStatus, node: NodeId = "") -> ev.NodeReported:
    name = node or workers[0].worker[0]
    return ev.NodeReported(node=name, slots=max(1, len(workers)), workers=workers)


def adopted(last: Generation = PAIR, *before: Generation, **policy: object) -> Job:
    """A newly elected coordinator that no node has reported to yet."""
    return Job(Coordinator(settings(**policy), last=last, may_train=before, now=0.0))


def trains(worker: str, number: int = 5, **fields: object) -> WorkerStatus:
    return status(worker, TRAINING, number, **fields)


def running(*workers: str, **policy: object) -> Job:
    """Generation 1 of these workers trains, each on a node of its own."""
    job = Job(Coordinator(settings(**policy)))
    first = [reported(status(w, READY)) for w in workers]
    first[0] = replace(first[0], slots=len(workers))  # so that the machine waits for the others
    first[1:] = [replace(r, slots=0) for r in first[1:]]
    assert job.tell(*first) == list(workers)
    job.tell(*(reported(trains(w, 1)) for w in workers))
    assert job.machine.phase is JobPhase.RUNNING
    return job


# ---- a running group under a new coordinator


def test_a_group_that_trains_is_adopted_unchanged() -> None:
    job = adopted()
    assert job.machine.current == PAIR
    assert job.machine.phase is JobPhase.RUNNING
    assert job.report(trains("a0", committed=7)) is None
    assert job.report(trains("b0", committed=8)) is None
    assert job.machine.committed == 8
    assert job.formed == []


def test_a_new_coordinator_completes_a_save_of_the_group_before_a_planned_change() -> None:
    job = adopted(generation(6, "b0", leave_after=9), generation(5, "a0", "b0"))
    for index, worker in enumerate(("a0", "b0")):
        job.tell(ev.ShardReported(worker=worker, generation=5, step=9, index=index, count=2))
    assert job.told(fx.CommitCheckpoint) == [fx.CommitCheckpoint(generation=5, step=9)]


@pytest.mark.parametrize("first", ["shard", "finished"])
def test_a_new_coordinator_abandons_a_save_that_lacks_a_finished_members_part(first: str) -> None:
    job = adopted()
    part = ev.ShardReported(worker="b0", generation=5, step=9, index=1, count=2)
    events = [reported(trains("b0", committed=9)), part]
    done = reported(status("a0", FINISHED, 5, committed=9))
    job.tell(*((*events, done) if first == "shard" else (done, *events)))
    (abandoned,) = job.told(fx.AbandonCheckpoint)
    assert (abandoned.step, abandoned.reason) == (9, "member_lost")  # type: ignore[attr-defined]


def test_a_member_that_reports_its_part_later_is_also_told_that_the_save_is_abandoned() -> None:
    job = adopted(generation(5, "a0", "b0", "c0"))
    part = ev.ShardReported(worker="b0", generation=5, step=9, index=1, count=3)
    job.tell(reported(status("a0", FINISHED, 5, committed=9)), part)
    assert job.told(fx.AbandonCheckpoint)
    job.tell(replace(part, worker="c0", index=2))
    assert job.told(fx.AbandonCheckpoint)


def test_a_member_back_in_contact_is_told_that_its_save_was_abandoned() -> None:
    """The other members have been told and may have ended, so nobody saves this step again."""
    job = running("a0", "b0", agent_grace_s=0.0)
    first, second = (
        ev.ShardReported(worker=worker, generation=1, step=9, index=index, count=2)
        for index, worker in enumerate(("a0", "b0"))
    )
    job.tell(first)
    job.machine.handle(ev.NodeLost(node="b"), job.now)  # the next generation is not stored yet
    job.tell(reported(trains("b0", 1, committed=9)), second)
    assert job.told(fx.AbandonCheckpoint)


def test_a_new_coordinator_admits_a_newcomer_under_the_next_generation_number() -> None:
    job = adopted()
    job.report(trains("a0"))
    job.report(trains("b0"))
    assert job.report(status("c0", READY)) == ["a0", "b0", "c0"]
    assert job.formed[0].number == 6
    assert job.formed[0].incarnation == "x"


def test_a_member_that_its_node_does_not_report_is_lost_at_once() -> None:
    job = adopted(generation(5, "a0", "a1", "b0"))
    assert job.report(trains("b0")) is None
    assert set(job.report(trains("a1")) or ()) == {"a1", "b0"}
    (lost,) = job.told(fx.Lost)
    assert lost.workers == ("a0",)  # type: ignore[attr-defined]


def test_members_whose_nodes_stay_silent_keep_their_place_while_the_group_trains() -> None:
    job = adopted()
    assert job.report(trains("a0"), after_s=0.5) is None
    assert job.told(fx.ProbeGroup)
    assert job.wakes_at() == pytest.approx(0.7)
    while job.now < 9.0:
        works = ev.ProgressReported(
            generation=5, committed=1, step_s=0.1, in_step_s=0.1, probed=True
        )
        assert job.tell(works) is None
    assert job.report(trains("b0"), after_s=0.5) is None
    assert not job.told(fx.ProbeGroup)
    assert job.wakes_at() is None
    assert job.tell(ev.TimerFired(), after_s=60.0) is None


def test_members_are_probed_once_in_each_interval() -> None:
    job = adopted()
    job.report(trains("a0"))
    assert len(job.told(fx.ProbeGroup)) == 1
    job.tell(ev.TimerFired(), after_s=0.1)
    assert not job.told(fx.ProbeGroup)
    job.tell(ev.TimerFired(), after_s=0.11)
    assert job.told(fx.ProbeGroup)


def test_members_out_of_contact_are_left_out_after_the_grace() -> None:
    job = adopted()
    job.report(trains("a0"))
    assert job.tell(ev.TimerFired(), after_s=8.9) is None
    assert job.wakes_at() == pytest.approx(10.0)
    assert job.tell(ev.TimerFired(), after_s=0.1) == ["a0"]


def test_members_out_of_contact_are_left_out_when_a_member_is_stuck() -> None:
    job = adopted()
    job.report(trains("a0"))
    late = ev.ProgressReported(generation=4, committed=1, step_s=0.1, in_step_s=9.0, probed=True)
    assert job.tell(late) is None
    stuck = replace(late, generation=5)
    assert job.tell(stuck) == ["a0"]


def test_a_member_whose_agent_restarts_is_waited_for_when_a_step_takes_long() -> None:
    job, b = running("a0", "b0", agent_grace_s=10.0), reported(trains("b0", 1))
    late = ev.ProgressReported(generation=1, committed=1, step_s=0.1, in_step_s=9.0, probed=True)
    assert job.tell(replace(b, restarting=True), ev.NodeLost(node="b"), late) is None
    assert job.told(fx.ProbeGroup)
    assert job.tell(b, late) is None
    assert job.tell(ev.NodeLost(node="b"), late) == ["a0"]  # this time it was not announced


@pytest.mark.parametrize("how", ["broken", "the grace is over"])
def test_a_member_whose_agent_restarts_is_left_out_when_it_is_lost(how: str) -> None:
    job, b = running("a0", "b0", agent_grace_s=10.0), reported(trains("b0", 1))
    assert job.tell(replace(b, restarting=True), ev.NodeLost(node="b")) is None
    if how == "broken":
        assert job.report(status("a0", READY, 1, has_state=True, broken=True)) == ["a0"]
    else:
        assert job.tell(ev.TimerFired(), after_s=10.0) == ["a0"]
    job = adopted()
    job.report(trains("a0"))
    assert job.report(status("a0", READY, 5, **BREAKS)) == ["a0"]


def test_nothing_is_decided_while_all_members_are_out_of_contact() -> None:
    job = adopted()
    assert job.tell(ev.TimerFired(), after_s=3600.0) is None
    assert job.wakes_at() is None
    assert job.report(status("c0", READY)) is None  # c0 would form a second group
    assert job.tell(ev.TimerFired(), after_s=3600.0) is None


@pytest.mark.parametrize("gone", ["a", "b"])
def test_no_second_group_forms_until_a_node_of_the_group_that_may_train_is_gone(gone: str) -> None:
    job = adopted()
    assert job.report(status("c0", READY)) is None
    assert job.tell(ev.NodeGone(node=gone)) is None  # the other holds the state and may come back
    assert job.tell(ev.TimerFired(), after_s=8.0) == ["c0"]


def test_a_member_of_a_group_that_may_train_takes_the_place_of_another_worker() -> None:
    job = adopted(generation(6), generation(5, "z0"), max_workers=2)
    job.tell(*(reported(status(w, READY, acknowledged=6)) for w in ("a0", "b0")))
    job.tell(reported(status("z0", READY, acknowledged=5)))
    assert set(job.tell(ev.TimerFired(), after_s=30.0) or ()) == {"a0", "z0"}


def test_no_group_begins_without_the_state_while_its_holder_may_come_back() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"))
    assert job.tell(ev.WorkerFailed(node="a", failure=killed("a0").failure)) is None
    assert job.report(status("c0", READY)) is None
    assert job.report(trains("b0", 1, committed=9)) == ["b0"]


def test_a_dissolved_group_waits_for_a_member_out_of_contact() -> None:
    job = running("a0", "b0", min_workers=2)
    assert job.tell(ev.NodeLost(node="b"), killed("a0"), after_s=1.0) is None
    assert job.tell(ev.TimerFired(), after_s=10.0) == []
    assert job.report(status("c0", READY), status("c1", READY)) is None
    assert job.tell(ev.TimerFired(), after_s=30.0) == ["c0", "c1"]


def test_only_the_member_that_holds_up_a_planned_dissolution_is_replaced() -> None:
    job = running("a0", "b0", min_workers=2, busy_timeout_s=20.0)
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == []
    assert job.tell(ev.TimerFired(), after_s=20.0) == []
    assert job.formed[-1].leave_after is None  # frees scripts that are blocked
    assert job.told(fx.ReplaceWorker) == []
    job.report(status("a0", READY, 1, acknowledged=3, committed=5))
    job.tell(ev.TimerFired(), after_s=20.0)
    assert [e.worker for e in job.told(fx.ReplaceWorker)] == ["b0"]  # type: ignore[attr-defined]


def test_a_member_back_in_contact_gets_time_to_acknowledge_a_generation() -> None:
    """The earlier coordinator died before it told b0 of generation 6; b0 was cut off for 60 s."""
    job = adopted(generation(6, "b0"), generation(5, "a0", "b0"))
    assert job.report(trains("b0", 5), after_s=60.0) is None
    assert job.told(fx.ReplaceWorker) == []
    assert job.wakes_at() == job.now + 10.0
    assert job.report(status("b0", READY, 5, acknowledged=6)) is None
    assert job.told(fx.ReplaceWorker) == []


def test_a_member_back_in_contact_that_does_not_acknowledge_in_time_is_replaced() -> None:
    job = adopted(generation(6, "b0"), generation(5, "a0", "b0"))
    assert job.report(trains("b0", 5), after_s=60.0) is None
    job.tell(ev.TimerFired(), after_s=10.0)
    assert [e.worker for e in job.told(fx.ReplaceWorker)] == ["b0"]  # type: ignore[attr-defined]


def test_a_node_whose_stream_was_replaced_gets_time_to_acknowledge_a_generation() -> None:
    """The generation was announced on the earlier stream, whose end went unnoticed here."""
    job = Job(Coordinator(settings(join_timeout_s=10.0)))
    two = [replace(reported(status(w, READY)), slots=n) for w, n in (("a0", 2), ("b0", 0))]
    assert job.tell(*two) == ["a0", "b0"]
    job.report(status("a0", JOINING, 1))
    job.tell(ev.NodeReconnected(node="b"), after_s=8.0)
    assert job.tell(two[1]) is None
    assert job.tell(ev.TimerFired(), after_s=8.0) is None
    assert job.tell(ev.TimerFired()) == ["a0"]
    assert [e.worker for e in job.told(fx.ReplaceWorker)] == ["b0"]  # type: ignore[attr-defined]


def test_a_node_out_of_contact_whose_stream_is_replaced_stays_so_until_it_reports() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"))
    assert job.tell(ev.NodeReconnected(node="b")) is None
    assert job.machine.nodes_out_of_contact() == ["b"]
    assert job.tell(ev.NodeReconnected(node="elsewhere")) is None


def test_a_stuck_member_without_state_is_replaced_so_that_newcomers_can_begin() -> None:
    job = Job(Coordinator(settings(max_workers=1, busy_timeout_s=30.0)))
    assert job.report(status("b0", READY)) == ["b0"]
    job.report(status("b0", JOINING, 1, has_state=False))
    assert job.report(status("a0", READY)) is None
    assert job.tell(ev.TimerFired(), after_s=30.0) is None  # a0 would form a second group
    assert [e.worker for e in job.told(fx.ReplaceWorker)] == ["b0"]  # type: ignore[attr-defined]
    assert job.tell(killed("b0")) == ["a0"]


def test_a_new_coordinator_waits_for_a_holder_of_the_state_after_another_member_is_lost() -> None:
    """The machine of the earlier coordinator may fail together with a worker on it (P2)."""
    job = adopted()
    assert job.report(status("b1", READY), after_s=0.1) is None  # b0 has died
    job.report(trains("a0"), after_s=0.1)
    assert job.formed[-1].members[0].worker == "a0"


def test_a_silent_member_left_out_when_another_node_is_gone_rejoins_later() -> None:
    job = adopted(generation(5, "a0", "b0", "d0"))
    job.report(trains("d0"))
    assert job.tell(ev.NodeGone(node="a")) == ["d0"]  # b0 is still out of contact
    assert job.report(status("b0", READY, 5, acknowledged=6), after_s=0.1) is None
    assert job.report(trains("d0", 6)) == ["d0", "b0"]


def test_a_new_coordinator_of_a_dissolved_group_waits_before_it_forms_one() -> None:
    job = adopted(generation(5))
    assert job.machine.phase is JobPhase.WAITING
    assert job.report(status("a0", READY, 4)) is None  # others may hold a later state
    wakes_at = job.wakes_at()
    assert wakes_at is not None
    assert job.tell(ev.TimerFired(), after_s=wakes_at - job.now) == ["a0"]
    assert job.formed[0].number == 6


# ---- a planned change that an earlier coordinator may not have announced


PLANNED = generation(6, "a0", "b0", "c0", leave_after=9, provisional=True)


def test_newcomers_of_a_provisional_group_form_none_alone_until_an_old_node_is_gone() -> None:
    job = adopted(PLANNED, PAIR)
    assert job.report(status("c0", READY)) is None
    assert job.tell(ev.TimerFired(), after_s=3600.0) is None
    assert job.tell(ev.NodeGone(node="b")) == ["c0"]


def test_newcomers_of_a_provisional_group_form_one_only_with_a_member_of_the_old_group() -> None:
    job = adopted(PLANNED, PAIR)
    job.report(status("c0", READY))
    members = job.tell(reported(trains("a0")), reported(trains("b0")))
    assert members is None or "a0" in members


def test_members_that_a_provisional_change_drops_are_awaited_if_only_they_have_the_state() -> None:
    job = adopted(generation(6, "a0", leave_after=9, provisional=True), PAIR)
    assert job.report(status("a1", READY)) is None
    assert job.report(status("b0", READY, 5, committed=9)) == ["b0"]


def test_a_group_that_may_train_is_stored_with_the_next_generation() -> None:
    job = Job(Coordinator(settings(), last=PLANNED, may_train=(PAIR,), now=0.0))
    over_s = FormationPolicy().roll_call_s
    effects = job.machine.handle(reported(trains("a0")), over_s)
    effects += job.machine.handle(ev.NodeGone(node="c"), over_s + 0.1)
    kept = [e.may_train for e in effects if isinstance(e, fx.PersistGeneration)]
    assert all(PAIR in earlier for earlier in kept)
    assert kept


# ---- a node that is not in the newest group, but in an earlier one that may still train


WITHOUT_B = generation(6, "a0")


def newest_group_is_lost() -> Job:
    """a0 has ended, a1 has no state, and nothing is known of b0, a member of generation 5."""
    job = adopted(WITHOUT_B, PAIR)
    assert job.report(status("a1", READY)) is None
    return job


def test_no_group_begins_without_the_state_while_an_earlier_member_may_come_back() -> None:
    job = newest_group_is_lost()
    back = status("b0", READY, 5, committed=9)
    assert job.report(back, after_s=8.0) == ["b0", "a1"]


def test_a_member_of_an_earlier_group_is_waited_for_like_any_that_is_out_of_contact() -> None:
    job = newest_group_is_lost()
    assert job.wakes_at() is not None
    assert job.tell(ev.TimerFired(), after_s=8.5) is None
    assert job.tell(ev.TimerFired(), after_s=0.5) == ["a1"]


def test_a_member_of_an_earlier_group_is_not_waited_for_when_its_node_is_gone() -> None:
    job = newest_group_is_lost()
    assert job.machine.nodes_out_of_contact() == ["b"]
    assert job.tell(ev.NodeGone(node="b")) == ["a1"]
    assert job.machine.nodes_out_of_contact() == []


def test_members_of_the_newest_group_go_on_without_one_of_an_earlier_group() -> None:
    job = adopted(generation(6, "a0", "c0"), PAIR)
    assert job.report(trains("a0", 6, committed=9)) is None
    assert job.report(trains("c0", 6, committed=9)) is None
    assert job.tell(killed("c0")) == ["a0"]


def test_the_job_stops_when_every_node_leaves_except_one_that_may_never_come_back() -> None:
    job = adopted(WITHOUT_B, PAIR)
    job.report(trains("a0", 6, committed=9))
    job.tell(ev.NodeLeaving(node="a", reason="drained"))
    assert job.machine.phase is JobPhase.DRAINING


def test_a_node_that_left_under_an_earlier_coordinator_does_not_hold_up_the_stop() -> None:
    """b0 left at a step boundary and ended. The new coordinator only knows that it was a member."""
    job = adopted(generation(6, "a0", "c0", leave_after=9), generation(5, "a0", "b0", "c0"))
    job.tell(reported(trains("a0", 6, committed=9)), reported(trains("c0", 6, committed=9)))
    job.tell(ev.NodeLeaving(node="a", reason="SIGTERM"))
    job.tell(ev.NodeLeaving(node="c", reason="SIGTERM"))
    assert job.machine.phase is JobPhase.DRAINING
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


# ---- a holder of the state that comes while a group without it is being written


def written_without_state(**policy: object) -> Coordinator:
    """Generation 7 of a1, which has no state, is being written: b0 did not come in time."""
    machine = adopted(WITHOUT_B, PAIR, **policy).machine
    machine.handle(reported(status("a1", READY)), 1.0)
    (persist,) = persisted(machine.handle(ev.TimerFired(), 10.0))
    assert [m.worker for m in persist.generation.members] == ["a1"]
    return machine


def persisted(effects: list[fx.Effect]) -> list[fx.PersistGeneration]:
    return [e for e in effects if isinstance(e, fx.PersistGeneration)]


def announced(effects: list[fx.Effect]) -> list[int]:
    return [e.generation.number for e in effects if isinstance(e, fx.AnnounceGeneration)]


def test_a_group_without_state_is_superseded_if_a_holder_comes_while_it_is_written() -> None:
    machine = written_without_state()
    assert machine.handle(reported(status("b0", READY, 5, committed=9)), 10.1) == []
    effects = machine.handle(ev.GenerationPersisted(number=7), 10.2)
    assert announced(effects) == []
    (persist,) = persisted(effects)
    assert [m.worker for m in persist.generation.members] == ["b0", "a1"]
    assert [g.number for g in persist.may_train] == [7]
    assert announced(machine.handle(ev.GenerationPersisted(number=8), 10.3)) == [8]


def test_a_group_without_state_is_kept_if_a_holder_comes_after_its_announcement() -> None:
    machine = written_without_state()
    assert announced(machine.handle(ev.GenerationPersisted(number=7), 10.1)) == [7]
    assert persisted(machine.handle(reported(status("b0", READY, 5, committed=9)), 10.2)) == []


def test_a_group_without_state_is_announced_if_no_other_group_can_follow_it() -> None:
    machine = written_without_state(max_workers=1)
    machine.handle(reported(status("b0", READY, 5, committed=9)), 10.1)
    effects = machine.handle(ev.GenerationPersisted(number=7), 10.2)
    assert announced(effects) == [7]
    assert persisted(effects) == []


def test_a_holder_without_a_committed_step_does_not_supersede_a_group_being_written() -> None:
    machine = written_without_state()
    machine.handle(reported(status("b0", READY, 5)), 10.1)
    assert announced(machine.handle(ev.GenerationPersisted(number=7), 10.2)) == [7]


# ---- nodes out of contact


def test_a_node_whose_stream_ends_is_lost_at_once_without_a_grace() -> None:
    job = running("a0", "b0", agent_grace_s=0.0)
    assert job.tell(ev.NodeLost(node="b")) == ["a0"]


def test_members_of_a_node_whose_stream_ends_keep_their_place_for_the_grace() -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLost(node="b")) is None
    assert job.told(fx.ProbeGroup)
    assert job.report(trains("b0", 1)) is None
    assert job.tell(ev.NodeLost(node="b")) is None
    assert job.tell(ev.TimerFired(), after_s=10.0) == ["a0"]


def test_a_node_without_a_member_is_lost_at_once_despite_the_grace() -> None:
    job = running("a0", "b0", max_workers=2)
    job.report(status("c0", READY))
    job.tell(ev.NodeLost(node="c"))
    assert job.tell(killed("b0")) == ["a0"]
    assert job.report(trains("a0", 2)) is None  # c0 is lost and cannot be admitted


def test_a_holder_outside_of_the_group_is_waited_for_when_the_group_is_lost() -> None:
    """b0 came back when the group had no room for it, and then its agent was restarted."""
    job = running("a0", max_workers=1)
    job.report(status("b0", READY, 1, acknowledged=1, committed=9))
    job.report(status("c0", READY))
    assert job.tell(ev.NodeLost(node="b")) is None
    assert job.tell(killed("a0")) is None
    assert job.tell(ev.TimerFired(), after_s=1.0) is None
    assert job.report(status("b0", READY, 1, acknowledged=1, committed=9)) == ["b0"]


def test_a_holder_outside_of_the_group_is_waited_for_no_longer_than_the_grace() -> None:
    job = running("a0", max_workers=1)
    job.report(status("b0", READY, 1, acknowledged=1, committed=9))
    job.report(status("c0", READY))
    assert job.tell(ev.NodeLost(node="b"), killed("a0")) is None
    assert job.tell(ev.TimerFired(), after_s=10.0) == ["c0"]


def test_a_member_that_comes_back_after_it_was_left_out_is_a_newcomer() -> None:
    job = running("a0", "b0", agent_grace_s=0.0)
    job.tell(ev.NodeLost(node="b"))
    job.report(trains("a0", 2))
    assert job.report(status("b0", READY, 1, acknowledged=2)) == ["a0", "b0"]
    assert job.formed[-1].leave_after is not None


def starts(*workers: str) -> Job:
    """Generation 1 of these workers, each on its own node, is formed. None has reported since."""
    job = Job(Coordinator(settings(max_workers=len(workers))))
    both = [replace(reported(status(w, READY)), slots=1) for w in workers]
    assert job.tell(ev.NodesReported(reports=tuple(both))) == list(workers)
    return job


@pytest.mark.parametrize("acknowledged", [0, 1])
def test_a_member_silent_while_joining_is_awaited_if_it_may_have_trained_with_a_lost_one(
    acknowledged: int,
) -> None:
    job = starts("a0", "b0")
    job.report(trains("a0", 1))
    job.report(status("b0", READY, acknowledged=acknowledged))
    job.report(trains("a0", 1, committed=3))
    job.report(status("c0", READY))
    job.tell(ev.NodeLost(node="b"), killed("a0"))
    assert [g.worker_ids for g in job.formed[1:]] == [{"a0"}]
    assert job.report(status("c0", READY), after_s=5.0) is None
    assert job.report(status("b0", READY, 1, committed=3)) == ["b0", "c0"]


def test_a_member_silent_while_joining_is_awaited_when_those_that_went_on_are_lost() -> None:
    job = starts("a0", "b0")
    job.report(trains("a0", 1))
    assert job.tell(ev.NodeLost(node="b")) == ["a0"]  # the group of a0 was not whole
    job.report(status("c0", READY))
    assert job.tell(killed("a0")) is None  # b0 may have trained with it
    assert job.tell(ev.TimerFired(), after_s=10.0) == ["c0"]


def test_steps_of_a_member_that_was_left_out_do_not_delay_a_planned_change() -> None:
    job = running("a0", "b0", agent_grace_s=0.0)
    assert job.tell(ev.NodeLost(node="b")) == ["a0"]
    job.report(trains("a0", 2, committed=4))
    assert job.report(status("b0", READY, 1, committed=50)) == ["a0", "b0"]
    assert job.formed[-1].leave_after == 5


def test_no_group_follows_that_of_a_lost_node_until_the_node_is_gone() -> None:
    job = running("a0", agent_grace_s=0.0)
    job.tell(ev.NodeLost(node="a"))
    assert job.report(status("c0", READY)) is None
    assert job.tell(ev.TimerFired(), after_s=3600.0) is None
    assert job.tell(ev.NodeGone(node="a")) == ["c0"]


def test_a_node_known_to_be_gone_is_not_waited_for() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"))
    assert job.tell(ev.NodeGone(node="b")) == ["a0"]


def test_a_member_back_in_contact_gets_time_to_hear_that_its_group_is_dissolved() -> None:
    job = running("a0", "b0", min_workers=2, agent_grace_s=0.0)
    assert job.tell(ev.NodeLost(node="a")) == []
    job.report(status("b0", READY, 1, acknowledged=2))
    assert job.report(trains("a0", 1, committed=4), after_s=2 * POLICY.busy_timeout_s) is None
    assert job.told(fx.ReplaceWorker) == []
    assert job.report(status("a0", READY, 1, acknowledged=2, committed=4)) == ["a0", "b0"]


def test_no_replacement_is_requested_for_a_silent_member_of_a_dissolved_group() -> None:
    """Its node, whose leave dissolved the group, is out of contact and would get no request."""
    job = running("a0", "b0", min_workers=2)
    assert job.tell(ev.NodeLeaving(node="a", reason="drain")) == []
    assert job.tell(ev.NodeLost(node="a")) is None
    job.report(status("b0", READY, 1, acknowledged=2))
    job.tell(ev.TimerFired(), after_s=POLICY.busy_timeout_s)
    assert not job.told(fx.ReplaceWorker)


# ---- nodes that leave


def test_a_leaving_node_is_drained_once_its_members_have_left_at_a_step_boundary() -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLeaving(node="a", reason="drain")) == ["b0"]
    assert job.formed[-1].leave_after is not None
    assert job.formed[-1].purpose is Purpose.TRAIN
    job.report(trains("a0", 1, acknowledged=2))
    assert not job.told(fx.NodeDrained)
    job.tell(reported(status("a0", READY, 1, acknowledged=2)), reported(trains("b0", 2)))
    assert job.told(fx.NodeDrained) == [fx.NodeDrained(node="a")]
    job.report(status("a0", READY, 1, acknowledged=2))
    assert not job.told(fx.NodeDrained)


def test_a_node_that_repeats_its_leave_is_told_again_that_it_is_drained() -> None:
    """The first message may have been lost with a stream, or the node may have been gone since."""
    job, leaving = running("a0", "b0"), ev.NodeLeaving(node="a", reason="drain")
    job.tell(leaving)
    job.tell(reported(status("a0", READY, 1, acknowledged=2)), reported(trains("b0", 2)))
    assert job.told(fx.NodeDrained) == [fx.NodeDrained(node="a")]
    job.tell(leaving)
    assert job.told(fx.NodeDrained) == [fx.NodeDrained(node="a")]
    job.tell(ev.NodeGone(node="a"))
    job.tell(leaving, reported(node="a"))
    assert job.told(fx.NodeDrained) == [fx.NodeDrained(node="a")]


def test_a_drained_node_that_is_welcomed_again_rejoins_the_group() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLeaving(node="a", reason="drain"))
    job.tell(reported(status("a0", READY, 1, acknowledged=2)), reported(trains("b0", 2)))
    assert job.tell(ev.TimerFired(), after_s=60.0) is None
    assert job.tell(ev.NodeWelcomed(node="a")) == ["b0", "a0"]


def test_when_every_node_leaves_the_job_is_saved_and_stopped() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLeaving(node="a", reason="SIGTERM"))
    assert job.machine.phase is not JobPhase.DRAINING
    assert job.tell(ev.NodeLeaving(node="b", reason="SIGTERM")) is not None
    assert job.machine.phase is JobPhase.DRAINING
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE
    number = job.formed[-1].number
    job.tell(*(reported(status(w, FINISHED, number)) for w in ("a0", "b0")))
    (end,) = job.told(fx.EndJob)
    assert end.exit_code == 143  # type: ignore[attr-defined]
    assert job.machine.phase is JobPhase.FINISHED


def test_a_drained_node_that_is_the_first_to_report_does_not_stop_the_job() -> None:
    job = Job(Coordinator(settings()))
    job.tell(ev.NodeLeaving(node="a", reason="drained"), reported(status("a0", READY)))
    assert not job.told(fx.EndJob)
    assert job.report(status("b0", READY)) == ["b0"]


def test_a_node_that_leaves_while_the_group_assembles_is_dropped_once_it_trains() -> None:
    job = running("a0", "b0", "c0")
    assert job.tell(killed("c0")) is not None
    assert job.tell(ev.NodeLeaving(node="b", reason="drain")) is None
    job.tell(reported(status("a0", JOINING, 2)), reported(status("b0", JOINING, 2)))
    assert job.tell(reported(trains("a0", 2)), reported(trains("b0", 2))) == ["a0"]


def test_lost_steps_do_not_delay_a_planned_change() -> None:
    job = running("a0", agent_grace_s=0.0)
    job.report(trains("a0", 1, committed=40))
    job.tell(ev.NodeLost(node="a"), ev.NodeGone(node="a"))
    assert job.report(status("b0", READY)) == ["b0"]
    job.report(trains("b0", job.formed[-1].number, committed=0))
    assert job.report(status("c0", READY)) == ["b0", "c0"]
    assert job.formed[-1].leave_after == 1


def test_a_returning_worker_with_more_steps_than_the_group_does_not_delay_its_change() -> None:
    """The group had to go back to a checkpoint in the meantime."""
    job = adopted()
    job.report(trains("a0", committed=7))
    job.report(trains("b0", committed=7))
    returned = status("c0", READY, 3, has_state=True, committed=90)
    assert job.report(returned) == ["a0", "b0", "c0"]
    assert job.formed[-1].leave_after == 8
    assert job.machine.committed == 7


def test_a_save_is_abandoned_if_a_member_was_left_behind_before_its_first_part_came() -> None:
    job = running("a0", "b0", "c0")
    job.tell(ev.NodeLost(node="c"))
    assert job.report(status("a0", READY, 1, committed=9, **BREAKS)) == ["a0", "b0"]
    part = ev.ShardReported(worker="a0", generation=1, step=9, index=0, count=3)
    job.tell(part)
    (abandoned,) = job.told(fx.AbandonCheckpoint)
    assert (abandoned.step, abandoned.reason) == (9, "member_lost")  # type: ignore[attr-defined]


def test_a_newcomer_that_finds_the_state_lost_ends_the_job() -> None:
    """The newcomer is rank 0, since no member has the state. Any other would find the same."""
    job = running("a0", "b0")
    failure = Failure(
        worker="c0", kind=FailureKind.EXCEPTION, signature="x", retryable=False, state_lost=True
    )
    job.tell(reported(trains("a0", 1, committed=4)), reported(trains("b0", 1, committed=4)))
    job.report(status("c0", READY))
    job.tell(ev.WorkerFailed(node="c", failure=replace(failure, state_lost=False)))
    assert job.told(fx.EndJob) == []
    job.report(status("c1", READY), node="c")
    job.tell(ev.WorkerFailed(node="c", failure=replace(failure, worker="c1")))
    assert [e.exit_code for e in job.told(fx.EndJob)] == [84]  # type: ignore[attr-defined]


def test_a_report_of_a_lost_state_does_not_end_the_job_once_a_holder_is_back() -> None:
    """b0 was given up and the others could not go on, so a1 finds no state to begin from."""
    job = running("a0", "b0", agent_grace_s=0.0)
    job.tell(ev.NodeLost(node="b"))
    job.report(status("a0", READY, 1, acknowledged=2, committed=4, has_state=False))
    assert job.tell(killed("a0")) == []
    assert job.report(status("a1", READY)) == ["a1"]
    job.report(status("a1", JOINING, 4, has_state=False))
    job.report(status("b0", READY, 1, acknowledged=4, committed=4))
    lost = Failure(
        worker="a1", kind=FailureKind.EXCEPTION, signature="x", retryable=False, state_lost=True
    )
    assert job.tell(ev.WorkerFailed(node="a", failure=lost)) == ["b0"]
    assert job.told(fx.EndJob) == []


def test_a_planned_change_that_a_member_holds_up_is_superseded_after_the_busy_timeout() -> None:
    """A leaving member joins no other group, so no arrival starts the clock of the timeout."""
    job = running("a0", "b0", busy_timeout_s=20.0)
    assert job.tell(ev.NodeLeaving(node="b", reason="drained")) == ["a0"]
    job.tell(reported(trains("a0", 1, acknowledged=2)), reported(trains("b0", 1, acknowledged=2)))
    settled = job.machine.current
    assert settled is not None
    assert job.report(status("b0", READY, 1, acknowledged=2, committed=settled.leave_after)) is None
    assert job.tell(ev.TimerFired(), after_s=10.0) is None
    assert sorted(job.tell(ev.TimerFired(), after_s=11.0) or []) == ["a0", "b0"]


def test_a_leaving_member_with_the_only_copy_of_a_step_stays_when_the_group_breaks() -> None:
    """The group breaks before the boundary is settled: a0 has completed the step, b0 has not, and
    c0 is gone."""
    job = running("a0", "b0", "c0")
    assert sorted(job.tell(ev.NodeLeaving(node="a", reason="drained")) or []) == ["b0", "c0"]
    assert job.formed[-1].provisional
    assert job.report(status("b0", READY, 1, acknowledged=2, committed=3, **BREAKS)) is None
    broken = status("a0", READY, 1, acknowledged=2, committed=4, **BREAKS)
    assert job.report(broken, after_s=0.1) is None
    assert sorted(job.tell(killed("c0"), after_s=0.1) or []) == ["a0", "b0"]


def test_a_group_that_breaks_before_a_change_that_drops_members_re_forms_with_them() -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLeaving(node="a", reason="drained")) == ["b0"]
    job.report(status("b0", READY, 1, acknowledged=2, committed=3, **BREAKS))
    job.report(status("a0", READY, 1, acknowledged=2, committed=4, **BREAKS), after_s=0.1)
    assert sorted(job.tell(ev.TimerFired()) or []) == ["a0", "b0"]


@pytest.mark.parametrize(("committed", "whole"), [(3, True), (4, False)])
def test_a_group_that_breaks_before_the_settled_boundary_re_forms_with_all_members(
    committed: int, whole: bool
) -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLeaving(node="a", reason="drained")) == ["b0"]
    job.report(trains("a0", 1, acknowledged=2, committed=3))
    job.report(trains("b0", 1, acknowledged=2, committed=3))
    settled = job.machine.current
    assert settled is not None
    assert settled.leave_after == 4
    job.report(status("b0", READY, 1, acknowledged=2, committed=committed, **BREAKS))
    job.report(status("a0", READY, 1, acknowledged=2, committed=4), after_s=0.1)
    formed = job.tell(ev.TimerFired(), after_s=1.0)
    assert (sorted(formed or []) == ["a0", "b0"]) is whole


def test_a_member_that_is_lost_before_the_change_that_drops_it_is_a_loss() -> None:
    job = running("a0", "b0", "c0")
    assert sorted(job.tell(ev.NodeLeaving(node="a", reason="drained")) or []) == ["b0", "c0"]
    assert sorted(job.tell(killed("a0"), after_s=0.1) or []) == ["b0", "c0"]
    (lost,) = job.told(fx.Lost)
    assert lost.workers == ("a0",)  # type: ignore[attr-defined]


def test_a_node_that_vanishes_before_the_change_that_drops_it_is_a_loss() -> None:
    job = running("a0", "b0", "c0")
    job.tell(ev.NodeLeaving(node="a", reason="drained"))
    job.tell(ev.NodeLost(node="a"), after_s=0.1)
    job.report(status("b0", READY, 1, acknowledged=2, committed=3, **BREAKS))
    formed = job.report(status("c0", READY, 1, acknowledged=2, committed=3, **BREAKS))
    assert sorted(formed or job.tell(ev.TimerFired(), after_s=30.0) or []) == ["b0", "c0"]
    (lost,) = job.told(fx.Lost)
    assert lost.workers == ("a0",)  # type: ignore[attr-defined]


def test_a_member_that_has_left_as_planned_is_not_lost_with_another_one() -> None:
    job = running("a0", "b0", "c0")
    job.tell(ev.NodeLeaving(node="a", reason="drained"))
    job.report(status("b0", JOINING, 2, acknowledged=2, committed=4))
    job.report(trains("c0", 1, acknowledged=2, committed=4))
    job.tell(killed("a0"), after_s=0.1)
    job.tell(killed("c0"), after_s=0.1)
    (lost,) = job.told(fx.Lost)
    assert lost.workers == ("c0",)  # type: ignore[attr-defined]
