"""Accounts for the time of the job's slots: each second has one kind, each lost one a cause."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from elastic.core.book.accounting import (
    Kind,
    TimeSpent,
    read_name,
    read_number,
    read_seconds,
    read_spent,
    seconds_of,
)
from elastic.core.book.incidents import MOST_INCIDENTS, Incident, Outcome
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import (
    Generation,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)

_BOOK_EVERY_S = 5.0  # how often a worker's figures are booked while its group trains
_MOST_NODES = 1000
_MOST_STORED = 500  # slots: a document with more omits their workers and figures
_MOST_GENERATIONS = 100  # generations whose incidents are remembered
_MOST_PERIODS = 5000  # of all slots together, without those under way
_READY_OR_IN_GROUP = (WorkerPhase.READY, WorkerPhase.JOINING, WorkerPhase.TRAINING)
_NOTHING = TimeSpent()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A worker's figures of what it has spent its time on."""

    worker: WorkerId
    generation: int
    """The group that the worker is in."""
    committed: int
    spent: TimeSpent


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """A snapshot of the books, with each second of each wanted slot under one kind."""

    kinds: Mapping[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    settled: Mapping[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    """The same without steps under way, which may still be given up: these figures only grow."""
    nodes: Mapping[str, Mapping[Kind, float]] = field(default_factory=dict)
    """Lost time by the node that caused it; "" for time that no node caused."""
    incidents: Sequence[Mapping[str, Any]] = ()
    """The newest incidents, oldest first."""
    wall_s: float = 0.0
    """Wall time times wanted slots."""
    wanted: int = 0
    """How many slots are wanted now."""

    @property
    def goodput(self) -> float | None:
        """The share of the time spent on steps that count; None before any time has passed."""
        total = sum(self.kinds.values())
        return self.kinds[Kind.PRODUCTIVE] / total if total > 0.0 else None

    def to_document(self) -> dict[str, Any]:
        """The accounts as JSON values, for programs of users."""
        goodput = self.goodput
        return {
            "wanted_slots": self.wanted,
            "slot_seconds": round(self.wall_s, 3),
            "goodput": round(goodput, 6) if goodput is not None else None,
            "kinds": {kind.value: round(s, 3) for kind, s in self.kinds.items()},
            "nodes": [
                {
                    "node": node,
                    "lost_s": round(sum(lost.values()), 3),
                    "kinds": {kind.value: round(s, 3) for kind, s in lost.items()},
                }
                for node, lost in sorted(self.nodes.items())
            ],
            "incidents": list(self.incidents),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """A time in which a slot had the same worker and its time the same kind."""

    node: str
    slot: int
    worker: WorkerId
    kind: Kind | None
    """None: the worker trained."""
    began: float
    ended: float


@dataclass(slots=True)
class _Slot:
    node: str
    number: int
    since: float
    """The instant up to which the slot's time is booked or open."""
    kind: Kind | None = Kind.START_UP
    """What the slot's time goes into now; None: the worker trains and reports the kinds later."""
    worker: WorkerId = ""
    wanted: bool = True
    open_s: float = 0.0
    """Time of a training worker whose kind is not known yet."""
    ahead_s: float = 0.0
    """Time that is booked here already, and that the worker will report as `regroup_s`."""
    tracked: bool = False
    """The worker counts what it spends."""
    known: TimeSpent = _NOTHING
    """The worker's figures that are booked."""
    report: Report | None = None
    """The newest report that is not booked yet."""
    reported_in: int = 0
    """The generation of the report that was booked last."""
    booked_at: float = 0.0
    cause: Incident | None = None
    """The incident because of which the slot does not train."""
    period_at: float = field(init=False)
    """When the present period of the slot began."""

    def __post_init__(self) -> None:
        self.period_at = self.since


@dataclass(slots=True)
class _Node:
    id: NodeId
    arrived: int
    slots: int = 0
    workers: dict[int, WorkerStatus] = field(default_factory=dict)
    present: bool = True
    left: int = 0
    """Counts departures: the newest has the highest."""
    unheard: bool = False
    """The node has not reported to this leader: all of this is what the previous leader knew."""


@dataclass(frozen=True, slots=True)
class _Part:
    kind: Kind
    seconds: float
    incident: Incident | None = None
    node: str = ""


class Books:
    """The slot-seconds of a job by kind, and the lost ones also by causing node and by incident."""

    def __init__(self) -> None:
        self.kinds = dict.fromkeys(Kind, 0.0)
        self.nodes: dict[str, defaultdict[Kind, float]] = {}
        """Lost slot-seconds by the node that caused the loss. "": no node caused it."""
        self.incidents: dict[int, Incident] = {}
        """The newest incidents by number, oldest first, and as many planned changes."""
        self.wall_s = 0.0
        """Wall time times wanted slots, counted independently: the kinds must add up to it."""
        self.last = 0
        """The highest number of an incident so far."""

    def open_incident(self, at: float, reason: str, outcome: Outcome) -> Incident:
        """Open the next incident. Beyond MOST_INCIDENTS the oldest of its sort is dropped."""
        incident = Incident(number=self.last + 1, at=at, reason=reason, outcome=outcome)
        self.keep(incident)
        return incident

    def number_after(self, number: int) -> None:
        """Give the next incident a higher number than this one."""
        self.last = max(self.last, number)

    def keep(self, incident: Incident) -> None:
        """Have the incident, which an earlier leader may have opened."""
        self.number_after(incident.number)
        self.incidents[incident.number] = incident
        is_planned = incident.outcome is Outcome.PLANNED
        same = [
            i.number
            for i in self.incidents.values()
            if (i.outcome is Outcome.PLANNED) is is_planned and i is not incident
        ]
        for number in same[: 1 - MOST_INCIDENTS]:
            del self.incidents[number]

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

    def to_document(self) -> dict[str, Any]:
        """Return the sums as JSON values; the incidents have documents of their own."""
        return {
            "kinds": seconds_of(self.kinds),
            "nodes": {node: seconds_of(lost) for node, lost in self.nodes.items()},
            "wall_s": round(self.wall_s, 6),
            "last": self.last,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Books:
        """Read what `to_document` returned. Raises one of UNREADABLE."""
        books = cls()
        books.kinds.update(read_seconds(document["kinds"]))
        for node, lost in list(document["nodes"].items())[:_MOST_NODES]:
            books.nodes[read_name(node)] = defaultdict(float, read_seconds(lost))
        books.wall_s = read_number(document["wall_s"])
        books.last = int(read_number(document["last"]))
        return books


class SlotAccounts:
    """The accounts of a job. `observe` takes every event after the book has found the losses in it;
    `spent` takes the figures of the workers.

    As many slots are wanted as have been there at once, up to `most`: first those of members, then
    those of other nodes that take part, then those that the newest departures have left empty. The
    time of a member is open until its own figures tell the kinds; no more than is open is booked
    from them. So the kinds add up to wall time times wanted slots, whatever is reported.

    name_of: returns the name of a node, which outlives its agent.
    """

    def __init__(self, most: int, *, name_of: Callable[[NodeId], str] = str) -> None:
        self._most, self._name_of = most, name_of
        self.books = Books()
        self.under_way: Incident | None = None
        """The loss from which the job has not recovered yet."""
        self.committed = 0
        """The job's committed steps as last reported to this leader or an earlier one."""
        self._nodes: dict[str, _Node] = {}
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._slot_of: dict[WorkerId, _Slot] = {}
        self._leaving: set[NodeId] = set()
        self._changed_nodes = False
        self._wanted = 0
        self._moves = 0
        self._group: Generation | None = None
        self._went_on = False
        """The generation has changed under this leader."""
        self._phase = JobPhase.GATHERING
        self._classic = False
        self._causes: dict[int, Incident] = {}
        self._usual_s = 0.0
        self._again = (0, 0)  # steps above the first up to the second are computed again
        self._again_since = 0
        self._pace: dict[WorkerId, tuple[int, float, str]] = {}
        self._slowest: tuple[int, float, float, str] = (0, 0.0, 0.0, "")
        self._periods: deque[Period] = deque(maxlen=_MOST_PERIODS)
        self.ended = False

    # ---- what the book finds

    def strikes(self, workers: Iterable[WorkerId], incident: Incident) -> list[str]:
        """These workers do not train because of the incident; return the names of their nodes."""
        slots = [slot for w in workers if (slot := self._slot_of_member(w)) is not None]
        for slot in slots:
            slot.cause = incident
        return [slot.node for slot in slots]

    def leads_to(self, generation: int, incident: Incident) -> None:
        """The generation follows because of the incident."""
        self._causes[generation] = incident
        while len(self._causes) > _MOST_GENERATIONS:
            del self._causes[min(self._causes)]

    def cause_of(self, workers: Iterable[WorkerId]) -> Incident | None:
        """The one incident whose lost workers these replace; None: they are not of one."""
        slots = [self._slot_of_member(worker) for worker in workers]
        causes = {slot.cause.number: slot.cause for slot in slots if slot and slot.cause}
        return next(iter(causes.values())) if len(causes) == 1 else None

    # ---- events

    def observe(
        self, event: ev.Event, group: Generation | None, phase: JobPhase, now: float
    ) -> None:
        """The machine has handled the event. group, phase: its newest generation, and the job's."""
        if self.ended:
            return
        if isinstance(event, ev.ClassicScriptReported):
            self._classic = True
        elif isinstance(event, ev.ProgressReported) and not event.probed:
            self._progressed(event)
        touched = self._see(event)
        if group is not self._group or phase is not self._phase:
            self._went_on |= self._group is not None and group is not self._group
            self._group, self._phase = group, phase
            touched = self._nodes
        for name in touched:
            self._update(name, now)
        if touched and (self._changed_nodes or len(self._slots) > self._wanted):
            self._changed_nodes = False
            self._want(now)

    def spent(self, report: Report, now: float) -> None:
        """A worker has reported its figures; the newest report counts."""
        slot = self._slot_of.get(report.worker)
        if slot is None or self.ended:
            return
        earlier = slot.report
        if earlier is not None and earlier.generation != report.generation:
            self._book(slot, now)
        slot.report = report
        is_first = report.generation != slot.reported_in
        if is_first or now - slot.booked_at >= _BOOK_EVERY_S:
            self._book(slot, now)

    def end(self, now: float, stood_s: float = 0.0) -> None:
        """The job has ended. stood_s: the time since its last step, if it has failed: that was a
        standstill, or the step that is lost."""
        if self.ended:
            return
        for slot in self._slots.values():
            self._settle(slot, now)
            self._book(slot, now)
            lost_s = min(slot.open_s, stood_s)
            slot.open_s -= lost_s
            cause = slot.cause or self.under_way
            self.books.add(_noticing(cause) if cause else Kind.HANG, lost_s, cause)
            self._close(slot, now)
        self.ended = True

    def _progressed(self, event: ev.ProgressReported) -> None:
        if event.step_s > 0.0:
            self._usual_s = event.step_s
        if event.committed < self.committed:
            self._again, self._again_since = (event.committed, self.committed), event.generation
        self.committed = event.committed

    # ---- queries

    def periods(self, now: float) -> list[Period]:
        """The newest periods of the slots; those under way come last, and end `now`."""
        return [*self._periods, *(_period(slot, now) for slot in self._slots.values())]

    def accounts(self, now: float, ahead_s: float = 0.0) -> Accounts:
        """A snapshot of the books. ahead_s: Unix time minus the clock of `now`."""
        for slot in self._slots.values():
            self._settle(slot, now)
        settled = dict(self.books.kinds)
        under_way_s = sum(slot.open_s for slot in self._slots.values())
        return Accounts(
            kinds={**settled, Kind.PRODUCTIVE: settled[Kind.PRODUCTIVE] + under_way_s},
            settled=settled,
            nodes={node: dict(lost) for node, lost in self.books.nodes.items()},
            incidents=[i.cost_document(ahead_s) for i in self.books.incidents.values()],
            wall_s=self.books.wall_s,
            wanted=sum(slot.wanted for slot in self._slots.values()),
        )

    # ---- from leader to leader

    def to_document(self, now: float, ahead_s: float) -> dict[str, Any]:
        """The accounts as JSON values, for the next leader."""
        for slot in self._slots.values():
            self._settle(slot, now)
        many = len(self._slots) > _MOST_STORED
        return {
            "books": self.books.to_document(),
            "unix_s": round(now + ahead_s, 6),
            "wanted": self._wanted,
            "committed": self.committed,
            "usual_s": self._usual_s,
            "again": [*self._again, self._again_since],
            "slots": [_stored(slot, many=many) for slot in self._slots.values()],
        }

    def adopt(self, document: Mapping[str, Any], now: float, ahead_s: float) -> None:
        """Go on from a previous leader's document and count the time since. An invalid one changes
        nothing."""
        try:
            self._read(document, now, ahead_s)
        except Exception:  # noqa: BLE001 - a document may be invalid in any way
            return

    def _read(self, document: Mapping[str, Any], now: float, ahead_s: float) -> None:
        books = Books.read(document["books"])
        books.number_after(self.books.last)
        for incident in self.books.incidents.values():
            books.keep(incident)
        since = min(now, read_number(document["unix_s"]) - ahead_s)
        slots = [_restored(found, since, books.incidents) for found in document["slots"][:100_000]]
        wanted, committed = read_number(document["wanted"]), read_number(document["committed"])
        low, high, again_since = (int(read_number(n)) for n in document["again"])
        usual_s = read_number(document.get("usual_s", 0.0))
        self.books, self._wanted = books, min(int(wanted), self._most)
        self.committed, self._again, self._again_since = int(committed), (low, high), again_since
        self._usual_s = usual_s
        for slot in slots:
            self._slots[slot.node, slot.number] = slot
            node = self._nodes.get(slot.node)
            if node is None:
                self._moves += 1
                node = self._nodes[slot.node] = _Node(id="", arrived=self._moves, unheard=True)
            node.slots = max(node.slots, slot.number + 1)
            if slot.worker:
                self._slot_of[slot.worker] = slot
                node.workers[slot.number] = WorkerStatus(
                    worker=slot.worker,
                    slot=slot.number,
                    phase=WorkerPhase.TRAINING if slot.tracked else WorkerPhase.STARTING,
                    has_state=slot.tracked,
                )

    def _slot_of_member(self, worker: WorkerId) -> _Slot | None:
        """The slot of a worker; that of a member of the newest group even if the worker is gone."""
        for member in self._group.members if self._group is not None else ():
            if member.worker == worker:
                return self._slots.get((self._name_of(member.node), member.slot))
        return self._slot_of.get(worker)

    # ---- the slots

    def _see(self, event: ev.Event) -> Iterable[str]:
        """Take over what nodes report; return the names of the nodes that have changed."""
        if isinstance(event, ev.NodeReported):
            return [self._reported(event)]
        if isinstance(event, ev.NodesReported):
            return [self._reported(report) for report in event.reports]
        if isinstance(event, ev.WorkerFailed):
            name = self._name_of(event.node)
            slot = self._slot_of.get(event.failure.worker)
            if slot is not None and slot.node == name:
                self._nodes[name].workers.pop(slot.number, None)
                return [name]
        if isinstance(event, ev.NodeLost | ev.NodeGone | ev.NodeLeaving | ev.NodeWelcomed):
            return self._moved(event)
        return ()

    def _reported(self, event: ev.NodeReported) -> str:
        name = self._name_of(event.node)
        node = self._nodes.get(name)
        if node is None or node.id != event.node:
            self._moves += 1
            node = self._nodes[name] = _Node(id=event.node, arrived=self._moves)
        if not node.present or node.slots != event.slots:
            node.present, node.slots, self._changed_nodes = True, event.slots, True
        node.workers = {s.slot: s for s in event.workers if s.slot is not None}
        return name

    def _moved(
        self, event: ev.NodeLost | ev.NodeGone | ev.NodeLeaving | ev.NodeWelcomed
    ) -> Iterable[str]:
        is_lost = isinstance(event, ev.NodeLost | ev.NodeGone)
        if isinstance(event, ev.NodeLeaving):
            self._leaving.add(event.node)
        else:
            self._leaving.discard(event.node)
        name = self._name_of(event.node)
        node = self._nodes.get(name)
        if node is None or not (node.id == event.node or node.unheard):
            return ()
        self._moves += 1
        node.present, node.left = not is_lost, self._moves
        node.unheard, self._changed_nodes = False, True
        return [name]

    def _update(self, name: str, now: float) -> None:
        node = self._nodes[name]
        if node.unheard and not self._went_on:
            return
        for number in range(node.slots):
            slot = self._slots.get((name, number))
            if slot is None:
                slot = self._slots[name, number] = _Slot(name, number, now, wanted=False)
            status = node.workers.get(number)
            worker = status.worker if status is not None else ""
            kind = self._kind_of(node, status)
            if kind is slot.kind and worker == slot.worker:
                continue
            self._settle(slot, now)
            self._note_period(slot, now)
            if worker != slot.worker or kind is Kind.SLOT_EMPTY:
                self._close(slot, now)
            if worker != slot.worker:
                self._occupy(slot, worker)
            slot.kind = kind
            if kind is None and not slot.tracked:
                slot.tracked, slot.cause = True, None

    def _note_period(self, slot: _Slot, now: float) -> None:
        if now > slot.period_at:
            self._periods.append(_period(slot, now))
        slot.period_at = now

    def _occupy(self, slot: _Slot, worker: WorkerId) -> None:
        if self._slot_of.get(slot.worker) is slot:
            del self._slot_of[slot.worker]
        self._pace.pop(slot.worker, None)
        slot.worker, slot.tracked, slot.known, slot.reported_in = worker, False, _NOTHING, 0
        slot.report, slot.ahead_s = None, 0.0
        if worker:
            self._slot_of[worker] = slot

    def _kind_of(self, node: _Node, status: WorkerStatus | None) -> Kind | None:
        is_member = (
            status is not None
            and self._group is not None
            and status.worker in self._group.worker_ids
        )
        leaves = node.id in self._leaving
        out = not node.present or node.unheard or (leaves and status is None)
        if out and not (is_member and status is not None and status.has_state):
            return Kind.SLOT_EMPTY
        waits = self._phase is JobPhase.WAITING
        if status is None or status.phase not in _READY_OR_IN_GROUP:
            return Kind.START_UP
        trains = status.has_state and (is_member or status.phase is WorkerPhase.TRAINING)
        if trains and not waits:
            return Kind.PRODUCTIVE if self._classic else None
        if leaves:
            return Kind.SLOT_EMPTY
        return Kind.BELOW_MINIMUM if waits else Kind.START_UP

    def _want(self, now: float) -> None:
        """Choose the slots that are wanted from now on."""
        nodes = self._nodes.values()
        there = sum(n.slots for n in nodes if n.present and n.id not in self._leaving)
        self._wanted = max(self._wanted, min(self._most, there))
        candidates = list(self._candidates())
        if len(candidates) > self._wanted:
            candidates = sorted(candidates, key=self._order)[: self._wanted]
        chosen = {(slot.node, slot.number) for slot in candidates}
        for key, slot in list(self._slots.items()):
            is_wanted = key in chosen
            if slot.wanted is not is_wanted:
                self._settle(slot, now)
                slot.wanted, slot.since = is_wanted, now
            if not is_wanted and not self._nodes[slot.node].present:
                self._close(slot, now)
                self._note_period(slot, now)
                self._occupy(slot, "")
                del self._slots[key]
        for name, node in list(self._nodes.items()):
            if not node.present and not any((name, n) in self._slots for n in range(node.slots)):
                del self._nodes[name]

    def _candidates(self) -> Iterator[_Slot]:
        for slot in self._slots.values():
            if slot.number < self._nodes[slot.node].slots:
                yield slot

    def _order(self, slot: _Slot) -> tuple[int, int, int]:
        node = self._nodes[slot.node]
        if slot.kind is None or (slot.tracked and slot.kind is not Kind.SLOT_EMPTY):
            return (0, node.arrived, slot.number)
        if node.present and node.id not in self._leaving:
            return (1, node.arrived, slot.number)
        return (2, -node.left, slot.number)

    # ---- booking

    def _settle(self, slot: _Slot, now: float) -> None:
        """Book the slot's time up to now, or count it as open."""
        elapsed_s, slot.since = max(0.0, now - slot.since), max(now, slot.since)
        if not slot.wanted or self.ended:
            return
        self.books.wall_s += elapsed_s
        if slot.kind is None:
            slot.open_s += elapsed_s
            return
        cause = slot.cause
        if cause is None and slot.kind is Kind.BELOW_MINIMUM:
            cause = self.under_way
        self.books.add(slot.kind, elapsed_s, cause, self._blamed(slot))
        if slot.tracked:
            slot.ahead_s += elapsed_s

    def _blamed(self, slot: _Slot) -> str:
        """The node that caused time without training: the slot's own node if that is absent."""
        return slot.node if slot.kind is Kind.SLOT_EMPTY else ""

    def _close(self, slot: _Slot, now: float) -> None:
        """Book the open time of a worker that will not report any more.

        Assume, from the end backwards: the time of the detection, or of the hang; a step that was
        given up; and steps that count.
        """
        self._book(slot, now)
        left_s, slot.open_s = slot.open_s, 0.0
        cause = slot.cause
        if cause is not None:
            noticing_s = min(left_s, cause.detection_s)
            self.books.add(_noticing(cause), noticing_s, cause)
            again_s = min(left_s - noticing_s, self._usual_s or left_s)
            self.books.add(Kind.RECOMPUTED, again_s, cause)
            left_s -= noticing_s + again_s
        self.books.add(Kind.PRODUCTIVE, left_s)

    def _book(self, slot: _Slot, now: float) -> None:
        """Book the worker's newest report, up to the time that is open."""
        report, slot.report = slot.report, None
        if report is None:
            return
        self._settle(slot, now)
        spent = report.spent.since(slot.known)
        slot.known, slot.reported_in, slot.booked_at = report.spent, report.generation, now
        parts = [part for part in self._parts(slot, spent, report, now) if part.seconds > 0.0]
        total_s = sum(part.seconds for part in parts)
        share = min(1.0, slot.open_s / total_s) if total_s > 0.0 else 0.0
        for part in parts:
            self.books.add(part.kind, share * part.seconds, part.incident, part.node)
        slot.open_s = max(0.0, slot.open_s - share * total_s)

    def _parts(self, slot: _Slot, spent: TimeSpent, report: Report, now: float) -> Iterator[_Part]:
        yield from self._lost(slot, spent, report.generation)
        left_s = spent.steps_s
        for kind, seconds, node in (
            (Kind.SESSION_RUN, spent.calls_s, ""),
            (Kind.CHECKPOINT, spent.saves_s, ""),
            (Kind.DATA_WAIT, spent.data_s, slot.node),
            (Kind.SLOWER_RANK, *self._waited(slot, spent, report, now)),
        ):
            part_s = min(left_s, seconds)
            left_s -= part_s
            yield _Part(kind, part_s, None, node)
        again_s = left_s * self._share_again(spent.steps, report)
        yield _Part(Kind.RECOMPUTED, again_s, self._causes.get(self._again_since))
        yield _Part(Kind.PRODUCTIVE, left_s - again_s)

    def _lost(self, slot: _Slot, spent: TimeSpent, generation: int) -> Iterator[_Part]:
        """The parts of the time from the loss of one group to the first step of the next."""
        cause = self._causes.get(generation)
        rest_s = max(0.0, spent.regroup_s - spent.join_s - spent.sync_s)
        if spent.regroup_s > 0.0:
            booked_s, slot.ahead_s = min(rest_s, slot.ahead_s), 0.0
            rest_s -= booked_s
        is_first = cause is not None and cause.followed_by == generation
        detection_s = cause.detection_s if cause is not None and is_first else 0.0
        before_s = min(rest_s, detection_s)
        within_s = min(spent.given_up_s, detection_s - before_s)
        if cause is not None:
            yield _Part(_noticing(cause), before_s + within_s, cause)
        yield _Part(Kind.RECOMPUTED, spent.given_up_s - within_s, cause)
        starts = cause is None
        for kind, seconds in (
            (Kind.DECISION, rest_s - before_s),
            (Kind.JOIN, spent.join_s),
            (Kind.STATE_TRANSFER, spent.sync_s),
            (Kind.FIRST_STEP, spent.first_steps_s),
        ):
            yield _Part(Kind.START_UP if starts else kind, seconds, cause)

    def _waited(
        self, slot: _Slot, spent: TimeSpent, report: Report, now: float
    ) -> tuple[float, str]:
        """The time spent waiting for the rank that is slowest by itself, and that rank's node."""
        if spent.steps <= 0 or spent.own_s <= 0.0:
            return 0.0, ""
        own_s = spent.own_s / spent.steps
        self._pace[report.worker] = (report.generation, own_s, slot.node)
        generation, at, slowest_s, node = self._slowest
        if generation != report.generation or now - at >= _BOOK_EVERY_S or own_s > slowest_s:
            present = [p for p in self._pace.values() if p[0] == report.generation]
            _, slowest_s, node = max(present, key=lambda p: p[1])
            self._slowest = (report.generation, now, slowest_s, node)
        return max(0.0, slowest_s - own_s) * spent.steps, node

    def _share_again(self, steps: int, report: Report) -> float:
        """The share of a worker's last `steps` committed steps that were computed again."""
        low, high = self._again
        if steps <= 0 or report.generation < self._again_since:
            return 0.0
        again = min(high, report.committed) - max(low, report.committed - steps)
        return max(0, again) / steps


def _period(slot: _Slot, now: float) -> Period:
    return Period(
        node=slot.node,
        slot=slot.number,
        worker=slot.worker,
        kind=slot.kind,
        began=slot.period_at,
        ended=now,
    )


def _noticing(cause: Incident) -> Kind:
    return Kind.HANG if cause.is_hang else Kind.DETECTION


def _stored(slot: _Slot, *, many: bool) -> list[Any]:
    kind = slot.kind.value if slot.kind is not None else ""
    if many:
        return [slot.node, slot.number, slot.wanted, kind]
    return [
        *(slot.node, slot.number, slot.wanted, kind),
        slot.worker,
        slot.tracked,
        round(slot.open_s, 6),
        round(slot.ahead_s, 6),
        slot.cause.number if slot.cause is not None else 0,
        slot.reported_in,
        [round(n, 6) for n in astuple(slot.known)],
    ]


def _restored(found: Sequence[Any], since: float, causes: Mapping[int, Incident]) -> _Slot:
    number = int(read_number(found[1]))
    slot = _Slot(read_name(found[0]), number, since, wanted=found[2] is True)
    slot.kind = Kind(found[3]) if found[3] else None
    if len(found) == 4:
        return slot
    slot.worker, slot.tracked = read_name(found[4]), found[5] is True
    slot.open_s, slot.ahead_s = read_number(found[6]), read_number(found[7])
    slot.cause, slot.reported_in = causes.get(int(found[8])), int(read_number(found[9]))
    slot.known = read_spent(found[10])
    return slot
