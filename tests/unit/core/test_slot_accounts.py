"""SlotAccounts: each second of a slot has one kind, and lost time belongs to its incident."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.book.accounting import Kind, TimeSpent, read_number
from elastic.core.book.book import Book, FirstStep
from elastic.core.book.incidents import Incident
from elastic.core.book.slot_accounts import Report, SlotAccounts
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    WorkerPhase,
    WorkerStatus,
)
from tests.fuzzed_documents import documents

AHEAD_S = 1000.0  # by which Unix time is ahead of the clock of the tests


@dataclass
class Machine:
    """The part of the coordinator's machine that the accounts read."""

    phase: JobPhase = JobPhase.GATHERING
    current: Generation | None = None
    committed: int = 0
    committed_at: float = 0.0

    def last_commit_at(self, now: float) -> float:
        return min(now, self.committed_at)


class Job:
    """Tells the accounts what happens to a job, and counts the seconds that they must add up to."""

    def __init__(self, most: int = 100) -> None:
        self.now, self.machine, self.book = 0.0, Machine(), Book(most)
        self.views: dict[str, dict[int, WorkerStatus]] = {}
        self.expected_s = 0.0
        self.spent: dict[str, TimeSpent] = {}

    @property
    def accounts(self) -> SlotAccounts:
        return self.book.slots

    def stored(self) -> Any:
        """What the next leader has of the accounts and the incidents."""
        incidents = self.accounts.books.incidents
        documents = {n: i.to_document(AHEAD_S) for n, i in incidents.items()}
        accounts = self.accounts.to_document(self.now, AHEAD_S)
        return json.loads(json.dumps([accounts, [*documents.values()]]))

    def is_led_by_another(self, stored: Any, most: int = 100) -> None:
        self.book = Book(most)
        accounts, incidents = stored
        self.book.resume({i["number"]: i for i in incidents}, (0, 0), AHEAD_S)
        self.book.adopt(accounts, self.now, AHEAD_S)

    def passes(self, seconds: float) -> None:
        self.expected_s += seconds * self.accounts.accounts(self.now).wanted
        self.now += seconds

    def tell(self, event: ev.Event, *effects: fx.Effect) -> None:
        self.book.observe(event, effects, self.machine, self.now)
        self.check()

    def check(self) -> None:
        found = self.accounts.accounts(self.now)
        assert found.wall_s == pytest.approx(self.expected_s, abs=1e-3)  # documents are rounded
        assert sum(found.kinds.values()) == pytest.approx(found.wall_s, abs=1e-3)
        assert min(found.kinds.values()) >= 0.0

    def has(self, node: str, slot: int, worker: str, phase: WorkerPhase, **fields: Any) -> None:
        status = WorkerStatus(worker=worker, phase=phase, slot=slot, **fields)
        self.views.setdefault(node, {})[slot] = status
        self.report(node)

    def report(self, node: str, slots: int = 1) -> None:
        view = self.views.setdefault(node, {})
        slots = max([slots, *(n + 1 for n in view)])
        self.tell(ev.NodeReported(node=node, slots=slots, workers=tuple(view.values())))

    def forms(self, number: int, reason: ChangeReason, *workers: str) -> None:
        places = {s.worker: (n, s.slot) for n, v in self.views.items() for s in v.values()}
        members = tuple(
            Member(worker=w, node=places[w][0], slot=places[w][1] or 0, endpoint="")
            for w in workers
        )
        group = Generation(number=number, incarnation="x", members=members, reason=reason)
        self.machine.current = group
        self.machine.phase = JobPhase.RUNNING if members else JobPhase.WAITING
        self.tell(ev.GenerationPersisted(number=number), fx.AnnounceGeneration(generation=group))

    def trains(self, *workers: str) -> None:
        assert self.machine.current is not None
        for node, view in self.views.items():
            for slot, status in list(view.items()):
                if status.worker in workers:
                    phase, number = WorkerPhase.TRAINING, self.machine.current.number
                    view[slot] = replace(status, phase=phase, generation=number, has_state=True)
            self.report(node)
        self.book.reformed(FirstStep(generation=self.machine.current.number, committed=0), self.now)

    def says(self, worker: str, committed: int = 0, **more: float) -> None:
        """Report that the worker has spent this much more since its last report."""
        assert self.machine.current is not None
        known = self.spent.get(worker, TimeSpent())
        fields = {name: getattr(known, name) + value for name, value in more.items()}
        self.spent[worker] = replace(known, **fields)
        report = Report(
            worker=worker,
            generation=self.machine.current.number,
            committed=committed,
            spent=self.spent[worker],
        )
        self.accounts.spent(report, self.now)
        self.check()

    def dies(self, node: str, slot: int, age_s: float = 0.0) -> None:
        worker = self.views[node].pop(slot).worker
        failure = Failure(worker=worker, kind=FailureKind.SIGNAL, code=9)
        self.tell(ev.WorkerFailed(node=node, failure=failure, age_s=age_s))

    def loses(self, *workers: str, reason: ChangeReason, standing_s: float | None = None) -> None:
        since = self.now - standing_s if standing_s is not None else None
        lost = fx.Lost(workers=workers, reason=reason, at=self.now, standing_since=since)
        self.tell(ev.TimerFired(), lost)

    def kinds(self) -> dict[str, float]:
        found = self.accounts.accounts(self.now).kinds
        return {kind.value: round(s, 3) for kind, s in found.items() if s > 1e-6}

    def incidents(self) -> list[Any]:
        return list(self.accounts.accounts(self.now).incidents)


def two_train() -> Job:
    """One worker on each of two nodes has trained for 10 s, after a start of 2 s."""
    job = Job()
    for node, worker in (("a", "w1"), ("b", "w2")):
        job.has(node, 0, worker, WorkerPhase.STARTING)
    job.passes(2.0)
    job.forms(1, ChangeReason.STARTED, "w1", "w2")
    job.trains("w1", "w2")
    job.passes(10.0)
    for worker in ("w1", "w2"):
        job.says(worker, 10, steps=10, steps_s=10.0, own_s=8.0)
    return job


def test_the_time_that_a_worker_reports_is_booked_under_its_kinds() -> None:
    job = two_train()
    job.passes(10.0)
    job.says("w1", 20, steps=10, steps_s=10.0, data_s=2.0, calls_s=1.0, saves_s=0.5)
    job.says("w2", 20, steps=10, steps_s=9.0, first_steps_s=1.0)
    assert job.kinds() == {
        "productive": 35.5,
        "data_wait": 2.0,
        "session_run": 1.0,
        "checkpoint_stall": 0.5,
        "start_up": 5.0,
    }
    assert job.accounts.accounts(job.now).nodes["a"] == {Kind.DATA_WAIT: 2.0}
    assert job.accounts.accounts(job.now).goodput == pytest.approx(35.5 / 44)


def test_a_worker_that_reports_too_much_time_is_booked_only_what_is_open() -> None:
    job = two_train()
    job.passes(10.0)
    job.says("w1", 20, steps=10, steps_s=30.0, calls_s=10.0, given_up_s=10.0)
    assert job.kinds()["session_run"] == 2.5
    assert job.kinds()["recomputed"] == 2.5


def test_the_time_that_all_lose_by_a_killed_worker_is_booked_to_its_node() -> None:
    job = two_train()
    job.passes(0.4)
    job.dies("b", 0)
    job.passes(0.1)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.passes(0.2)
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    job.passes(1.3)
    regroup = {"regroup_s": 0.6, "join_s": 0.2, "sync_s": 0.1}
    job.says("w1", 11, given_up_s=0.4, first_steps_s=0.3, steps=1, steps_s=0.7, **regroup)
    (incident,) = job.incidents()
    assert (incident["nodes"], incident["workers"]) == (["b"], ["w2"])
    assert (incident["reason"], incident["generation"]) == ("member_lost", 2)
    assert incident["seconds"] == {
        "recomputed": 0.8,  # by both workers
        "detection": 0.1,
        "decision": 0.2,
        "join": 0.2,
        "state_transfer": 0.1,
        "first_step": 0.3,
        "start_up": 1.6,  # of the worker that will take its place
    }
    assert incident["lost_s"] == pytest.approx(3.3)
    lost = job.accounts.accounts(job.now).nodes["b"]
    assert sum(lost.values()) == pytest.approx(3.3)


def test_the_return_of_a_lost_worker_belongs_to_the_incident_of_its_loss() -> None:
    job = two_train()
    job.dies("b", 0)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    job.has("b", 0, "w3", WorkerPhase.STARTING)
    job.passes(3.0)
    job.has("b", 0, "w3", WorkerPhase.READY)
    job.forms(3, ChangeReason.MEMBER_JOINED, "w1", "w3")
    job.passes(1.0)
    job.trains("w3")
    job.says("w1", 13, steps=3, steps_s=3.0, regroup_s=1.0, join_s=0.6)
    (incident,) = job.incidents()
    assert incident["seconds"] == {"start_up": 4.0, "join": 0.6, "decision": 0.4}


def test_the_time_of_a_hang_is_booked_apart_from_recomputed_work() -> None:
    job = two_train()
    job.passes(30.0)
    job.loses("w2", reason=ChangeReason.STALLED, standing_s=29.5)
    job.dies("b", 0)
    job.forms(2, ChangeReason.STALLED, "w1")
    job.says("w1", 10, given_up_s=30.0)
    assert job.kinds()["hang"] == 59.0
    assert job.incidents()[0]["seconds"] == {"hang": 59.0, "recomputed": 1.0}


def test_a_hang_and_the_wait_until_the_hanging_worker_is_left_out_are_one_incident() -> None:
    job = two_train()
    job.passes(30.0)
    job.loses(reason=ChangeReason.STALLED, standing_s=29.5)
    job.forms(2, ChangeReason.STALLED, "w1", "w2")
    job.passes(5.0)
    job.loses("w2", reason=ChangeReason.JOIN_TIMED_OUT)
    job.dies("b", 0)
    job.forms(3, ChangeReason.JOIN_TIMED_OUT, "w1")
    job.trains("w1")
    job.says("w1", 10, given_up_s=30.0, regroup_s=5.0)
    (incident,) = job.incidents()
    assert (incident["reason"], incident["nodes"], incident["generation"]) == ("stalled", ["b"], 3)
    assert incident["seconds"] == {"hang": 69.0, "recomputed": 1.0}
    job.dies("a", 0)
    assert len(job.incidents()) == 2, "the group that followed had trained"


def test_the_detection_of_a_loss_counts_from_the_last_commit_if_the_group_trains_on() -> None:
    job = two_train()
    job.tell(ev.NodeLost(node="b"))
    job.passes(30.0)
    job.machine.committed_at = job.now - 0.5
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    (incident,) = job.incidents()
    assert incident["seconds"]["detection"] == 0.5


def test_an_incident_begins_when_an_agent_noticed_it_not_when_it_told_the_new_leader() -> None:
    job = two_train()
    job.passes(2.0)
    job.dies("b", 0, age_s=1.5)
    job.passes(0.1)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    (incident,) = job.incidents()
    assert (incident["unix_s"], incident["detection_s"]) == (job.now - 1.6, 1.6)


def test_an_agent_that_comes_back_does_not_date_a_later_incident() -> None:
    job = two_train()
    job.tell(ev.NodeLost(node="b"))
    job.passes(1.0)
    job.report("b")
    job.passes(30.0)
    job.machine.committed_at = job.now - 0.5
    job.dies("a", 0)
    job.loses("w1", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.MEMBER_LOST, "w2")
    (incident,) = job.incidents()
    assert (incident["unix_s"], incident["detection_s"]) == (job.now, 0.0)


def test_time_without_a_group_is_booked_as_below_the_minimum() -> None:
    job = two_train()
    job.dies("b", 0)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.BELOW_MINIMUM)
    job.passes(60.0)
    assert job.kinds()["below_minimum"] == 60.0
    job.has("b", 0, "w3", WorkerPhase.READY)
    job.forms(3, ChangeReason.STARTED, "w1", "w3")
    job.trains("w1", "w3")
    job.passes(5.0)
    job.says("w1", 12, steps=2, steps_s=2.0, regroup_s=63.0, join_s=1.0, sync_s=1.0)
    assert job.incidents()[0]["seconds"] == {
        "below_minimum": 60.0,
        "start_up": 60.0,
        "decision": 1.0,
        "join": 1.0,
        "state_transfer": 1.0,
    }


def test_the_slots_of_a_lost_node_stay_wanted_until_another_takes_their_place() -> None:
    job = two_train()
    job.tell(
        ev.NodeLost(node="b"), fx.Lost(workers=("w2",), reason=ChangeReason.MEMBER_LOST, at=job.now)
    )
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    job.passes(7.0)
    assert job.kinds()["slot_empty"] == 7.0
    assert job.accounts.accounts(job.now).nodes["b"][Kind.SLOT_EMPTY] == 7.0
    job.has("c", 0, "w3", WorkerPhase.STARTING)
    job.passes(2.0)
    assert job.kinds()["slot_empty"] == 7.0
    assert job.accounts.accounts(job.now).wanted == 2


def test_more_slots_than_the_job_may_have_are_not_wanted() -> None:
    job = Job(most=2)
    for node, worker in (("a", "w1"), ("b", "w2"), ("c", "w3")):
        job.has(node, 0, worker, WorkerPhase.STARTING)
    job.forms(1, ChangeReason.STARTED, "w2", "w3")
    job.trains("w2", "w3")
    job.passes(3.0)
    assert job.kinds() == {"productive": 6.0}


def test_a_drained_node_leaves_its_slots_empty() -> None:
    job = two_train()
    job.tell(ev.NodeLeaving(node="b", reason="disk"))
    job.passes(1.0)
    job.forms(2, ChangeReason.MEMBER_LEAVING, "w1")
    job.has("b", 0, "w2", WorkerPhase.READY, has_state=True)
    job.passes(4.0)
    assert job.kinds()["slot_empty"] == 4.0
    assert job.incidents()[0]["nodes"] == ["b"]


def test_steps_after_a_return_to_an_older_checkpoint_are_booked_as_recomputed() -> None:
    job = two_train()
    progress = ev.ProgressReported(generation=1, committed=10, step_s=1.0, in_step_s=0.0)
    job.tell(progress)
    job.loses("w1", "w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.STARTED, "w1", "w2")
    job.tell(replace(progress, generation=2, committed=4))
    job.passes(8.0)
    job.says("w1", 12, steps=8, steps_s=8.0)
    assert job.kinds()["recomputed"] == 6.0


def test_time_spent_waiting_for_a_slower_rank_is_booked_to_its_node() -> None:
    job = two_train()
    job.passes(10.0)
    job.says("w2", 20, steps=10, steps_s=10.0, own_s=9.5)
    job.says("w1", 20, steps=10, steps_s=10.0, own_s=6.0)
    assert job.kinds()["slower_rank"] == pytest.approx(3.5)
    assert job.accounts.accounts(job.now).nodes["b"] == {Kind.SLOWER_RANK: pytest.approx(3.5)}


def test_training_time_of_a_script_for_torchrun_is_booked_as_productive() -> None:
    job = Job()
    job.tell(ev.ClassicScriptReported())
    job.has("a", 0, "w1", WorkerPhase.READY)
    job.forms(1, ChangeReason.STARTED, "w1")
    job.trains("w1")
    job.passes(9.0)
    assert job.accounts.accounts(job.now).settled[Kind.PRODUCTIVE] == 9.0


def test_the_next_leader_books_the_time_without_a_leader() -> None:
    job = two_train()
    job.passes(1.0)
    stored = job.stored()
    before = job.accounts
    job.passes(4.0)
    job.is_led_by_another(stored)
    job.check()
    job.tell(ev.TimerFired())
    job.passes(1.0)
    assert job.kinds() == {"productive": 32.0, "start_up": 4.0}
    job.dies("b", 0)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    job.says("w1", 15, steps=5, steps_s=5.0, given_up_s=1.0)
    assert job.kinds()["recomputed"] == pytest.approx(1.0 + 6.0), "w2 has said nothing since"
    assert before.accounts(job.now).wall_s == pytest.approx(job.expected_s)


def test_the_next_leader_books_one_step_of_a_lost_worker_as_recomputed() -> None:
    job = two_train()
    report = ev.ProgressReported(generation=1, committed=10, step_s=0.5, in_step_s=0.1)
    job.tell(report)
    job.passes(20.0)
    stored = job.stored()
    job.is_led_by_another(stored)
    job.tell(ev.TimerFired())
    before = job.kinds().get("recomputed", 0.0)
    job.dies("b", 0)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    assert job.kinds()["recomputed"] - before == pytest.approx(0.5)
    assert job.accounts.committed == 10


def test_a_leader_goes_on_from_a_document_without_the_usual_duration_of_a_step() -> None:
    job = two_train()
    stored = job.stored()
    del stored[0]["usual_s"]
    job.is_led_by_another(stored)
    assert job.kinds()


@pytest.mark.parametrize("invalid", ["x", -1.0, math.nan, 10**400])
def test_an_invalid_document_of_an_earlier_leader_changes_nothing(invalid: object) -> None:
    job = two_train()
    job.passes(3.0)
    stored = job.accounts.to_document(job.now, AHEAD_S)
    job.book = Book(100)
    before = job.accounts.to_document(job.now, AHEAD_S)
    job.accounts.adopt({**stored, "usual_s": invalid}, job.now, AHEAD_S)
    assert job.accounts.to_document(job.now, AHEAD_S) == before


def test_no_time_is_open_after_the_end_of_the_job() -> None:
    job = two_train()
    job.passes(2.0)
    job.tell(ev.TimerFired(), fx.EndJob(exit_code=0))
    found = job.accounts.accounts(job.now + 100.0)
    assert found.settled == found.kinds
    assert found.wall_s == pytest.approx(job.expected_s)


@pytest.mark.parametrize("value", [10**400, math.inf, math.nan, -1, True])
def test_a_number_that_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a valid number"):
        read_number(value)


NODES = st.sampled_from("abc")
SLOTS = st.integers(0, 1)
SECONDS = st.floats(0.0, 20.0)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), SECONDS),
        st.tuples(st.just("has"), NODES, SLOTS, st.sampled_from(WorkerPhase), st.booleans()),
        st.tuples(st.just("dies"), NODES, SLOTS),
        st.tuples(st.just("node"), NODES, st.sampled_from(("lost", "gone", "leaving", "welcome"))),
        st.tuples(st.just("forms"), st.sampled_from(ChangeReason), st.integers(0, 6)),
        st.tuples(st.just("loses"), st.integers(0, 6), SECONDS),
        st.tuples(st.just("says"), NODES, SLOTS, st.lists(SECONDS, min_size=11, max_size=11)),
        st.tuples(st.just("again"), st.integers(0, 20)),
        st.tuples(st.just("leader"), SECONDS),
    ),
    max_size=40,
)


@given(operations=OPERATIONS, most=st.integers(1, 6))
def test_kinds_add_up_to_wall_time_times_slots(operations: list[Any], most: int) -> None:
    job = Job(most)
    number = 0
    for kind, *how in operations:
        members = sorted(s.worker for v in job.views.values() for s in v.values())
        if kind == "passes":
            job.passes(how[0])
        elif kind == "has":
            node, slot, phase, has_state = how
            job.has(node, slot, f"{node}{slot}", phase, has_state=has_state)
        elif kind == "dies" and how[1] in job.views.get(how[0], {}):
            job.dies(*how)
        elif kind == "node":
            name = how[0]
            job.tell(
                {
                    "lost": ev.NodeLost(node=name),
                    "gone": ev.NodeGone(node=name),
                    "leaving": ev.NodeLeaving(node=name, reason=""),
                    "welcome": ev.NodeWelcomed(node=name),
                }[how[1]]
            )
        elif kind == "forms":
            number += 1
            job.forms(number, how[0], *members[: how[1]])
            job.trains(*members[: how[1]])
        elif kind == "loses":
            reason = ChangeReason.STALLED if how[0] % 2 else ChangeReason.MEMBER_LOST
            job.loses(*members[: how[0]], reason=reason, standing_s=how[1])
        elif kind == "says" and number:
            fields = dict(zip(TimeSpent.__dataclass_fields__, how[2], strict=True))
            fields["steps"] = int(fields["steps"])
            job.says(f"{how[0]}{how[1]}", int(how[2][0]), **fields)
        elif kind == "again":
            job.tell(
                ev.ProgressReported(generation=number, committed=how[0], step_s=1, in_step_s=0)
            )
        elif kind == "leader":
            stored = job.stored()
            job.passes(how[0])
            job.is_led_by_another(stored, most)
        job.check()
    job.passes(1.0)
    job.tell(ev.TimerFired(), fx.EndJob(exit_code=0))


def some() -> dict[str, Any]:
    job = two_train()
    job.dies("b", 0)
    job.loses("w2", reason=ChangeReason.MEMBER_LOST)
    job.forms(2, ChangeReason.MEMBER_LOST, "w1")
    job.passes(1.0)
    return job.accounts.to_document(job.now, AHEAD_S)


@given(value=documents(json.dumps(some()).encode()))
def test_a_leader_can_begin_from_any_stored_document(value: bytes) -> None:
    book = Book(4)
    accounts = book.slots
    with contextlib.suppress(ValueError, RecursionError):
        accounts.adopt(json.loads(value), 20.0, AHEAD_S)
    book.observe(ev.TimerFired(), (), Machine(), 21.0)
    json.dumps(accounts.to_document(22.0, AHEAD_S), allow_nan=False)
    json.dumps(accounts.accounts(22.0, AHEAD_S).to_document(), allow_nan=False)


def test_the_nodes_and_workers_of_an_incident_are_bounded() -> None:
    incident = Incident(number=1, at=0.0)
    for n in range(1000):
        incident.concerns([f"n{n}"], [f"w{n}"])
    assert len(incident.nodes) == len(incident.workers) == 100


def test_the_periods_of_a_slot_follow_each_other_and_are_bounded() -> None:
    job = Job()
    job.has("a", 0, "w1", WorkerPhase.READY)
    job.forms(1, ChangeReason.STARTED, "w1")
    job.passes(2.0)
    job.trains("w1")
    job.passes(3.0)
    job.dies("a", 0)
    job.passes(1.0)
    found = job.accounts.periods(job.now)
    assert [(p.worker, p.kind) for p in found] == [
        ("w1", Kind.START_UP),
        ("w1", None),
        ("", Kind.START_UP),
    ]
    assert [p.ended - p.began for p in found] == [2.0, 3.0, 1.0]
    for number in range(2, 4000):
        job.has("a", 0, f"w{number}", WorkerPhase.READY)
        job.passes(1.0)
        job.dies("a", 0)
        job.passes(1.0)
    assert len(job.accounts.periods(job.now)) <= 5001


def test_a_standstill_at_which_the_job_is_given_up_was_not_productive() -> None:
    job = two_train()
    job.machine.committed_at = job.now
    before = job.kinds()
    job.passes(60.0)
    job.machine.phase = JobPhase.FAILED
    job.tell(ev.TimerFired(), fx.EndJob(exit_code=1))
    assert job.kinds() == {**before, "hang": 120.0}


def test_a_job_given_up_while_its_group_breaks_books_the_time_to_that_incident() -> None:
    job = two_train()
    job.machine.committed_at = job.now
    before = job.kinds()
    job.passes(20.0)
    job.loses(reason=ChangeReason.GROUP_BROKEN, standing_s=20.0)
    job.passes(10.0)
    job.machine.phase = JobPhase.FAILED
    job.tell(ev.TimerFired(), fx.EndJob(exit_code=1))
    assert job.kinds() == {**before, "detection": 60.0}
    (incident,) = job.incidents()
    assert incident["lost_s"] == pytest.approx(60.0)


def test_the_time_after_the_last_step_of_a_complete_job_is_no_standstill() -> None:
    job = two_train()
    job.machine.committed_at = job.now
    job.passes(5.0)
    job.machine.phase = JobPhase.FINISHED
    job.tell(ev.TimerFired(), fx.EndJob(exit_code=0))
    assert "hang" not in job.kinds()
