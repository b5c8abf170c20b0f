"""One simulated worker process: the real Worker machine, its link to the agent, its script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic.core.agent import events as ev
from elastic.core.coordinator.events import ProgressReported, ShardReported
from elastic.core.data_order import SampleRange
from elastic.core.membership import Failure, FailureKind, Generation, WorkerId, WorkerPhase
from elastic.core.worker.machine import AbortGroup, Effect, Worker
from tests.sim.clock import Link
from tests.sim.group import Group
from tests.sim.replica import Replica
from tests.sim.thread import Thread

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

PROGRESS_EVERY_S = 0.5


class Struck(Exception):
    """A fault strikes at a point of the script."""


class ScriptError(Exception):
    """The user's script raised."""


class Process:
    """A worker from its fork to its exit."""

    def __init__(self, world: World, node: Node, name: WorkerId, pid: int) -> None:
        self.world, self.node, self.name, self.pid = world, node, name, pid
        self.clock = world.clock
        self.worker: Worker = world.parts.worker(name, pid=pid)
        self.endpoint = f"{node.name}:{pid}"
        self.up = Link(self.clock, 0.0001, 0.002)
        self.down = Link(self.clock, 0.0001, 0.002)
        self.alive = True
        self.frozen = False
        self.deaf = False
        self.slot: int | None = None
        self.started_at = self.clock.now
        self.replica: Replica | None = None
        self.begun = 0
        self.in_step_since: float | None = None
        self.stored_steps: set[int] = set()
        self.abandoned_step = -1
        self._unsettled: dict[int, ShardReported] = {}
        self._written_at = 0.0
        self.dismissed = False
        self.done = False
        self._group: Group | None = None
        self._exit_code = 0
        self.thread = Thread(self.clock, world.parts.script(self).run(), self._raised)

    # ---- what the script asks for

    @property
    def held(self) -> Replica:
        """Its replica, once it has taken part."""
        assert self.replica is not None
        return self.replica

    @property
    def committed(self) -> int:
        return self.replica.committed if self.replica is not None else self.worker.status.committed

    @property
    def responsive(self) -> bool:
        """Alive, and its state can still be had."""
        return self.alive and not self.frozen

    def tell(self, effects: Sequence[Effect]) -> None:
        """Do what the machine wants."""
        for effect in effects:
            if isinstance(effect, AbortGroup):
                self._abort(effect.generation)
            else:
                self.note("reports", effect.status.phase.name, effect.status.generation)
                if effect.status.phase is WorkerPhase.READY:
                    self.world.journal.ready_at.setdefault(self.name, self.clock.now)
                self.up.send(self.node.tell, ev.WorkerReported(status=effect.status))

    def reach(self, point: str) -> None:
        """The script is at a named point: faults may strike."""
        self.world.faults.reached(self, point)

    def enter(self, generation: Generation) -> Group:
        self._group = self.world.group_of(generation)
        return self._group

    def leave_group(self, *, broken: bool = False) -> None:
        self.in_step_since = None
        group, self._group = self._group, None
        if group is not None and broken:
            group.abort(self)
        elif group is not None:
            group.leave(self)

    def begin_generation(self, generation: Generation, replica: Replica) -> None:
        self.world.agreed(self, generation, replica)
        self.replica = replica
        self.begun = replica.committed
        if generation.rank_of(self.name) == 0:
            self._report_progress(generation, self._group)

    def begin_step(self) -> None:
        self.begun = self.committed + 1
        self.in_step_since = self.clock.now

    def commit(self, generation: Generation, samples: SampleRange) -> None:
        before = self.held.lineage
        self.replica = self.held.commit(generation.number, samples)
        self.in_step_since = None
        self.worker.committed(self.replica.committed)
        self.world.committed(self, generation, samples, before)

    def save(self, generation: Generation) -> None:
        """Copy the state and write this rank's part in the background, after the part before."""
        rank = generation.rank_of(self.name)
        self._written_at = max(self._written_at, self.clock.now) + self.clock.between(0.005, 0.3)
        self.clock.at(self._written_at, self._saved, generation, rank, self.replica)
        self.reach("saving")

    # ---- what the agent says

    def assigned(self, slot: int) -> None:
        if not self.deaf:
            self.slot = slot
            self.tell(self.worker.assigned(slot))
            self.thread.nudge()

    def generation_announced(self, generation: Generation) -> None:
        if self.deaf:
            return
        self.tell(self.worker.generation_announced(generation))
        self.thread.nudge()

    def checkpoint_settled(self, step: int, abandoned: bool) -> None:
        if self.deaf:
            return
        self._unsettled = {at: sent for at, sent in self._unsettled.items() if at > step}
        if abandoned:
            self.abandoned_step = step
        else:
            self.stored_steps.add(step)
        self.thread.nudge()

    def report_again(self) -> None:
        """The agent or the coordinator is new."""
        if self.deaf or not self.alive:
            return
        if self.worker.status.phase is not WorkerPhase.STARTING:
            self.up.send(self.node.tell, ev.WorkerReported(status=self.worker.status))
        for shard in self._unsettled.values():
            self.up.send(self.node.shard_saved, shard)

    def answer_probe(self) -> None:
        """Where this member is, at this moment."""
        group = self._group
        if self.alive and not self.deaf and group is not None:
            self.up.send(self.node.progressed, self._progress(group.generation, probed=True))

    def dismiss(self) -> None:
        self.dismissed = True
        if not self.deaf:
            self.thread.nudge()

    # ---- its end

    def end(self, *, exit_code: int = 0, signal: int = 0, silent: bool = False) -> None:
        """The process is gone; the agent learns of it unless the whole node is."""
        if not self.alive:
            return
        self.alive = False
        self.thread.stop()
        self.down.open = False
        if self._group is not None:
            self._group.leave(self, died=True, silent=silent)
        self.note("ends", exit_code, signal)
        self.world.journal.gone_at.setdefault(self.name, self.clock.now)
        self.up.send(
            self.node.exited, ev.WorkerExited(worker=self.name, exit_code=exit_code, signal=signal)
        )

    def freeze(self, *, deaf: bool) -> None:
        """The script's thread never runs again; `deaf`: nor does any other of the process."""
        self.frozen = True
        self.deaf = deaf
        self.thread.stop()
        self.note("freezes", deaf)
        self.world.journal.gone_at.setdefault(self.name, self.clock.now)

    def break_link(self) -> None:
        if self._group is not None:
            self._group.break_link(self)

    def note(self, what: str, *details: object) -> None:
        self.world.journal.note(self.clock.now, self.name, what, *details)

    def _abort(self, generation: int) -> None:
        self.note("aborts", generation)
        if self._group is not None:
            self._group.abort(self)

    def _saved(self, generation: Generation, rank: int, replica: Replica) -> None:
        if self.alive and not self.deaf:
            if replica in self.world.storage.committed[-1:]:  # by the group before
                self.checkpoint_settled(replica.committed, False)
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
        since = self.in_step_since
        return ProgressReported(
            generation=generation.number,
            committed=self.committed,
            step_s=self.world.pace.reported_step_s,
            in_step_s=self.clock.now - since if since is not None else 0.0,
            probed=probed,
        )

    def _raised(self, error: Exception) -> None:
        if isinstance(error, Struck):
            return
        if not isinstance(error, ScriptError):
            raise error  # a mistake of the simulation, or a broken invariant
        failure = Failure(
            worker=self.name,
            kind=FailureKind.EXCEPTION,
            code=1,
            signature=str(error),
            message=str(error),
        )
        self.up.send(self.node.tell, ev.WorkerReportedFailure(failure=failure))
        self.end(exit_code=1)
