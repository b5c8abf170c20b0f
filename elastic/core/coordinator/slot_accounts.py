"""Follows the coordinator's events and accounts for the time of every wanted slot of the job."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from elastic.core.accounting import (
    Books,
    Incident,
    Kind,
    TimeSpent,
    read_name,
    read_number,
    read_spent,
)
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import (
    ChangeReason,
    Generation,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)

_BOOK_EVERY_S = 5.0  # how often a worker's figures are booked while its group trains
_MOST_STORED = 500  # slots: a document with more omits their workers and figures
_MOST_GENERATIONS = 100  # generations whose incidents are remembered
_MOST_PERIODS = 5000  # of all slots together, without those under way
_READY_OR_IN_GROUP = (WorkerPhase.READY, WorkerPhase.JOINING, WorkerPhase.TRAINING)
_NOTHING = TimeSpent()


class Decisions(Protocol):
    """What the accounts need of the coordinator's machine."""

    phase: JobPhase

    @property
    def current(self) -> Generation | None: ...

    def last_commit_at(self, now: float) -> float: ...


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


class SlotAccounts:
    """The accounts of a job. `observe` takes every event after the machine has handled it; `spent`
    takes the figures of the workers.

    As many slots are wanted as have been there at once, up to `most`: first those of members, then
    those of other nodes that take part, then those that the newest departures have left empty. The
    time of a member is open until its own figures tell the kinds; no more than is open is booked
    from them. So the kinds add up to wall time times wanted slots, whatever is reported.

    name_of: returns the name of a node, which outlives its agent.
    """

    def __init__(self, most: int, *, name_of: Callable[[NodeId], str] = str) -> None:
        self._most, self._name_of = most, name_of
        self._books = Books()
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
        self._signs: dict[NodeId, float] = {}
        """When the first sign of a loss came, by the node out of contact; "" for other signs."""
        self._under_way: Incident | None = None
        self._causes: dict[int, Incident] = {}
        self._committed = 0
        self._usual_s = 0.0
        self._again = (0, 0)  # steps above the first up to the second are computed again
        self._again_since = 0
        self._pace: dict[WorkerId, tuple[int, float, str]] = {}
        self._slowest: tuple[int, float, float, str] = (0, 0.0, 0.0, "")
        self._periods: deque[Period] = deque(maxlen=_MOST_PERIODS)
        self.ended = False

    # ---- events

    def observe(
        self, event: ev.Event, effects: Iterable[fx.Effect], machine: Decisions, now: float
    ) -> None:
        """The machine has handled the event and returned the effects."""
        if self.ended:
            return
        self._hear(event, now)
        for effect in effects:
            self._decided(effect, machine, now)
        touched = self._see(event)
        group, phase = machine.current, machine.phase
        if group is not self._group or phase is not self._phase:
            before = self._group
            self._went_on |= before is not None and group is not before
            self._group, self._phase = group, phase
            touched = self._nodes
        for name in touched:
            self._update(name, now)
        if touched and (self._changed_nodes or len(self._slots) > self._wanted):
            self._changed_nodes = False
            self._want(now)
        if any(isinstance(effect, fx.EndJob) for effect in effects):
            failed = machine.phase is JobPhase.FAILED
            self.end(now, now - machine.last_commit_at(now) if failed else 0.0)

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
            cause = slot.cause or self._under_way
            self._books.add(_noticing(cause) if cause else Kind.HANG, lost_s, cause)
            self._close(slot, now)
        self.ended = True

    def open_incident(
        self, at: float, reason: str, nodes: Iterable[str], workers: Iterable[WorkerId]
    ) -> Incident:
        """Open an incident that has not changed the group."""
        incident = self._books.open_incident(at, reason)
        incident.concerns(nodes, workers)
        return incident

    def resume_incident(
        self,
        number: int,
        at: float,
        nodes: Iterable[str],
        workers: Iterable[WorkerId],
        *,
        followed_by: int,
        under_way: bool,
    ) -> Incident:
        """Go on with an incident of which the previous leader did not record the end. followed_by:
        the next generation; 0: none was decided. under_way: the incident is not over."""
        incident = self._books.resume_incident(number, at)
        incident.concerns(nodes, workers)
        if followed_by:
            incident.generation = followed_by
            self._causes[followed_by] = incident
        if under_way:
            self._under_way = incident
        return incident

    # ---- queries

    @property
    def under_way(self) -> Incident | None:
        """The incident that is not over: the group that follows does not train yet."""
        return self._under_way

    def periods(self, now: float) -> list[Period]:
        """The newest periods of the slots; those under way come last, and end `now`."""
        return [*self._periods, *(_period(slot, now) for slot in self._slots.values())]

    def accounts(self, now: float, ahead_s: float = 0.0) -> Accounts:
        """A snapshot of the books. ahead_s: Unix time minus the clock of `now`."""
        for slot in self._slots.values():
            self._settle(slot, now)
        settled = dict(self._books.kinds)
        under_way_s = sum(slot.open_s for slot in self._slots.values())
        return Accounts(
            kinds={**settled, Kind.PRODUCTIVE: settled[Kind.PRODUCTIVE] + under_way_s},
            settled=settled,
            nodes={node: dict(lost) for node, lost in self._books.nodes.items()},
            incidents=[i.to_document(ahead_s) for i in self._books.incidents],
            wall_s=self._books.wall_s,
            wanted=sum(slot.wanted for slot in self._slots.values()),
        )

    def costs(self) -> Mapping[int, Incident]:
        """The newest incidents by number, with their costs up to the last event. Includes those of
        previous leaders, whose costs may still grow."""
        return {incident.number: incident for incident in self._books.incidents}

    # ---- from leader to leader

    def to_document(self, now: float, ahead_s: float) -> dict[str, Any]:
        """The accounts as JSON values, for the next leader."""
        for slot in self._slots.values():
            self._settle(slot, now)
        many = len(self._slots) > _MOST_STORED
        return {
            "books": self._books.to_document(ahead_s),
            "unix_s": round(now + ahead_s, 6),
            "wanted": self._wanted,
            "committed": self._committed,
            "usual_s": self._usual_s,
            "again": [*self._again, self._again_since],
            "slots": [_stored(slot, many=many) for slot in self._slots.values()],
        }

    @property
    def committed(self) -> int:
        """The job's committed steps as last reported to this leader or an earlier one."""
        return self._committed

    def number_after(self, number: int) -> None:
        """Give the next incident a higher number: incidents up to `number` are known elsewhere."""
        self._books.number_after(number)

    def adopt(self, document: Mapping[str, Any], now: float, ahead_s: float) -> None:
        """Go on from a previous leader's document and count the time since. An invalid one changes
        nothing."""
        try:
            self._read(document, now, ahead_s)
        except Exception:  # noqa: BLE001 - a document may be invalid in any way
            return

    def _read(self, document: Mapping[str, Any], now: float, ahead_s: float) -> None:
        books = Books.read(document["books"], ahead_s)
        since = min(now, read_number(document["unix_s"]) - ahead_s)
        causes = {i.number: i for i in books.incidents}
        slots = [_restored(found, since, causes) for found in document["slots"][:100_000]]
        wanted, committed = read_number(document["wanted"]), read_number(document["committed"])
        low, high, again_since = (int(read_number(n)) for n in document["again"])
        usual_s = read_number(document.get("usual_s", 0.0))
        self._books, self._wanted = books, min(int(wanted), self._most)
        self._committed, self._again, self._again_since = int(committed), (low, high), again_since
        self._usual_s = usual_s
        self._causes = {i.generation: i for i in books.incidents if i.generation}
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

    # ---- events and effects

    def _hear(self, event: ev.Event, now: float) -> None:
        """Note the signs of a loss, before its time is booked."""
        if isinstance(event, ev.WorkerFailed):
            worker = event.failure.worker
            slot, group = self._slot_of.get(worker), self._group
            if slot is not None and group is not None and worker in group.worker_ids:
                at = now - event.age_s
                self._signs[""] = min(at, self._signs.get("", at))
                self._struck(now, event.failure.kind.name.lower(), [slot.node], [worker])
        elif isinstance(event, ev.NodeLost) and self._group is not None:
            if any(m.node == event.node for m in self._group.members):
                self._signs.setdefault(event.node, now)
        elif isinstance(event, ev.NodeReported):
            self._is_back(event)
        elif isinstance(event, ev.NodesReported):
            for report in event.reports:
                self._is_back(report)
        elif isinstance(event, ev.ClassicScriptReported):
            self._classic = True
        elif isinstance(event, ev.ProgressReported) and not event.probed:
            self._progressed(event)

    def _is_back(self, report: ev.NodeReported) -> None:
        """Drop the sign of a node that is back with all of its members: it was no loss."""
        group, workers = self._group, (s.worker for s in report.workers)
        if report.node not in self._signs or group is None:
            return
        if group.workers_on(report.node).issubset(workers):
            del self._signs[report.node]

    def _progressed(self, event: ev.ProgressReported) -> None:
        if event.step_s > 0.0:
            self._usual_s = event.step_s
        if event.committed < self._committed:
            self._again, self._again_since = (event.committed, self._committed), event.generation
        self._committed = event.committed

    def _struck(
        self, now: float, reason: str, nodes: Iterable[str], workers: Iterable[WorkerId]
    ) -> Incident:
        """The incident of a loss. Further losses before the next group trains belong to it."""
        workers = tuple(workers)
        incident = self._under_way
        if incident is None:
            at = min(self._signs.values(), default=now)
            incident = self._under_way = self._books.open_incident(at, reason)
        incident.concerns(nodes, workers)
        for worker in workers:
            if (slot := self._slot_of_member(worker)) is not None:
                slot.cause = incident
        return incident

    def _slot_of_member(self, worker: WorkerId) -> _Slot | None:
        """The slot of a worker; that of a member of the newest group even if the worker is gone."""
        for member in self._group.members if self._group is not None else ():
            if member.worker == worker:
                return self._slots.get((self._name_of(member.node), member.slot))
        return self._slot_of.get(worker)

    def _decided(self, effect: fx.Effect, machine: Decisions, now: float) -> None:
        if isinstance(effect, fx.Lost):
            slots = [s for s in map(self._slot_of_member, effect.workers) if s is not None]
            homes = [slot.node for slot in slots]
            incident = self._struck(now, effect.reason.name.lower(), homes, effect.workers)
            if effect.reason is ChangeReason.STALLED or not incident.is_hang:
                incident.reason = effect.reason.name.lower()
            incident.is_hang |= effect.reason is ChangeReason.STALLED
            began = [incident.at, effect.at, *self._signs.values()]
            if effect.standing_since is not None:
                began.append(effect.standing_since)
            incident.at = min(began)
            self._signs.clear()
            stood_s = now - machine.last_commit_at(now)  # a group may train on without an agent
            incident.detection_s = max(0.0, min(effect.at - incident.at, stood_s))
        elif isinstance(effect, fx.AnnounceGeneration):
            self._formed(effect.generation, now)

    def _formed(self, generation: Generation, now: float) -> None:
        if not generation.members:
            return  # all workers wait: the incident is not over
        incident = self._under_way
        self._signs.clear()
        if incident is not None:
            incident.generation = generation.number
        elif self._group is not None and self._group.members:
            incident = self._changed(generation, self._group, now)
            incident.generation = incident.generation or generation.number
        else:
            return  # the first group
        self._causes[generation.number] = incident
        while len(self._causes) > _MOST_GENERATIONS:
            del self._causes[min(self._causes)]

    def _changed(self, generation: Generation, before: Generation, now: float) -> Incident:
        """The incident of a planned change: by the workers that join, or by those that leave."""
        joined = [m for m in generation.members if m.worker not in before.worker_ids]
        left = [m for m in before.members if m.worker not in generation.worker_ids]
        slots = [self._slot_of_member(m.worker) for m in joined]
        causes = {slot.cause.number: slot.cause for slot in slots if slot and slot.cause}
        if len(causes) == 1 and not left:
            return next(iter(causes.values()))  # these replace workers that were lost
        incident = self._books.open_incident(now, generation.reason.name.lower())
        who = left if generation.reason is ChangeReason.MEMBER_LEAVING else joined or left
        incident.concerns((self._name_of(m.node) for m in who), (m.worker for m in who))
        return incident

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
        if self._under_way is not None and _is_over(self._under_way, event.workers):
            self._under_way = None
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
        self._books.wall_s += elapsed_s
        if slot.kind is None:
            slot.open_s += elapsed_s
            return
        cause = slot.cause
        if cause is None and slot.kind is Kind.BELOW_MINIMUM:
            cause = self._under_way
        self._books.add(slot.kind, elapsed_s, cause, self._blamed(slot))
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
            self._books.add(_noticing(cause), noticing_s, cause)
            again_s = min(left_s - noticing_s, self._usual_s or left_s)
            self._books.add(Kind.RECOMPUTED, again_s, cause)
            left_s -= noticing_s + again_s
        self._books.add(Kind.PRODUCTIVE, left_s)

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
            self._books.add(part.kind, share * part.seconds, part.incident, part.node)
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
        is_first = cause is not None and cause.generation == generation
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


def _is_over(incident: Incident, workers: Iterable[WorkerStatus]) -> bool:
    """True if the group that followed the incident trains."""
    training = [s.generation for s in workers if s.phase is WorkerPhase.TRAINING]
    return 0 < incident.generation <= max(training, default=0)


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
