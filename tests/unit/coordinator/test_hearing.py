"""Each kind of message of an agent, as an event for the machine and an entry of the journal."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from elastic.coordinator import hearing
from elastic.coordinator.connected_agents import ConnectedAgents, ConnectedNode
from elastic.coordinator.hearing import Hearing, ToldOnce
from elastic.coordinator.incidents import Recoveries
from elastic.coordinator.saves import Saves
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    WorkerPhase,
)
from elastic.rpc.codec import failure_to_pb, generation_to_pb
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2
from tests.unit.coordinator.agents import Diary, agent, sent, view, worker
from tests.unit.core.cluster_views import generation

MEMBER = Member(worker="w", node="n1@0123", slot=0, endpoint="w:1")
CURRENT = Generation(number=3, incarnation="i", members=(MEMBER,), reason=ChangeReason.STARTED)
KILLED = Failure(
    worker="w",
    kind=FailureKind.SIGNAL,
    code=9,
    message="was killed",
    traceback="tb",
    log_tail="tail",
    log="/log",
)


class Machine:
    def __init__(self) -> None:
        self.current: Generation | None = CURRENT
        self.may_train: list[Member] = []
        self.generations = {3: CURRENT}

    def members_that_may_train(self) -> list[Member]:
        return self.may_train

    def generation(self, number: int) -> Generation | None:
        return self.generations.get(number)


class Place:
    def __init__(self, told_once: ToldOnce | None = None) -> None:
        self.told_once = told_once if told_once is not None else ToldOnce()
        self.spent: list[str] = []
        self.events: list[ev.Event] = []
        self.told: list[dict[str, Any]] = []
        self.failed: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self.late: list[tuple[str, float]] = []
        self.stopped: list[tuple[str, int]] = []
        self.known: list[tuple[str, Generation, Generation | None]] = []
        self.machine: Any = Machine()
        self.diary, self.recoveries = Diary(), Recoveries()
        journal = self.diary.journal
        self.hearing = Hearing(
            journal,
            self.recoveries,
            Saves(
                None,
                journal,
                post=self.events.append,
                broadcast=self._broadcast,
                start=lambda _work, _name: None,
            ),
            None,
            None,
            post=self.events.append,
            broadcast=self._broadcast,
            machine=self.machine,
            on_failure=lambda node, failure: self.failed.append((node.node, failure.worker)),
            on_leave=lambda node, reason: self.left.append((node.node, reason)),
            on_late=lambda node, waited_s: self.late.append((node.node, waited_s)),
            on_stop=lambda reason, code: self.stopped.append((reason, code)),
            on_known=lambda node, newest, before: self.known.append((node.node, newest, before)),
            on_spent=lambda worker, _spent: self.spent.append(worker),
            told_once=self.told_once,
        )
        self.node = arrived()

    def hear(self, **kind: Any) -> None:
        self.hearing.hear(self.node, pb.AgentMessage(**kind))

    def _broadcast(self, **kind: Any) -> None:
        self.told.append(kind)


def arrived() -> ConnectedNode:
    nodes, stream = ConnectedAgents(), agent("n1", "0123")
    nodes.arrive(stream)
    (node,) = nodes
    return node


def test_a_view_is_the_nodes_and_kept_for_the_status() -> None:
    place, trains = Place(), worker("w", WorkerPhase.TRAINING, 3)
    place.hearing.hear(place.node, view(trains))
    assert place.events == [ev.NodeReported(node="n1@0123", slots=2, workers=(trains,))]
    assert place.node.statuses == (trains,)


@pytest.mark.parametrize(("generation", "signs"), [(3, True), (2, False)])
def test_a_broken_group_is_the_first_sign_of_a_loss(generation: int, signs: bool) -> None:
    place = Place()
    broken = worker("w", WorkerPhase.READY, generation, broken=True)
    place.hearing.hear(place.node, view(broken))
    assert has_signs(place) is signs


def has_signs(place: Place) -> bool:
    """Of a loss, before it is decided."""
    at = 1e12
    place.recoveries.lost(fx.Lost(workers=("v",), reason=ChangeReason.MEMBER_LOST, at=at))
    under_way = place.recoveries._under_way
    assert under_way is not None
    return under_way.sign_at < at


def test_a_silent_node_that_comes_back_with_its_members_is_no_sign() -> None:
    place = Place()
    place.recoveries.sign(1.0, silent=place.node.node)
    place.hearing.hear(place.node, view(worker("w", WorkerPhase.TRAINING, 3)))
    assert not has_signs(place)


@pytest.mark.parametrize(
    ("name", "may_train", "signs"),
    [("w", [], True), ("spare", [], False), ("leaves", [replace(MEMBER, worker="leaves")], True)],
)
def test_the_end_of_a_member_is_a_sign_and_that_of_a_spare_is_none(
    name: str, may_train: list[Member], signs: bool
) -> None:
    place = Place()
    place.machine.may_train = may_train
    place.hear(failure=failure_to_pb(replace(KILLED, worker=name)))
    assert has_signs(place) is signs


def test_a_failure_is_recorded_judged_and_counted_against_the_node() -> None:
    place = Place()
    place.hear(failure=failure_to_pb(KILLED))
    assert place.events == [ev.WorkerFailed(node="n1@0123", failure=KILLED)]
    assert place.diary.of("worker_failed") == [
        {
            "worker": "w",
            "node": "n1",
            "kind": "signal",
            "message": "was killed",
            "traceback": "tb",
            "log_tail": "tail",
            "log": "/log",
        }
    ]
    assert place.failed == [("n1@0123", "w")]


def test_what_is_told_again_is_heard_once_and_answered_when_it_is_stored() -> None:
    place = Place()
    for _ in range(2):
        place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=1))
    assert (len(place.events), len(place.failed)) == (1, 1)
    assert sent(place.node.stream) == []
    heard = place.told_once.heard()
    place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=2))
    place.told_once.stored(heard)
    (answer,) = sent(place.node.stream)
    assert answer.once_stored == 1
    place.told_once.stored(place.told_once.heard())
    (answer,) = sent(place.node.stream)
    assert answer.once_stored == 2
    place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=2))
    (answer,) = sent(place.node.stream)
    assert answer.once_stored == 2
    assert (len(place.events), len(place.failed), place.told_once.count) == (2, 2, 2)


def test_what_a_leader_before_has_stored_is_answered_and_not_counted_again() -> None:
    place = Place(ToldOnce({"s": 3}))
    place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=3))
    (answer,) = sent(place.node.stream)
    assert answer.once_stored == 3
    assert (place.events, place.failed, place.diary.entries) == ([], [], [])
    for source, number in (("s", 4), ("t", 1)):
        place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source=source, number=number))
    assert len(place.failed) == 2


def test_of_many_agents_those_heard_last_are_known() -> None:
    told, most = ToldOnce(), hearing._MOST_SOURCES
    stream = agent("n1")
    for number in range(most + 5):
        told.hear(pb.Once(source=f"s-{number}", number=1), stream)
        told.hear(pb.Once(source="often", number=number + 1), stream)
    assert list(told.heard()) == [*(f"s-{number}" for number in range(6, most + 5)), "often"]


def test_a_recovery_is_timed_by_when_it_was_over_and_not_by_when_it_is_told() -> None:
    place = Place()
    now = time.monotonic()
    lost = fx.Lost(workers=("v",), reason=ChangeReason.MEMBER_LOST, at=now - 5.0)
    place.recoveries.lost(lost)
    place.recoveries.announced(CURRENT, now - 5.0)
    spent = job_pb2.TimeSpent(steps=1)
    report = job_pb2.Reformed(worker="w", generation=3, out_s=1.0, spent=spent)
    place.hear(reformed=report, once=pb.Once(source="s", number=1, age_s=4.0))
    (recovered,) = place.diary.of("recovered")
    assert recovered["total_s"] == pytest.approx(1.0, abs=0.5)
    assert place.spent == []  # newer figures have come
    place.hear(reformed=report, once=pb.Once(source="s", number=2))
    assert place.spent == ["w"]


PROGRESS = job_pb2.Progress(
    generation=3, committed=7, epoch=1, step_s=0.1, in_step_s=0.05, reported={"loss": 0.5}
)


def test_progress_of_the_present_group_is_recorded_and_posted() -> None:
    place = Place()
    place.hear(progress=PROGRESS)
    assert place.hearing.progress == PROGRESS
    assert place.events == [
        ev.ProgressReported(generation=3, committed=7, step_s=0.1, in_step_s=0.05)
    ]
    (recorded,) = place.diary.of("progress")
    assert (recorded["step"], recorded["world_size"], recorded["reported"]) == (7, 1, {"loss": 0.5})


def test_the_answer_to_a_probe_is_posted_and_is_nobodys_progress() -> None:
    place, answer = Place(), job_pb2.Progress()
    answer.CopyFrom(PROGRESS)
    answer.probed = True
    place.hear(progress=answer)
    (event,) = place.events
    assert isinstance(event, ev.ProgressReported)
    assert event.probed
    assert place.diary.names() == []
    assert place.hearing.progress == job_pb2.Progress()


NEXT = Generation(number=4, incarnation="i", members=(), reason=ChangeReason.MEMBER_LOST)


@pytest.mark.parametrize("current", [None, NEXT])
def test_progress_of_a_group_that_was_left_at_once_is_history(current: Generation | None) -> None:
    place = Place()
    place.machine.current = current
    place.hear(progress=PROGRESS)
    assert place.events == []
    assert place.diary.names() == []


def test_progress_of_a_group_that_nobody_remembers_is_history() -> None:
    place = Place()
    del place.machine.generations[3]
    place.hear(progress=PROGRESS)
    assert place.events == []
    assert place.diary.names() == []


def test_progress_until_a_planned_change_takes_effect_is_that_of_the_group_before() -> None:
    place = Place()
    place.machine.current = replace(NEXT, leave_after=9)
    place.hear(progress=PROGRESS)
    assert len(place.events) == 1
    (recorded,) = place.diary.of("progress")
    assert (recorded["generation"], recorded["world_size"]) == (3, 1)


def test_where_the_state_came_from_is_recorded() -> None:
    place = Place()
    place.hear(reformed=job_pb2.Reformed(generation=3, source="initial", committed=4))
    place.hear(reformed=job_pb2.Reformed(generation=3, committed=4))
    assert place.diary.of("state_restored") == [{"source": "initial", "committed": 4}]
    assert place.diary.of("recovered") == []


def test_a_recovery_is_recorded_with_its_first_step() -> None:
    place = Place()
    place.recoveries.lost(fx.Lost(workers=("v",), reason=ChangeReason.MEMBER_LOST, at=0.0))
    place.recoveries.announced(CURRENT, 0.0)
    place.hear(reformed=job_pb2.Reformed(generation=3, committed=4))
    (recovered,) = place.diary.of("recovered")
    assert (recovered["generation"], recovered["lost"]) == (3, ["v"])


def test_saves_notices_and_wishes_reach_those_they_are_for() -> None:
    place = Place()
    shard = job_pb2.ShardSaved(worker="w", generation=3, step=5, index=0, count=1)
    place.hear(shard_saved=shard)
    place.hear(save_failed=job_pb2.SaveFailed(generation=3, step=5, message="full"))
    assert [type(e) for e in place.events] == [ev.ShardReported, ev.SaveReportedFailed]
    damaged = {"step": "4", "reason": "digest"}
    place.hear(notice=local_pb2.Notice(name="checkpoint_damaged", fields=damaged))
    assert place.diary.of("checkpoint_damaged") == [{"node": "n1", "details": damaged}]
    place.hear(leave=pb.LeaveRequest(reason="SIGTERM"))
    place.hear(stop=pb.StopRequest(reason="Ctrl-C", exit_code=130))
    assert place.left == [("n1@0123", "SIGTERM")]
    assert place.stopped == [("Ctrl-C", 130)]
    before = generation(3, "w1")
    newest = replace(generation(4, "w1", "x2"), leave_after=9, provisional=True)
    place.hear(known=job_pb2.Known(newest=generation_to_pb(newest)))
    place.hear(
        known=job_pb2.Known(newest=generation_to_pb(newest), before=generation_to_pb(before))
    )
    assert place.known == [("n1@0123", newest, None), ("n1@0123", newest, before)]


def test_what_a_script_or_a_worker_names_takes_the_place_of_nothing() -> None:
    place = Place()
    names = ("step", "epoch", "generation", "world_size", "step_s", "time", "event", "name", "self")
    progress = job_pb2.Progress(generation=3, committed=7, reported=dict.fromkeys(names, math.nan))
    place.hear(progress=progress)
    (recorded,) = place.diary.of("progress")
    assert (recorded["step"], recorded["generation"]) == (7, 3)
    assert recorded["reported"].keys() == set(names)
    fields = {"node": "other", "name": "x", "time": "noon"}
    place.hear(notice=local_pb2.Notice(name="state_differed", fields=fields))
    assert place.diary.of("state_differed") == [{"node": "n1", "details": fields}]
    place.hear(notice=local_pb2.Notice(name="job_ended"))
    assert not place.diary.of("job_ended")
    assert place.diary.of("notice") == [{"node": "n1", "details": {"name": "job_ended"}}]


def test_what_is_not_understood_is_passed_over() -> None:
    place = Place()
    place.hear()
    place.hear(hello=pb.AgentHello(node="n1"))
    assert place.events == []


def test_a_job_without_a_ledger_has_its_members_forget_the_steps() -> None:
    """They may have been told to keep them, by agents that --record-samples was given to."""
    place = Place()
    rows = [job_pb2.LedgerEntry(step=s, run="i", generation=3) for s in (0, 1)]
    place.hear(ledger=local_pb2.LedgerEntries(entries=rows, whole=True))
    place.hear(ledger=local_pb2.LedgerEntries(whole=True))
    (told,) = place.told
    assert told["ledger_stored"] == local_pb2.LedgerStored(committed=2, run="i", generation=3)


def test_how_long_the_agents_loop_stood_still_is_kept_for_the_status() -> None:
    place = Place()
    place.hear(view=pb.NodeView(longest_pause_s=0.25))
    assert place.node.longest_pause_s == 0.25


def test_of_a_node_that_is_late_it_is_known_how_long_it_waited() -> None:
    place = Place()
    place.hear(leave_timed_out=pb.LeaveTimedOut(waited_s=15.25))
    assert place.late == [("n1@0123", 15.25)]
