"""The daemon turns each kind of agent message into machine events and journal entries."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.coordinator import daemon as coordinator_daemon
from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.leadership import lead
from elastic.core import quarantine
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    WorkerPhase,
)
from elastic.rpc.codec import failure_to_pb, generation_to_pb
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2, stacks_pb2
from tests.unit.coordinator.agents import Diary, agent, options, sent, view, worker
from tests.unit.core.cluster_views import generation
from tests.waiting import until


@pytest.fixture(autouse=True)
def _failures_within_a_moment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_ONE_LOSS_S", 0.0)


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


class Machine(Coordinator):
    """A machine that records its events, and whose generations the test sets."""

    def __init__(self) -> None:
        super().__init__(CoordinatorSettings(incarnation="i"), now=0.0)
        self.newest: Generation | None = CURRENT
        self.may_train: list[Member] = []
        self.generations = {3: CURRENT}
        self.events: list[ev.Event] = []

    @property
    def current(self) -> Generation | None:
        return self.newest

    def members_that_may_train(self) -> list[Member]:
        return self.may_train

    def generation(self, number: int) -> Generation | None:
        return self.generations.get(number)

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        del now
        self.events.append(event)
        return []


class Place:
    """A leader with one connected agent."""

    def __init__(self, daemon: CoordinatorDaemon, machine: Machine, diary: Diary) -> None:
        self.daemon, self.machine, self.diary = daemon, machine, diary
        self.told_once = daemon._told_once
        self.stream = agent("n1", "0123")
        daemon.agent_connected(self.stream)
        (self.node,) = daemon.nodes
        machine.events.clear()
        diary.entries.clear()
        sent(self.stream)

    @property
    def events(self) -> list[ev.Event]:
        return self.machine.events

    def says(self, message: pb.AgentMessage) -> None:
        self.daemon.agent_said(self.stream, message)

    def hear(self, **kind: Any) -> None:
        self.says(pb.AgentMessage(**kind))

    def loses(self, worker: str, at: float) -> None:
        """The machine has lost the worker, and formed the current group without it."""
        lost = fx.Lost(workers=(worker,), reason=ChangeReason.MEMBER_LOST, at=at)
        for effect in (lost, fx.AnnounceGeneration(generation=CURRENT)):
            self.daemon.watch.observe(ev.TimerFired(), [effect], at)

    def failures(self) -> int:
        """The number of failures that count against the node."""
        return sum(map(len, self.daemon._failures.instants().values()))


@pytest.fixture
def told_before() -> dict[str, int]:
    """By source, the last number that earlier leaders have stored."""
    return {}


@pytest.fixture
async def place(
    told_before: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    store, diary, machine = MemoryStore(), Diary(), Machine()
    monkeypatch.setattr(coordinator_daemon, "make_machine", lambda *_: machine)
    leadership = await lead(store, job="job", candidate="c")
    leadership = replace(leadership, records=replace(leadership.records, told_once=told_before))
    daemon = CoordinatorDaemon(options(quarantine_after=10), store, leadership, diary.journal)
    yield Place(daemon, machine, diary)
    await daemon.close()


async def test_a_view_is_posted_for_its_node_and_kept_for_the_status(place: Place) -> None:
    trains = worker("w", WorkerPhase.TRAINING, 3)
    place.says(view(trains))
    assert place.events == [
        ev.NodesReported(reports=(ev.NodeReported(node="n1@0123", slots=2, workers=(trains,)),))
    ]
    assert place.node.statuses == (trains,)


async def test_a_leader_knows_from_agents_when_checkpoints_are_due_and_what_the_script_is(
    place: Place,
) -> None:
    assert (place.daemon.checkpoint_every, place.daemon.is_classic) == (0, False)
    place.daemon.agent_connected(agent("n2", "4567", checkpoint_every=50))
    assert (place.daemon.checkpoint_every, place.daemon.is_classic) == (50, False)
    place.daemon.agent_connected(agent("n3", "89ab", classic=True))
    assert place.daemon.is_classic


@pytest.mark.parametrize("group", [None, CURRENT], ids=["no group", "a group"])
@pytest.mark.parametrize("trained", [False, True])
async def test_the_first_node_of_a_run_that_has_trained_and_has_no_group_resumes_it(
    place: Place, group: Generation | None, trained: bool
) -> None:
    place.daemon.agent_lost(place.stream)
    assert list(place.daemon.nodes) == []
    place.machine.newest = group
    place.daemon.watch.totals.last_commit_unix_s = 9.0 if trained else 0.0
    place.daemon.agent_connected(agent("n2", "4567"))
    resumed_unix_s = place.daemon.watch.totals.resumed_unix_s
    assert (resumed_unix_s > 0.0) is (trained and group is None)
    place.daemon.agent_connected(agent("n3", "89ab"))
    assert place.daemon.watch.totals.resumed_unix_s == resumed_unix_s, (
        "the second node resumes nothing"
    )


async def test_members_learn_of_a_new_group_after_they_were_asked_where_they_hang(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.coordinator.holdups._BEFORE_GROUP_S", 3600.0)
    following = replace(CURRENT, number=4)
    place.daemon._execute(fx.ExplainHang(generation=CURRENT, step=7, standing_s=2.0))
    place.daemon._execute(fx.PersistGeneration(generation=following))
    await asyncio.sleep(0.05)
    assert not place.events
    (request,) = (m.stacks for m in sent(place.stream) if m.HasField("stacks"))
    place.hear(stacks=stacks_pb2.NodeStacks(request=request.request))
    await until(lambda: ev.GenerationPersisted(number=4) in place.events)


async def test_a_failure_is_recorded_judged_and_counted_against_the_node(place: Place) -> None:
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
    assert place.failures() == 1


async def test_a_repeated_message_counts_once_and_is_acknowledged_once_stored(place: Place) -> None:
    for _ in range(2):
        place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=1))
    assert (len(place.events), place.failures()) == (1, 1)
    assert sent(place.stream) == []
    heard = place.told_once.heard()
    place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=2))
    place.told_once.stored(heard)
    (answer,) = sent(place.stream)
    assert answer.once_stored == 1
    place.told_once.stored(place.told_once.heard())
    (answer,) = sent(place.stream)
    assert answer.once_stored == 2
    place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=2))
    (answer,) = sent(place.stream)
    assert answer.once_stored == 2
    assert (len(place.events), place.failures(), place.told_once.count) == (2, 2, 2)


@pytest.mark.parametrize("told_before", [{"s": 3}])
async def test_a_message_stored_by_an_earlier_leader_is_acknowledged_only(place: Place) -> None:
    place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source="s", number=3))
    (answer,) = sent(place.stream)
    assert answer.once_stored == 3
    assert (place.events, place.failures(), place.diary.entries) == ([], 0, [])
    for source, number in (("s", 4), ("t", 1)):
        place.hear(failure=failure_to_pb(KILLED), once=pb.Once(source=source, number=number))
    assert place.failures() == 2


async def test_a_recoverys_duration_ends_when_it_was_over_not_when_it_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    booked: list[str] = []
    monkeypatch.setattr(place.daemon.watch, "spent", lambda worker, _: booked.append(worker))
    now = time.monotonic()
    place.loses("v", now - 5.0)
    spent = job_pb2.TimeSpent(steps=1)
    report = job_pb2.Reformed(worker="w", generation=3, out_s=1.0, spent=spent)
    place.hear(reformed=report, once=pb.Once(source="s", number=1, age_s=4.0))
    (recovered,) = place.diary.of("recovered")
    assert recovered["total_s"] == pytest.approx(1.0, abs=0.5)
    assert booked == []  # the report is 4 s old: newer figures have come
    place.hear(reformed=report, once=pb.Once(source="s", number=2))
    assert booked == ["w"]


@pytest.mark.parametrize(
    ("told_s", "age_s"), [(4.0, 4.0), (-4.0, 0.0), (math.inf, 0.0), (math.nan, 0.0)]
)
async def test_a_loss_begins_when_the_end_of_its_worker_was_noticed(
    place: Place, told_s: float, age_s: float
) -> None:
    once = pb.Once(source="s", number=1, age_s=told_s)
    now = time.monotonic()
    place.hear(failure=failure_to_pb(KILLED), once=once)
    assert place.events == [ev.WorkerFailed(node="n1@0123", failure=KILLED, age_s=age_s)]
    since = place.daemon.watch.recovering_since
    assert since is not None
    assert now - age_s <= since < now - age_s + 1.0


PROGRESS = job_pb2.Progress(
    generation=3,
    committed=7,
    epoch=1,
    step_s=0.1,
    in_step_s=0.05,
    steps_total_s=0.7,
    reported={"loss": 0.5},
)


async def test_progress_of_the_current_group_is_recorded_and_posted(place: Place) -> None:
    place.hear(progress=PROGRESS)
    assert place.daemon.watch.progress == PROGRESS
    assert place.events == [
        ev.ProgressReported(
            generation=3, committed=7, step_s=0.1, in_step_s=0.05, steps_total_s=0.7
        )
    ]
    (recorded,) = place.diary.of("progress")
    assert (recorded["step"], recorded["world_size"], recorded["reported"]) == (7, 1, {"loss": 0.5})


async def test_an_answer_to_a_probe_is_posted_but_not_recorded_as_progress(place: Place) -> None:
    answer = job_pb2.Progress()
    answer.CopyFrom(PROGRESS)
    answer.probed = True
    place.hear(progress=answer)
    (event,) = place.events
    assert isinstance(event, ev.ProgressReported)
    assert event.probed
    assert place.diary.names() == []
    assert place.daemon.watch.progress == job_pb2.Progress()


NEXT = Generation(number=4, incarnation="i", members=(), reason=ChangeReason.MEMBER_LOST)


@pytest.mark.parametrize("current", [None, NEXT])
async def test_progress_of_a_group_that_is_no_longer_current_is_ignored(
    place: Place, current: Generation | None
) -> None:
    place.machine.newest = current
    place.hear(progress=PROGRESS)
    assert place.events == []
    assert place.diary.names() == []


async def test_progress_of_an_unknown_generation_is_ignored(place: Place) -> None:
    del place.machine.generations[3]
    place.hear(progress=PROGRESS)
    assert place.events == []
    assert place.diary.names() == []


async def test_progress_before_a_planned_change_belongs_to_the_group_before(place: Place) -> None:
    place.machine.newest = replace(NEXT, leave_after=9)
    place.hear(progress=PROGRESS)
    assert len(place.events) == 1
    (recorded,) = place.diary.of("progress")
    assert (recorded["generation"], recorded["world_size"]) == (3, 1)


async def test_the_source_of_the_restored_state_is_recorded(place: Place) -> None:
    place.hear(reformed=job_pb2.Reformed(generation=3, source="initial", committed=4))
    place.hear(reformed=job_pb2.Reformed(generation=3, committed=4))
    assert place.diary.of("state_restored") == [{"source": "initial", "committed": 4}]
    assert place.diary.of("recovered") == []


async def test_a_recovery_is_recorded_when_its_first_step_is_reported(place: Place) -> None:
    place.loses("v", 0.0)
    place.hear(reformed=job_pb2.Reformed(generation=3, committed=4))
    (recovered,) = place.diary.of("recovered")
    assert (recovered["generation"], recovered["lost"]) == (3, ["v"])


async def test_saves_notices_and_requests_are_posted_or_recorded(place: Place) -> None:
    shard = job_pb2.ShardSaved(worker="w", generation=3, step=5, index=0, count=1)
    place.hear(shard_saved=shard)
    place.hear(save_failed=job_pb2.SaveFailed(generation=3, step=5, message="full"))
    assert [type(e) for e in place.events] == [ev.ShardReported, ev.SaveReportedFailed]
    damaged = {"step": "4", "reason": "digest"}
    place.hear(notice=local_pb2.Notice(name="checkpoint_damaged", fields=damaged))
    assert place.diary.of("checkpoint_damaged") == [{"node": "n1", "details": damaged}]
    place.hear(leave=pb.LeaveRequest(reason="SIGTERM"))
    place.hear(stop=pb.StopRequest(reason="Ctrl-C", exit_code=130))
    assert place.diary.of("node_leaving") == [{"node": "n1", "reason": "SIGTERM"}]
    assert place.events[2:] == [
        ev.NodeLeaving(node="n1@0123", reason="SIGTERM"),
        ev.StopRequested(exit_code=130, reason="Ctrl-C"),
    ]


@pytest.mark.parametrize("before", [None, generation(3, "w1")])
async def test_a_generation_known_to_an_agent_but_not_stored_makes_the_leader_outdated(
    place: Place, before: Generation | None
) -> None:
    fields = {"leave_after": 9, "provisional": True, "incarnation": "i"}
    newest = generation(4, "w1", "x2", **fields)
    known = job_pb2.Known(newest=generation_to_pb(newest))
    if before is not None:
        known.before.CopyFrom(generation_to_pb(before))
    place.hear(known=known)
    lost = place.daemon.store_lost.result()
    assert lost.generation == newest
    assert lost.may_train == ((before,) if before is not None else ())


async def test_names_chosen_by_scripts_or_workers_replace_no_field_of_events(place: Place) -> None:
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


async def test_empty_and_unexpected_messages_are_ignored(place: Place) -> None:
    place.hear()
    place.hear(hello=pb.AgentHello(node="n1"))
    assert place.events == []


async def test_members_of_a_job_without_a_ledger_are_told_to_forget_steps(place: Place) -> None:
    """Members keep the records of steps if their agents were given --record-samples."""
    rows = [job_pb2.LedgerEntry(step=s, run="i", generation=3) for s in (0, 1)]
    place.hear(ledger=local_pb2.LedgerEntries(entries=rows, whole=True))
    place.hear(ledger=local_pb2.LedgerEntries(whole=True))
    (told,) = sent(place.stream)
    assert told.ledger_stored == local_pb2.LedgerStored(committed=2, run="i", generation=3)


async def test_a_view_says_whether_its_agent_restarts(place: Place) -> None:
    place.hear(view=pb.NodeView(restarting=True))
    place.hear(view=pb.NodeView())
    batches = [e for e in place.events if isinstance(e, ev.NodesReported)]
    assert [r.restarting for batch in batches for r in batch.reports] == [True, False]


async def test_the_longest_pause_of_an_agents_loop_is_kept_for_the_status(place: Place) -> None:
    place.hear(view=pb.NodeView(longest_pause_s=0.25))
    assert place.node.longest_pause_s == 0.25


@pytest.mark.parametrize("asked", [True, False])
async def test_the_end_of_an_agents_stream_says_whether_it_was_to_leave(
    place: Place, asked: bool
) -> None:
    if asked:
        place.hear(leave=pb.LeaveRequest(reason="SIGTERM"))
    place.daemon.agent_lost(place.stream)
    assert place.diary.of("node_lost") == [{"node": "n1", "as_wanted": asked}]


async def test_a_leave_that_took_too_long_is_recorded_with_its_waiting_time(place: Place) -> None:
    place.hear(leave_timed_out=pb.LeaveTimedOut(waited_s=15.25))
    (late,) = place.diary.of("leave_timed_out")
    assert (late["node"], late["waited_s"]) == ("n1", 15.25)


async def test_a_failure_tells_how_far_the_nodes_workers_had_come(place: Place) -> None:
    message = failure_to_pb(KILLED)
    message.committed, message.committed_in = 77, 3
    place.hear(failure=message)
    expected = ev.WorkerFailed(node="n1@0123", failure=KILLED, committed=77, committed_in=3)
    assert place.events == [expected]


async def test_a_pulse_is_answered_with_the_agents_own_time(place: Place) -> None:
    place.hear(pulse=1234.5)
    (answer,) = sent(place.stream)
    assert answer.pulse == 1234.5
    assert (place.events, place.diary.entries) == ([], [])


async def test_a_pulse_of_an_agent_that_was_replaced_is_not_answered(place: Place) -> None:
    """Nothing shows any more that its node is not taken for gone."""
    place.daemon.nodes.leave(place.stream)
    place.hear(pulse=1234.5)
    assert sent(place.stream) == []


async def test_a_worker_that_joins_does_not_count_as_having_lost_all_steps(place: Place) -> None:
    """It has no state yet, but its group's number."""
    without = worker("w", WorkerPhase.JOINING, 3, has_state=False)
    came = worker("w", WorkerPhase.TRAINING, 3)
    for state, committed, where in (
        (came, 70, "PLACE_FORWARD"),
        (came, 0, "PLACE_JOINING"),
        (without, 0, "PLACE_BETWEEN"),  # it fails to get the state
        (came, 71, "PLACE_FORWARD"),
    ):
        place.says(view(state))
        progress = job_pb2.Progress(worker="w", generation=3, committed=committed)
        progress.place = stacks_pb2.Place.Value(where)
        place.hear(progress=progress)
    assert place.daemon.watch.totals.steps_lost == 0
    assert place.daemon.watch.progress.committed == 71
    reports = [e for e in place.events if isinstance(e, ev.ProgressReported)]
    assert [e.joining for e in reports] == [False, True, True, False]


async def test_the_end_tells_of_steps_that_only_an_earlier_leader_has_heard_of(
    place: Place,
) -> None:
    """The accounts pass from leader to leader. No worker has told this machine of a step."""
    told = ev.ProgressReported(generation=3, committed=71, step_s=0.1, in_step_s=0.0)
    place.daemon.watch.observe(told, [], time.monotonic())
    assert place.machine.committed == 0
    place.daemon._end(84, "all workers that held the state were lost")
    (ended,) = place.diary.of("job_ended")
    assert (ended["committed"], place.daemon.ended.result().committed) == (71, 71)


async def test_a_save_without_a_failure_is_not_said_to_have_failed(place: Place) -> None:
    """The storage stands still, or the workers have not begun to save."""
    assert place.daemon._not_saved("SIGTERM", 3) == (
        "SIGTERM; no save was complete in time: 3 steps since the start of the job are not saved"
    )
    place.daemon.saves.last_failure = "disk full"
    assert "; the last save failed (disk full): " in place.daemon._not_saved("SIGTERM", 3)


async def test_a_view_of_more_workers_than_a_node_can_have_is_refused(place: Place) -> None:
    """Each takes memory and time here for as long as the node is connected."""
    with pytest.raises(ValueError, match="a view of 20000 workers of one node"):
        place.hear(view=pb.NodeView(workers=[job_pb2.WorkerStatus()] * 20_000))
    assert place.node.statuses == ()
    assert place.events == []
