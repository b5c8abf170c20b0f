"""One simulated worker process: the real Worker machine, its link to the agent, its script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.core.agent import events as ev
from elastic.core.coordinator.events import ProgressReported, ShardReported
from elastic.core.membership import (
    Failure,
    FailureKind,
    Generation,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)
from elastic.core.worker.machine import AbortGroup, Effect, FreezeGroup, Worker
from elastic.errors import ConfigurationError, ElasticError, GroupLost, StateLost, Stranded
from tests.sim.clock import Link
from tests.sim.group import Group
from tests.sim.replica import Replica, Samples
from tests.sim.thread import ScriptError, Thread

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

PROGRESS_EVERY_S = 0.5
_COMPILES_AGAIN = 0.003  # the share of the later steps that compile


class Struck(Exception):
    """Leaves a script at the point where a fault ends or freezes its process."""


class Process:
    """A worker from its fork to its exit."""

    def __init__(self, world: World, node: Node, name: WorkerId, pid: int) -> None:
        self.world, self.node, self.name, self.pid = world, node, name, pid
        self.clock = world.clock
        self._points = world.faults.points
        self._trace = world.journal.trace
        self.worker: Worker = world.parts.worker(name, pid=pid)
        self.endpoint = f"{node.name}:{pid}"
        self.up = Link(self.clock, 0.0001, 0.002)
        self.down = Link(self.clock, 0.0001, 0.002)
        self.alive, self.ended_at = True, math.inf
        self.epoch = node.epoch
        self.frozen = False
        self.deaf = False
        self.attached_at = self.assigned_at = math.inf
        self.has_agent = True
        self.known_to, self.known_since = 0, math.inf
        """The number of the agent that it has reported to, and since when; the first agent is 1."""
        self.to_end = False
        """Its agent has decided to end it."""
        self.told_in_run = False
        self.slot: int | None = None
        self.started_at = self.clock.now
        self.replica: Replica | None = None
        self.begun = 0
        self.in_step_since: float | None = None
        self.slow_s = 0.0
        """How long the step that the script is about to compute takes in addition."""
        self.set_up_since: float | None = None
        self.compares_since: float | None = None
        self._first_step = True
        self._has_compiled = False
        self._settled: dict[int, bool] = {}
        self._last_save = (0, 0)
        self._unsettled: dict[int, ShardReported] = {}
        self._written_at = 0.0
        self.dismissed = False
        self.done = False
        self.ready_since = math.inf
        """Since when it waits for a group; infinity if it does not."""
        self._group: Group | None = None
        self._kept: Group | None = None
        """A frozen group that the script has left, if collectives are queued."""
        self.has_garbage = False
        """Its last step took garbage."""
        self.is_doubtful = False
        """Another member aborted their group while this one was not frozen."""
        self._exit_code = 0
        self.script = world.parts.script(self)
        self.thread = Thread(self.clock, self.script.run(), self._raised)

    # ---- what the script asks for

    @property
    def committed(self) -> int:
        return self.script.part.progress.committed

    @property
    def responsive(self) -> bool:
        """True if the process is alive and its state can still be obtained."""
        return self.alive and not self.frozen

    def tell(self, effects: Sequence[Effect]) -> None:
        """Carry out the effects of the worker's machine."""
        for effect in effects:
            if isinstance(effect, AbortGroup):
                self._abort(effect.generation)
            elif isinstance(effect, FreezeGroup):
                if self._group is not None:
                    self._group.freeze(self)
            else:
                self._report(effect.status)

    def _report(self, status: WorkerStatus) -> None:
        now, journal = self.clock.now, self.world.journal
        self.note("reports", status.phase, status.generation)
        self.attached_at = min(self.attached_at, now)
        self._take_back(status.in_run)
        if status.has_state and self.is_torn and not self.is_doubtful:
            journal.false_claims.append(f"{self.name} at {now:.4f}")
        if status.phase is not WorkerPhase.READY:
            self.ready_since = math.inf
        else:
            self.ready_since = min(self.ready_since, now)
            journal.ready_at.setdefault(self.name, now)
        if self.has_agent:
            self.up.send(self.node.tell, ev.WorkerReported(status=status))

    def _take_back(self, in_run: bool) -> None:
        """Note the end of a call as others learn of it. It is not reported by itself: until the
        next report others believe that the worker is inside the call."""
        if self.told_in_run and not in_run:
            self.script.left_call_at = self.clock.now
        self.told_in_run = in_run

    def reach(self, point: str) -> None:
        """The script is at a named point: faults may strike."""
        if point in self._points:
            self.world.faults.reached(self, point)

    @property
    def group(self) -> Group:
        """The group that the script is in or joins. Raises GroupLost if there is none."""
        if self._group is None:
            raise GroupLost("there is no group")
        return self._group

    def is_in(self, generation: Generation) -> bool:
        """True if the script is in the group of `generation`, or joins it."""
        return self._group is not None and self._group.generation.number == generation.number

    def enter(self, generation: Generation) -> Group:
        if self._kept is not None:
            self._kept.abort(self)
            self._kept = None
        self._group = self.world.group_of(generation)
        return self._group

    def leave_group(self, *, broken: bool = False) -> None:
        self.in_step_since = self.set_up_since = None
        group, self._group = self._group, None
        if group is not None and self.world.job.queues:
            group.freeze(self)
            self._kept = group
        elif group is not None and broken:
            group.abort(self)
        elif group is not None:
            group.leave(self)

    def agreed(self, generation: Generation, replica: Replica) -> None:
        if self.is_doubtful:
            self.is_doubtful, self.has_garbage, self.begun = False, False, 0
        self.world.agreed(self, generation, replica)
        self.begun = replica.committed

    def sets_up(self, generation: Generation) -> None:
        """The setup for training begins, which counts as a part of the first step."""
        self._first_step = True
        self.set_up_since = self.clock.now
        if generation.rank_of(self.name) == 0:
            self._report_progress(generation, self._group)

    def drop(self) -> None:
        """The state that the process holds must not be used any more."""
        self.replica, self.begun = None, 0

    @property
    def is_torn(self) -> bool:
        """True while another state overwrites its own, or if a block could not be undone."""
        return self.replica is None and self.script.postponed is None

    def held_in_vain(self) -> None:
        """A planned change was not settled in time."""
        following = self.worker.following
        if following is not None:
            held = (self.clock.now, self.name, following.number)
            self.world.journal.held_in_vain.append(held)

    def begin_step(self) -> None:
        self.begun = self.committed + 1
        self.in_step_since = self.clock.now

    def begins_to_compile(self) -> bool:
        """True, after a report, in the first step and in others for which there is no code yet."""
        if self._has_compiled and not self.clock.chance(_COMPILES_AGAIN):
            return False
        self._has_compiled = True
        self.report_compiling(self.committed)
        return True

    def report_compiling(self, committed: int | None) -> None:
        compiled = ev.WorkerCompiled(worker=self.name, committed=committed)
        self.up.send(self.node.tell, compiled)

    def commit(self, samples: Samples, before: int, replica: Replica) -> None:
        self.in_step_since = None
        if self.has_garbage:
            self.note("commits garbage", replica.committed)
            return
        self.replica = None if self.is_doubtful else replica  # it will be given another one
        if self._first_step:
            generation = self.worker.status.generation
            recovered = ev.WorkerRecovered(worker=self.name, generation=generation)
            self.up.send(self.node.tell, recovered)
        self._first_step = False
        self.world.committed(self, samples, before, replica)

    def save(self, generation: Generation, replica: Replica) -> None:
        """Copy the state and write this rank's part in the background, after its previous part."""
        self._last_save = (replica.committed, generation.number)
        self.world.journal.saving.add((self.name, generation.number, replica.committed))
        self._settled.pop(replica.committed, None)
        rank = generation.rank_of(self.name)
        self._written_at = max(self._written_at, self.clock.now) + self.clock.between(0.005, 0.3)
        self.clock.at(self._written_at, self._saved, generation, rank, replica)
        self.reach("saving")

    def has_begun_to_save(self, step: int, generation: Generation) -> bool:
        return self._last_save == (step, generation.number)

    def is_settled(self, step: int) -> bool:
        """The checkpoint is known to be committed, or abandoned."""
        return step in self._settled

    def is_saved(self, step: int) -> bool:
        return self._settled.get(step, False)

    # ---- what the agent says

    def assigned(self, slot: int) -> None:
        if not self.deaf:
            self.slot, self.assigned_at = slot, self.clock.now
            self.tell(self.worker.assigned(slot))
            self.thread.nudge()

    def generation_announced(self, generation: Generation) -> None:
        if self.deaf:
            return
        self.tell(self.worker.generation_announced(generation))
        self.thread.nudge()
        if self.worker.is_out_of_time:
            self.clock.after(self.clock.between(0.5, 0.8), self._leave_block)

    def _leave_block(self) -> None:
        """Stop the script's thread in its block, and have another one save and leave, like
        AgentControl and worker/script_thread.py."""
        if self.alive and not self.frozen and self.script.can_be_given_up:
            self.script.can_be_given_up = False
            self.thread.stop()
            self.note("leaves its block", self.committed)
            self.thread = Thread(self.clock, self.script.leave_early(), self._raised)
            self.thread.start()

    def checkpoint_settled(self, step: int, abandoned: bool, generation: int) -> None:
        """`generation`: that of the group whose save is committed or given up."""
        saves_in_another = self._last_save[0] == step and self._last_save[1] != generation
        if self.deaf or (abandoned and saves_in_another):
            return
        self._unsettled = {at: sent for at, sent in self._unsettled.items() if at > step}
        self._settled[step] = not abandoned
        self.thread.nudge()

    def find_agent(self, agents: int) -> None:
        """Connect to the node's agent with the number `agents`, if no other has followed it."""
        if self.node.is_agent(agents):
            self.has_agent = True
            self.report_again()

    def report_again(self) -> None:
        """Repeat the status and unsettled saves, as the agent or the coordinator is new."""
        if self.deaf or not self.alive or not self.has_agent:
            return
        if self.worker.status.phase is not WorkerPhase.STARTING:
            self.up.send(self.node.tell, ev.WorkerReported(status=self.worker.status))
        for shard in self._unsettled.values():
            self.up.send(self.node.shard_saved, shard)

    def answer_probe(self) -> None:
        group = self._group
        if self.alive and not self.deaf and group is not None:
            self.up.send(self.node.progressed, self._progress(group.generation, probed=True))

    def dismiss(self) -> None:
        self.dismissed = True
        if not self.deaf:
            self.thread.nudge()

    # ---- its end

    def end(self, *, exit_code: int = 0, signal: int = 0, silent: bool = False) -> None:
        """End the process. The agent learns of it unless the whole node is lost."""
        if not self.alive:
            return
        self.alive, self.ended_at = False, self.clock.now
        self.thread.stop()
        self.down.open = False
        self.note("ends", exit_code, signal)
        self.world.journal.gone_at.setdefault(self.name, self.clock.now)
        exited = ev.WorkerExited(worker=self.name, exit_code=exit_code, signal=signal)
        if signal and not silent and self.clock.chance(0.3):  # the kernel frees its memory first
            self.up.send(self.node.exited, replace(exited, gone=False))
            self.clock.after(self.clock.between(0.0, 1.5), self._gone, exited)
        else:
            self._gone(exited, silent=silent)

    def _gone(self, exited: ev.WorkerExited, *, silent: bool = False) -> None:
        """The process's connections break, and its parent can reap it."""
        if self._group is not None:
            self._group.leave(self, died=True, silent=silent or not self.node.alive)
        self.up.send(self.node.exited, exited)

    def freeze(self, *, deaf: bool) -> None:
        """Stop the script's thread for good; `deaf`: all other threads of the process, too."""
        self.frozen = True
        self.deaf = deaf
        self.thread.stop()
        self.note("freezes", deaf)
        self.world.journal.gone_at.setdefault(self.name, self.clock.now)

    def break_link(self) -> None:
        if self._group is not None:
            self._group.break_link(self)

    def note(self, what: str, *details: object) -> None:
        self._trace.append((self.clock.now, self.name, what, *details))

    def _abort(self, generation: int) -> None:
        self.note("aborts", generation)
        group = self._group or self._kept
        if group is not None and group.generation.number == generation:
            group.abort(self)

    def _saved(self, generation: Generation, rank: int, replica: Replica) -> None:
        if self.alive and not self.deaf:
            if self.world.storage.newest.lineage == replica.lineage:  # by an earlier group
                self.checkpoint_settled(replica.committed, False, generation.number)
                return
            self.world.storage.put_shard(generation, rank, replica)
            shard = ShardReported(
                worker=self.name,
                generation=generation.number,
                step=replica.committed,
                index=rank,
                count=generation.world_size,
            )
            self._unsettled[replica.committed] = shard
            self.up.send(self.node.shard_saved, shard)

    def _report_progress(self, generation: Generation, group: Group | None) -> None:
        if not self.alive or self.deaf or group is not self._group:
            return
        self.up.send(self.node.progressed, self._progress(generation))
        self.clock.after(PROGRESS_EVERY_S, self._report_progress, generation, group)

    def _progress(self, generation: Generation, *, probed: bool = False) -> ProgressReported:
        since = self.set_up_since if self.set_up_since is not None else self.in_step_since
        return ProgressReported(
            generation=generation.number,
            committed=self.committed,
            step_s=self.world.pace.reported_step_s,
            in_step_s=self.clock.now - since if since is not None else 0.0,
            probed=probed,
            first_step=self._first_step,
        )

    def _raised(self, error: Exception) -> None:
        if isinstance(error, Struck):
            return
        if not isinstance(error, (ScriptError, ElasticError)):
            raise error  # a mistake of the simulation, or a broken invariant
        self.world.journal.raised(self.clock.now, self.name, error)
        if isinstance(error, StateLost) and not self.world.somebody_holds_state():
            self.world.journal.nobody_held_state = True
        failure = Failure(
            worker=self.name,
            kind=FailureKind.LEFT_OUT if isinstance(error, Stranded) else FailureKind.EXCEPTION,
            code=1,
            signature=str(error) if isinstance(error, ScriptError) else type(error).__name__,
            message=str(error),
            retryable=not isinstance(error, (ConfigurationError, StateLost)),
            state_lost=isinstance(error, StateLost),
        )
        self.up.send(self.node.tell, ev.WorkerReportedFailure(failure=failure))
        self.end(exit_code=1)
