"""The checkers can fail: each mistake put into a machine or a script is found by its checker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.agent.machine import Agent
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator.machine import Coordinator
from elastic.core.membership import Generation
from elastic.core.recovery import Declaration, RecoveryPlan, plan_recovery
from elastic.core.worker.machine import AbortGroup, Effect, Worker
from tests.sim.group import Group
from tests.sim.history import check
from tests.sim.script import Script
from tests.sim.thread import Body
from tests.sim.world import Parts


class ReusesNumbers(Coordinator):
    def _form(self, *arguments: Any) -> list[fx.Effect]:
        effects = super()._form(*arguments)
        self._number -= self._number == 3
        return effects


class SettlesWithoutWaiting(Coordinator):
    """Never mind who has heard of a planned change."""

    def _settle_planned(self) -> list[fx.Effect]:
        planned = self._current
        if planned is None or not planned.provisional:
            return []
        settled = replace(planned, provisional=False)
        self._make_current(settled)
        return [fx.SettleGeneration(generation=settled)]


class KeepsTheFirstEstimate(Coordinator):
    """Never mind how far those were who have heard of it."""

    def _settle_planned(self) -> list[fx.Effect]:
        planned, effects = self._current, super()._settle_planned()
        if planned is None or not effects:
            return effects
        settled = replace(planned, provisional=False)
        self._make_current(settled)
        return [fx.SettleGeneration(generation=settled)]


class NeverHolds(Worker):
    def generation_announced(self, generation: Generation) -> list[Effect]:
        return super().generation_announced(replace(generation, provisional=False))


class NeverRestarts(Agent):
    def _spawn_missing(self, now: float) -> Iterator[Any]:
        return iter(()) if self._spawned else super()._spawn_missing(now)


class IgnoresAborts(Worker):
    def generation_announced(self, generation: Generation) -> list[Effect]:
        effects = super().generation_announced(generation)
        return [e for e in effects if not isinstance(e, AbortGroup)]


class CommitsAlone(Script):
    def _reduce(self, group: Group) -> Body:
        del group
        yield 0.001


class TakesTheLeastAdvanced(Script):
    @staticmethod
    def plan(declarations: Sequence[Declaration]) -> RecoveryPlan:
        if not any(d.intact for d in declarations):
            return plan_recovery(declarations)
        turned = [replace(d, committed=-d.committed, committed_in=0) for d in declarations]
        plan = plan_recovery(turned)
        return replace(plan, committed=-(plan.committed or 0))


class RestoresWithoutThePosition(Script):
    def _agree(self, group: Group, generation: Generation) -> Body:
        yield from super()._agree(group, generation)
        replica = self.process.held
        if self.clock.now > 3.0:
            position = replace(replica.position, cursor=max(0, replica.position.cursor - 1))
            self.process.replica = replica._replace(position=position)


class LeavesWithoutSaving(Script):
    def _save_and_leave(self, generation: Generation) -> Body:
        del generation
        yield 0.001
        self.process.done = True


@pytest.mark.parametrize(
    ("parts", "checker", "seeds"),
    [
        (Parts(coordinator=ReusesNumbers), "one_lineage", range(200)),
        (Parts(coordinator=SettlesWithoutWaiting), "planned_changes", range(200)),
        (Parts(coordinator=KeepsTheFirstEstimate), "planned_changes", range(200)),
        (Parts(worker=NeverHolds), "planned_changes", range(200)),
        (Parts(agent=NeverRestarts), "liveness", range(200)),
        (Parts(worker=IgnoresAborts), "liveness", range(200)),
        (Parts(script=CommitsAlone), "one_lineage", range(200)),
        (Parts(script=TakesTheLeastAdvanced), "no_step_lost", range(200)),
        (Parts(script=RestoresWithoutThePosition), "every_sample_once", range(200)),
        (Parts(script=LeavesWithoutSaving), "stopping", range(200)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_mistake_is_found(parts: Parts, checker: str, seeds: range) -> None:
    assert any(found.startswith(checker) for seed in seeds for found in check(seed, parts))
