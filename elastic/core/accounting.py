"""Books of slot-seconds: each second of each slot stands under one kind, and what was lost under
its cause.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

from elastic.core.membership import WorkerId

MOST_INCIDENTS = 50
"""The most incidents that are remembered one by one; kinds and nodes have the sums of all."""
_MOST_NODES = 1000
_MOST_NAMES = 100  # of nodes or workers of one incident that are remembered
_LONGEST = 300  # characters of a name that is read
_MOST_S = 2.0**53


class Kind(enum.Enum):
    """What a slot's time went into."""

    PRODUCTIVE = "productive"
    """Steps that count, without what follows."""
    RECOMPUTED = "recomputed"
    """Steps that were given up, and those computed again after a checkpoint was loaded."""
    DATA_WAIT = "data_wait"
    """A step waited for its data loader."""
    SLOWER_RANK = "slower_rank"
    """A step waited for a rank whose samples came later, or whose script began the step later."""
    DETECTION = "detection"
    """The time from the first sign of a loss to the decision."""
    DECISION = "decision"
    """The time from the decision to the begin of joining: written, announced, boundary reached."""
    JOIN = "join"
    STATE_TRANSFER = "state_transfer"
    FIRST_STEP = "first_step"
    """What the first step of a group takes beyond a usual one."""
    CHECKPOINT = "checkpoint_stall"
    SESSION_RUN = "session_run"
    START_UP = "start_up"
    """Workers start until they train; or their scripts have ended and the job has not."""
    BELOW_MINIMUM = "below_minimum"
    SLOT_EMPTY = "slot_empty"
    """The node is lost, or left, drained or in quarantine."""
    HANG = "hang"
    """The group stood still until the hang was noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """What one worker has spent its time on since it first was in a group, up to its last commit
    or change of group. Every field only grows."""

    steps: int = 0
    """Committed."""
    steps_s: float = 0.0
    """The time from commit to commit; for a group's first step no more than a usual one."""
    data_s: float = 0.0
    """The part of `steps_s` that waited for the data loader."""
    calls_s: float = 0.0
    """The part of `steps_s` inside `session.run`."""
    saves_s: float = 0.0
    """The part of `steps_s` that saves held up."""
    own_s: float = 0.0
    """The part of `steps_s` from a commit until the samples of the next step were there."""
    first_steps_s: float = 0.0
    """The first steps of groups, beyond a usual one."""
    given_up_s: float = 0.0
    """The time in steps and calls that were lost with their group."""
    regroup_s: float = 0.0
    """The time from leaving a group until the next one could train."""
    join_s: float = 0.0
    """The part of `regroup_s` that built the group."""
    sync_s: float = 0.0
    """The part of `regroup_s` that brought the group to one state."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.steps_s + self.first_steps_s + self.given_up_s + self.regroup_s

    def since(self, earlier: TimeSpent) -> TimeSpent:
        """What was spent since `earlier`; all of it if that was another process's."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        more = [mine - theirs for mine, theirs in pairs]
        return _spent(more) if min(more) >= 0 else self


_SPENT = tuple(f.name for f in fields(TimeSpent))


def _spent(values: Sequence[Any]) -> TimeSpent:
    return TimeSpent(**dict(zip(_SPENT, values, strict=True)))


@dataclass(slots=True)
class Incident:
    """One cause of lost time: a loss, a hang, or a planned change of the group."""

    number: int
    at: float
    """Its first sign, on the clock of the books."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    """Nodes that were lost, joined or left."""
    workers: tuple[WorkerId, ...] = ()
    generation: int = 0
    """The generation that followed; 0: none has yet."""
    detection_s: float = 0.0
    """The time from the first sign to the decision."""
    is_hang: bool = False
    seconds: defaultdict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """Slot-seconds that it has cost."""

    @property
    def lost_s(self) -> float:
        """The sum."""
        return sum(self.seconds.values())

    def concerns(self, nodes: Iterable[str], workers: Iterable[WorkerId]) -> None:
        """More of them have turned out to be lost."""
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))[:_MOST_NAMES]
        self.workers = tuple(dict.fromkeys((*self.workers, *workers)))[:_MOST_NAMES]

    def to_document(self, ahead_s: float) -> dict[str, Any]:
        """The incident as JSON values."""
        return {
            "number": self.number,
            "unix_s": round(self.at + ahead_s, 3),
            "reason": self.reason,
            "nodes": list(self.nodes),
            "workers": list(self.workers),
            "generation": self.generation,
            "detection_s": round(self.detection_s, 6),
            "is_hang": self.is_hang,
            "lost_s": round(self.lost_s, 6),
            "seconds": _seconds(self.seconds),
        }


class Books:
    """What the slots of a job have spent, by kind, by the node that was the cause, by incident."""

    def __init__(self) -> None:
        self.kinds = dict.fromkeys(Kind, 0.0)
        self.nodes: dict[str, defaultdict[Kind, float]] = {}
        """Lost time by the node that was its cause; "": no node was."""
        self.incidents: deque[Incident] = deque(maxlen=MOST_INCIDENTS)
        self.wall_s = 0.0
        """Wall time times wanted slots: kept apart from the kinds, which must add up to it."""
        self._last = 0

    def open_incident(self, at: float, reason: str = "") -> Incident:
        """Another one; the oldest is forgotten."""
        self._last += 1
        incident = Incident(number=self._last, at=at, reason=reason)
        self.incidents.append(incident)
        return incident

    def resume_incident(self, number: int, at: float) -> Incident:
        """The one of this number, which may have been opened since the books were kept."""
        for known in self.incidents:
            if known.number == number:
                return known
        incident = Incident(number=number, at=at)
        self.incidents.append(incident)
        self.number_after(number)
        return incident

    def number_after(self, number: int) -> None:
        """The next incident has a higher number than this."""
        self._last = max(self._last, number)

    def add(
        self, kind: Kind, seconds: float, incident: Incident | None = None, node: str = ""
    ) -> None:
        """Book slot-seconds; what is lost with its cause: an incident, or a node alone."""
        if seconds <= 0.0:
            return
        self.kinds[kind] += seconds
        if kind is Kind.PRODUCTIVE:
            return
        nodes = incident.nodes if incident is not None and incident.nodes else (node,)
        if incident is not None:
            incident.seconds[kind] += seconds
        for name in nodes:
            self._of(name)[kind] += seconds / len(nodes)

    def _of(self, node: str) -> defaultdict[Kind, float]:
        known = self.nodes.get(node)
        if known is None:
            if len(self.nodes) >= _MOST_NODES and node:
                return self._of("")
            known = self.nodes[node] = defaultdict(float)
        return known

    # ---- from leader to leader

    def to_document(self, ahead_s: float) -> dict[str, Any]:
        """The books as JSON values. ahead_s: by how much Unix time is ahead of their clock."""
        return {
            "kinds": _seconds(self.kinds),
            "nodes": {node: _seconds(lost) for node, lost in self.nodes.items()},
            "incidents": [i.to_document(ahead_s) for i in self.incidents],
            "wall_s": round(self.wall_s, 6),
            "last": self._last,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any], ahead_s: float) -> Books:
        """The way back. Raises ValueError, TypeError, LookupError or AttributeError."""
        books = cls()
        books.kinds.update(_read_seconds(document["kinds"]))
        for node, lost in list(document["nodes"].items())[:_MOST_NODES]:
            books.nodes[read_name(node)] = defaultdict(float, _read_seconds(lost))
        books.incidents.extend(
            _read_incident(found, ahead_s) for found in document["incidents"][-MOST_INCIDENTS:]
        )
        books.wall_s = read_number(document["wall_s"])
        books._last = int(read_number(document["last"]))
        return books


def read_number(value: Any) -> float:
    """Seconds or a count. Raises ValueError or TypeError."""
    number = float(value)
    if isinstance(value, bool) or not (math.isfinite(number) and 0.0 <= number <= _MOST_S):
        raise ValueError(f"{value!r} counts nothing")
    return number


def read_name(value: Any) -> str:
    """The name of a node, a worker or a reason. Raises ValueError."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{value!r} is no name")
    value.encode()
    return value


def read_spent(values: Iterable[Any]) -> TimeSpent:
    """What `astuple` has made of it. Raises ValueError or TypeError."""
    numbers = [read_number(value) for value in values]
    return _spent((int(numbers[0]), *numbers[1:]))


def _seconds(kinds: Mapping[Kind, float]) -> dict[str, float]:
    return {kind.value: round(seconds, 6) for kind, seconds in kinds.items() if seconds > 0.0}


def _read_seconds(document: Mapping[str, Any]) -> dict[Kind, float]:
    known = {kind.value for kind in Kind}
    return {Kind(name): read_number(s) for name, s in document.items() if name in known}


def _read_incident(document: Mapping[str, Any], ahead_s: float) -> Incident:
    incident = Incident(
        number=int(read_number(document["number"])),
        at=read_number(document["unix_s"]) - ahead_s,
        reason=read_name(document["reason"]),
        generation=int(read_number(document["generation"])),
        detection_s=read_number(document["detection_s"]),
        is_hang=document["is_hang"] is True,
    )
    incident.concerns(map(read_name, document["nodes"]), map(read_name, document["workers"]))
    incident.seconds.update(_read_seconds(document["seconds"]))
    return incident
