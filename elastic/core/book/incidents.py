"""One incident: its signs, cause, course, outcome and cost, and its two documents.

docs/ARCHITECTURE.md ("The book") says what one loss is. Failed saves are incidents, too, and so are
planned changes of the group, of which only the cost is of interest.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elastic.core.book.accounting import Kind, read_name, read_number, read_seconds, seconds_of
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import Failure, FailureKind, WorkerId
from elastic.core.whereabouts import MOST_STACKS, RankStacks

MOST_INCIDENTS = 50
"""The maximum number of losses kept one by one, and of planned changes. The sums by kind and by
node cover all."""
MOST_SIGNS = 12
MOST_PROCESSES = 4  # recorded in full; others are only counted
MOST_SAVES = 8  # given up because of one incident
LONGEST = 1000  # characters of a message or a verdict
LONGEST_DETAIL = 300
_LONGEST_TRACEBACK = 4000
_LONGEST_LOG = 2500
_LONGEST_STACKS = 2500  # of one rank
_MOST_NAMES = 100  # most node names, and most worker names, kept for one incident


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

    PLANNED = "planned"
    """Nothing was lost: workers joined or left as planned."""
    UNDER_WAY = "under_way"
    WAITING = "waiting"
    """There are not enough workers for a group yet."""
    RECOVERED = "recovered"
    """The group that followed has committed a step."""
    TRAINS_ON = "trains_on"
    """A save failed, which has not held up the training."""
    SAVED_SINCE = "saved_since"
    """A save failed, and a later one is complete."""
    JOB_ENDED = "job_ended"
    UNKNOWN = "unknown"
    """It is not known how it went on."""


_CAUSES = {
    Sign.NODE_LOST: Cause.NODE_LOST,
    Sign.NODE_GONE: Cause.NODE_LOST,
    Sign.NODE_ABSENT: Cause.NODE_LOST,
    Sign.OVERDUE: Cause.HANG,
    Sign.LEAVE_TIMED_OUT: Cause.LEAVE_TIMED_OUT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """One sign of an incident."""

    at: float
    sign: Sign
    node: str = ""
    """The node that is lost, or that the worker is on; empty for OVERDUE, which concerns all."""
    worker: WorkerId = ""
    rank: int | None = None
    detail: str = ""

    @property
    def who(self) -> tuple[Sign, str, WorkerId]:
        return self.sign, self.node, self.worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Casualty:
    """A worker process that ended."""

    failure: Failure
    node: str
    rank: int | None
    """The worker's rank in the group that lost it."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """How a group stood still: at which step, for how long, and why."""

    generation: int
    step: int
    standing_s: float
    verdict: str = ""
    stacks: tuple[RankStacks, ...] = ()

    def explained(self, verdict: Diagnosis, stacks: Iterable[RankStacks]) -> Standstill:
        """The same with what its members have reported, cut to a bounded length."""
        told = [
            replace(
                s,
                doing=begin_of(s.doing, LONGEST_DETAIL),
                text=begin_of(s.text, _LONGEST_STACKS),
            )
            for s in [*stacks][:MOST_STACKS]
        ]
        return replace(self, verdict=begin_of(verdict.text, LONGEST), stacks=tuple(told))


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSaves:
    """Saves that failed soon after each other, for the same reason."""

    message: str
    first_step: int
    last_step: int
    count: int = 1


@dataclass(slots=True)
class Incident:
    """Everything that is known of one incident."""

    number: int
    at: float
    """When its first sign was seen, on the clock of the book."""
    outcome: Outcome = Outcome.PLANNED
    reason: str = ""
    """The reason of the change of the group; of a failed save, that."""
    nodes: tuple[str, ...] = ()
    """Nodes that were lost, joined or left."""
    workers: tuple[WorkerId, ...] = ()
    followed_by: int = 0
    """The generation that followed. 0: none has followed yet, or that one is lost, too."""
    detection_s: float = 0.0
    """The time from the first sign to the decision in which the group did not train."""
    is_hang: bool = False
    seconds: defaultdict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """The lost slot-seconds, by kind."""

    generation: int = 0
    """The group in which it happened."""
    world_size: int = 0
    committed: int = 0
    """The steps that were committed before it."""
    noticed: list[Noticed] = field(default_factory=list)
    """The signs, the first one first."""
    casualties: list[Casualty] = field(default_factory=list)
    further: int = 0
    """How many more processes ended."""
    hang: Standstill | None = None
    saves: FailedSaves | None = None
    saves_lost: list[int] = field(default_factory=list)
    """The steps whose saves were under way and were given up because of it."""
    ended_at: float | None = None
    world_size_after: int = 0
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the event `recovered`; empty before that event."""
    steps_again: int = 0
    """How many steps were under way when the group was lost, and had to be begun again."""
    samples_per_step: float = 0.0
    """0: unknown."""
    verdict: str = ""
    """Why the job ended with this incident."""

    lost: dict[WorkerId, None] = field(default_factory=dict)
    """All workers that were lost with it, without a bound. Not stored."""
    decided_at: float | None = None
    """When the coordinator decided to go on without them; None: not yet; minus infinity: under an
    earlier leader."""
    persisted_at: float | None = None
    told: bool = False
    """Users were told of it."""

    @property
    def lost_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def is_open(self) -> bool:
        return self.outcome in _OPEN

    @property
    def steps_lost(self) -> int:
        """How many committed steps were lost because no worker that held them was left."""
        return max(0, self.committed - int(self.recovery.get("committed", self.committed)))

    @property
    def cause(self) -> Cause:
        """What happened first. A broken group is a consequence if anything else is known."""
        if self.saves is not None:
            return Cause.SAVE_FAILED
        found = [
            (c.at, Cause.WORKER_FAILED)
            for c in self.casualties
            if c.failure.kind is not FailureKind.LEFT_OUT
        ]
        found += [(n.at, _CAUSES[n.sign]) for n in self.noticed if n.sign in _CAUSES]
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        if self.casualties:
            return Cause.WORKER_LEFT_OUT
        signs = {n.sign for n in self.noticed}
        if Sign.UNREACHABLE in signs:
            return Cause.UNREACHABLE
        return Cause.GROUP_BROKEN if Sign.GROUP_BROKEN in signs else Cause.UNKNOWN

    def concerns(self, nodes: Iterable[str], workers: Iterable[WorkerId]) -> None:
        """Add nodes and workers that turned out to be part of this incident."""
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))[:_MOST_NAMES]
        self.workers = tuple(dict.fromkeys((*self.workers, *workers)))[:_MOST_NAMES]

    def notice(self, noticed: Iterable[Noticed]) -> None:
        """Add signs, each of which counts once."""
        known = {n.who for n in self.noticed}
        fresh = [n for n in noticed if n.who not in known]
        self.noticed = sorted([*self.noticed, *fresh], key=lambda n: n.at)[:MOST_SIGNS]
        self.at = min([self.at, *(n.at for n in self.noticed)])

    def add(self, casualty: Casualty) -> None:
        """Add a process that ended because of it, or was its cause."""
        failure = casualty.failure
        if any(c.failure.worker == failure.worker for c in self.casualties):
            return
        self.at = min(self.at, casualty.at)
        if len(self.casualties) >= MOST_PROCESSES:
            self.further += 1
            return
        self.casualties.append(casualty)
        if not self.noticed or failure.kind is not FailureKind.LEFT_OUT:
            self.notice(
                [
                    Noticed(
                        at=casualty.at,
                        sign=Sign.WORKER_ENDED,
                        node=casualty.node,
                        worker=failure.worker,
                        rank=casualty.rank,
                    )
                ]
            )

    def to_document(self, ahead_s: float) -> dict[str, Any]:
        """Everything, as JSON values of bounded length. ahead_s: Unix time minus the clock."""
        return {
            "number": self.number,
            "unix_s": round(self.at + ahead_s, 3),
            "cause": self.cause.value,
            "outcome": self.outcome.value,
            "lasted_s": round(self.ended_at - self.at, 6) if self.ended_at is not None else None,
            **{name: getattr(self, name) for name in (*_COUNTS, *_TEXTS)},
            "detection_s": round(self.detection_s, 6),
            "is_hang": self.is_hang,
            "steps_lost": self.steps_lost,
            "samples_given_up": self._samples_given_up(),
            "recovery": dict(self.recovery),
            "noticed": [
                {"after_s": round(n.at - self.at, 6), **_but_instant(n), "sign": n.sign.value}
                for n in self.noticed
            ],
            "processes": [_document_of_process(c, self.at) for c in self.casualties],
            "further_processes": self.further,
            "hang": asdict(self.hang) if self.hang is not None else None,
            "saves": asdict(self.saves) if self.saves is not None else None,
            "saves_lost": list(self.saves_lost),
            "nodes": list(self.nodes),
            "workers": list(self.workers),
            "lost_s": round(self.lost_s, 6),
            "seconds": seconds_of(self.seconds),
        }

    def cost_document(self, ahead_s: float) -> dict[str, Any]:
        """What the accounts show of it, as JSON values, for programs of users."""
        return {
            "number": self.number,
            "unix_s": round(self.at + ahead_s, 3),
            "reason": self.reason,
            "nodes": list(self.nodes),
            "workers": list(self.workers),
            "generation": self.followed_by,
            "detection_s": round(self.detection_s, 6),
            "is_hang": self.is_hang,
            "lost_s": round(self.lost_s, 6),
            "seconds": seconds_of(self.seconds),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any], ahead_s: float) -> Incident:
        """Read what `to_document` returned, perhaps in an earlier version, which wrote fewer
        fields. Raises one of UNREADABLE."""
        at, lasted_s = read_number(document["unix_s"]) - ahead_s, document.get("lasted_s")
        again, lost = (read_number(document.get(name, 0)) for name in ("steps_again", "steps_lost"))
        steps, samples = again + lost, document.get("samples_given_up")
        hang, saves = document["hang"], document.get("saves")
        outcomes = {outcome.value: outcome for outcome in Outcome}
        plain: dict[str, Any] = {name: str(document.get(name, "")) for name in _TEXTS}
        plain |= {n: int(read_number(document.get(n, 0))) for n in ("number", *_COUNTS)}
        incident = cls(
            at=at,
            outcome=outcomes.get(document["outcome"], Outcome.UNKNOWN),
            **plain,
            detection_s=read_number(document.get("detection_s", 0.0)),
            is_hang=document.get("is_hang") is True,
            noticed=[_noticed_of(d, at) for d in document["noticed"][:MOST_SIGNS]],
            casualties=[_casualty_of(d, at) for d in document["processes"][:MOST_PROCESSES]],
            further=int(document["further_processes"]),
            hang=_hang_of(hang) if hang is not None else None,
            saves=_saves_of(saves) if saves is not None else None,
            saves_lost=[int(step) for step in document["saves_lost"][:MOST_SAVES]],
            ended_at=at + read_number(lasted_s) if lasted_s is not None else None,
            recovery=_recovery_of(document.get("recovery", {})),
            samples_per_step=read_number(samples) / steps if samples and steps else 0.0,
        )
        incident.reason = incident.reason or incident.recovery.get("reason", "")
        incident.told = incident.outcome is not Outcome.UNDER_WAY
        incident.concerns(map(read_name, document["nodes"]), map(read_name, document["workers"]))
        incident.seconds.update(read_seconds(document.get("seconds", {})))
        return incident

    def _samples_given_up(self) -> int | None:
        """None: unknown."""
        steps = self.steps_again + self.steps_lost
        if steps and not self.samples_per_step:
            return None
        return round(steps * self.samples_per_step)


_TEXTS = ("verdict", "reason")
_COUNTS = (
    *("generation", "world_size", "followed_by", "world_size_after", "committed", "steps_again"),
)
_OPEN = (Outcome.UNDER_WAY, Outcome.WAITING)
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


def is_open(document: Mapping[str, Any]) -> bool:
    """Whether the job had not recovered from the incident when its document was written."""
    return document.get("outcome") in [outcome.value for outcome in _OPEN]


def begin_of(text: str, most: int) -> str:
    """The start of `text`, at most `most` characters. " ..." marks what was cut off."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def end_of(text: str, most: int) -> str:
    """The end of `text` in the same way: the end of a traceback or a log says most."""
    return text if len(text) <= most else f"... {text[4 - most :]}"


def _but_instant(noticed: Noticed) -> dict[str, Any]:
    fields = asdict(noticed)
    del fields["at"]
    return fields


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


def _noticed_of(document: Mapping[str, Any], since: float) -> Noticed:
    return Noticed(
        at=since + read_number(document["after_s"]),
        sign=Sign(document["sign"]),
        node=read_name(document["node"]),
        worker=read_name(document["worker"]),
        rank=_rank_of(document),
        detail=str(document["detail"]),
    )


def _casualty_of(document: Mapping[str, Any], since: float) -> Casualty:
    texts = {n: str(document[n]) for n in ("message", "place", "traceback", "log_tail", "log")}
    failure = Failure(
        worker=read_name(document["worker"]),
        kind=FailureKind[document["kind"].upper()],
        code=int(document["code"]),
        **texts,  # type: ignore[arg-type]
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
        verdict=str(document["verdict"]),
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


def _recovery_of(document: Mapping[str, Any]) -> dict[str, Any]:
    if not document:
        return {}
    return {
        "generation": int(read_number(document["generation"])),
        "reason": read_name(document.get("reason", "")),
        "committed": int(read_number(document["committed"])),
        **{name: read_number(s) for name, s in document.items() if name.endswith("_s")},
    }


def _saves_of(document: Mapping[str, Any]) -> FailedSaves:
    steps = {name: int(document[name]) for name in ("first_step", "last_step", "count")}
    return FailedSaves(message=str(document["message"]), **steps)


def _rank_of(document: Mapping[str, Any]) -> int | None:
    rank = document["rank"]
    return None if rank is None else int(rank)
