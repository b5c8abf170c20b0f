"""What agents say, as events for the machine and entries of the journal.

Views of many nodes are handed to the machine together: each costs a decision about all workers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from elastic.coordinator.connected_agents import ConnectedNode, name_of
from elastic.coordinator.incidents import Recoveries
from elastic.coordinator.saves import Saves
from elastic.coordinator.step_recorder import StepRecorder
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.membership import Failure, Generation, NodeId, WorkerId
from elastic.rpc.codec import failure_from_pb, generation_from_pb, statuses_from_pb
from elastic.rpc.control import AgentStream
from elastic.runtime.journal import Journal
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2, stacks_pb2

_NOTICES = {
    *("state_differed", "step_copies_state", "checkpoint_damaged"),
    *("report_failed", "output_lost"),
}


class Hearing:
    """Understands every kind of AgentMessage but the hello.

    ledger, curve: None for a job without.
    on_failure: told of each worker that failed, on_leave of a node that asks to leave, on_late of
    one that has not come to a step boundary in its time, on_known of the generations that an agent
    has heard of, on_progress of what rank 0 reports unasked, on_recovered of each recovery,
    on_reformed of each member's first step in a group, on_stacks of where a node's workers are,
    on_pace of what the parts of a step take on a rank.
    """

    def __init__(
        self,
        journal: Journal,
        recoveries: Recoveries,
        saves: Saves,
        ledger: StepRecorder | None,
        curve: StepRecorder | None,
        *,
        post: Callable[[ev.Event], None],
        broadcast: Callable[..., None],
        machine: Coordinator,
        on_failure: Callable[[ConnectedNode, Failure], None],
        on_leave: Callable[[ConnectedNode, str], None],
        on_late: Callable[[ConnectedNode, float], None],
        on_stop: Callable[[str, int], None],
        on_known: Callable[[ConnectedNode, Generation, Generation | None], None],
        on_progress: Callable[[job_pb2.Progress], None] = lambda _: None,
        on_reformed: Callable[[job_pb2.Reformed], None] = lambda _: None,
        on_recovered: Callable[[Mapping[str, Any]], None] = lambda _: None,
        on_stacks: Callable[[ConnectedNode, stacks_pb2.NodeStacks], None] = lambda *_: None,
        on_spent: Callable[[str, job_pb2.TimeSpent], None] = lambda _worker, _spent: None,
        on_pace: Callable[[str, job_pb2.Pace], None] = lambda _worker, _pace: None,
        told_once: ToldOnce | None = None,
    ) -> None:
        self._journal = journal
        self._recoveries = recoveries
        self._saves = saves
        self._ledger = ledger
        self._curve = curve
        self._post = post
        self._broadcast = broadcast
        self._machine = machine
        self._on_failure = on_failure
        self._on_known = on_known
        self._on_progress, self._on_reformed = on_progress, on_reformed
        self._on_recovered = on_recovered
        self._on_spent, self._on_pace = on_spent, on_pace
        self.progress = job_pb2.Progress()
        """The newest of rank 0."""
        self._told_once = told_once if told_once is not None else ToldOnce()
        self._age_s = 0.0
        """Of the message that is heard now."""
        self._kinds: dict[str, Callable[[ConnectedNode, Any], None]] = {
            "view": self._view,
            "failure": self._failure,
            "progress": self._progressed,
            "reformed": self._reformed,
            "shard_saved": lambda node, report: saves.saved(node.stream, report),
            "save_failed": lambda node, report: saves.failed(node.stream, report),
            "ledger": self._steps_recorded,
            "curve": self._curve_reported,
            "notice": self._notice,
            "known": self._known,
            "stacks": on_stacks,
            "leave": lambda node, leave: on_leave(node, leave.reason),
            "leave_timed_out": lambda node, late: on_late(node, late.waited_s),
            "stop": lambda _node, stop: on_stop(stop.reason, stop.exit_code),
            "worker_time": lambda _node, found: on_spent(found.worker, found.spent),
            "worker_pace": lambda _node, found: on_pace(found.worker, found.pace),
        }

    def hear(self, node: ConnectedNode, message: pb.AgentMessage) -> None:
        """Take one message; what a newer version may say beyond is passed over."""
        kind, once = message.WhichOneof("kind"), message.once
        if once.number and not self._told_once.hear(once, node.stream):
            return
        self._age_s = max(0.0, once.age_s) if math.isfinite(once.age_s) else 0.0
        if kind is not None and (heard := self._kinds.get(kind)) is not None:
            heard(node, getattr(message, kind))

    def _known(self, node: ConnectedNode, known: job_pb2.Known) -> None:
        before = generation_from_pb(known.before) if known.HasField("before") else None
        self._on_known(node, generation_from_pb(known.newest), before)

    def _view(self, node: ConnectedNode, view: pb.NodeView) -> None:
        node.statuses = statuses_from_pb(view.workers)
        node.longest_pause_s = view.longest_pause_s
        current = self._machine.current
        if current is not None:
            if any(s.broken and s.generation == current.number for s in node.statuses):
                self._recoveries.sign(time.monotonic())
            self._recoveries.reported(node.node, (s.worker for s in node.statuses), current)
        self._post(ev.NodeReported(node=node.node, slots=node.stream.slots, workers=node.statuses))

    def _failure(self, node: ConnectedNode, message: job_pb2.Failure) -> None:
        failure = failure_from_pb(message)
        if self._is_member(failure.worker):  # nobody waits for a spare
            self._recoveries.sign(time.monotonic())
        self._journal.record(
            "worker_failed",
            worker=failure.worker,
            node=name_of(node.node),
            kind=failure.kind.name.lower(),
            message=failure.message,
            traceback=failure.traceback,
            log_tail=failure.log_tail,
            log=failure.log,
            **({"kernel": failure.kernel} if failure.kernel else {}),
        )
        self._post(ev.WorkerFailed(node=node.node, failure=failure))
        self._on_failure(node, failure)

    def _is_member(self, worker: WorkerId) -> bool:
        """Of the newest group, or of one that trains until a planned change takes effect."""
        current = self._machine.current
        members = (
            *(current.members if current is not None else ()),
            *self._machine.members_that_may_train(),
        )
        return any(m.worker == worker for m in members)

    def _progressed(self, node: ConnectedNode, progress: job_pb2.Progress) -> None:
        del node
        group, current = self._machine.generation(progress.generation), self._machine.current
        if group is None or current is None:
            return
        if group is not current and current.leave_after is None:
            return  # left at once: what it says of itself is past
        if not progress.probed:
            self.progress = progress
            self._on_progress(progress)
            self._record_progress(progress, group)
        self._on_spent(progress.worker, progress.spent)
        self._on_pace(progress.worker, progress.pace)
        self._post(
            ev.ProgressReported(
                generation=progress.generation,
                committed=progress.committed,
                step_s=progress.step_s,
                in_step_s=progress.in_step_s,
                probed=progress.probed,
                first_step=progress.first_step,
                worker=progress.worker,
                waiting_s=progress.waiting_s,
                collectives=progress.collectives,
                quiet_s=progress.quiet_s,
            )
        )

    def _record_progress(self, progress: job_pb2.Progress, group: Generation) -> None:
        self._journal.record(
            "progress",
            step=progress.committed,
            epoch=progress.epoch,
            generation=progress.generation,
            world_size=group.world_size,
            step_s=round(progress.step_s, 6),
            samples_per_s=round(progress.samples_per_s, 1),
            reported={name: round(value, 6) for name, value in progress.reported.items()},
        )

    def _reformed(self, node: ConnectedNode, report: job_pb2.Reformed) -> None:
        del node
        if not self._age_s:  # else newer figures have come
            self._on_spent(report.worker, report.spent)
        if report.source:
            self._journal.record("state_restored", source=report.source, committed=report.committed)
        if report.bytes_received:
            self._journal.record(
                "state_received",
                worker=report.worker,
                generation=report.generation,
                bytes=report.bytes_received,
                sync_s=round(report.sync_s, 6),
            )
        record = self._recoveries.reformed(report, time.monotonic() - self._age_s)
        if record is not None:
            self._journal.record("recovered", **record)
            self._on_recovered(record)
        self._on_reformed(report)

    def _steps_recorded(self, node: ConnectedNode, entries: local_pb2.LedgerEntries) -> None:
        """Members keep what they are not told is stored, for the next coordinator if need be."""
        if self._ledger is None:
            self._nobody_stores(entries)
        else:
            self._ledger.take(node, entries.entries, whole=entries.whole)

    def _curve_reported(self, node: ConnectedNode, points: local_pb2.CurvePoints) -> None:
        if self._curve is not None:
            self._curve.take(node, points.points, whole=points.whole)

    def _nobody_stores(self, entries: local_pb2.LedgerEntries) -> None:
        """This job keeps no ledger, whatever its members were told: they need not keep any."""
        if entries.entries:
            last = entries.entries[-1]
            self._broadcast(
                ledger_stored=local_pb2.LedgerStored(
                    committed=last.step + 1, run=last.run, generation=last.generation
                )
            )

    def _notice(self, node: ConnectedNode, notice: local_pb2.Notice) -> None:
        """A worker's own event. It chooses among names, and its fields stand by themselves."""
        source = name_of(node.node)
        if notice.name in _NOTICES:
            self._journal.record(notice.name, node=source, details=dict(notice.fields))
        else:
            self._journal.record("notice", node=source, details={"name": notice.name})


_MOST_SOURCES = 5_000


class ToldOnce:
    """How far each agent was heard in what is counted once, however often it tells of it: it does
    until it hears that it is stored, since a leader may die with what it has just heard.
    """

    def __init__(self, stored: Mapping[str, int] = MappingProxyType({})) -> None:
        """stored: what leaders before have heard, the newest number of each source."""
        self._heard, self._stored = dict(stored), dict(stored)
        self._unanswered: dict[str, AgentStream] = {}
        self.count = 0
        """Grows with each message that is new."""

    def hear(self, once: pb.Once, stream: AgentStream) -> bool:
        """An agent tells of something; True if nobody has heard of it before."""
        source, number = once.source, once.number
        if number <= self._stored.get(source, 0):
            stream.send(once_stored=self._stored[source])
            return False
        self._unanswered[source] = stream
        if number <= self._heard.get(source, 0):
            return False
        self._heard.pop(source, None)  # the order is that of the newest
        self._heard[source] = number
        self.count += 1
        if len(self._heard) > _MOST_SOURCES:
            oldest = next(iter(self._heard))
            del self._heard[oldest]
            self._stored.pop(oldest, None)
        return True

    def heard(self) -> dict[str, int]:
        """The newest number of each source, of that heard last at the end."""
        return dict(self._heard)

    def stored(self, heard: Mapping[str, int]) -> None:
        """Leaders after this one will know of these."""
        for source, number in heard.items():
            if source in self._heard:
                self._stored[source] = number
        for source, stream in list(self._unanswered.items()):
            if number := heard.get(source, 0):
                stream.send(once_stored=number)
            if number == self._heard.get(source, number):
                del self._unanswered[source]


_MOST_NAMES = 100


class ScriptValues:
    """Tells once when a value turns NaN or infinite, and again after it was finite."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._not_finite: set[str] = set()

    @property
    def not_finite(self) -> Sequence[str]:
        """Names of those that are no finite numbers now."""
        return sorted(self._not_finite)

    def heard(self, values: Mapping[str, float], step: int) -> None:
        """Rank 0 has reported these, with so many steps committed."""
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        bad = bad[:_MOST_NAMES]
        for name in bad:
            if name not in self._not_finite:
                shown = str(values[name])
                self._journal.record("loss_not_finite", name=name, value=shown, step=step)
        self._not_finite = set(bad)


_AT_ONCE = 8  # nodes of which none need wait for another
_WAIT_S_PER_NODE = 1e-5


class ViewBatches:
    """`post` takes events in order; a newer view of a node replaces one that still waits.

    The more nodes there are the longer a view waits, 10 ms for a thousand, and never behind the
    next event that is not a view.
    """

    def __init__(self, post: Callable[[ev.Event], None], nodes: Callable[[], int]) -> None:
        self._post = post
        self._nodes = nodes
        self._waiting: dict[NodeId, ev.NodeReported] = {}
        self._timer: asyncio.TimerHandle | None = None

    def post(self, event: ev.Event) -> None:
        """Hand it on, now or soon."""
        if not isinstance(event, ev.NodeReported):
            self.flush()
            self._post(event)
            return
        self._waiting.pop(event.node, None)  # the order is that of the newest
        self._waiting[event.node] = event
        if self._nodes() <= _AT_ONCE:
            self.flush()
        elif self._timer is None:
            delay_s = self._nodes() * _WAIT_S_PER_NODE
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.flush)

    def flush(self) -> None:
        """Hand on what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            reports, self._waiting = tuple(self._waiting.values()), {}
            self._post(ev.NodesReported(reports=reports))

    def close(self) -> None:
        """Hand on nothing more."""
        self._waiting.clear()
        self.flush()
