"""Books of slot-seconds: each second of a slot has one kind, and each lost second has a cause."""

from __future__ import annotations

import enum
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

from elastic.core.membership import WorkerId

MOST_INCIDENTS = 50
"""The maximum number of incidents kept one by one. The sums by kind and by node cover all."""
_MOST_NODES = 1000
_MOST_NAMES = 100  # most node names, and most worker names, kept for one incident
_LONGEST = 300  # most characters of a name that is read
_MOST = 2.0**53  # above it floats cannot count by one


class Kind(enum.Enum):
    """What a slot spent its time on."""

    PRODUCTIVE = "productive"
    """Committed steps, without the parts of them that the other kinds count."""
    RECOMPUTED = "recomputed"
    """Steps that were given up, and steps computed again after a checkpoint was loaded."""
    DATA_WAIT = "data_wait"
    """A step waited for its data loader."""
    SLOWER_RANK = "slower_rank"
    """A step waited for a rank that got its samples later, or began the step later."""
    DETECTION = "detection"
    """The time from the first sign of a loss to the decision."""
    DECISION = "decision"
    """The time from the decision until members begin to join: the decision is written and
    announced, and they reach the boundary."""
    JOIN = "join"
    STATE_TRANSFER = "state_transfer"
    FIRST_STEP = "first_step"
    """The time that the first step of a group takes beyond that of a usual step."""
    CHECKPOINT = "checkpoint_stall"
    SESSION_RUN = "session_run"
    """Calls of all members: the script's, and the comparison of replicas."""
    START_UP = "start_up"
    """Workers start and do not train yet, or their scripts have ended before the job has."""
    BELOW_MINIMUM = "below_minimum"
    SLOT_EMPTY = "slot_empty"
    """The node is lost, has left, is drained or is in quarantine."""
    HANG = "hang"
    """The group stood still until the hang was noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """What one worker has spent its time on, from its first group to its last commit or change of
    group. Every field only grows."""

    steps: int = 0
    """The number of committed steps."""
    steps_s: float = 0.0
    """The time from commit to commit. A group's first step adds no more than a usual step takes."""
    data_s: float = 0.0
    """The part of `steps_s` that waited for the data loader."""
    calls_s: float = 0.0
    """The part of `steps_s` inside `session.run`."""
    saves_s: float = 0.0
    """The part of `steps_s` in which saves held up training."""
    own_s: float = 0.0
    """The part of `steps_s` from each commit until the samples of the next step arrived."""
    first_steps_s: float = 0.0
    """The time that the first steps of groups took beyond that of a usual step."""
    given_up_s: float = 0.0
    """The time in steps and calls that were lost with their group."""
    regroup_s: float = 0.0
    """The time from leaving a group until the next group could train."""
    join_s: float = 0.0
    """The part of `regroup_s` that built the group."""
    sync_s: float = 0.0
    """The part of `regroup_s` that brought the group to one state."""

    @property
    def total_s(self) -> float:
        return self.steps_s + self.first_steps_s + self.given_up_s + self.regroup_s

    def since(self, earlier: TimeSpent) -> TimeSpent:
        """The time spent since `earlier`, or all of it if `earlier` is from another process."""
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
    """When its first sign was seen, on the clock of the books."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    """Nodes that were lost, joined or left."""
    workers: tuple[WorkerId, ...] = ()
    generation: int = 0
    """The generation that followed. 0: none has followed yet."""
    detection_s: float = 0.0
    """The time from the first sign to the decision."""
    is_hang: bool = False
    seconds: defaultdict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """The lost slot-seconds, by kind."""

    @property
    def lost_s(self) -> float:
        return sum(self.seconds.values())

    def concerns(self, nodes: Iterable[str], workers: Iterable[WorkerId]) -> None:
        """Add nodes and workers that turned out to be part of this incident."""
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))[:_MOST_NAMES]
        self.workers = tuple(dict.fromkeys((*self.workers, *workers)))[:_MOST_NAMES]

    def to_document(self, ahead_s: float) -> dict[str, Any]:
        """Return JSON values. ahead_s: Unix time minus the time on the clock of the books."""
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
    """The slot-seconds of a job by kind, and the lost ones also by causing node and by incident."""

    def __init__(self) -> None:
        self.kinds = dict.fromkeys(Kind, 0.0)
        self.nodes: dict[str, defaultdict[Kind, float]] = {}
        """Lost slot-seconds by the node that caused the loss. "": no node caused it."""
        self.incidents: deque[Incident] = deque(maxlen=MOST_INCIDENTS)
        self.wall_s = 0.0
        """Wall time times wanted slots, counted independently: the kinds must add up to it."""
        self._last = 0

    def open_incident(self, at: float, reason: str = "") -> Incident:
        """Open the next incident. Beyond MOST_INCIDENTS the oldest is dropped."""
        self._last += 1
        incident = Incident(number=self._last, at=at, reason=reason)
        self.incidents.append(incident)
        return incident

    def resume_incident(self, number: int, at: float) -> Incident:
        """Return the incident with this number. The stored books may be older than the incident:
        then it is opened here."""
        for known in self.incidents:
            if known.number == number:
                return known
        incident = Incident(number=number, at=at)
        self.incidents.append(incident)
        self.number_after(number)
        return incident

    def number_after(self, number: int) -> None:
        """Let the next incident have a higher number than this one."""
        self._last = max(self._last, number)

    def add(
        self, kind: Kind, seconds: float, incident: Incident | None = None, node: str = ""
    ) -> None:
        """Book slot-seconds. Lost ones have a cause: an incident, or only a node."""
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
        """Return JSON values. ahead_s: Unix time minus the time on the clock of the books."""
        return {
            "kinds": _seconds(self.kinds),
            "nodes": {node: _seconds(lost) for node, lost in self.nodes.items()},
            "incidents": [i.to_document(ahead_s) for i in self.incidents],
            "wall_s": round(self.wall_s, 6),
            "last": self._last,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any], ahead_s: float) -> Books:
        """Read what `to_document` returned. Raises ValueError, TypeError, LookupError or
        AttributeError if the document is malformed."""
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
    """Check a number of seconds or a count: finite, at least 0. Raises ValueError or TypeError."""
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if isinstance(value, bool) or not (math.isfinite(number) and 0.0 <= number <= _MOST):
        raise ValueError(f"{value!r} is not a valid number")
    return number


def read_name(value: Any) -> str:
    """Check the name of a node or worker, or the text of a reason. Raises ValueError."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{value!r} is not a valid name")
    value.encode()
    return value


def read_spent(values: Iterable[Any]) -> TimeSpent:
    """Read a TimeSpent that `astuple` turned into a tuple. Raises ValueError or TypeError."""
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
