"""What is known of an incident: its first cause, who noticed it, how it went on.

An incident is a loss or a hang that changed the group, or a save that failed. Its number and what
it has cost are those of the accounts (core/accounting.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.core.accounting import Incident
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import Failure, FailureKind, WorkerId

MOST_SIGNS = 12
MOST_PROCESSES = 4  # with all that they tell; of more, how many there were
MOST_STACKS = 4  # ranks of one hang
MOST_SAVES = 8  # that were given up for one incident
LONGEST = 1000  # characters of a message or a verdict
LONGEST_DETAIL = 300
_LONGEST_TRACEBACK = 4000
_LONGEST_LOG = 2500
_LONGEST_STACKS = 2500  # of one rank
_MOST_NAMES = 16  # nodes or workers


class Sign(enum.Enum):
    """How something was noticed."""

    WORKER_ENDED = "worker_ended"
    """Its agent saw the process end."""
    GROUP_BROKEN = "group_broken"
    """A member's collective failed."""
    NODE_LOST = "node_lost"
    """The stream of its agent broke."""
    NODE_GONE = "node_gone"
    """Its registration was lost, or another process has its name."""
    OVERDUE = "overdue"
    """A step, a pause between steps or the way into a group lasted too long."""
    LEAVE_TIMED_OUT = "leave_timed_out"
    """A node was to leave at a step boundary, and its workers came to none."""
    SAVE_REFUSED = "save_refused"
    """A part of a checkpoint, or its manifest, could not be written."""


class Cause(enum.Enum):
    """What struck first, as far as is known."""

    WORKER_FAILED = "worker_failed"
    NODE_LOST = "node_lost"
    HANG = "hang"
    WORKER_LEFT_OUT = "worker_left_out"
    """It answered no more, or came to no new group."""
    LEAVE_TIMED_OUT = "leave_timed_out"
    GROUP_BROKEN = "group_broken"
    """Connections between members that all live."""
    SAVE_FAILED = "save_failed"
    UNKNOWN = "unknown"


class Outcome(enum.Enum):
    """How it went on."""

    UNDER_WAY = "under_way"
    WAITING = "waiting"
    """Workers wait until there are enough of them."""
    RECOVERED = "recovered"
    """A step was committed without what was lost."""
    STRUCK_AGAIN = "struck_again"
    """Before that the next incident came."""
    TRAINS_ON = "trains_on"
    """A save failed, which has held up nobody."""
    SAVED_SINCE = "saved_since"
    """The same, and a later one is whole."""
    JOB_ENDED = "job_ended"
    UNKNOWN = "unknown"
    """The leader changed before it was over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """One sign of an incident."""

    sign: Sign
    at: float
    node: str = ""
    """That tells it; of OVERDUE empty: the coordinator noticed by itself."""
    worker: WorkerId = ""
    rank: int | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Casualty:
    """A process that ended."""

    failure: Failure
    node: str
    rank: int | None
    """In the group that it was lost from."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStacks:
    """The main threads of one rank's processes, as lines."""

    rank: int
    node: str
    worker: WorkerId
    doing: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """The group stood still."""

    generation: int
    step: int
    standing_s: float
    verdict: Diagnosis = field(default_factory=Diagnosis)
    stacks: tuple[RankStacks, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSaves:
    """Saves that failed one after the other, for the same reason."""

    message: str
    first_step: int
    last_step: int
    count: int = 1


@dataclass(slots=True)
class Record:
    """One incident."""

    number: int
    at: float
    """The first sign."""
    generation: int = 0
    """The group that it struck."""
    world_size: int = 0
    committed: int = 0
    """Steps that were committed before."""
    noticed: list[Noticed] = field(default_factory=list)
    casualties: list[Casualty] = field(default_factory=list)
    further: int = 0
    """Processes that ended besides."""
    hang: Standstill | None = None
    saves: FailedSaves | None = None
    saves_lost: list[int] = field(default_factory=list)
    """Steps whose saves were under way, and were given up for it."""
    outcome: Outcome = Outcome.UNDER_WAY
    ended_at: float | None = None
    followed_by: int = 0
    """The generation that trains after it."""
    world_size_after: int = 0
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """As the event `recovered` has it; empty before."""
    steps_again: int = 0
    """Begun when the group was lost, and begun again."""
    steps_lost: int = 0
    """Committed, and lost since nobody who held them was left."""
    samples_per_step: float = 0.0
    """0: not known."""
    verdict: str = ""
    """Why the job ended with it."""
    cost: Incident | None = None
    told: bool = False

    @property
    def cause(self) -> Cause:
        """What struck first. A broken group is a consequence, unless nothing else is known."""
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
            Sign.OVERDUE: Cause.HANG,
            Sign.LEAVE_TIMED_OUT: Cause.LEAVE_TIMED_OUT,
        }
        found += [(n.at, causes[n.sign]) for n in self.noticed if n.sign in causes]
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        if self.casualties:
            return Cause.WORKER_LEFT_OUT
        signs = {n.sign for n in self.noticed}
        return Cause.GROUP_BROKEN if Sign.GROUP_BROKEN in signs else Cause.UNKNOWN

    @property
    def is_open(self) -> bool:
        """It is not over."""
        return self.outcome in (Outcome.UNDER_WAY, Outcome.WAITING)

    @property
    def workers(self) -> Sequence[WorkerId]:
        """That the accounts know to be lost with it."""
        return self.cost.workers if self.cost is not None else ()

    def to_document(self, ahead_s: float) -> dict[str, Any]:
        """As JSON values, all of bounded length. ahead_s: by how much Unix time is ahead of the
        clock of the instants."""
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
            "lost_s": round(cost.lost_s, 3) if cost is not None else 0.0,
            "seconds": {k.value: round(s, 3) for k, s in cost.seconds.items() if s > 0.0}
            if cost is not None
            else {},
        }

    def _samples_given_up(self) -> int | None:
        """None: not known."""
        steps = self.steps_again + self.steps_lost
        if steps and not self.samples_per_step:
            return None
        return round(steps * self.samples_per_step)


def begin_of(text: str, most: int) -> str:
    """At most so many characters; what was cut off shows."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def end_of(text: str, most: int) -> str:
    """The same of its end, which says most of a traceback or a log."""
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
        "kernel": begin_of(failure.kernel, LONGEST_DETAIL),
    }


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
