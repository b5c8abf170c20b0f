"""Follows the coordinator's events and records each incident: its cause, its signs, its outcome.

An incident is a loss or a hang that changed the group, or a save that failed. The accounts
(core/accounting.py) number the incidents and know their cost.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from elastic.core.accounting import MOST_INCIDENTS, Incident, read_name, read_number
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    NodeId,
    WorkerId,
)

MOST_SIGNS = 12
MOST_PROCESSES = 4  # recorded in full; others are only counted
MOST_STACKS = 4  # ranks of one hang
MOST_SAVES = 8  # given up because of one incident
LONGEST = 1000  # characters of a message or a verdict
LONGEST_DETAIL = 300
_LONGEST_TRACEBACK = 4000
_LONGEST_LOG = 2500
_LONGEST_STACKS = 2500  # of one rank
_MOST_NAMES = 16  # nodes or workers
_SAME_S = 600.0  # a storage that is too slow for every other save is one incident
_LATE_S = 3.0  # signs of what happened while the coordinator was stopped come within this time


class Sign(enum.Enum):
    """How something was noticed."""

    WORKER_ENDED = "worker_ended"
    """A worker's agent saw its process end."""
    GROUP_BROKEN = "group_broken"
    """A member's collective failed."""
    NODE_LOST = "node_lost"
    """The stream of a node's agent broke."""
    NODE_GONE = "node_gone"
    """All workers of a node have certainly ended, without a word from its agent."""
    NODE_ABSENT = "node_absent"
    """A node's agent has not come to a new leader."""
    OVERDUE = "overdue"
    """A step, a pause between steps or joining a group took too long."""
    LEAVE_TIMED_OUT = "leave_timed_out"
    """The workers of a leaving node did not reach a step boundary in time."""
    UNREACHABLE = "unreachable"
    """Members did not reach each other when they tried."""
    COORDINATOR_STOPPED = "coordinator_stopped"
    """The coordinator itself did not run, so it noticed everything late."""
    SAVE_REFUSED = "save_refused"
    """A part of a checkpoint, or its manifest, could not be written."""


class Cause(enum.Enum):
    """What happened first, as far as is known."""

    WORKER_FAILED = "worker_failed"
    NODE_LOST = "node_lost"
    HANG = "hang"
    WORKER_LEFT_OUT = "worker_left_out"
    """A worker did not answer any more, or did not come to a new group."""
    LEAVE_TIMED_OUT = "leave_timed_out"
    GROUP_BROKEN = "group_broken"
    """Connections broke between members that are all alive."""
    UNREACHABLE = "unreachable"
    """The network does not carry the connections between some members."""
    SAVE_FAILED = "save_failed"
    UNKNOWN = "unknown"


class Outcome(enum.Enum):
    """The state of an incident, or how it ended."""

    UNDER_WAY = "under_way"
    WAITING = "waiting"
    """There are not enough workers for a group yet."""
    RECOVERED = "recovered"
    """The group that followed has committed a step."""
    STRUCK_AGAIN = "struck_again"
    """Another incident came before that."""
    TRAINS_ON = "trains_on"
    """A save failed, which has not held up the training."""
    SAVED_SINCE = "saved_since"
    """A save failed, and a later one is complete."""
    JOB_ENDED = "job_ended"
    UNKNOWN = "unknown"
    """The leader changed before the incident was over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """One sign of an incident."""

    sign: Sign
    at: float
    node: str = ""
    """The node that is lost, or that the worker is on; empty for OVERDUE, which concerns all."""
    worker: WorkerId = ""
    rank: int | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Casualty:
    """A worker process that ended."""

    failure: Failure
    node: str
    rank: int | None
    """The worker's rank in the group that lost it."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStacks:
    """The stacks of the main threads of one rank's processes, as text."""

    rank: int
    node: str
    worker: WorkerId
    doing: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """How a group stood still: at which step, for how long, and why."""

    generation: int
    step: int
    standing_s: float
    verdict: Diagnosis = field(default_factory=Diagnosis)
    stacks: tuple[RankStacks, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSaves:
    """Saves that failed soon after each other, for the same reason."""

    message: str
    first_step: int
    last_step: int
    count: int = 1


@dataclass(slots=True)
class Record:
    """Everything that is recorded of one incident."""

    number: int
    at: float
    """When the first sign was noticed."""
    generation: int = 0
    """The group in which it happened."""
    world_size: int = 0
    committed: int = 0
    """The steps that were committed before it."""
    noticed: list[Noticed] = field(default_factory=list)
    casualties: list[Casualty] = field(default_factory=list)
    further: int = 0
    """How many more processes ended."""
    hang: Standstill | None = None
    saves: FailedSaves | None = None
    saves_lost: list[int] = field(default_factory=list)
    """The steps whose saves were under way and were given up because of it."""
    outcome: Outcome = Outcome.UNDER_WAY
    ended_at: float | None = None
    followed_by: int = 0
    """The generation that trains after it."""
    world_size_after: int = 0
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the event `recovered`; empty before that event."""
    steps_again: int = 0
    """How many steps were under way when the group was lost, and had to be begun again."""
    steps_lost: int = 0
    """How many committed steps were lost because no worker that held them was left."""
    went_on_at: int | None = None
    """How many steps were committed where the next group went on. None: it has not, or an earlier
    leader knew it."""
    samples_per_step: float = 0.0
    """0: unknown."""
    verdict: str = ""
    """Why the job ended with this incident."""
    cost: Incident | None = None
    told: bool = False
    """The record was in `Incidents.news`."""

    @property
    def cause(self) -> Cause:
        """What happened first. A broken group is a consequence if anything else is known."""
        if self.saves is not None:
            return Cause.SAVE_FAILED
        found: list[tuple[float, Cause]] = [
            (c.at, Cause.WORKER_FAILED)
            for c in self.casualties
            if c.failure.kind is not FailureKind.LEFT_OUT
        ]
        causes = {
            Sign.NODE_LOST: Cause.NODE_LOST,
            Sign.NODE_GONE: Cause.NODE_LOST,
            Sign.NODE_ABSENT: Cause.NODE_LOST,
            Sign.OVERDUE: Cause.HANG,
            Sign.LEAVE_TIMED_OUT: Cause.LEAVE_TIMED_OUT,
        }
        found += [(n.at, causes[n.sign]) for n in self.noticed if n.sign in causes]
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        if self.casualties:
            return Cause.WORKER_LEFT_OUT
        signs = {n.sign for n in self.noticed}
        if Sign.UNREACHABLE in signs:
            return Cause.UNREACHABLE
        return Cause.GROUP_BROKEN if Sign.GROUP_BROKEN in signs else Cause.UNKNOWN

    @property
    def is_open(self) -> bool:
        return self.outcome in (Outcome.UNDER_WAY, Outcome.WAITING)

    @property
    def workers(self) -> Sequence[WorkerId]:
        """The workers that were lost with it, as far as the accounts know."""
        return self.cost.workers if self.cost is not None else ()

    def to_document(self, ahead_s: float) -> dict[str, Any]:
        """The record as JSON values, all of bounded length. ahead_s: Unix time minus the clock of
        the instants."""
        cost, ended_at = self.cost, self.ended_at
        return {
            "number": self.number,
            "unix_s": round(self.at + ahead_s, 3),
            "cause": self.cause.value,
            "outcome": self.outcome.value,
            "lasted_s": round(ended_at - self.at, 6) if ended_at is not None else None,
            "generation": self.generation,
            "world_size": self.world_size,
            "followed_by": self.followed_by,
            "world_size_after": self.world_size_after,
            "committed": self.committed,
            "steps_again": self.steps_again,
            "steps_lost": self.steps_lost,
            "samples_given_up": self._samples_given_up(),
            "recovery": {k: v for k, v in self.recovery.items() if k != "lost"},
            "noticed": [_document_of(n, self.at) for n in self.noticed],
            "processes": [_document_of_process(c, self.at) for c in self.casualties],
            "further_processes": self.further,
            "hang": _document_of_hang(self.hang) if self.hang is not None else None,
            "saves": asdict(self.saves) if self.saves is not None else None,
            "saves_lost": list(self.saves_lost),
            "verdict": self.verdict,
            "nodes": list(cost.nodes[:_MOST_NAMES]) if cost is not None else [],
            "workers": list(cost.workers[:_MOST_NAMES]) if cost is not None else [],
            **(lost_time(cost) if cost is not None else {"lost_s": 0.0, "seconds": {}}),
        }

    def _samples_given_up(self) -> int | None:
        """None: unknown."""
        steps = self.steps_again + self.steps_lost
        if steps and not self.samples_per_step:
            return None
        return round(steps * self.samples_per_step)


def lost_time(cost: Incident) -> dict[str, Any]:
    """The slot-seconds that an incident has cost so far, as in the document of its record."""
    return {
        "lost_s": round(cost.lost_s, 3),
        "seconds": {kind.value: round(s, 3) for kind, s in cost.seconds.items() if s > 0.0},
    }


def begin_of(text: str, most: int) -> str:
    """The start of `text`, at most `most` characters. " ..." marks what was cut off."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def end_of(text: str, most: int) -> str:
    """The end of `text` in the same way: the end of a traceback or a log says most."""
    return text if len(text) <= most else f"... {text[4 - most :]}"


def _document_of(noticed: Noticed, since: float) -> dict[str, Any]:
    return {
        "after_s": round(noticed.at - since, 6),
        "sign": noticed.sign.value,
        "node": noticed.node,
        "worker": noticed.worker,
        "rank": noticed.rank,
        "detail": noticed.detail,
    }


def _document_of_process(casualty: Casualty, since: float) -> dict[str, Any]:
    failure = casualty.failure
    return {
        "after_s": round(casualty.at - since, 6),
        "node": casualty.node,
        "rank": casualty.rank,
        "worker": failure.worker,
        "kind": failure.kind.name.lower(),
        "code": failure.code,
        "message": begin_of(failure.message, LONGEST),
        "place": begin_of(failure.place, LONGEST_DETAIL),
        "traceback": end_of(failure.traceback, _LONGEST_TRACEBACK),
        "log_tail": end_of(failure.log_tail, _LONGEST_LOG),
        "log": begin_of(failure.log, LONGEST_DETAIL),
    }


def open_record(document: Mapping[str, Any], ahead_s: float) -> Record:
    """Read a document of `Record.to_document`; for incidents that are not over.

    Raises ValueError, TypeError, LookupError, AttributeError or OverflowError.
    """
    at = read_number(document["unix_s"]) - ahead_s
    return Record(
        number=int(document["number"]),
        at=at,
        generation=int(document["generation"]),
        world_size=int(document["world_size"]),
        committed=int(document["committed"]),
        noticed=[_noticed_of(d, at) for d in document["noticed"][:MOST_SIGNS]],
        casualties=[_casualty_of(d, at) for d in document["processes"][:MOST_PROCESSES]],
        further=int(document["further_processes"]),
        hang=_hang_of(document["hang"]) if document["hang"] is not None else None,
        saves_lost=[int(step) for step in document["saves_lost"][:MOST_SAVES]],
        outcome=Outcome(document["outcome"]),
        told=Outcome(document["outcome"]) is Outcome.WAITING,
    )


def _noticed_of(document: Mapping[str, Any], since: float) -> Noticed:
    return Noticed(
        sign=Sign(document["sign"]),
        at=since + read_number(document["after_s"]),
        node=read_name(document["node"]),
        worker=read_name(document["worker"]),
        rank=_rank_of(document),
        detail=str(document["detail"]),
    )


def _casualty_of(document: Mapping[str, Any], since: float) -> Casualty:
    failure = Failure(
        worker=read_name(document["worker"]),
        kind=FailureKind[document["kind"].upper()],
        code=int(document["code"]),
        message=str(document["message"]),
        place=str(document["place"]),
        traceback=str(document["traceback"]),
        log_tail=str(document["log_tail"]),
        log=str(document["log"]),
    )
    return Casualty(
        failure=failure,
        node=read_name(document["node"]),
        rank=_rank_of(document),
        at=since + read_number(document["after_s"]),
    )


def _hang_of(document: Mapping[str, Any]) -> Standstill:
    return Standstill(
        generation=int(document["generation"]),
        step=int(document["step"]),
        standing_s=read_number(document["standing_s"]),
        verdict=Diagnosis(text=str(document["verdict"])),
        stacks=tuple(
            RankStacks(
                rank=int(found["rank"]),
                node=read_name(found["node"]),
                worker=read_name(found["worker"]),
                doing=str(found["doing"]),
                text=str(found["text"]),
            )
            for found in document["stacks"][:MOST_STACKS]
        ),
    )


def _rank_of(document: Mapping[str, Any]) -> int | None:
    rank = document["rank"]
    return None if rank is None else int(rank)


def _document_of_hang(hang: Standstill) -> dict[str, Any]:
    return {
        "generation": hang.generation,
        "step": hang.step,
        "standing_s": hang.standing_s,
        "verdict": begin_of(hang.verdict.text, LONGEST),
        "stacks": [
            {
                "rank": s.rank,
                "node": s.node,
                "worker": s.worker,
                "doing": begin_of(s.doing, LONGEST_DETAIL),
                "text": begin_of(s.text, _LONGEST_STACKS),
            }
            for s in hang.stacks
        ],
    }


_REMEMBERED = 32  # saves that failed or were given up
_MOST_NODES = 10_000


class View(Protocol):
    """What the records need of the coordinator's machine."""

    @property
    def current(self) -> Generation | None: ...

    @property
    def committed(self) -> int: ...


class Incidents:
    """The records of a job's incidents.

    `observe` takes each event of the coordinator's machine after the accounts have. The other
    methods take what the machine does not learn. `changed` collects the records that changed,
    `news` those that users should be told about; the caller clears both.

    open_incident: opens an incident in the accounts, from (instant, reason, nodes, workers).
    name_of: returns the name of a node, which outlives its agent.
    """

    def __init__(
        self,
        open_incident: Callable[[float, str, Sequence[str], Sequence[WorkerId]], Incident],
        *,
        name_of: Callable[[NodeId], str] = str,
    ) -> None:
        self._open_incident, self._name_of = open_incident, name_of
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._pending: deque[Noticed] = deque(maxlen=MOST_SIGNS)
        """Signs of what may become an incident."""
        self._ended_early: deque[Casualty] = deque(maxlen=MOST_PROCESSES)
        """Workers that ended, and do not belong to a known incident yet."""
        self._hang: Standstill | None = None
        self._stop: Noticed | None = None
        """That the coordinator was stopped, until an incident has been found with it."""
        self._group: Generation | None = None
        self._places: dict[WorkerId, tuple[str, int]] = {}
        """(node, rank) of the members of the newest group."""
        self._places_before: dict[WorkerId, tuple[str, int]] = {}
        """The same of the group before."""
        self._came: dict[str, None] = {}
        """Nodes that have reported to this leader."""
        self._given_up: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._reporter: tuple[WorkerId, int, int] = ("", 0, 0)
        self._batch = 0.0
        self.committed_before = 0
        """How many steps were committed as far as earlier leaders knew. It counts until a member
        has reported to this one."""
        self.changed: set[int] = set()
        """The numbers of the records that have changed."""
        self.news: list[int] = []
        """The numbers of incidents that are over or may take long, each once."""

    # ---- events

    def resume(self, record: Record) -> None:
        """Go on with an incident of which the previous leader has not seen the end."""
        self._records[record.number] = record
        self.changed.add(record.number)

    def observe(
        self,
        event: ev.Event,
        effects: Sequence[fx.Effect],
        machine: View,
        incident: Incident | None,
        now: float,
    ) -> None:
        """The machine has handled the event and returned the effects. incident: the one under way,
        from the accounts."""
        if self._group is None:  # this leader's first event
            self._take_group(machine.current)
        self._hear(event, now)
        for effect in effects:
            if isinstance(effect, fx.ExplainHang):
                self._stands_still(effect, now)
            elif isinstance(effect, fx.Lost):
                self._miss(effect)
            elif isinstance(effect, fx.PeersUnreachable) and effect.parted:
                self._part(effect)
        record = self._record_of(incident, machine, now) if incident is not None else None
        if isinstance(event, ev.WorkerFailed):
            self._went_further(event.committed_in, event.committed)
            self._ended(event, record, now)
        for effect in effects:
            if isinstance(effect, fx.AbandonCheckpoint):
                self._abandoned(event, effect, record, now)
            elif isinstance(effect, fx.AnnounceGeneration):
                self._formed(effect.generation)
            elif isinstance(effect, fx.EndJob):
                self._job_ended(now)
        if machine.current is not self._group:
            self._take_group(machine.current)

    def progressed(self, worker: WorkerId, committed: int, samples: int) -> None:
        """Rank 0 reports how many steps and samples the whole group has committed in all."""
        known, steps, count = self._reporter
        if worker == known and committed > steps and samples > count:
            self._batch = (samples - count) / (committed - steps)
        self._reporter = (worker, committed, samples)

    def stopped(self, stopped_s: float, at: float) -> None:
        """The coordinator runs again since `at`. Before, it did not run for `stopped_s`."""
        detail = f"it did not run for {stopped_s:.1f} s: it was stopped, or its machine was paused"
        self._stop = Noticed(sign=Sign.COORDINATOR_STOPPED, at=at, detail=detail)

    def left_late(self, node: str, now: float) -> None:
        """A node's time to leave is over, and its workers are ended."""
        self._notice(Noticed(sign=Sign.LEAVE_TIMED_OUT, at=now, node=node))

    def explained(self, generation: int, verdict: Diagnosis, stacks: Sequence[RankStacks]) -> None:
        """The members of a group that stands still have reported where they are."""
        told = tuple(stacks[:MOST_STACKS])
        if self._hang is not None and self._hang.generation == generation:
            self._hang = replace(self._hang, verdict=verdict, stacks=told)
        for record in reversed(self._records.values()):
            if record.hang is not None and record.hang.generation == generation:
                record.hang = replace(record.hang, verdict=verdict, stacks=told)
                self.changed.add(record.number)
                return

    def recovered(self, recovery: Mapping[str, Any], now: float) -> None:
        """The group that followed has committed a step. recovery: the fields of `recovered`."""
        self._pending.clear()
        self._ended_early.clear()
        self._hang = None
        still = [r for r in self._records.values() if r.is_open]
        for record in still:
            last = record is still[-1]
            record.outcome = Outcome.RECOVERED if last else Outcome.STRUCK_AGAIN
            record.ended_at, record.followed_by = now, int(recovery["generation"])
            record.recovery = recovery if last else {}
            if len(still) == 1:  # a member may have noticed it before any sign came here
                record.at = min(record.at, now - recovery["total_s"])
            record.world_size_after = self._group.world_size if self._group is not None else 0
            record.went_on_at = int(recovery["committed"])
            record.steps_lost = max(0, record.committed - record.went_on_at)
            self._tell(record)

    def reformed(self, generation: int, recomputed: int) -> None:
        """A member has committed its first step in a group and reports how many steps it had to
        begin again (`recomputed`). Called after `recovered`."""
        for record in reversed(self._records.values()):
            if record.followed_by == generation and record.outcome is Outcome.RECOVERED:
                if recomputed > record.steps_again:
                    record.steps_again = recomputed
                    self.changed.add(record.number)
                return

    def save_failed(
        self, step: int, generation: int, message: str, now: float, worker: WorkerId = ""
    ) -> None:
        """Storage has refused a checkpoint. Successive failures for the same reason are one
        incident, also if other saves are complete between them."""
        if (step, generation) in self._given_up:
            return
        self._given_up.append((step, generation))
        message = begin_of(message, LONGEST)
        newest = list(self._records.values())[-1:]
        lately = [r for r in newest if r.ended_at is not None and now - r.ended_at < _SAME_S]
        for record in [*self._failing(), *lately]:
            saves = record.saves
            if saves is not None and _without_digits(saves.message) == _without_digits(message):
                record.saves = replace(saves, last_step=step, count=saves.count + 1)
                record.outcome, record.ended_at = Outcome.TRAINS_ON, now
                self.changed.add(record.number)
                return
        node, rank = self._place(worker)
        workers = [worker] if worker else []
        incident = self._open_incident(now, "save_failed", [node] if node else [], workers)
        record = self._add(incident, step, now)
        record.saves = FailedSaves(message=message, first_step=step, last_step=step)
        record.outcome, record.ended_at = Outcome.TRAINS_ON, now
        record.noticed = [
            Noticed(sign=Sign.SAVE_REFUSED, at=now, node=node, worker=worker, rank=rank)
        ]
        self._tell(record)

    def saved(self) -> None:
        """A checkpoint is complete."""
        for record in self._failing():
            record.outcome = Outcome.SAVED_SINCE
            self.changed.add(record.number)

    def ended(self, message: str) -> None:
        for record in self._records.values():
            if record.outcome is Outcome.JOB_ENDED:
                record.verdict = begin_of(message, LONGEST)
                self.changed.add(record.number)

    # ---- queries

    def documents(self, ahead_s: float) -> dict[int, dict[str, Any]]:
        """All records by number, oldest first."""
        return {number: r.to_document(ahead_s) for number, r in self._records.items()}

    def document(self, number: int, ahead_s: float) -> dict[str, Any] | None:
        record = self._records.get(number)
        return record.to_document(ahead_s) if record is not None else None

    @property
    def newest_open(self) -> Record | None:
        """The newest incident that is not over."""
        return next((r for r in reversed(self._records.values()) if r.is_open), None)

    # ---- internals

    def _failing(self) -> list[Record]:
        """Incidents of failed saves since which no save was complete."""
        return [r for r in self._records.values() if r.outcome is Outcome.TRAINS_ON]

    def _hear(self, event: ev.Event, now: float) -> None:
        """Note the signs in an event, except for the end of a process."""
        if isinstance(event, ev.NodeReported):
            self._reported(event, now)
        elif isinstance(event, ev.NodesReported):
            for report in event.reports:
                self._reported(report, now)
        elif isinstance(event, ev.NodeLost | ev.NodeGone):
            sign = Sign.NODE_LOST if isinstance(event, ev.NodeLost) else Sign.NODE_GONE
            members = self._group.members if self._group is not None else ()
            if any(m.node == event.node for m in members):
                self._notice(Noticed(sign=sign, at=now, node=self._name_of(event.node)))

    def _reported(self, report: ev.NodeReported, now: float) -> None:
        node, group = self._name_of(report.node), self._group
        self._came[node] = None
        if len(self._came) > _MOST_NODES:
            del self._came[next(iter(self._came))]
        if self._pending:  # a node that is in contact again is not lost
            kept = [n for n in self._pending if (n.sign, n.node) != (Sign.NODE_LOST, node)]
            if len(kept) < len(self._pending):
                self._pending = deque(kept, maxlen=MOST_SIGNS)
        for status in report.workers if group is not None else ():
            if status.broken and group is not None and status.generation == group.number:
                self._notice(
                    Noticed(
                        sign=Sign.GROUP_BROKEN,
                        at=now,
                        node=node,
                        worker=status.worker,
                        rank=self._place(status.worker)[1],
                        detail=begin_of(status.detail, LONGEST_DETAIL),
                    )
                )

    def _went_further(self, generation: int, committed: int) -> None:
        """The group of an incident has committed this many steps, perhaps more than was known, and
        the job may have gone on without them."""
        for record in self._records.values():
            is_its_end = record.is_open or record.went_on_at is not None  # not a failed save
            if is_its_end and record.generation == generation and record.committed < committed:
                record.committed = committed
                if record.went_on_at is not None:
                    record.steps_lost = max(0, committed - record.went_on_at)
                self.changed.add(record.number)

    def _miss(self, effect: fx.Lost) -> None:
        for worker in effect.workers:
            node = self._place(worker)[0]
            if node and node not in self._came:
                self._notice(Noticed(sign=Sign.NODE_ABSENT, at=effect.at, node=node))

    def _part(self, effect: fx.PeersUnreachable) -> None:
        for found in effect.unreached:
            node, peer = self._name_of(found.by), self._name_of(found.peer.node)
            detail = f"node {peer} at {found.peer.endpoint}: {found.why}"
            self._notice(
                Noticed(
                    sign=Sign.UNREACHABLE,
                    at=effect.at,
                    node=node,
                    worker=found.peer.worker,
                    detail=begin_of(detail, LONGEST_DETAIL),
                )
            )

    def _stands_still(self, effect: fx.ExplainHang, now: float) -> None:
        self._notice(Noticed(sign=Sign.OVERDUE, at=now))
        number = effect.generation.number
        if self._hang is None or self._hang.generation != number:
            self._hang = Standstill(
                generation=number, step=effect.step, standing_s=round(effect.standing_s, 3)
            )

    def _notice(self, noticed: Noticed) -> None:
        who = (noticed.sign, noticed.node, noticed.worker)
        if all((n.sign, n.node, n.worker) != who for n in self._pending):
            self._pending.append(noticed)

    def _record_of(self, incident: Incident, machine: View, now: float) -> Record:
        """The record of the incident, with all signs that were noticed up to now."""
        record = self._records.get(incident.number)
        if record is None:
            record = self._add(incident, machine.committed or self.committed_before, now)
        if self._pending:
            known = {(n.sign, n.node, n.worker) for n in record.noticed}
            fresh = [n for n in self._pending if (n.sign, n.node, n.worker) not in known]
            record.noticed = sorted([*record.noticed, *fresh], key=lambda n: n.at)[:MOST_SIGNS]
            record.at = min(record.at, *(n.at for n in record.noticed))
            self._pending.clear()
            self.changed.add(record.number)
        if self._stop is not None and self._stop.at >= record.at - _LATE_S:
            stop, self._stop = replace(self._stop, at=max(self._stop.at, record.at)), None
            record.noticed = sorted([*record.noticed, stop], key=lambda n: n.at)[:MOST_SIGNS]
            self.changed.add(record.number)
        if self._hang is not None and record.hang is None:
            record.hang, self._hang = self._hang, None
            self.changed.add(record.number)
        for casualty in [c for c in self._ended_early if c.failure.worker in incident.workers]:
            self._ended_early.remove(casualty)
            self._add_casualty(record, casualty)
        return record

    def _add(self, incident: Incident, committed: int, now: float) -> Record:
        group = self._group
        record = Record(
            number=incident.number,
            at=min(incident.at, now),
            generation=group.number if group is not None else 0,
            world_size=group.world_size if group is not None else 0,
            committed=committed,
            samples_per_step=self._batch,
            cost=incident,
        )
        # The cost of the newest one may have grown since its record was stored.
        self.changed |= set(list(self._records)[-1:]) | {record.number}
        self._records[record.number] = record
        while len(self._records) > MOST_INCIDENTS:
            self._records.popitem(last=False)
        return record

    def _ended(self, event: ev.WorkerFailed, record: Record | None, now: float) -> None:
        """Add the process to the open incident, or to the one with which its worker was lost."""
        failure, node = event.failure, self._name_of(event.node)
        if record is None:
            late = [r for r in self._records.values() if failure.worker in r.workers]
            record = late[-1] if late else None
        rank = self._place(failure.worker)[1]
        casualty = Casualty(failure=failure, node=node, rank=rank, at=now - event.age_s)
        if record is None:
            self._ended_early.append(casualty)
        else:
            self._add_casualty(record, casualty)

    def _add_casualty(self, record: Record, casualty: Casualty) -> None:
        failure = casualty.failure
        if any(c.failure.worker == failure.worker for c in record.casualties):
            return
        self.changed.add(record.number)
        record.at = min(record.at, casualty.at)
        if len(record.casualties) >= MOST_PROCESSES:
            record.further += 1
            return
        record.casualties.append(casualty)
        if not record.noticed or failure.kind is not FailureKind.LEFT_OUT:
            record.noticed.append(
                Noticed(
                    sign=Sign.WORKER_ENDED,
                    at=casualty.at,
                    node=casualty.node,
                    worker=failure.worker,
                    rank=casualty.rank,
                )
            )
            record.noticed.sort(key=lambda noticed: noticed.at)
            del record.noticed[MOST_SIGNS:]

    def _abandoned(
        self, event: ev.Event, effect: fx.AbandonCheckpoint, record: Record | None, now: float
    ) -> None:
        """A save was given up: storage failed, or a member was lost before its part was written."""
        if isinstance(event, ev.SaveReportedFailed):
            self.save_failed(effect.step, effect.generation, effect.message, now, event.worker)
        elif record is not None and effect.step not in record.saves_lost:
            record.saves_lost = [*record.saves_lost, effect.step][-MOST_SAVES:]
            self._given_up.append((effect.step, effect.generation))
            self.changed.add(record.number)

    def _formed(self, generation: Generation) -> None:
        """Tell users at once if too few workers are left. A generation without members alone does
        not show that: at a change a torchrun script's group is dissolved before the next one."""
        if generation.members or generation.reason is not ChangeReason.BELOW_MINIMUM:
            return
        for record in self._records.values():
            if record.outcome is Outcome.UNDER_WAY:
                record.outcome = Outcome.WAITING
                self._tell(record)

    def _job_ended(self, now: float) -> None:
        self.changed |= set(self._records)
        for record in self._records.values():
            if record.is_open:
                record.outcome, record.ended_at = Outcome.JOB_ENDED, now
                self._tell(record)

    def _take_group(self, group: Generation | None) -> None:
        self._group = group
        if group is not None and group.members:
            self._places_before = self._places
            self._places = {
                m.worker: (self._name_of(m.node), rank) for rank, m in enumerate(group.members)
            }

    def _place(self, worker: WorkerId) -> tuple[str, int | None]:
        """(node, rank) of a member of the two newest groups; ("", None) for any other worker."""
        return self._places.get(worker) or self._places_before.get(worker) or ("", None)

    def _tell(self, record: Record) -> None:
        self.changed.add(record.number)
        if not record.told:
            record.told = True
            self.news.append(record.number)


def _without_digits(message: str) -> str:
    """The message without step numbers, in which messages of the same error differ."""
    return "".join(c for c in message if not c.isdigit())
