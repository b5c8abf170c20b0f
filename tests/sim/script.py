"""The training script of a simulated worker: what the user's loop does through `session.steps`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from elastic.core.data_order import SampleRange
from elastic.core.membership import Generation, Purpose
from elastic.core.recovery import Declaration, RecoveryPlan, plan_recovery
from elastic.core.worker.machine import HOLD_S
from tests.sim.group import RENDEZVOUS, Group, GroupLost
from tests.sim.replica import Replica
from tests.sim.thread import Body, Wait

if TYPE_CHECKING:
    from tests.sim.process import Process


class View(NamedTuple):
    """What a member brings to the agreement; `replica` is None if it does not hold the state."""

    replica: Replica | None
    checkpoint: Replica
    """The newest committed checkpoint that it sees."""

    @property
    def declaration(self) -> Declaration:
        held = self.replica or Replica()
        return Declaration(
            committed=held.committed,
            committed_in=held.generation,
            intact=self.replica is not None,
            signature=0,
        )


class Script:
    """One worker's script. Its points are named, so that a fault can strike there."""

    plan: Callable[[Sequence[Declaration]], RecoveryPlan] = staticmethod(plan_recovery)

    def __init__(self, process: Process) -> None:
        self.process = process
        self.clock = process.clock
        self.job = process.world.job

    def run(self) -> Body:
        process, worker = self.process, self.process.worker
        yield self._takes(process.world.pace.start_s)
        process.tell(worker.attached())
        process.reach("attached")
        while process.slot is None:
            yield Wait.NEWS
        process.reach("assigned")
        yield self._takes(process.world.pace.prepare_s)
        process.tell(worker.prepared(process.endpoint))
        process.reach("prepared")
        while not process.done:
            generation = worker.joinable()
            if generation is None:
                yield Wait.NEWS
            else:
                yield from self._take_part(generation)
        process.reach("done")
        yield self._takes((0.0, 0.05))
        process.tell(worker.finished(process.committed))
        process.world.journal.finished_at[process.name] = self.clock.now
        while not process.dismissed:
            yield Wait.NEWS
        process.end(exit_code=0)

    def _take_part(self, generation: Generation) -> Body:
        process, worker = self.process, self.process.worker
        yield self._takes((0.0, 0.001))  # what is announced meanwhile must not be missed
        process.tell(worker.join_began(generation))
        group = process.enter(generation)
        process.reach("join")
        try:
            if worker.superseded():
                raise GroupLost("superseded")
            yield from group.collective(RENDEZVOUS, process)
            yield from self._agree(group, generation)
            yield from self._train(group, generation)
        except GroupLost as lost:
            process.leave_group(broken=True)
            process.world.journal.broke.add(generation.number)
            process.tell(worker.group_broke(process.committed, str(lost)))
            return
        process.leave_group()
        if not process.done:
            process.tell(worker.group_left(process.committed))

    def _agree(self, group: Group, generation: Generation) -> Body:
        process = self.process
        process.reach("agree")
        process.world.declared(process, generation)
        own = View(process.replica, process.world.storage.newest)
        views: dict[str, View] = yield from group.collective("agree", process, own)
        by_rank = [views[m.worker] for m in generation.members]
        plan = type(self).plan([v.declaration for v in by_rank])
        if plan.committed is None:  # rank 0 restores: others may see a newer checkpoint by now
            chosen = by_rank[0].checkpoint
            yield self._takes((0.01, 0.1))
        else:
            targets = {t.target for t in plan.transfers}
            own_rank = generation.rank_of(process.name)
            source = min(set(range(len(by_rank))) - targets)
            chosen = by_rank[source if own_rank in targets else own_rank].replica
        if plan.transfers:
            yield from self._transfer(group, chosen)
        process.begin_generation(generation, chosen)
        process.tell(process.worker.joined(generation, chosen.committed))
        process.reach("joined")

    def _transfer(self, group: Group, chosen: Replica) -> Body:
        """Those behind receive the state; one that is interrupted holds nothing whole."""
        if self.process.replica != chosen:
            self.process.replica = None
            self.process.tell(self.process.worker.state_dropped())
        self.process.reach("transfer")
        yield from group.collective("transfer", self.process, took_s=0.05)

    def _train(self, group: Group, generation: Generation) -> Body:
        process = self.process
        if generation.purpose is Purpose.SAVE_AND_LEAVE:
            yield from self._save_and_leave(generation)
            return
        save = generation.save_first
        while not process.done:
            replica = process.held
            if save or (self.job.saves and replica.committed % self.job.save_every == 0):
                process.save(generation)
                save = False
            if (yield from self._leaves_here(replica.committed)):
                return
            samples = self.job.samples_after(replica.position, generation.world_size)
            if samples is None:
                yield from self._end(group, generation)
                return
            else:
                yield from self._step(group, generation, samples)

    def _end(self, group: Group, generation: Generation) -> Body:
        """After the last step: meet, since a member that is behind needs another's state, and keep
        the result, as Session does it."""
        self.process.reach("meet")
        yield from group.collective("meet", self.process)
        self.process.reach("met")
        if not self.job.saves:
            self.process.done = True
        elif not self.process.worker.must_leave(self.process.committed):
            yield from self._save_and_leave(generation)

    def _leaves_here(self, committed: int) -> Body:
        """At a step boundary, as Membership.leaves_here does it."""
        worker, until = self.process.worker, self.clock.now + HOLD_S
        if worker.holds(committed):
            self.process.note("holds", committed)
            self.clock.at(until, self.process.thread.nudge)
        while worker.holds(committed):
            if self.clock.now >= until:
                return True
            yield Wait.NEWS
        return worker.must_leave(committed)

    def _step(self, group: Group, generation: Generation, samples: SampleRange) -> Body:
        process = self.process
        process.begin_step()
        process.reach("step")
        yield self._takes(process.world.pace.step_s)
        yield from self._reduce(group)
        process.reach("reduced")
        process.commit(generation, samples)
        process.reach("committed")
        if samples.stop == self.job.length and self.clock.chance(process.world.pace.evaluates):
            yield self._takes((0.1, process.world.pace.evaluation_s))

    def _reduce(self, group: Group) -> Body:
        yield from group.collective(("step", self.process.committed), self.process)

    def _save_and_leave(self, generation: Generation) -> Body:
        """Save, and stay until the checkpoint is whole, can not be, or a newer generation takes
        over: as Checkpointing.save_and_wait does it."""
        process = self.process
        process.abandoned_step = -1
        process.save(generation)
        while process.committed not in {*process.stored_steps, process.abandoned_step}:
            if process.worker.must_leave(process.committed):
                return
            yield Wait.NEWS
        process.done = True

    def _takes(self, bounds: tuple[float, float]) -> float:
        return self.clock.between(*bounds)
