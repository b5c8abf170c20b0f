"""The one book of a run: each loss of workers, from its first sign to the step that follows it.

A fold: it takes what the coordinator's machine has handled and decided, and the reports that bypass
the machine. What users see of losses and of time is read from it; nothing is decided by it.
docs/ARCHITECTURE.md ("The book") defines a loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elastic.core.book.incidents import (
    LONGEST,
    LONGEST_DETAIL,
    MOST_PROCESSES,
    MOST_SAVES,
    MOST_SIGNS,
    UNREADABLE,
    Casualty,
    FailedSaves,
    Incident,
    Noticed,
    Outcome,
    Sign,
    Standstill,
    begin_of,
)
from elastic.core.book.slot_accounts import SlotAccounts
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.phases import JobPhase
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import ChangeReason, Generation, NodeId, WorkerId
from elastic.core.whereabouts import RankStacks

_REMEMBERED = 32  # saves that failed or were given up
_MOST_RECOVERIES = 20  # shown with their phases
_MOST_NODES = 10_000
_SAME_S = 600.0  # a storage that is too slow for every other save is one incident
_EARLIER = -math.inf  # when an earlier leader decided, which is not known
_LATE_S = 3.0  # signs of what happened while the coordinator was stopped come within this time


class Decisions(Protocol):
    """What the book needs of the coordinator's machine."""

    phase: JobPhase

    @property
    def current(self) -> Generation | None: ...

    @property
    def committed(self) -> int: ...

    def last_commit_at(self, now: float) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStep:
    """A member has committed its first step in a group."""

    generation: int
    committed: int
    """The step that the group agreed on."""
    recomputed: int = 0
    """How many steps this member had begun and begins again."""
    abort_s: float = 0.0
    join_s: float = 0.0
    sync_s: float = 0.0
    first_step_s: float = 0.0
    out_s: float = 0.0
    """How long it was without a group before this step; 0: it was in none before."""


class Book:
    """The book of a run. `observe` takes each event after the machine has handled it; the other
    methods take what the machine does not learn. Instants are of one monotonic clock.

    `changed` collects the numbers of the incidents whose documents have changed, `news` the
    incidents that users should be told about; the caller clears both.

    most: how many slots the job may have. name_of: returns the name of a node, which outlives its
    agent. leads_since: earlier signs of a loss are unknown here.
    """

    def __init__(
        self,
        most: int,
        *,
        name_of: Callable[[NodeId], str] = str,
        leads_since: float = -math.inf,
    ) -> None:
        self.slots = SlotAccounts(most, name_of=name_of)
        self._name_of, self._heard_since = name_of, leads_since
        self._signs: deque[Noticed] = deque(maxlen=MOST_SIGNS)
        """Signs of what may become a loss."""
        self._ended_early: deque[Casualty] = deque(maxlen=MOST_PROCESSES)
        """Workers that ended, and are not known to be members."""
        self._hang: Standstill | None = None
        self._stop: Noticed | None = None
        """That the coordinator was stopped, until an incident has been found with it."""
        self._began = False
        self._group: Generation | None = None
        self._places: dict[WorkerId, tuple[str, int]] = {}
        """(node, rank) of the members of the newest group."""
        self._places_before: dict[WorkerId, tuple[str, int]] = {}
        """The same of the group before."""
        self._dropping: set[NodeId] = set()
        """Nodes with members that the planned change under way drops, until they may go."""
        self._came: dict[str, None] = {}
        """Nodes that have reported to this leader."""
        self._given_up: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._reporter: tuple[WorkerId, int, int] = ("", 0, 0)
        self._batch = 0.0
        self._committed = 0
        self.changed: set[int] = set()
        self.news: list[Incident] = []

    # ---- what happens

    def observe(
        self, event: ev.Event, effects: Sequence[fx.Effect], machine: Decisions, now: float
    ) -> None:
        """The machine has handled the event and returned the effects."""
        self._committed = machine.committed or self.slots.committed
        if not self._began:
            self._began = True
            self._take_group(machine.current)
        self._hear(event, now)
        for effect in effects:
            if isinstance(effect, fx.ExplainHang):
                self._stands_still(effect, now)
            elif isinstance(effect, fx.PeersUnreachable) and effect.parted:
                self._part(effect)
            elif isinstance(effect, fx.Lost):
                self._lost(effect, now - machine.last_commit_at(now))
            elif isinstance(effect, fx.AnnounceGeneration):
                self._formed(effect.generation, now)
            elif isinstance(effect, fx.NodeDrained):
                self._dropped({effect.node})
        self._gather()
        self.slots.observe(event, machine.current, machine.phase, now)
        for effect in effects:
            if isinstance(effect, fx.AbandonCheckpoint):
                self._abandoned(event, effect, now)
            elif isinstance(effect, fx.EndJob):
                failed = machine.phase is JobPhase.FAILED
                self._job_ended(now, now - machine.last_commit_at(now) if failed else 0.0)
        if machine.current is not self._group:
            self._take_group(machine.current)

    def connected(self, now: float) -> None:
        """An agent with members has connected: what it saw before, it reports only now."""
        self._heard_since = now

    def progressed(self, worker: WorkerId, committed: int, samples: int) -> None:
        """Rank 0 reports how many steps and samples the whole group has committed in all."""
        known, steps, count = self._reporter
        if worker == known and committed > steps and samples > count:
            self._batch = (samples - count) / (committed - steps)
        self._reporter = (worker, committed, samples)

    def stopped(self, stopped_s: float, at: float) -> None:
        """The coordinator runs again since `at`. Before, it did not run for `stopped_s`."""
        self._heard_since = at  # the signs that came meanwhile were not heard
        detail = f"it did not run for {stopped_s:.1f} s: it was stopped, or its machine was paused"
        self._stop = Noticed(sign=Sign.COORDINATOR_STOPPED, at=at, detail=detail)

    def left_late(self, node: str, machine: Decisions, now: float) -> None:
        """The workers of a node did not leave at a step boundary in time, and are ended. The group
        has waited for them since its last commit, and the one without them may be planned."""
        planned, is_new = machine.current, self.under_way is None
        loss = self._struck(machine.last_commit_at(now), "leave_timed_out", [node], ())
        loss.notice([Noticed(sign=Sign.LEAVE_TIMED_OUT, at=now, node=node)])
        if is_new and planned is not None and planned.leave_after is not None:
            loss.decided_at, loss.detection_s = now, now - loss.at
            self._follow(loss, planned, now)

    def explained(self, generation: int, verdict: Diagnosis, stacks: Iterable[RankStacks]) -> None:
        """The members of a group that stands still have reported where they are."""
        if self._hang is not None and self._hang.generation == generation:
            self._hang = self._hang.explained(verdict, stacks)
        for incident in self._newest_first():
            if incident.hang is not None and incident.hang.generation == generation:
                incident.hang = incident.hang.explained(verdict, stacks)
                self.changed.add(incident.number)
                return

    def reformed(self, step: FirstStep, now: float) -> dict[str, Any] | None:
        """A member has committed its first step in a group; return the fields of the event
        `recovered` if this ends a loss."""
        loss, ended = self.under_way, None
        if loss is None and self._group is not None and step.generation == self._group.number:
            self._dropped(set(self._dropping))
        follows = loss is not None and 0 < loss.followed_by <= step.generation
        # A newcomer cannot say when a loss was that began under an earlier leader.
        if loss is not None and follows and (loss.decided_at != _EARLIER or step.out_s):
            ended = self._recovered(loss, step, now)
        for incident in self._newest_first():
            if incident.recovery.get("generation") == step.generation:
                if step.recomputed > incident.steps_again:
                    incident.steps_again = step.recomputed
                    self.changed.add(incident.number)
                break
        return ended

    def save_failed(
        self, step: int, generation: int, message: str, now: float, worker: WorkerId = ""
    ) -> None:
        """Storage has refused a checkpoint. Successive failures for the same reason are one
        incident, also if other saves are complete between them."""
        if (step, generation) in self._given_up:
            return
        self._given_up.append((step, generation))
        message = begin_of(message, LONGEST)
        newest = self._newest_first()[:1]
        lately = [i for i in newest if i.ended_at is not None and now - i.ended_at < _SAME_S]
        for incident in [*self._failing(), *lately]:
            saves = incident.saves
            if saves is not None and _without_digits(saves.message) == _without_digits(message):
                incident.saves = replace(saves, last_step=step, count=saves.count + 1)
                incident.outcome, incident.ended_at = Outcome.TRAINS_ON, now
                self.changed.add(incident.number)
                return
        node, rank = self._place(worker)
        incident = self._open(now, "save_failed", Outcome.TRAINS_ON)
        incident.concerns([node] if node else [], [worker] if worker else [])
        incident.committed, incident.ended_at = step, now
        incident.saves = FailedSaves(message=message, first_step=step, last_step=step)
        refused = Noticed(sign=Sign.SAVE_REFUSED, at=now, node=node, worker=worker, rank=rank)
        incident.notice([refused])
        self._tell(incident)

    def saved(self) -> None:
        """A checkpoint is complete."""
        for incident in self._failing():
            incident.outcome = Outcome.SAVED_SINCE
            self.changed.add(incident.number)

    def ended(self, message: str) -> None:
        """The job has ended, for the reason in the message."""
        self.changed |= {i.number for i in self._newest_first()}
        for incident in self._newest_first():
            if incident.outcome is Outcome.JOB_ENDED:
                incident.verdict = begin_of(message, LONGEST)

    # ---- what is known

    @property
    def under_way(self) -> Incident | None:
        """The loss from which the job has not recovered yet."""
        return self.slots.under_way

    def documents(self, ahead_s: float) -> dict[int, dict[str, Any]]:
        """All incidents but planned changes, by number, oldest first."""
        return {i.number: i.to_document(ahead_s) for i in reversed(self._newest_first())}

    def recoveries(self) -> list[dict[str, Any]]:
        """The fields of the newest events `recovered`, newest last."""
        found = [_told(i, i.workers) for i in reversed(self._newest_first()) if i.recovery]
        return found[-_MOST_RECOVERIES:]

    # ---- from leader to leader

    def adopt(self, accounts: Mapping[str, Any], now: float, ahead_s: float) -> None:
        """Go on from the accounts of a previous leader, and count the time since; call it after
        `resume`. Invalid ones change nothing."""
        self.slots.adopt(accounts, now, ahead_s)

    def resume(
        self, documents: Mapping[int, Mapping[str, Any]], decided: tuple[int, int], ahead_s: float
    ) -> set[int]:
        """Go on from the documents of incidents by number; return those that cannot be read, whose
        numbers are not given again. decided: the newest generation, and the number of the loss that
        it follows; zeros: there is none."""
        generation, number = decided
        illegible = set()
        for known in sorted(documents):
            self.slots.books.number_after(known)
            try:
                incident = Incident.read(documents[known], ahead_s)
            except UNREADABLE:
                illegible.add(known)
                continue
            self.slots.books.keep(incident)
            if incident.followed_by:
                self.slots.leads_to(incident.followed_by, incident)
            if not incident.is_open:
                continue
            self.changed.add(known)
            if self.under_way is not None:
                self.under_way.outcome = Outcome.UNKNOWN
            self.slots.under_way = incident
            incident.lost, incident.decided_at = dict.fromkeys(incident.workers), _EARLIER
            if known == number:
                incident.followed_by = generation
                self.slots.leads_to(generation, incident)
        return illegible

    # ---- the losses

    def _struck(
        self, at: float, reason: str, nodes: Iterable[str], workers: Sequence[WorkerId]
    ) -> Incident:
        """A loss, first seen at `at`. What is lost before the step that ends it belongs to it."""
        loss = self.under_way
        if loss is None:
            loss = self.slots.under_way = self._open(at, reason, Outcome.UNDER_WAY)
        self.changed.add(loss.number)
        loss.at, loss.followed_by = min(loss.at, at), 0
        loss.lost |= dict.fromkeys(workers)
        loss.concerns([*self.slots.strikes(workers, loss), *nodes], workers)
        return loss

    def _open(self, at: float, reason: str, outcome: Outcome) -> Incident:
        # The cost of the one before may have grown since its document was stored.
        self.changed |= {i.number for i in self._newest_first()[:1]}
        incident = self.slots.books.open_incident(at, reason, outcome)
        self.changed.add(incident.number)
        if self._group is not None:
            incident.generation, incident.world_size = self._group.number, self._group.world_size
        incident.committed, incident.samples_per_step = self._committed, self._batch
        return incident

    def _lost(self, effect: fx.Lost, stood_s: float) -> None:
        """The coordinator has decided to go on without these workers. stood_s: the time since the
        last commit: a group may train on without an agent."""
        for worker in effect.workers:
            node = self._place(worker)[0]
            if node and node not in self._came:
                self._notice(Noticed(sign=Sign.NODE_ABSENT, at=effect.at, node=node))
        reason, began = effect.reason.name.lower(), [effect.at, *(n.at for n in self._signs)]
        if effect.standing_since is not None:
            began.append(effect.standing_since)
        loss = self._struck(min(began), reason, (), effect.workers)
        if effect.reason is ChangeReason.STALLED or not loss.is_hang:
            loss.reason = reason
        loss.is_hang |= effect.reason is ChangeReason.STALLED
        self._gather()
        loss.decided_at, loss.persisted_at = effect.at, None
        loss.detection_s = max(0.0, min(effect.at - loss.at, stood_s))

    def _formed(self, generation: Generation, now: float) -> None:
        loss, before = self.under_way, self._group
        if loss is not None and loss.persisted_at is None:
            loss.persisted_at = now
        if not generation.members:
            # A generation without members alone does not show that too few workers are left: at a
            # change a torchrun script's group is dissolved before the next one.
            if loss is not None and generation.reason is ChangeReason.BELOW_MINIMUM:
                loss.outcome = Outcome.WAITING
                self._tell(loss)
            return
        self._signs.clear()
        if loss is not None and generation.leave_after is None:
            self._follow(loss, generation, now)
        elif before is not None and before.members:
            self._planned(generation, before, now)

    def _follow(self, loss: Incident, generation: Generation, now: float) -> None:
        loss.followed_by = generation.number
        loss.persisted_at = now if loss.persisted_at is None else loss.persisted_at
        self.slots.leads_to(generation.number, loss)

    def _planned(self, generation: Generation, before: Generation, now: float) -> None:
        """A planned change, by the workers that join, or by those that leave."""
        joined = [m for m in generation.members if m.worker not in before.worker_ids]
        left = [m for m in before.members if m.worker not in generation.worker_ids]
        cause = self.slots.cause_of(m.worker for m in joined) if not left else None
        if cause is None:  # otherwise these replace workers that were lost
            reason = generation.reason.name.lower()
            cause = self.slots.books.open_incident(now, reason, Outcome.PLANNED)
            who = left if generation.reason is ChangeReason.MEMBER_LEAVING else joined or left
            cause.concerns((self._name_of(m.node) for m in who), (m.worker for m in who))
        cause.followed_by = cause.followed_by or generation.number
        self.slots.leads_to(generation.number, cause)

    def _recovered(self, loss: Incident, step: FirstStep, now: float) -> dict[str, Any]:
        measured_s = step.join_s + step.sync_s + step.first_step_s
        if loss.decided_at == _EARLIER:  # what was not measured is detection
            signs = [*(n.at for n in loss.noticed), *(c.at for c in loss.casualties)]
            loss.at = min([now - step.out_s, *signs])
            loss.decided_at = loss.persisted_at = now - min(measured_s, step.out_s)
        elif now - step.out_s < self._heard_since:
            loss.at = min(loss.at, now - step.out_s)
        decided_at = loss.decided_at if loss.decided_at is not None else now
        persisted_at = loss.persisted_at if loss.persisted_at is not None else decided_at
        phases = {
            "detect_s": decided_at - loss.at,
            "persist_s": max(0.0, persisted_at - decided_at),
            "abort_s": step.abort_s,  # it overlaps the others, which add up to the total
            "join_s": step.join_s,
            "sync_s": step.sync_s,
            "first_step_s": step.first_step_s,
        }
        total_s = now - loss.at
        known_s = phases["detect_s"] + phases["persist_s"] + measured_s
        phases["notify_s"] = max(0.0, total_s - known_s)
        loss.outcome, loss.ended_at = Outcome.RECOVERED, now
        loss.recovery = {
            "generation": step.generation,
            "reason": loss.reason,
            "committed": step.committed,
            "total_s": round(total_s, 6),
            **{name: round(value, 6) for name, value in phases.items()},
        }
        loss.committed = max(loss.committed, step.committed)  # reports of progress lag behind
        loss.world_size_after = self._group.world_size if self._group is not None else 0
        self.slots.under_way = self._hang = None
        self._signs.clear()
        self._ended_early.clear()
        self._tell(loss)
        return _told(loss, loss.lost)

    def _job_ended(self, now: float, stood_s: float) -> None:
        self.slots.end(now, stood_s)
        loss, self.slots.under_way = self.under_way, None
        if loss is not None:
            loss.outcome, loss.ended_at = Outcome.JOB_ENDED, now
            self._tell(loss)

    # ---- the signs

    def _hear(self, event: ev.Event, now: float) -> None:
        members = self._group.members if self._group is not None else ()
        if isinstance(event, ev.NodeReported):
            self._reported(event, now)
        elif isinstance(event, ev.NodesReported):
            for report in event.reports:
                self._reported(report, now)
        elif isinstance(event, ev.NodeLost | ev.NodeGone):
            sign = Sign.NODE_LOST if isinstance(event, ev.NodeLost) else Sign.NODE_GONE
            if event.node in self._dropping or any(m.node == event.node for m in members):
                self._notice(Noticed(sign=sign, at=now, node=self._name_of(event.node)))
        elif isinstance(event, ev.WorkerFailed):
            self._went_further(event.committed_in, event.committed)
            self._ended(event, now)

    def _reported(self, report: ev.NodeReported, now: float) -> None:
        node, group = self._name_of(report.node), self._group
        self._came[node] = None
        if len(self._came) > _MOST_NODES:
            del self._came[next(iter(self._came))]
        if group is None:
            return
        has = {s.worker for s in report.workers}
        if self._signs and group.workers_on(report.node) <= has:
            self._refute(node)  # it is back, and has lost nothing
        for status in report.workers:
            if status.broken and status.generation == group.number:
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

    def _ended(self, event: ev.WorkerFailed, now: float) -> None:
        """Add the process to the loss under way, to the one with which its worker was lost, or keep
        it until it is known to be a member."""
        failure, node, at = event.failure, self._name_of(event.node), now - event.age_s
        rank = self._place(failure.worker)[1]
        casualty = Casualty(failure=failure, node=node, rank=rank, at=at)
        late = [i for i in self._newest_first() if failure.worker in i.workers]
        is_member = self._group is not None and failure.worker in self._group.worker_ids
        if is_member and not self.slots.ended:
            began = min([at, *(n.at for n in self._signs)])
            loss = self._struck(began, failure.kind.name.lower(), [node], [failure.worker])
            if loss.decided_at is None:  # the agent that tells of it is there: no node is lost
                loss.noticed = [n for n in loss.noticed if n.who != (Sign.NODE_LOST, node, "")]
                self._refute(node)
        elif self.under_way is not None or late:
            loss = self.under_way or late[0]
        else:
            self._ended_early.append(casualty)
            return
        loss.add(casualty)
        self.changed.add(loss.number)

    def _went_further(self, generation: int, committed: int) -> None:
        """The group of a loss has committed this many steps, perhaps more than was known, and the
        job may have gone on without them."""
        for incident in self._newest_first():
            is_its_end = incident.saves is None and incident.generation == generation
            if is_its_end and incident.committed < committed:
                incident.committed = committed
                self.changed.add(incident.number)

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

    def _dropped(self, nodes: set[NodeId]) -> None:
        """The planned change has dropped the members on these nodes, which may be lost now."""
        for node in nodes & self._dropping:
            self._refute(self._name_of(node))
        self._dropping -= nodes

    def _refute(self, node: str) -> None:
        """The node was not lost: only the stream of its agent had ended."""
        for noticed in [n for n in self._signs if n.who == (Sign.NODE_LOST, node, "")]:
            self._signs.remove(noticed)

    def _notice(self, noticed: Noticed) -> None:
        if all(n.who != noticed.who for n in self._signs):
            self._signs.append(noticed)

    def _gather(self) -> None:
        """Add the signs that were noticed up to now to the loss under way."""
        loss = self.under_way
        if loss is None:
            return
        before = (len(loss.noticed), len(loss.casualties), loss.further, loss.hang)
        loss.notice(self._signs)
        self._signs.clear()
        if self._stop is not None and self._stop.at >= loss.at - _LATE_S:
            loss.notice([replace(self._stop, at=max(self._stop.at, loss.at))])
            self._stop = None
        if self._hang is not None and loss.hang is None:
            loss.hang, self._hang = self._hang, None
        for casualty in [c for c in self._ended_early if c.failure.worker in loss.lost]:
            self._ended_early.remove(casualty)
            loss.add(casualty)
        if before != (len(loss.noticed), len(loss.casualties), loss.further, loss.hang):
            self.changed.add(loss.number)

    def _abandoned(self, event: ev.Event, effect: fx.AbandonCheckpoint, now: float) -> None:
        """A save was given up: storage failed, or a member was lost before its part was written."""
        loss = self.under_way
        if isinstance(event, ev.SaveReportedFailed):
            self.save_failed(effect.step, effect.generation, effect.message, now, event.worker)
        elif loss is not None and effect.step not in loss.saves_lost:
            loss.saves_lost = [*loss.saves_lost, effect.step][-MOST_SAVES:]
            self._given_up.append((effect.step, effect.generation))
            self.changed.add(loss.number)

    # ---- inside

    def _newest_first(self) -> list[Incident]:
        """The incidents but planned changes."""
        incidents = self.slots.books.incidents
        newest = (incidents[number] for number in sorted(incidents, reverse=True))
        return [i for i in newest if i.outcome is not Outcome.PLANNED]

    def _failing(self) -> list[Incident]:
        """Incidents of failed saves since which no save was complete."""
        return [i for i in self._newest_first() if i.outcome is Outcome.TRAINS_ON]

    def _take_group(self, group: Generation | None) -> None:
        before, self._group = self._group, group
        is_settled = before is not None and group is not None and before.number == group.number
        if not is_settled:
            is_planned = group is not None and group.leave_after is not None
            going = before.members if before is not None and is_planned else ()
            stay = group.worker_ids if group is not None else frozenset()
            self._dropping = {m.node for m in going if m.worker not in stay}
        if group is not None and group.members:
            if not is_settled:
                self._places_before = self._places
            self._places = {
                m.worker: (self._name_of(m.node), rank) for rank, m in enumerate(group.members)
            }

    def _place(self, worker: WorkerId) -> tuple[str, int | None]:
        """(node, rank) of a member of the two newest groups; ("", None) for any other worker."""
        return self._places.get(worker) or self._places_before.get(worker) or ("", None)

    def _tell(self, incident: Incident) -> None:
        self.changed.add(incident.number)
        if not incident.told:
            incident.told = True
            self.news.append(incident)


def _told(loss: Incident, workers: Iterable[WorkerId]) -> dict[str, Any]:
    """The fields of the event `recovered`."""
    first = {name: loss.recovery.get(name) for name in ("generation", "reason")}
    return {**first, "lost": list(workers), **loss.recovery}


def _without_digits(message: str) -> str:
    """The message without step numbers, in which messages of the same error differ."""
    return "".join(c for c in message if not c.isdigit())
