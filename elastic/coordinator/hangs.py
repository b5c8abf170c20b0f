"""Hangs and slow steps: who keeps the others waiting, and where, as events and for operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from elastic.coordinator.attendance import AttendingNode
from elastic.coordinator.stacks import (
    Found,
    StackRounds,
    asked_for,
    explain,
    odd_stacks,
    reply,
)
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.diagnosis import Diagnosis
from elastic.core.incidents import RankStacks
from elastic.core.membership import Generation
from elastic.runtime.journal import Journal
from elastic.v1 import stacks_pb2 as pb

_MOST_TOLD = 16  # ranks of one event


class Hangs:
    """Collects stacks when a group stands still, or when somebody asks.

    post: takes what the machine is to know; start: runs what takes time. on_explained: told of each
    hang.
    """

    def __init__(
        self,
        rounds: StackRounds,
        journal: Journal,
        *,
        post: Callable[[ev.Event], None],
        start: Callable[[Coroutine[Any, Any, Any], str], object],
        on_explained: Callable[[int, Diagnosis, Sequence[RankStacks]], None] = lambda *_: None,
    ) -> None:
        self._rounds = rounds
        self._journal = journal
        self._post = post
        self._start = start
        self._on_explained = on_explained
        self.newest = ""
        """The verdict of the newest hang or slow step."""
        self.newest_unix_s = 0.0

    def told(self, node: AttendingNode, stacks: pb.NodeStacks) -> None:
        """A node tells where its workers are."""
        self._rounds.told(node, stacks)

    def explain(self, effect: fx.ExplainHang) -> None:
        """The members are asked at once, before they are told of a new group."""
        asking = self._rounds.ask(brief=True)

        async def told() -> None:
            found = await asking
            verdict = self._verdict(effect.generation, found)
            self._on_explained(
                effect.generation.number, verdict, odd_stacks(effect.generation, verdict, found)
            )
            self._journal.record(
                "hang",
                step=effect.step,
                generation=effect.generation.number,
                standing_s=round(effect.standing_s, 3),
                verdict=verdict.text,
                ranks=_ranks(verdict),
            )
            self._post(ev.HangExplained(generation=effect.generation.number, verdict=verdict))

        self._start(told(), "explain-hang")

    def explain_slow_step(self, effect: fx.ExplainSlowStep, committed: Callable[[], int]) -> None:
        """Where the members are is told unless the step has come to its end meanwhile."""
        asking = self._rounds.ask(brief=True)

        async def told() -> None:
            found = await asking
            if committed() > effect.step:
                return
            verdict = self._verdict(effect.generation, found)
            self._journal.record(
                "slow_step",
                step=effect.step,
                lasts_s=round(effect.lasts_s, 3),
                usual_s=round(effect.usual_s, 6),
                verdict=verdict.text,
                ranks=_ranks(verdict),
            )

        self._start(told(), "explain-slow-step")

    async def stacks(
        self, of: str, generation: Generation | None, workers: Sequence[str]
    ) -> pb.JobStacks:
        """For an operator: of all ranks their main threads, of one all threads. Raises
        ConfigurationError if there is none of this rank or name."""
        worker = asked_for(of, generation, workers)
        found = await self._rounds.ask(worker=worker, brief=not worker)
        return reply(generation, found, worker)

    def _verdict(self, generation: Generation, found: Found) -> Diagnosis:
        verdict = explain(generation, found)
        self.newest, self.newest_unix_s = verdict.text, time.time()
        return verdict


def _ranks(verdict: Diagnosis) -> list[dict[str, Any]]:
    """Those that have not come, with the places at which they are."""
    return [
        {
            "rank": odd.rank,
            "worker": odd.worker,
            "node": odd.node,
            "doing": odd.doing,
            "place": odd.frame.place if odd.frame is not None else "",
            "place_s": round(odd.place_s, 3),
        }
        for odd in verdict.odd[:_MOST_TOLD]
    ]
