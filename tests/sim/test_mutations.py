"""Each mistake that is put into a machine or a script is found by the checker for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.agent import events as agent_events
from elastic.core.agent.machine import Agent
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator.decisions import Decision, End
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.nodes import Nodes
from elastic.core.membership import Generation
from elastic.core.recovery import Declaration
from elastic.core.worker import participation as act
from elastic.core.worker.machine import AbortGroup, Effect, FreezeGroup, Worker
from elastic.core.worker.participation import Participation, Progress, SaveAndWait
from tests.sim.history import check
from tests.sim.script import Script
from tests.sim.thread import Body
from tests.sim.world import Parts


def lose_silent(nodes: Nodes) -> None:
    for name in {w.node for w in nodes.workers().values() if w.out_of_contact_since is not None}:
        nodes.lost(name)


class ReusesNumbers(Coordinator):
    def _form(self, *arguments: Any) -> list[fx.Effect]:
        effects = super()._form(*arguments)
        self._number -= self._number == 3
        return effects


class SettlesWithoutWaiting(Coordinator):
    """Settles a planned change before all members have heard of it."""

    def _settle(self, now: float) -> list[fx.Effect]:
        del now
        planned = self._current
        if planned is None or not planned.provisional:
            return []
        settled = replace(planned, provisional=False)
        self._make_current(settled)
        return [fx.SettleGeneration(generation=settled)]


class KeepsTheFirstEstimate(Coordinator):
    """Settles the first estimate, however far members were when they heard of it."""

    def _settle(self, now: float) -> list[fx.Effect]:
        planned, effects = self._current, super()._settle(now)
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
    def _reduce(self, committed: int) -> Body:
        del committed
        yield 0.001


class TakesTheLeastAdvanced(Participation):
    """Gives the state of the member that is behind to the members that are ahead."""

    def _declaration(self) -> Declaration:
        mine = super()._declaration()
        return replace(mine, committed=-mine.committed, committed_in=-mine.committed_in)


class FollowsTheLeastAdvanced(Script):
    participation = TakesTheLeastAdvanced


class RestoresWithoutThePosition(Participation):
    def _take_over(self, progress: Progress) -> None:
        positions = tuple(replace(p, cursor=max(0, p.cursor - 1)) for p in progress.positions)
        super()._take_over(replace(progress, positions=positions))


class ForgetsASample(Script):
    participation = RestoresWithoutThePosition


class LeavesWithoutSaving(Script):
    def _save_and_wait(self, save: SaveAndWait) -> Body:
        del save
        yield 0.001


class TrainsWithoutALease(Script):
    """Trains on where the others take its node for gone."""

    def _await_lease(self) -> Body:
        yield from ()


class IgnoresTheLineage(Coordinator):
    """Forms a group beside another that may train."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._lineage.allows = lambda *_: True  # type: ignore[method-assign]


class ForgetsWhoMayTrain(Coordinator):
    """A newly elected leader knows only the newest generation."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "may_train": ()})


class ExpectsNobody(Coordinator):
    """A newly elected leader takes nodes that have not come yet for lost."""

    def _adopt(self, *arguments: Any) -> None:
        super()._adopt(*arguments)
        lose_silent(self._nodes)


class ForgetsWhomItFinds(Agent):
    """Starts new workers beside those that an earlier agent has left."""

    def handle(self, event: agent_events.Event, now: float) -> list[Any]:
        if isinstance(event, agent_events.Started):
            event = agent_events.Started()
        return super().handle(event, now)


class StopsAtOnce(Coordinator):
    """Takes nodes that are out of contact while the job stops for lost."""

    def _decide(self, now: float) -> Decision | End:
        if self._stop is not None:
            lose_silent(self._nodes)
        return super()._decide(now)


class LetsGoAtOnce(Coordinator):
    """Lets a leaving node go, whatever its workers do."""

    def _consider(self, now: float) -> list[fx.Effect]:
        before = self._nodes.leaving
        effects = super()._consider(now)
        gone = before if self._stop is None else ()
        return [*effects, *(fx.NodeDrained(node=node) for node in sorted(gone))]


class LetsEveryNewcomerIn(Coordinator):
    """Admits every newcomer, however often others like it have failed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._newcomers.held_back = lambda *_: {}  # type: ignore[method-assign]


class DoesNotKnowWhoCompiles(Coordinator):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._progress.compiles = lambda *_: None  # type: ignore[method-assign]


class NeverFreezes(Worker):
    def generation_announced(self, generation: Generation) -> list[Effect]:
        effects = super().generation_announced(generation)
        return [e for e in effects if not isinstance(e, FreezeGroup)]


class AbortsAtTheFirstForm(Worker):
    def generation_announced(self, generation: Generation) -> list[Effect]:
        form = generation.provisional and not generation.freezes
        return super().generation_announced(replace(generation, provisional=form))


class AbortsAlone(Script):
    """Frees the peers of a lost group by itself."""

    def _break(self, broken: act.Break) -> None:
        self.process.group.abort(self.process)
        super()._break(broken)


class LetsAbortAtOnce(Coordinator):
    """Does not wait until all whom an abort could feed are frozen."""

    def _settle(self, now: float) -> list[fx.Effect]:
        current = self._current
        if current is None or not current.freezes:
            return super()._settle(now)
        settled = replace(current, provisional=False)
        self._make_current(settled)
        return [fx.SettleGeneration(generation=settled)]


class CountsEveryState(Coordinator):
    """Takes the step of a member that was not frozen when others aborted its group."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._freezing._counts = lambda _: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("parts", "checker", "stress"),
    [
        (Parts(coordinator=LetsEveryNewcomerIn), "newcomers", "refused"),
        (Parts(coordinator=DoesNotKnowWhoCompiles), "slow_steps", "compiles"),
        (Parts(coordinator=IgnoresTheLineage), "one_lineage", "split"),
        (Parts(coordinator=ForgetsWhoMayTrain), "one_lineage", "split"),
        (Parts(script=TrainsWithoutALease), "one_lineage", "stopped"),
        (Parts(coordinator=ExpectsNobody), "control_plane", "leaders"),
        (Parts(agent=ForgetsWhomItFinds), "control_plane", "agents"),
        (Parts(coordinator=StopsAtOnce), "stopping", "stop"),
        (Parts(coordinator=LetsGoAtOnce), "drains", "drain"),
        (Parts(worker=NeverFreezes), "same_state", "queued"),
        (Parts(worker=AbortsAtTheFirstForm), "same_state", "queued"),
        (Parts(script=AbortsAlone), "same_state", "queued"),
        (Parts(coordinator=LetsAbortAtOnce), "same_state", "queued"),
        (Parts(coordinator=CountsEveryState), "same_state", "queued split"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_checker_finds_a_mistake_under_stress(parts: Parts, checker: str, stress: str) -> None:
    found = (what for seed in range(300) for what in check(seed, parts, stress))
    assert any(what.startswith(checker) for what in found)


@pytest.mark.parametrize(
    ("parts", "checker", "seeds"),
    [
        (Parts(coordinator=ReusesNumbers), "one_lineage", range(200)),
        (Parts(coordinator=SettlesWithoutWaiting), "planned_changes", range(200, 400)),
        (Parts(coordinator=KeepsTheFirstEstimate), "planned_changes", range(200)),
        (Parts(worker=NeverHolds), "planned_changes", range(200, 400)),
        (Parts(agent=NeverRestarts), "liveness", range(200)),
        (Parts(worker=IgnoresAborts), "liveness", range(200)),
        (Parts(script=CommitsAlone), "one_lineage", range(200)),
        (Parts(script=FollowsTheLeastAdvanced), "no_step_lost", range(200)),
        (Parts(script=ForgetsASample), "every_sample_once", range(200)),
        (Parts(script=LeavesWithoutSaving), "stopping", range(200)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_checker_finds_a_mistake_in_200_seeds(parts: Parts, checker: str, seeds: range) -> None:
    assert any(found.startswith(checker) for seed in seeds for found in check(seed, parts))
