"""Follows the coordinator's events, and keeps a record of each incident."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from elastic.core.accounting import MOST_INCIDENTS, Incident
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.diagnosis import Diagnosis
from elastic.core.incidents import (
    LONGEST,
    LONGEST_DETAIL,
    MOST_PROCESSES,
    MOST_SAVES,
    MOST_SIGNS,
    MOST_STACKS,
    Casualty,
    FailedSaves,
    Noticed,
    Outcome,
    RankStacks,
    Record,
    Sign,
    Standstill,
    begin_of,
)
from elastic.core.membership import ChangeReason, FailureKind, Generation, NodeId, WorkerId

_REMEMBERED = 32  # saves that were given up


class View(Protocol):
    """What is to be known of the coordinator's machine."""

    @property
    def current(self) -> Generation | None:
        """The newest generation."""
        ...

    @property
    def committed(self) -> int:
        """Committed steps, as far as is known."""
        ...


class Incidents:
    """`observe` each event of the coordinator's machine after the accounts have; the other methods
    tell what the machine does not hear. What has changed is in `changed`, what is to be told to
    people in `news`; both are the caller's to clear.

    open_incident: opens one in the accounts, from (instant, reason, nodes, workers). name_of: the
    name of a node, which outlives its agent.
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
        self._hang: Standstill | None = None
        self._group: Generation | None = None
        self._places: dict[WorkerId, tuple[str, int]] = {}
        """(node, rank) of the members of the newest group that has any, then of the one before."""
        self._places_before: dict[WorkerId, tuple[str, int]] = {}
        self._given_up: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._reporter: tuple[WorkerId, int, int] = ("", 0, 0)
        self._batch = 0.0
        self.changed: set[int] = set()
        """Numbers of records that are not as they were."""
        self.news: list[int] = []
        """Those that are over, or may take long: each once."""

    # ---- what happens

    def observe(
        self,
        event: ev.Event,
        effects: Sequence[fx.Effect],
        machine: View,
        incident: Incident | None,
        now: float,
    ) -> None:
        """The machine, as it is now, has taken the event and answered with the effects. incident:
        what the accounts know to be under way."""
        self._hear(event, now)
        for effect in effects:
            if isinstance(effect, fx.ExplainHang):
                self._stands_still(effect, now)
        record = self._record_of(incident, machine, now) if incident is not None else None
        if isinstance(event, ev.WorkerFailed):
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
        """Rank 0 says how many samples it has committed in all, of the whole group."""
        known, steps, count = self._reporter
        if worker == known and committed > steps and samples > count:
            self._batch = (samples - count) / (committed - steps)
        self._reporter = (worker, committed, samples)

    def left_late(self, node: str, now: float) -> None:
        """A node was to leave, and its workers are ended."""
        self._notice(Noticed(sign=Sign.LEAVE_TIMED_OUT, at=now, node=node))

    def explained(self, generation: int, verdict: Diagnosis, stacks: Sequence[RankStacks]) -> None:
        """The members of a group that stands still have told where they are."""
        told = tuple(stacks[:MOST_STACKS])
        if self._hang is not None and self._hang.generation == generation:
            self._hang = replace(self._hang, verdict=verdict, stacks=told)
        for record in reversed(self._records.values()):
            if record.hang is not None and record.hang.generation == generation:
                record.hang = replace(record.hang, verdict=verdict, stacks=told)
                self.changed.add(record.number)
                return

    def recovered(self, recovery: Mapping[str, Any], now: float) -> None:
        """A step is committed in the group that followed. recovery: the fields of `recovered`."""
        self._pending.clear()
        self._hang = None
        still = [r for r in self._records.values() if r.is_open]
        for record in still:
            last = record is still[-1]
            record.outcome = Outcome.RECOVERED if last else Outcome.STRUCK_AGAIN
            record.ended_at, record.followed_by = now, int(recovery["generation"])
            record.recovery = recovery if last else {}
            record.world_size_after = self._group.world_size if self._group is not None else 0
            record.steps_lost = max(0, record.committed - int(recovery["committed"]))
            self._tell(record)

    def reformed(self, generation: int, recomputed: int) -> None:
        """A member has committed its first step in a group, and says how many steps it had begun
        in the one before. Called after `recovered`."""
        for record in reversed(self._records.values()):
            if record.followed_by == generation and record.outcome is Outcome.RECOVERED:
                if recomputed > record.steps_again:
                    record.steps_again = recomputed
                    self.changed.add(record.number)
                return

    def save_failed(
        self, step: int, generation: int, message: str, now: float, worker: WorkerId = ""
    ) -> None:
        """Storage has refused a checkpoint. Those that fail one after the other for the same reason
        are one incident."""
        if (step, generation) in self._given_up:
            return
        self._given_up.append((step, generation))
        message = begin_of(message, LONGEST)
        for record in self._failing():
            saves = record.saves
            if saves is not None and _without_digits(saves.message) == _without_digits(message):
                record.saves = replace(saves, last_step=step, count=saves.count + 1)
                record.ended_at = now
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
        """A checkpoint is whole: one that fails from now on is another incident."""
        for record in self._failing():
            record.outcome = Outcome.SAVED_SINCE
            self.changed.add(record.number)

    def ended(self, message: str) -> None:
        """Why the job has, in words."""
        for record in self._records.values():
            if record.outcome is Outcome.JOB_ENDED:
                record.verdict = begin_of(message, LONGEST)
                self.changed.add(record.number)

    # ---- what is known

    def documents(self, ahead_s: float) -> dict[int, dict[str, Any]]:
        """All of them by number, oldest first."""
        return {number: r.to_document(ahead_s) for number, r in self._records.items()}

    def document(self, number: int, ahead_s: float) -> dict[str, Any] | None:
        """One of them; None if there is none of the number."""
        record = self._records.get(number)
        return record.to_document(ahead_s) if record is not None else None

    # ---- inside

    def _failing(self) -> list[Record]:
        """Saves since which none was whole."""
        return [r for r in self._records.values() if r.outcome is Outcome.TRAINS_ON]

    def _hear(self, event: ev.Event, now: float) -> None:
        """Signs other than the end of a process."""
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
        """With what was noticed up to now."""
        record = self._records.get(incident.number)
        if record is None:
            record = self._add(incident, machine.committed, now)
        if self._pending:
            known = {(n.sign, n.node, n.worker) for n in record.noticed}
            fresh = [n for n in self._pending if (n.sign, n.node, n.worker) not in known]
            record.noticed = sorted([*record.noticed, *fresh], key=lambda n: n.at)[:MOST_SIGNS]
            record.at = min(record.at, *(n.at for n in record.noticed))
            self._pending.clear()
            self.changed.add(record.number)
        if self._hang is not None and record.hang is None:
            record.hang, self._hang = self._hang, None
            self.changed.add(record.number)
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
        # What the newest has cost may have grown since it was told.
        self.changed |= set(list(self._records)[-1:]) | {record.number}
        self._records[record.number] = record
        while len(self._records) > MOST_INCIDENTS:
            self._records.popitem(last=False)
        return record

    def _ended(self, event: ev.WorkerFailed, record: Record | None, now: float) -> None:
        """A process has: one that the accounts have counted as lost before belongs to that."""
        failure, node = event.failure, self._name_of(event.node)
        if record is None:
            late = [r for r in self._records.values() if failure.worker in r.workers]
            record = late[-1] if late else None
        if record is None or any(c.failure.worker == failure.worker for c in record.casualties):
            return
        self.changed.add(record.number)
        if len(record.casualties) >= MOST_PROCESSES:
            record.further += 1
            return
        rank = self._place(failure.worker)[1]
        record.casualties.append(Casualty(failure=failure, node=node, rank=rank, at=now))
        if not record.noticed or failure.kind is not FailureKind.LEFT_OUT:
            record.noticed.append(
                Noticed(sign=Sign.WORKER_ENDED, at=now, node=node, worker=failure.worker, rank=rank)
            )
            del record.noticed[MOST_SIGNS:]

    def _abandoned(
        self, event: ev.Event, effect: fx.AbandonCheckpoint, record: Record | None, now: float
    ) -> None:
        """For want of storage, or because a member was lost that had not written its part."""
        if isinstance(event, ev.SaveReportedFailed):
            self.save_failed(effect.step, effect.generation, effect.message, now, event.worker)
        elif record is not None and effect.step not in record.saves_lost:
            record.saves_lost = [*record.saves_lost, effect.step][-MOST_SAVES:]
            self._given_up.append((effect.step, effect.generation))
            self.changed.add(record.number)

    def _formed(self, generation: Generation) -> None:
        """People are told at once that workers wait. A group of a script that was written for
        torchrun is dissolved at every change, and the next one follows."""
        if generation.members or generation.reason is not ChangeReason.BELOW_MINIMUM:
            return
        for record in self._records.values():
            if record.outcome is Outcome.UNDER_WAY:
                record.outcome = Outcome.WAITING
                self._tell(record)

    def _job_ended(self, now: float) -> None:
        """Nobody updates the records after it: what each has cost is as it will stay."""
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
        """(node, rank) of a member of the newest groups."""
        return self._places.get(worker) or self._places_before.get(worker) or ("", None)

    def _tell(self, record: Record) -> None:
        self.changed.add(record.number)
        if not record.told:
            record.told = True
            self.news.append(record.number)


def _without_digits(message: str) -> str:
    """Messages of the same error differ in the step."""
    return "".join(c for c in message if not c.isdigit())
