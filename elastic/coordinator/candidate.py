"""One candidate: it follows while another leads, leads when elected, steps down when deposed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from elastic.coordinator.daemon import CoordinatorDaemon, GroupFigures
from elastic.coordinator.history import JobHistory
from elastic.coordinator.job_options import JobOptions
from elastic.coordinator.leadership import (
    LEADER_TTL_S,
    Election,
    Leadership,
    Stored,
    restore_generation,
)
from elastic.coordinator.metrics import JobFigures
from elastic.coordinator.node_registry import NodeRegistry
from elastic.coordinator.operators import Operators
from elastic.coordinator.page import JobView
from elastic.coordinator.totals import Totals
from elastic.errors import TransientError
from elastic.runtime.journal import Journal, RecentEntries
from elastic.runtime.loop_watch import LoopPauses
from elastic.store.interface import GuardFailed, Store
from elastic.store.job_documents import LeaderDocument
from elastic.store.job_runs import AlreadyEnded, RunEnd, RunEnds, announce_end
from elastic.store.lease_keeper import LeaseState
from elastic.v1 import control_pb2 as pb

OUT_OF_REACH_S = 15.0
"""Seconds after which a leader that no agent reaches makes way for another candidate. By default
nodes whose agents have died are no longer registered then, and agents find a new leader sooner."""
_MOST_OUT_OF_REACH_S = 120.0
_LOOKS = 15


class NotLeading(TransientError):
    """This coordinator does not lead: another one does, or none yet."""


class Candidate:
    """Campaigns, leads and steps down. It passes agents and operators on to the leader of its term,
    and turns them away while it does not lead."""

    def __init__(
        self,
        options: JobOptions,
        store: Store,
        journal: Journal,
        recent: RecentEntries,
        *,
        leader_ttl_s: float = LEADER_TTL_S,
        pauses: LoopPauses | None = None,
        totals: Totals | None = None,
        history: JobHistory | None = None,
        out_of_reach_s: float = OUT_OF_REACH_S,
    ) -> None:
        self._leader_ttl_s = leader_ttl_s
        self._out_of_reach_s = self._patience_s = out_of_reach_s
        self._pauses = pauses if pauses is not None else LoopPauses()
        self._history = history
        self._totals = totals if totals is not None else Totals()
        self._follows = False
        self._options = options
        self._store = store
        self._journal = journal
        self._recent = recent
        self._operators: Operators | None = None
        self._last: Operators | None = None  # set once the run has ended under this leader
        self._over = False
        self._suspect = False
        self._concluding = False
        self.address = options.address
        """host:port where agents and operators find this candidate."""
        self.has_campaigned = False
        """This candidate has begun to campaign, or has found that the run had ended before."""
        self.page = ""
        """Where people find this coordinator's page; empty: it serves none."""
        self.exit_code: int | None = None
        """The run's, once it has ended, here or elsewhere; None while it may go on."""
        self.leader: LeaderDocument | None = None
        """The leader that this candidate waited for last."""
        self._election = Election(
            store,
            job=options.job,
            address=options.address,
            run_id=options.run_id,
            on_change=self._leadership_changed,
            on_waiting=self._waits_for,
            page=lambda: self.page,
            ttl_s=leader_ttl_s,
        )

    async def run(self) -> int:
        """Campaign and lead until the run ends, here or elsewhere; return its exit code.

        When cancelled, resigns at once. May be called again for a run that all nodes have left.
        """
        self._concluding, self._over, self._last, self.exit_code = False, False, None, None
        self.exit_code = await self._run_to_its_end()
        return self.exit_code

    async def _run_to_its_end(self) -> int:
        ends = RunEnds(self._store, job=self._options.job, run_id=self._options.run_id)
        elsewhere: asyncio.Future[RunEnd] | None = None
        try:
            await ends.start()
            elsewhere = asyncio.ensure_future(ends.next_end())
            while True:
                here = asyncio.ensure_future(self._lead_once())
                try:
                    await asyncio.wait({here, elsewhere}, return_when=asyncio.FIRST_COMPLETED)
                    if self._concluding:  # this leader has announced that end itself
                        await asyncio.wait({here})
                    if here.done() and (exit_code := here.result()) is not None:
                        return exit_code
                    if elsewhere.done():
                        return elsewhere.result().exit_code
                finally:
                    here.cancel()
                    await asyncio.gather(here, return_exceptions=True)
        except AlreadyEnded as ended:
            self._journal.record("already_ended", exit_code=ended.end.exit_code, message=str(ended))
            self.has_campaigned = True
            return ended.end.exit_code
        finally:
            if elsewhere is not None:
                elsewhere.cancel()
                await asyncio.gather(elsewhere, return_exceptions=True)
            await self._election.resign()
            self._over = True

    async def _lead_once(self) -> int | None:
        """Lead for one term; return the exit code if the run ended in it. Raises AlreadyEnded."""
        self._journal.record("campaigning", address=self._options.address)
        self._follows = self.has_campaigned = True
        made_way = self._patience_s > self._out_of_reach_s
        leadership: Leadership | None = await self._election.campaign(
            after_s=self._leader_ttl_s if made_way else 0.0
        )
        self._follows = False
        self._suspect = False
        try:
            while leadership is not None:
                end = await self._lead(leadership)
                if not isinstance(end, Stored):
                    return end
                leadership = await self._restored(leadership, end)
            return None
        finally:
            await self._election.resign()

    async def _lead(self, leadership: Leadership) -> int | Stored | None:
        """Lead. Return the run's exit code if the run has ended, None if only the term has, or the
        generation that the store has lost."""
        daemon = CoordinatorDaemon(
            self._options,
            self._store,
            leadership,
            self._journal,
            leads=self._election.held,
            totals=self._totals,
            history=self._history,
            pauses=self._pauses,
        )
        operators = Operators(daemon, self._pauses, self._recent)
        last = leadership.last_generation
        self._journal.record(
            "elected",
            address=self._options.address,
            generation=leadership.last_number,
            members=[m.worker for m in last.members] if last is not None else [],
        )
        registry = asyncio.ensure_future(self._registry(leadership, daemon).run())
        holding = asyncio.ensure_future(self._election.hold())
        unreached = asyncio.ensure_future(self._until_out_of_reach(daemon))
        tasks = (registry, holding, unreached)
        try:
            await daemon.start()
            self._operators = operators
            ends: set[asyncio.Future[Any]] = {
                *(daemon.ended, daemon.deposed, daemon.store_lost),
                *tasks,
            }
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if daemon.ended.done():
                return await self._conclude(leadership, operators)
            for task in tasks:
                if task.done():
                    task.result()
            if daemon.store_lost.done() and not holding.done():
                return daemon.store_lost.result()
            reason = daemon.deposed.result() if daemon.deposed.done() else "the lease was lost"
            if unreached.done() and not holding.done():
                reason = unreached.result()
                self._patience_s = min(2 * self._patience_s, _MOST_OUT_OF_REACH_S)
            self._journal.record("deposed", reason=reason)
            return None
        finally:
            self._operators = None
            daemon.retire()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await daemon.close()

    async def _until_out_of_reach(self, daemon: CoordinatorDaemon) -> str:
        """Return the reason to make way, once nodes have been registered for long and no agent has
        reached this leader. Other candidates go first at the next election, since one of them may
        be within reach. Each such term of the same candidate lasts twice as long as the one before:
        if no candidate is within reach, the leader changes rarely."""
        since = time.monotonic()
        while True:
            now = time.monotonic()
            if daemon.is_attended:
                self._patience_s = self._out_of_reach_s
            if daemon.is_attended or not daemon.awaits_nodes or not self._election.held():
                since = now
            since = max(since, daemon.heard_at)
            if now - since >= self._patience_s:
                return (
                    f"no agent has reached {self._options.address} for {now - since:.0f} s, though "
                    "nodes are registered"
                )
            await asyncio.sleep(self._patience_s / _LOOKS)

    async def _restored(self, leadership: Leadership, lost: Stored) -> Leadership | None:
        """Write again what the store has lost. Return None if another coordinator leads."""
        self._journal.record(
            "store_rolled_back", generation=lost.generation.number, stored=leadership.last_number
        )
        try:
            return await restore_generation(self._store, leadership, lost)
        except GuardFailed as error:
            self._journal.record("deposed", reason=str(error))
            return None

    async def _conclude(self, leadership: Leadership, operators: Operators) -> int:
        """Store the run's end, for agents that are not connected and those that come later."""
        daemon = operators.leader
        end = daemon.ended.result()
        self._concluding, self._last = True, operators
        with contextlib.suppress(GuardFailed, TransientError):
            await daemon.wait_until_stored()
            await announce_end(self._store, job=self._options.job, guard=leadership.guard, end=end)
        await daemon.flushed()
        return end.exit_code

    def _registry(self, leadership: Leadership, daemon: CoordinatorDaemon) -> NodeRegistry:
        last = leadership.last
        groups = [last.generation, *last.may_train] if last is not None else []
        registry = NodeRegistry(
            self._store,
            daemon,
            job=self._options.job,
            isolation_timeout_s=self._options.isolation_timeout_s,
            expected={m.node for g in groups for m in g.members},
            as_of=last.revision if last is not None else 0,
        )
        daemon.registry = registry
        return registry

    def _waits_for(self, leader: LeaderDocument) -> None:
        self.leader = leader
        theirs, ours = leader.run_id, self._options.run_id
        other = theirs not in ("", ours)
        self._journal.record(
            "standing_by",
            address=self._options.address,
            leader=leader.address,
            run_id=theirs or ours,
            waits_for=f"the end of run {theirs!r}" if other else "the end of that coordinator",
        )

    def _leadership_changed(self, state: LeaseState) -> None:
        if state is LeaseState.SUSPECT and not self._suspect:
            self._suspect = True
            self._journal.record("leadership_in_doubt", reason="the store does not answer")
        if state is LeaseState.HELD and self._suspect:
            self._suspect = False
            self._journal.record("leadership_confirmed")
            if (leader := self.agents()) is not None:
                leader.leadership_confirmed()

    def figures(self) -> JobFigures | None:
        """The job as it is while this candidate leads, or as it was at its end; None otherwise."""
        operators = self._operators or self._last
        return operators.figures() if operators is not None else None

    def view(self) -> JobView | None:
        """Like `figures`, for the page."""
        operators = self._operators or self._last
        return operators.view() if operators is not None else None

    def why_not_ready(self) -> str:
        """Return the reason; empty while it leads or follows, and after the end of the run."""
        if self._operators is not None or self._follows or self._over:
            return ""
        return "it neither leads nor follows yet"

    @property
    def group(self) -> GroupFigures | None:
        """None while this candidate does not lead."""
        leader = self.agents()
        return leader.group if leader is not None else None

    # ---- ControlHandler

    def agents(self) -> CoordinatorDaemon | None:
        """Return the handler of agents' messages; None while this candidate does not lead."""
        return self._operators.leader if self._operators is not None else None

    def operators(self) -> Operators:
        """Return the handler of operators' requests. Raises NotLeading."""
        if self._operators is None:
            raise NotLeading(f"the coordinator at {self._options.address} does not lead now")
        return self._operators

    def status(self) -> pb.JobStatus:
        """Like `Operators.status`; also works after the run's end. Raises NotLeading."""
        return (self._last or self.operators()).status()

    def incidents(self, number: int | None) -> list[str]:
        """Like `Operators.incidents`; also works after the run's end. Raises NotLeading."""
        return (self._last or self.operators()).incidents(number)

    def follow_events(self, *, follow: bool) -> AsyncIterator[str]:
        """Yield the journal of this coordinator, even while another one leads."""
        return self._recent.follow() if follow else self._recent.remembered()
