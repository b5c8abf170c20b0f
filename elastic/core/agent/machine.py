"""The agent's state machine: manages the worker processes of one node until the agent ends."""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from typing_extensions import assert_never

from elastic.core.agent import effects as fx
from elastic.core.agent import events as ev
from elastic.core.membership import (
    Failure,
    FailureKind,
    Generation,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
    signal_name,
)
from elastic.core.restarts import Backoff
from elastic.errors import ExitCode

_ADOPTION_S = 2.0  # a worker that has called elastic.init() reports to a new agent within this
# A worker that starts after a loss builds its model and reads its data on the cores that the
# survivors need to go on. So it waits: this long for the announcement of the survivors' next group,
# and this long in all if there is one, both counted from the loss.
_ANNOUNCEMENT_S = 0.1
_SURVIVORS_FIRST_S = 0.25
_GONE_WITHIN_S = 15.0  # after the kill: GPUs need time, and a process on a hung disk never ends


class AgentPhase(enum.Enum):
    """What the agent is doing."""

    SEARCHING = 1  # an earlier agent's workers may run, and are not known yet
    WARMING = 2  # the zygote imports torch
    SERVING = 3
    ENDING = 4  # waits for its processes to be gone


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """The part of the node's settings that the machine needs."""

    node: NodeId
    slots: int
    start: str = ""
    """Differs at each start of the node's agent, so that no worker's name is used twice."""
    spares: int = 1
    backoff: Backoff = field(default_factory=Backoff)
    start_timeout_s: float = 600.0
    """How long a worker with a slot may take to ask for a group."""
    first_step_s: float = 600.0
    """How much longer the worker gets if its script runs torch.compile meanwhile. 0: no limit."""
    exit_grace_s: float = 5.0
    """How long dismissed workers get to exit by themselves."""
    classic: bool = False
    """The script was written for torchrun: it runs in one group from its start, and cannot change
    it. When the group changes, workers that have run are ended."""
    end_grace_s: float = 30.0
    """How long a classic script gets to end after SIGTERM."""
    leave_timeout_s: float | None = None
    """When the agent is asked to leave, its workers leave the job and are ended after this time at
    the latest. None: the whole job belongs to this node, and is saved and stopped."""


@dataclass(slots=True)
class _Loss:
    """The loss of a worker that trained, while others of this node train on."""

    at: float
    generation: int
    """The newest generation that was known then."""
    until: float
    """No worker gets a slot or is forked before this instant."""


class Agent:
    """One node's agent. Only `handle` changes it, and returns the effects to carry out."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._processes: dict[WorkerId, Process] = {}
        self._spawned = 0
        self._fruitless = 0
        self._spawn_not_before = 0.0
        self._most_committed = 0
        self._generation: Generation | None = None
        self._before: Generation | None = None
        self._script_is_elastic = False
        self._dismissed = False
        self._exit_code: int | None = None
        self._kill_at: float | None = None
        self._gone_by: float | None = None
        self._leave_by: float | None = None
        self._drained_by: float | None = None
        self._reported: tuple[WorkerStatus, ...] | None = ()
        self._runs_out = False  # asked to leave, with a classic script: start no worker any more
        self._loss: _Loss | None = None
        self._held: list[ev.Event] = []
        """What concerns the workers of an earlier agent, until they are known."""
        self.phase = AgentPhase.WARMING

    @property
    def generation(self) -> Generation | None:
        """The newest generation announced, in its newest form."""
        return self._generation

    @property
    def before(self) -> Generation | None:
        """The previous generation, if its group trains until the newest takes effect."""
        return self._before

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Take one event; return the effects to carry out, in order. now: monotonic seconds."""
        before = self._reported
        effects = self._apply(event, now)
        effects += self._tend(now)
        self._reported = after = self._view()
        if after is not None and (after != before or isinstance(event, ev.Started)):
            effects.append(fx.ReportNode(workers=after))
        return effects

    # ---- events

    def _apply(self, event: ev.Event, now: float) -> list[fx.Effect]:
        match event:
            case ev.SearchStarted():
                self.phase = AgentPhase.SEARCHING
                return []
            case ev.NothingFound():
                return self._nothing_found(now)
            case ev.Started():
                return self._started(event, now)
            case ev.WorkerSpawned():
                return self._worker_spawned(event)
            case ev.WorkerNotSpawned():
                return self._worker_not_spawned(event, now)
            case ev.WorkerReported():
                return self._worker_reported(event, now)
            case ev.WorkerCompiled():
                return self._worker_compiled(event, now)
            case ev.WorkerRecovered():
                return self._worker_recovered(event)
            case ev.WorkerReportedFailure():
                return self._worker_reported_failure(event)
            case ev.WorkerExited():
                return self._worker_exited(event, now)
            case ev.WorkerFrozen():
                return self._worker_frozen(event)
            case ev.ReplaceRequested():
                return self._replace(event.worker, event.kind, event.message, event.place)
            case ev.GenerationAnnounced():
                return self._generation_announced(event)
            case ev.DismissRequested():
                return self._dismiss_all(now)
            case ev.JobEnded():
                return self._job_ended(event, now)
            case ev.LeaveRequested():
                return self._leave_requested(event, now)
            case ev.DrainRequested():
                return self._drain_requested(event, now)
            case ev.Drained():
                return self._drained(event, now)
            case ev.IncarnationSuperseded():
                return self._incarnation_superseded()
            case ev.CutOff():
                return self._cut_off(event)
            case ev.StopRequested():
                return self._stop_requested(event, now)
            case ev.TimerFired():
                return []
            case _:
                assert_never(event)

    def _nothing_found(self, now: float) -> list[fx.Effect]:
        if self.phase is AgentPhase.SEARCHING:
            self.phase = AgentPhase.WARMING
        return self._take_up_held(now)

    def _started(self, event: ev.Started, now: float) -> list[fx.Effect]:
        if self.phase in (AgentPhase.SEARCHING, AgentPhase.WARMING):
            self.phase = AgentPhase.SERVING
        for worker, pid in event.workers:
            status = WorkerStatus(worker=worker, pid=pid)
            deadline = now + _ADOPTION_S
            self._processes[worker] = Process(status=status, deadline=deadline, adopted=True)
        return self._take_up_held(now)

    def _take_up_held(self, now: float) -> list[fx.Effect]:
        held, self._held = self._held, []
        if self.phase is AgentPhase.ENDING:
            return []
        return [effect for event in held for effect in self._apply(event, now)]

    def _worker_spawned(self, event: ev.WorkerSpawned) -> list[fx.Effect]:
        if process := self._processes.get(event.worker):
            process.status = replace(process.status, pid=event.pid)
        return []

    def _worker_not_spawned(self, event: ev.WorkerNotSpawned, now: float) -> list[fx.Effect]:
        if self._processes.pop(event.worker, None) is not None:
            self._delay_spawning(now)
        return []

    def _worker_reported(self, event: ev.WorkerReported, now: float) -> list[fx.Effect]:
        process = self._processes.get(event.status.worker)
        if process is None:
            return []
        self._script_is_elastic = True
        slot = process.status.slot  # given here: a report sent before it must not undo it
        if process.adopted:
            process.adopted, slot = False, event.status.slot
            process.deadline = now + self._settings.start_timeout_s
        elif slot is None and event.status.slot is not None:
            slot = event.status.slot  # from an earlier agent: it was silent for longer than allowed
            if any(p.status.slot == slot for p in self._processes.values()):
                message = f"reported too late to keep its slot {slot}"
                return self._replace(event.status.worker, FailureKind.LEFT_OUT, message)
        own = process.status  # pid and compiling are not part of its report
        process.status = replace(event.status, slot=slot, pid=own.pid, compiling=own.compiling)
        if process.status.phase not in (WorkerPhase.SPARE, WorkerPhase.PREPARING):
            process.deadline = None
        if self._settings.classic and process.runs:
            self._fruitless = 0
        if event.status.committed > self._most_committed:
            self._most_committed = event.status.committed
            self._fruitless = 0
        if process.status.phase is WorkerPhase.SPARE and slot is not None:
            # Its connection broke before it learned of its slot, or it reported just before that.
            assign = fx.AssignSlot(worker=process.status.worker, slot=slot)
            return [assign, *self._catch_up(process)]
        if self._runs_out and process.runs:  # found after the node was asked to leave
            return [*self._catch_up(process), *self._retire([process], now)]
        return self._catch_up(process)

    def _worker_compiled(self, event: ev.WorkerCompiled, now: float) -> list[fx.Effect]:
        process = self._processes.get(event.worker)
        if process is None:
            return []
        process.status = replace(process.status, compiling=event.committed)
        patient = process.compiled or process.adopted or process.deadline is None
        if event.committed is not None and not patient:
            process.compiled = True
            more_s = self._settings.first_step_s
            process.deadline = (process.deadline or now) + more_s if more_s > 0.0 else None
        return []

    def _worker_recovered(self, event: ev.WorkerRecovered) -> list[fx.Effect]:
        if self._loss is not None and event.generation > self._loss.generation:
            self._loss = None
        return []

    def _worker_reported_failure(self, event: ev.WorkerReportedFailure) -> list[fx.Effect]:
        if process := self._processes.get(event.failure.worker):
            process.reported = event.failure
        return []

    def _worker_exited(self, event: ev.WorkerExited, now: float) -> list[fx.Effect]:
        process = self._processes.get(event.worker)
        if process is None:
            return []
        if event.gone:
            del self._processes[event.worker]
        if process.dying:
            return []
        process.dying, process.deadline = True, None
        if process.ended_well(event) or self.phase is AgentPhase.ENDING:
            return []
        if process.retired:
            own = process.failed_by_itself(event)
            return [fx.ReportFailure(failure=failure_of(process, event))] if own else []
        if self._is_fruitless(process, event):
            self._delay_spawning(now)
        if process.trained and not self._settings.classic and self._survivors():
            known = self._generation.number if self._generation is not None else 0
            self._loss = _Loss(at=now, generation=known, until=now + _ANNOUNCEMENT_S)
        return [fx.ReportFailure(failure=failure_of(process, event))]

    def _worker_frozen(self, event: ev.WorkerFrozen) -> list[fx.Effect]:
        message = f"did not respond for {event.silent_s:.1f} s"
        return self._replace(event.worker, FailureKind.LEFT_OUT, message)

    def _generation_announced(self, event: ev.GenerationAnnounced) -> list[fx.Effect]:
        if not event.generation.is_news_after(self._generation):
            return []
        newest, known = event.generation, self._generation
        if newest.leave_after is None:
            self._before = None
        elif known is None or newest.number > known.number:
            self._before = known
        self._generation = newest
        loss = self._loss
        if loss is not None and event.generation.number > loss.generation:
            goes_on = any(name in event.generation.worker_ids for name in self._survivors())
            loss.until = loss.at + _SURVIVORS_FIRST_S if goes_on else loss.at
        return [
            fx.ForwardGeneration(worker=name, generation=event.generation)
            for name, process in self._processes.items()
            if process.hears_generations
        ]

    def _job_ended(self, event: ev.JobEnded, now: float) -> list[fx.Effect]:
        self._exit_code = event.exit_code
        if event.exit_code == ExitCode.TERMINATED and self._drained_by is not None:
            self._exit_code = ExitCode.DRAINED  # this was the last node that left
        if event.exit_code == 0:
            return self._dismiss_all(now)
        if self.phase is not AgentPhase.ENDING:
            self.phase = AgentPhase.ENDING
            phases = [p.status.phase for p in self._processes.values()]
            grace_s = self._settings.exit_grace_s if WorkerPhase.FINISHED in phases else 0.0
            self._kill_at = now + grace_s
            return self._dismissals(now)
        return []

    def _leave_requested(self, event: ev.LeaveRequested, now: float) -> list[fx.Effect]:
        timeout_s = self._settings.leave_timeout_s
        if self.phase is AgentPhase.SEARCHING:
            self._held.append(event)
            if timeout_s is not None:
                self._leave_within(timeout_s, event.exit_code, now)
            return []
        if self.phase is AgentPhase.WARMING or not self._processes:
            self.phase = AgentPhase.ENDING
            self._exit_code = event.exit_code
            return []
        if timeout_s is not None and not self._may_be_in_a_group():
            self._exit_code = event.exit_code
            return self._end_all(now)
        self._runs_out = self._settings.classic
        retiring = self._retire([p for p in self._processes.values() if p.runs], now)
        if timeout_s is None:
            return [fx.AskToStop(exit_code=event.exit_code, reason=event.reason), *retiring]
        self._leave_within(timeout_s, event.exit_code, now)
        return [fx.AskToLeave(reason=event.reason), *retiring]

    def _leave_within(self, timeout_s: float, exit_code: int, now: float) -> None:
        """Note the first request to leave: a repeated one gives no more time."""
        if self._leave_by is None:
            self._leave_by = now + timeout_s
            self._exit_code = exit_code

    def _drain_requested(self, event: ev.DrainRequested, now: float) -> list[fx.Effect]:
        timeout_s = self._settings.leave_timeout_s
        if event.called_off:
            self._drained_by = None
        elif timeout_s is not None and self._drained_by is None:
            self._drained_by = now + timeout_s
        return []

    def _drained(self, event: ev.Drained, now: float) -> list[fx.Effect]:
        if self._exit_code is None:
            self._exit_code = event.exit_code
        return self._end_all(now)

    def _incarnation_superseded(self) -> list[fx.Effect]:
        self._generation = self._before = None
        message = "was in a group that the store had lost; the job began again without it"
        ended = self._replace_all(message)
        for process in self._processes.values():
            process.retired = True  # neither the worker nor its node has failed
        return ended

    def _cut_off(self, event: ev.CutOff) -> list[fx.Effect]:
        message = (
            f"was cut off from the coordinator and the store for {event.silent_s:.0f} s: the job "
            "may have gone on without it"
        )
        return self._replace_all(message)

    def _replace_all(self, message: str) -> list[fx.Effect]:
        return [
            effect
            for name in list(self._processes)
            for effect in self._replace(name, FailureKind.LEFT_OUT, message)
        ]

    def _stop_requested(self, event: ev.StopRequested, now: float) -> list[fx.Effect]:
        self._exit_code = event.exit_code
        return self._end_all(now)

    # ---- decisions from the whole view

    def _tend(self, now: float) -> list[fx.Effect]:
        """Bring the node to where it should be, whatever happened (level-triggered)."""
        late: list[fx.Effect] = []
        ends_by = self._ends_by()
        if ends_by and now >= min(ends_by):
            if self._exit_code is None:
                self._exit_code = ExitCode.DRAINED
            if self.phase in (AgentPhase.SEARCHING, AgentPhase.SERVING):
                late.append(fx.TellLeaveTimedOut(waited_s=self._waited_to_leave_s(now)))
            self._end_all(now)
        if self.phase is AgentPhase.ENDING:
            return [*late, *self._let_go_of_finished(), *self._wind_up(now)]
        if self.phase is AgentPhase.SEARCHING and ends_by:
            return [fx.SetTimer(at=min(ends_by))]
        if self.phase in (AgentPhase.SEARCHING, AgentPhase.WARMING):
            return []
        effects = [*self._retire_spent(now), *self._let_go_of_finished(), *self._expire(now)]
        if self._loss is not None and now >= self._loss.until:
            self._loss = None
        if not self._adopting() and self._loss is None:
            effects += [*self._fill_slots(now), *self._spawn_missing(now)]
        return [*effects, fx.SetTimer(at=self._next_instant(now))]

    def _fill_slots(self, now: float) -> list[fx.Effect]:
        idle = [p for p in self._processes.values() if p.idle and p.ending is None]
        if not idle or self._runs_out:
            return []
        effects: list[fx.Effect] = []
        taken = {p.status.slot for p in self._processes.values()}
        for slot in range(self._settings.slots):
            if slot in taken or not idle:
                continue
            process = idle.pop(0)
            process.status = replace(process.status, slot=slot)
            process.deadline = now + self._settings.start_timeout_s
            effects.append(fx.AssignSlot(worker=process.status.worker, slot=slot))
        return effects

    def _spawn_missing(self, now: float) -> list[fx.Effect]:
        """Fork the missing workers. Spares only for scripts that are known to wait for a slot: any
        other script would just train."""
        if self._dismissed or self._runs_out or now < self._spawn_not_before:
            return []
        effects: list[fx.Effect] = []
        waits = self._script_is_elastic or self._settings.classic
        wanted = self._settings.slots + (self._settings.spares if waits else 0)
        there = len([p for p in self._processes.values() if not p.retired])
        for _ in range(wanted - there):
            self._spawned += 1
            start = f"-{self._settings.start}" if self._settings.start else ""
            worker = f"{self._settings.node}{start}-{self._spawned}"
            status = WorkerStatus(worker=worker)
            deadline = now + self._settings.start_timeout_s
            self._processes[worker] = Process(status=status, deadline=deadline)
            effects.append(fx.SpawnWorker(worker=worker))
        return effects

    def _expire(self, now: float) -> Iterator[fx.Effect]:
        for process in list(self._processes.values()):
            if process.deadline is None or now < process.deadline:
                continue
            waiting = process.idle or process.ending is not None
            if waiting:
                continue
            if process.adopted:  # it has not called elastic.init() yet, so it has no slot
                process.adopted = False
                process.deadline = now + self._settings.start_timeout_s
                continue
            message = (
                "did not call session.steps() or session.run() within "
                f"{self._settings.start_timeout_s:g} s (--start-timeout-s)"
            )
            yield from self._replace(process.status.worker, FailureKind.START_TIMEOUT, message)

    def _wind_up(self, now: float) -> list[fx.Effect]:
        overdue = self._gone_by is not None and now >= self._gone_by
        if not self._processes or overdue:
            return [fx.SetTimer(at=None), fx.ExitAgent(exit_code=self._exit_code or 0)]
        if self._kill_at is None or now >= self._kill_at:
            effects: list[fx.Effect] = [
                fx.EndWorker(worker=name)
                for name, process in self._processes.items()
                if process.ending is None
            ]
            for name, process in self._processes.items():
                process.ending = process.ending or Failure(worker=name, kind=FailureKind.SIGNAL)
            if self._gone_by is None:
                self._gone_by = now + _GONE_WITHIN_S
            return [*effects, fx.SetTimer(at=self._gone_by)]
        return [fx.SetTimer(at=self._kill_at)]

    def _next_instant(self, now: float) -> float | None:
        instants: list[float] = []
        for p in self._processes.values():
            if p.deadline is not None and not p.idle and p.ending is None:
                instants.append(p.deadline)
            if p.kill_at is not None:
                instants.append(p.kill_at)
        if self._spawn_not_before > now:
            instants.append(self._spawn_not_before)
        if self._loss is not None:
            instants.append(self._loss.until)
        instants += self._ends_by()
        return min(instants) if instants else None

    def _ends_by(self) -> list[float]:
        """The instants at which this node's workers are ended, even in the middle of a step."""
        return [by for by in (self._leave_by, self._drained_by) if by is not None]

    def _waited_to_leave_s(self, now: float) -> float:
        timeout_s = self._settings.leave_timeout_s
        assert timeout_s is not None, "nothing ends by itself where the job is this node's"
        return now - (min(self._ends_by()) - timeout_s)

    # ---- internals

    def _replace(
        self, worker: WorkerId, kind: FailureKind, message: str, place: str = ""
    ) -> list[fx.Effect]:
        process = self._processes.get(worker)
        if process is None or process.ending is not None or process.retired or process.dying:
            return []
        process.ending = Failure(
            worker=worker,
            kind=kind,
            signature=f"{kind.name}: {message}",
            message=message,
            place=place,
        )
        return [fx.EndWorker(worker=worker, how=fx.How.DUMP_AND_KILL)]

    def _delay_spawning(self, now: float) -> None:
        self._fruitless += 1
        delay_s = self._settings.backoff.delay_s(self._fruitless)
        self._spawn_not_before = max(self._spawn_not_before, now + delay_s)

    def _retire_spent(self, now: float) -> list[fx.Effect]:
        """Ask classic workers to end if their group is gone; kill those that do not in time."""
        newest = self._generation
        if not self._settings.classic or newest is None:
            return []
        effects: list[fx.Effect] = []
        for name, process in self._processes.items():
            process.group = max(process.group, process.status.generation)
            if name in newest.worker_ids:
                process.group = newest.number
            elif process.group:
                effects += self._retire([process], now)
            if process.kill_at is not None and now >= process.kill_at:
                process.kill_at = None
                effects.append(fx.EndWorker(worker=name))
        return effects

    def _let_go_of_finished(self) -> list[fx.Effect]:
        """Dismiss the retired workers when the scripts of all of them have ended. Before that the
        others may need the store of their group, which a finished one may host."""
        retired = [p for p in self._processes.values() if p.retired]
        if any(p.status.phase is not WorkerPhase.FINISHED for p in retired):
            return []
        news = [p for p in retired if not p.let_go]
        for process in news:
            process.let_go = True
        return [fx.DismissWorker(worker=p.status.worker) for p in news]

    def _retire(self, processes: Iterable[Process], now: float) -> list[fx.Effect]:
        """Ask these workers to end if they run a classic script."""
        asked = [p for p in processes if not p.retired and p.ending is None]
        if not self._settings.classic:
            return []
        for process in asked:
            process.retired, process.deadline = True, None
            process.kill_at = now + self._settings.end_grace_s
        return [fx.EndWorker(worker=p.status.worker, how=fx.How.TERMINATE) for p in asked]

    def _is_fruitless(self, process: Process, exited: ev.WorkerExited) -> bool:
        """True if the next start should be delayed. A classic worker that ran counts as fruitful,
        because its progress is unknown: only the job's budget bounds its restarts."""
        if self._settings.classic:
            return not process.runs
        by_itself = exited.signal == 0 and not exited.unseen
        return process.status.phase is not WorkerPhase.SPARE or by_itself

    def _catch_up(self, process: Process) -> list[fx.Effect]:
        """Tell a worker about the newest generation if it may take part and may not know it."""
        newest = self._generation
        if newest is None or not process.hears_generations:
            return []
        status = process.status
        knows = status.acknowledged >= newest.number
        waits = status.queues and newest.leave_after is None and status.generation < newest.number
        if knows and not (waits and not newest.provisional):  # it may know the provisional form
            return []
        return [fx.ForwardGeneration(worker=process.status.worker, generation=newest)]

    def _may_be_in_a_group(self) -> bool:
        found = any(p.adopted or p.status.generation for p in self._processes.values())
        return found or self._generation is not None

    def _end_all(self, now: float) -> list[fx.Effect]:
        self.phase = AgentPhase.ENDING
        self._kill_at = now
        return []

    def _dismiss_all(self, now: float) -> list[fx.Effect]:
        if self.phase is AgentPhase.ENDING:
            return []
        self._dismissed = True
        self.phase = AgentPhase.ENDING
        self._exit_code = self._exit_code or 0
        self._kill_at = now + self._settings.exit_grace_s
        return self._dismissals(now)

    def _dismissals(self, now: float) -> list[fx.Effect]:
        """Dismiss workers whose scripts have ended, and end the others at once; ask classic scripts
        that still run to end, within `end_grace_s`."""
        asked: list[fx.Effect] = []
        if self._settings.classic and any(p.runs for p in self._processes.values()):
            asked = self._retire([p for p in self._processes.values() if p.runs], now)
            self._kill_at = now + self._settings.end_grace_s
        return asked + [
            fx.DismissWorker(worker=name)
            if process.status.phase is WorkerPhase.FINISHED
            else fx.EndWorker(worker=name)
            for name, process in self._processes.items()
            if not process.retired
        ]

    def _survivors(self) -> list[WorkerId]:
        found = self._processes.items()
        return [name for name, p in found if p.trained and p.ending is None and not p.dying]

    def _adopting(self) -> bool:
        return any(p.adopted for p in self._processes.values())

    def _view(self) -> tuple[WorkerStatus, ...] | None:
        """The report for the coordinator. None while it is unknown what adopted workers do: if they
        were reported as starting, the group in which they train would leave them out."""
        present = [p.status for p in self._processes.values() if not p.dying]
        return None if self._adopting() else tuple(present)


_RUNNING = (WorkerPhase.JOINING, WorkerPhase.TRAINING)


@dataclass(slots=True)
class Process:
    """A worker process, from the request to fork it until it is gone."""

    status: WorkerStatus
    deadline: float | None = None
    """Until when the worker must ask for a group, or report if it is adopted."""
    adopted: bool = False
    """An earlier agent left the worker, and it has not reported to this one: it may have a slot."""
    ending: Failure | None = None
    """Why this agent ends the worker, if it does."""
    dying: bool = False
    """It was killed, and its failure is reported, but it keeps its slot until it is gone."""
    reported: Failure | None = None
    """What the script raised, if it did."""
    group: int = 0
    """The newest generation of which the worker is or was a member."""
    compiled: bool = False
    """The script was seen to run torch.compile, so the worker got more time."""
    retired: bool = False
    """The worker was asked to end together with its group. Doing so is no failure."""
    let_go: bool = False
    """The worker is retired and finished, and was told that nobody needs it any more."""
    kill_at: float | None = None
    """When the retired worker is killed if it still runs."""

    @property
    def idle(self) -> bool:
        is_spare = self.status.phase is WorkerPhase.SPARE and self.status.slot is None
        return is_spare and not self.dying

    @property
    def runs(self) -> bool:
        return self.status.phase in _RUNNING

    @property
    def trained(self) -> bool:
        """The script is or was in a group, and has not ended."""
        return self.status.generation > 0 and self.status.phase is not WorkerPhase.FINISHED

    @property
    def hears_generations(self) -> bool:
        """The worker has a slot, so it may become a member."""
        return self.status.phase not in (WorkerPhase.STARTING, WorkerPhase.SPARE)

    def ended_well(self, exited: ev.WorkerExited) -> bool:
        clean = exited.unseen or (exited.exit_code == 0 and exited.signal == 0)
        return clean and self.status.phase is WorkerPhase.FINISHED

    def failed_by_itself(self, exited: ev.WorkerExited) -> bool:
        """True if this retired worker did not end because it was asked to.

        Its end may even be what broke the group, if its peers were the first to report. A worker
        reports a failure only if its script failed before it was asked to end.
        """
        killed = exited.signal == signal.SIGKILL and self.kill_at is not None
        return self.ending is None and (self.reported is not None or killed)


def failure_of(process: Process, exited: ev.WorkerExited) -> Failure:
    """Why the process ended: this agent's decision, else what the script raised, else what the
    kernel says."""
    if process.ending is not None:
        return process.ending
    if process.reported is not None and exited.signal == 0:
        return process.reported
    worker = process.status.worker
    if exited.unseen:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            signature="ended unseen",
            message="ended in an unknown way: the zygote does not answer",
        )
    if exited.signal == signal.SIGKILL and exited.out_of_memory:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=exited.signal,
            signature="out of memory",
            message=(
                f"was ended by {signal_name(exited.signal)}: the kernel had no memory left for the "
                "processes of this node; raise its memory limit, or reduce what the script uses"
            ),
        )
    if exited.signal:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=exited.signal,
            signature=f"signal {exited.signal}",
            message=f"was ended by {signal_name(exited.signal)}"
            + (": the zygote, which starts the node's workers, had ended" * exited.with_zygote),
        )
    return Failure(
        worker=worker,
        kind=FailureKind.EXIT_CODE,
        code=exited.exit_code,
        signature=f"exit code {exited.exit_code}",
        message=f"ended with exit code {exited.exit_code} before its script was done",
    )
