"""Records of incidents: their cause, signs, course and outcome, and their bounded size."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elastic.core.book.book import Book, FirstStep
from elastic.core.book.incidents import MOST_INCIDENTS, MOST_PROCESSES
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.phases import JobPhase
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    WorkerPhase,
    WorkerStatus,
)
from elastic.core.whereabouts import RankStacks

AHEAD_S = 1000.0
LARGE = 100_000


@dataclass
class Machine:
    phase: JobPhase = JobPhase.RUNNING
    current: Generation | None = None
    committed: int = 0

    def last_commit_at(self, now: float) -> float:
        return now


def name_of(node: str) -> str:
    return node.partition("@")[0]


class Job:
    """Three nodes of one slot each, whose machine decides what the test says."""

    def __init__(self, come: str = "abc") -> None:
        """come: the nodes whose agents report."""
        self.now, self.machine = 100.0, Machine()
        self.book = Book(3, name_of=name_of)
        self.number = 0
        for node in come:
            self.reports(node)
        self.forms("abc", ChangeReason.STARTED)

    def tell(self, event: ev.Event, *effects: fx.Effect) -> None:
        self.book.observe(event, effects, self.machine, self.now)

    def reports(self, node: str, phase: WorkerPhase = WorkerPhase.READY, **more: Any) -> None:
        generation = self.number if phase is WorkerPhase.TRAINING or more else 0
        status = WorkerStatus(
            worker=f"w{node}", phase=phase, slot=0, generation=generation, has_state=True, **more
        )
        self.tell(ev.NodeReported(node=f"{node}@1", slots=1, workers=(status,)))

    def forms(self, nodes: str, reason: ChangeReason) -> None:
        self.number += 1
        members = tuple(Member(worker=f"w{n}", node=f"{n}@1", slot=0, endpoint="") for n in nodes)
        group = Generation(number=self.number, incarnation="x", members=members, reason=reason)
        self.machine.current = group
        self.machine.phase = JobPhase.RUNNING if members else JobPhase.WAITING
        self.tell(
            ev.GenerationPersisted(number=self.number), fx.AnnounceGeneration(generation=group)
        )

    def dies(
        self,
        node: str,
        kind: FailureKind = FailureKind.SIGNAL,
        *effects: fx.Effect,
        age_s: float = 0.0,
        committed: int = 0,
        committed_in: int = 0,
        **more: str,
    ) -> None:
        failure = Failure(worker=f"w{node}", kind=kind, code=9, **more)  # type: ignore[arg-type]
        event = ev.WorkerFailed(
            node=f"{node}@1",
            failure=failure,
            age_s=age_s,
            committed=committed,
            committed_in=committed_in,
        )
        self.tell(event, *effects)

    def loses(self, *workers: str, reason: ChangeReason = ChangeReason.MEMBER_LOST) -> None:
        lost = fx.Lost(workers=workers, reason=reason, at=self.now)
        self.tell(ev.TimerFired(), lost)

    def goes_on_without(self, dead: str, nodes: str) -> None:
        """The worker of a node dies, and those of these nodes form the next group."""
        self.dies(dead)
        self.loses(f"w{dead}")
        self.forms(nodes, ChangeReason.MEMBER_LOST)

    def recovers(self, committed: int, recomputed: int = 0) -> None:
        step = FirstStep(generation=self.number, committed=committed, recomputed=recomputed)
        self.book.reformed(step, self.now)

    def news(self) -> list[int]:
        return [incident.number for incident in self.book.news]

    def only(self) -> dict[str, Any]:
        (document,) = self.book.documents(AHEAD_S).values()
        return document


def test_a_killed_worker_is_the_cause_although_its_peer_noticed_first() -> None:
    job = Job()
    job.book.progressed("wa", 10, 640)
    job.book.progressed("wa", 20, 1280)
    job.machine.committed = 20
    job.reports("a", broken=True, detail="connection reset")
    job.now += 0.01
    job.dies("b", message="was ended by SIGKILL (signal 9)", log="/b.log")
    job.loses("wb")
    job.now += 0.09
    job.forms("ac", ChangeReason.MEMBER_LOST)
    assert job.only()["outcome"] == "under_way"
    assert job.news() == []
    job.now += 0.1
    job.recovers(20, recomputed=1)
    found = job.only()
    assert (found["cause"], found["outcome"], found["number"]) == ("worker_failed", "recovered", 1)
    assert [n["sign"] for n in found["noticed"]] == ["group_broken", "worker_ended"]
    assert (found["noticed"][0]["node"], found["noticed"][0]["rank"]) == ("a", 0)
    (process,) = found["processes"]
    assert (process["node"], process["rank"], process["code"]) == ("b", 1, 9)
    assert (found["committed"], found["steps_again"], found["samples_given_up"]) == (20, 1, 64)
    assert found["lasted_s"] == 0.2
    assert found["unix_s"] == 1100.0
    assert (found["world_size"], found["world_size_after"]) == (3, 2)
    assert found["nodes"] == ["b"]
    assert job.news() == [1], "told once, when it is over"


def test_a_node_that_is_lost_without_a_report_is_the_cause() -> None:
    job = Job()
    job.tell(ev.NodeLost(node="c@1"))
    job.now += 1.0
    job.reports("a", broken=True)
    job.loses("wc")
    assert job.only()["cause"] == "node_lost"
    assert job.only()["noticed"][0]["node"] == "c"


def test_an_agent_that_comes_back_is_no_sign_of_a_later_incident() -> None:
    job = Job()
    job.tell(ev.NodeLost(node="c@1"))
    job.reports("c", WorkerPhase.TRAINING)
    job.dies("b")
    job.loses("wb")
    found = job.only()
    assert [n["sign"] for n in found["noticed"]] == ["worker_ended"]
    assert found["cause"] == "worker_failed"


def test_a_hang_keeps_its_verdict_and_stacks_and_the_end_of_its_worker() -> None:
    job = Job()
    group = job.machine.current
    assert group is not None
    lost = fx.Lost(workers=(), reason=ChangeReason.STALLED, at=job.now, standing_since=job.now - 20)
    job.tell(ev.TimerFired(), fx.ExplainHang(generation=group, step=7, standing_s=20.0), lost)
    stacks = [RankStacks(rank=1, node="b", worker="wb", doing="is there", text="x" * LARGE)] * 9
    job.book.explained(group.number, Diagnosis(text="rank 1 hangs"), stacks)
    job.forms("abc", ChangeReason.STALLED)
    job.now += 2.0
    job.dies("b", FailureKind.LEFT_OUT, message="hung 22 s in train.py:47")
    job.loses("wb", reason=ChangeReason.JOIN_TIMED_OUT)
    job.forms("ac", ChangeReason.JOIN_TIMED_OUT)
    job.recovers(7)
    found = job.only()
    assert (found["cause"], found["noticed"][0]["sign"]) == ("hang", "overdue")
    assert found["hang"]["verdict"] == "rank 1 hangs"
    assert (found["hang"]["step"], found["hang"]["standing_s"]) == (7, 20.0)
    assert [p["message"] for p in found["processes"]] == ["hung 22 s in train.py:47"]
    assert len(found["hang"]["stacks"]) == 4
    assert found["lasted_s"] == 22.0, "from the start of the standstill"


def test_a_loss_before_the_next_step_belongs_to_the_one_before() -> None:
    job = Job()
    job.goes_on_without("b", "ac")
    job.reports("a", WorkerPhase.TRAINING)
    job.now += 1.0
    job.goes_on_without("c", "a")
    job.now += 1.0
    assert job.book.reformed(FirstStep(generation=2, committed=0), job.now) is None, "it is lost"
    job.recovers(0)
    found = job.only()
    assert (found["outcome"], found["followed_by"], found["lasted_s"]) == ("recovered", 3, 2.0)
    assert (found["nodes"], found["workers"]) == (["b", "c"], ["wb", "wc"])
    assert [p["node"] for p in found["processes"]] == ["b", "c"]
    assert job.news() == [1]


def test_a_loss_after_the_next_step_is_an_incident_of_its_own() -> None:
    job = Job()
    job.goes_on_without("b", "ac")
    job.recovers(0)
    job.goes_on_without("c", "a")
    job.recovers(1)
    assert [d["workers"] for d in job.book.documents(AHEAD_S).values()] == [["wb"], ["wc"]]
    assert job.news() == [1, 2]


def test_the_last_commit_is_the_one_that_the_next_group_declares_if_reports_lag_behind() -> None:
    job = Job()
    job.machine.committed = 18
    job.goes_on_without("b", "ac")
    job.recovers(20)
    assert (job.only()["committed"], job.only()["steps_lost"]) == (20, 0)


def test_a_worker_is_the_cause_if_its_agents_stream_ended_first() -> None:
    """Both are killed; the agent that follows tells of the worker."""
    job = Job()
    job.tell(ev.NodeLost(node="b@1"))
    job.now += 0.5
    job.dies("b", message="was ended by SIGKILL (signal 9)")
    job.loses("wb")
    assert job.only()["cause"] == "worker_failed"
    assert [n["sign"] for n in job.only()["noticed"]] == ["worker_ended"]


def test_an_incident_in_which_workers_wait_is_news_at_once() -> None:
    job = Job()
    job.dies("b")
    job.loses("wb")
    job.forms("", ChangeReason.BELOW_MINIMUM)
    assert job.only()["outcome"] == "waiting"
    assert job.news() == [1]
    job.forms("ac", ChangeReason.STARTED)
    job.recovers(0)
    assert job.only()["outcome"] == "recovered"
    assert job.news() == [1]


def test_a_group_that_is_dissolved_to_restart_all_workers_does_not_count_as_waiting() -> None:
    job = Job()
    job.goes_on_without("b", "")
    assert job.only()["outcome"] == "under_way"
    assert job.news() == []


def test_the_end_of_the_job_ends_the_incident_under_way() -> None:
    job = Job()
    failure = Failure(worker="wb", kind=FailureKind.EXCEPTION, traceback="Traceback ... KeyError")
    job.tell(ev.WorkerFailed(node="b@1", failure=failure), fx.EndJob(exit_code=1, failure=failure))
    job.book.ended("the script fails the same way again")
    found = job.only()
    assert (found["outcome"], found["verdict"]) == (
        "job_ended",
        "the script fails the same way again",
    )
    assert found["processes"][0]["traceback"].endswith("KeyError")


def test_steps_that_a_checkpoint_lacks_are_counted_with_their_samples() -> None:
    job = Job()
    job.book.progressed("wa", 10, 100)
    job.book.progressed("wa", 20, 200)
    job.machine.committed = 20
    job.goes_on_without("b", "ac")
    job.recovers(12, recomputed=1)
    found = job.only()
    assert (found["steps_lost"], found["steps_again"], found["samples_given_up"]) == (8, 1, 90)


def test_steps_of_a_group_that_nobody_heard_of_are_counted_when_its_node_is_back() -> None:
    """A node trains on while its agent is stopped, and the job goes back to a checkpoint."""
    job = Job()
    job.machine.committed = 20
    job.goes_on_without("b", "ac")
    job.recovers(12)
    job.book.changed.clear()
    job.dies("b", committed=12, committed_in=1)  # no more than is known
    job.dies("b", committed=50, committed_in=2)  # of the group that goes on
    assert job.only()["steps_lost"] == 8
    for committed in (40, 30):
        job.dies("b", committed=committed, committed_in=1)
    assert (job.only()["steps_lost"], job.only()["committed"]) == (28, 40)
    assert job.book.changed == {job.only()["number"]}


def test_the_last_steps_of_a_group_count_although_its_loss_was_noticed_before() -> None:
    """The view of a node that is back no longer has the worker; then its failure comes."""
    job = Job()
    job.machine.committed = 20
    job.loses("wb")
    job.dies("b", committed=27, committed_in=1)
    job.forms("ac", ChangeReason.MEMBER_LOST)
    job.recovers(12)
    assert (job.only()["committed"], job.only()["steps_lost"]) == (27, 15)


def test_saves_that_fail_for_one_reason_are_one_incident() -> None:
    job = Job()
    for step in (100, 200, 300):
        message = f"step-{step}: No space left on device"
        failed = ev.SaveReportedFailed(generation=1, step=step, message=message, worker="wb")
        given_up = fx.AbandonCheckpoint(generation=1, step=step, message=message)
        job.tell(failed, given_up)
        job.tell(failed, given_up)  # for a member that has missed it
    found = job.only()
    assert (found["cause"], found["outcome"]) == ("save_failed", "trains_on")
    assert found["saves"] == {
        "message": "step-100: No space left on device",
        "first_step": 100,
        "last_step": 300,
        "count": 3,
    }
    assert (found["noticed"][0]["node"], found["noticed"][0]["rank"]) == ("b", 1)
    assert job.news() == [1]
    job.book.saved()
    assert job.only()["outcome"] == "saved_since"
    job.book.save_failed(350, 1, "step-350: No space left on device", job.now)
    assert job.only()["outcome"] == "trains_on"
    assert job.only()["saves"]["count"] == 4, "every other save fails"
    job.book.save_failed(400, 1, "the manifest: No space left on device", job.now)
    assert len(job.book.documents(AHEAD_S)) == 2


def test_a_save_that_was_given_up_for_a_loss_belongs_to_the_loss() -> None:
    job = Job()
    given_up = fx.AbandonCheckpoint(generation=1, step=50, message="wb was lost while saving")
    job.dies("b", FailureKind.SIGNAL, given_up)
    job.loses("wb")
    assert job.only()["saves_lost"] == [50]
    assert job.only()["cause"] == "worker_failed"


def test_the_end_of_a_lost_process_is_added_to_its_incident_once_it_is_known() -> None:
    job = Job()
    job.tell(ev.NodeLost(node="c@1"))
    job.loses("wc")
    job.forms("ab", ChangeReason.MEMBER_LOST)
    job.recovers(0)
    job.reports("a", WorkerPhase.TRAINING)
    job.book.changed.clear()
    job.now += 1.0
    job.dies("c", message="was ended by SIGKILL (signal 9)")
    assert job.only()["processes"][0]["rank"] == 2
    assert job.book.changed == {1}
    assert job.only()["cause"] == "node_lost"


def test_the_end_of_a_process_is_kept_until_it_is_known_to_be_a_member() -> None:
    """A new leader may hear of the end of a worker before its peers report that they lost it."""
    job = Job()
    job.dies("d", message="was ended by SIGKILL")
    job.now += 0.01
    job.reports("a", broken=True)
    job.now += 0.09
    job.loses("wd")
    found = job.only()
    assert found["cause"] == "worker_failed"
    assert [n["sign"] for n in found["noticed"]] == ["worker_ended", "group_broken"]
    assert (found["processes"][0]["node"], found["unix_s"]) == ("d", 1100.0)


def test_the_end_of_a_process_comes_before_signs_that_a_new_leader_heard_of_earlier() -> None:
    job = Job()
    job.reports("a", broken=True)
    job.now += 0.1
    job.dies("b", age_s=0.5)
    job.loses("wb")
    found = job.only()
    assert [n["sign"] for n in found["noticed"]] == ["worker_ended", "group_broken"]
    assert [round(n["after_s"], 6) for n in found["noticed"]] == [0.0, 0.4]
    assert found["unix_s"] == 1100.0 - 0.4


def test_a_new_leaders_first_incident_begins_with_what_earlier_leaders_knew() -> None:
    """Leader and worker are killed together: nobody else knows how far the job had come."""
    job = Job()
    job.book = Book(3, name_of=name_of)
    job.book.slots.committed = 39
    job.dies("b")
    job.loses("wb")
    job.forms("ac", ChangeReason.MEMBER_LOST)
    job.recovers(20)
    found = job.only()
    assert (found["committed"], found["steps_lost"]) == (39, 19)
    assert (found["generation"], found["world_size"]) == (1, 3)
    assert found["processes"][0]["rank"] == 1


def test_a_node_that_never_comes_to_a_new_leader_is_the_cause() -> None:
    job = Job("ab")
    job.now += 1.0
    job.loses("wc")
    found = job.only()
    assert (found["cause"], found["noticed"][0]["sign"]) == ("node_lost", "node_absent")
    assert found["noticed"][0]["node"] == "c"


def test_an_incident_goes_on_under_the_next_leader() -> None:
    first, second = Job(), Job()
    first.tell(ev.NodeLost(node="c@1"))
    first.now += 1.0
    first.dies("b", message="was ended by SIGKILL (signal 9)")
    group = first.machine.current
    assert group is not None
    lost = fx.Lost(workers=("wb", "wc"), reason=ChangeReason.STALLED, at=first.now)
    first.tell(ev.TimerFired(), fx.ExplainHang(generation=group, step=7, standing_s=2.0), lost)
    stacks = [RankStacks(rank=1, node="b", worker="wb", doing="is there", text="x")]
    first.book.explained(group.number, Diagnosis(text="rank 1 hangs"), stacks)
    document = json.loads(json.dumps(first.only()))
    assert document["outcome"] == "under_way"

    second.book.resume({1: document}, (0, 0), AHEAD_S)
    assert json.loads(json.dumps(second.only())) == document
    second.now = first.now + 1.0
    second.dies("c", message="its host is gone")
    second.loses("wb", "wc")
    second.forms("a", ChangeReason.MEMBER_LOST)
    second.recovers(5)
    found = second.only()
    assert (found["number"], found["cause"], found["outcome"]) == (1, "node_lost", "recovered")
    assert [p["node"] for p in found["processes"]] == ["b", "c"]
    assert found["lasted_s"] == 2.0
    assert second.news() == [1]
    assert second.book.under_way is None


def test_a_spare_that_ends_is_no_incident() -> None:
    job = Job()
    failure = Failure(worker="spare", kind=FailureKind.SIGNAL, code=9)
    job.tell(ev.WorkerFailed(node="b@1", failure=failure))
    assert job.book.documents(AHEAD_S) == {}


def test_records_are_bounded_in_number_and_size() -> None:
    job = Job()
    for _ in range(2 * MOST_INCIDENTS):
        for node in "abc":
            text = "\u20ac" * LARGE
            job.dies(node, message=text, traceback=text, log_tail=text, log=text)
        job.loses("wa", "wb", "wc")
        job.forms("abc", ChangeReason.MEMBER_LOST)
        for node in "abc":
            job.reports(node, WorkerPhase.TRAINING)
        job.recovers(0)
    found = job.book.documents(AHEAD_S)
    assert list(found) == list(range(MOST_INCIDENTS + 1, 2 * MOST_INCIDENTS + 1))
    assert max(len(json.dumps(d, ensure_ascii=False)) for d in found.values()) < 40_000


def test_processes_that_end_together_are_all_counted_when_only_some_are_kept() -> None:
    job = Job()
    nodes = "abcdef"
    for node in nodes:
        job.reports(node)
    job.forms(nodes, ChangeReason.MEMBER_JOINED)
    for node in nodes:
        job.dies(node)
    job.loses(*(f"w{node}" for node in nodes))
    found = job.only()
    assert len(found["processes"]) == MOST_PROCESSES
    assert found["further_processes"] == len(nodes) - MOST_PROCESSES


def test_a_stop_of_the_coordinator_is_a_sign_of_the_incident_that_it_noticed_late() -> None:
    job = Job()
    job.book.stopped(5.0, at=50.0)  # long before
    job.goes_on_without("c", "ab")
    job.recovers(10)
    job.reports("a", WorkerPhase.TRAINING)
    job.now += 30.0
    job.book.stopped(18.2, at=job.now)
    job.now += 0.5
    job.dies("b", age_s=12.0)
    job.loses("wb")
    before, found = job.book.documents(0.0).values()
    assert [n["sign"] for n in before["noticed"]] == ["worker_ended"]
    assert [n["sign"] for n in found["noticed"]] == ["worker_ended", "coordinator_stopped"]
    assert "18.2 s" in found["noticed"][1]["detail"]
    assert found["cause"] == "worker_failed"


def test_a_member_keeps_its_rank_when_the_change_that_drops_it_is_settled() -> None:
    job = Job()
    job.forms("ab", ChangeReason.MEMBER_LEAVING)
    assert job.machine.current is not None
    job.machine.current = replace(job.machine.current, leave_after=9)
    job.tell(ev.TimerFired())
    job.dies("c")
    job.loses("wc")
    assert job.only()["processes"][0]["rank"] == 2


def drops_c() -> Job:
    """A job with a planned change under way that drops a node."""
    job = Job()
    assert job.machine.current is not None
    job.machine.current = replace(
        job.machine.current,
        number=2,
        members=job.machine.current.members[:2],
        leave_after=9,
    )
    job.number = 2
    job.tell(ev.GenerationPersisted(number=2))
    return job


def test_a_node_that_vanishes_before_the_change_that_drops_it_is_the_cause() -> None:
    job = drops_c()
    job.tell(ev.NodeLost(node="c@1"))
    job.now += 0.5
    job.loses("wc", reason=ChangeReason.GROUP_BROKEN)
    job.forms("ab", ChangeReason.GROUP_BROKEN)
    job.recovers(9)
    found = job.only()
    assert (found["cause"], found["workers"], found["lasted_s"]) == ("node_lost", ["wc"], 0.5)


@pytest.mark.parametrize("first", ["it is lost", "it may go", "the others train"])
def test_a_node_that_goes_once_a_planned_change_has_dropped_it_is_no_sign(first: str) -> None:
    job = drops_c()
    if first == "it is lost":
        job.tell(ev.NodeLost(node="c@1"))
    if first == "the others train":
        job.recovers(9)
    else:
        job.tell(ev.TimerFired(), fx.NodeDrained(node="c@1"))
    job.tell(ev.NodeLost(node="c@1"))
    job.now += 100.0
    job.dies("b")
    job.loses("wb")
    assert [n["sign"] for n in job.only()["noticed"]] == ["worker_ended"]
