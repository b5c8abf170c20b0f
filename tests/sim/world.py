"""One simulated history from its first event to its last: the machines, and the facts recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.agent.machine import Agent, AgentSettings
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.data_order import SampleRange
from elastic.core.invariants import InvariantBroken
from elastic.core.membership import Generation
from elastic.core.worker.machine import Worker
from tests.sim.clock import Clock
from tests.sim.faults import Faults
from tests.sim.group import Group
from tests.sim.journal import Agreed, Commit, Journal, Reduced
from tests.sim.leader import Leader
from tests.sim.node import Node
from tests.sim.plan import Plan
from tests.sim.process import Process
from tests.sim.replica import Replica
from tests.sim.script import Script
from tests.sim.storage import Storage

# Longer than all patience that the settings of a plan can add up to once faults have stopped.
SETTLING_TIME_S = 90.0
Observer = Callable[[float, str, Any, Sequence[Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a history is made of; a mutation test exchanges one."""

    coordinator: Callable[[CoordinatorSettings], Coordinator] = Coordinator
    agent: Callable[[AgentSettings], Agent] = Agent
    worker: Callable[..., Worker] = Worker
    script: Callable[[Process], Script] = Script


class World:
    """Everything that exists in one history."""

    def __init__(
        self,
        plan: Plan,
        parts: Parts | None = None,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.parts = parts or Parts()
        self.job, self.pace, self.news_s = plan.job, plan.pace, plan.news_s
        self.clock = clock or Clock(plan.seed)
        self.journal = Journal(plan.job, news_s=plan.news_s)
        self.storage = Storage()
        self.nodes: list[Node] = []
        self.leader = Leader(self, plan.coordinator)
        self.faults = Faults(self, plan.faults)
        self._observer = observer
        self._groups: dict[int, Group] = {}
        self._pids = 0
        self._newest_when_formed: dict[int, Replica] = {}
        self._best_declared: dict[int, Replica] = {}
        for settings in plan.nodes:
            self.clock.after(self.clock.between(0.0, 0.5), self.add_node, settings)
        self.faults.start()

    def run(self) -> Journal:
        """Let it happen."""
        try:
            self.clock.run(until_s=self._deadline_s, ended=self._over)
        except InvariantBroken as broken:
            self.journal.broken_invariant = str(broken)
        self.journal.left_behind = [
            f"{node.name} with {sorted(node.processes)}"
            for node in self.nodes
            if node.alive and (node.exit_code is None or node.processes)
        ]
        self.journal.torn_checkpoints = self.storage.torn
        self.journal.newest_checkpoint = self.storage.newest
        return self.journal

    def add_node(self, settings: AgentSettings) -> None:
        node = Node(self, settings)
        self.nodes.append(node)
        node.start()

    def group_of(self, generation: Generation) -> Group:
        number = generation.number
        if number not in self._groups:
            self._groups[number] = Group(
                self.clock, generation, lambda name: self._whole(number, name)
            )
        return self._groups[number]

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    # ---- the record

    def observe(self, who: str, event: Any, effects: Sequence[Any]) -> None:
        if self._observer is not None:
            self._observer(self.clock.now, who, event, effects)

    def exists(self, generation: Generation) -> None:
        members = " ".join(m.worker for m in generation.members)
        details = (generation.number, generation.reason.name, generation.leave_after, members)
        self.journal.note(self.clock.now, "coordinator", "generation", *details)
        self.journal.generations.append(generation)
        self._newest_when_formed[generation.number] = self.storage.newest

    def declared(self, generation: Generation, replica: Replica | None) -> None:
        """A member brings its state to the agreement; it may be overwritten by the result."""
        best = self._best_declared.get(generation.number)
        if replica is not None and (best is None or replica.age > best.age):
            self._best_declared[generation.number] = replica

    def agreed(self, process: Process, generation: Generation, replica: Replica) -> None:
        self.journal.agreed.append(
            Agreed(
                at=self.clock.now,
                worker=process.name,
                generation=generation.number,
                begun=process.begun if process.replica is not None else 0,
                replica=replica,
                best_survivor=_best(
                    self.best_survivor(), self._best_declared.get(generation.number)
                ),
                checkpoint=self._newest_when_formed[generation.number],
            )
        )
        process.note("agrees", generation.number, replica.committed)

    def committed(
        self, process: Process, generation: Generation, samples: SampleRange, before: int
    ) -> None:
        replica = process.held
        self.journal.commits.append(
            Commit(
                self.clock.now,
                process.name,
                generation.number,
                generation.world_size,
                samples,
                before,
                replica,
            )
        )
        process.note("commits", generation.number, replica.committed)

    def _whole(self, generation: int, name: Hashable) -> None:
        if isinstance(name, tuple):
            self.journal.reduced.append(Reduced(self.clock.now, generation, name[1]))

    def best_survivor(self, *, finished: bool = False) -> Replica | None:
        """Members at the end of the job are not asked for their state any more."""
        held = [
            p.replica
            for node in self.nodes
            if node.alive and node.connected
            for p in node.processes.values()
            if p.responsive and p.replica is not None
            if finished or not (p.done or p.replica.complete(self.job))
        ]
        return _best(*held)

    def _deadline_s(self) -> float:
        return self.faults.last_at + SETTLING_TIME_S

    def _over(self) -> bool:
        return self.leader.ended and all(
            node.exit_code is not None or not node.alive for node in self.nodes
        )


def _best(*replicas: Replica | None) -> Replica | None:
    return max((r for r in replicas if r is not None), key=lambda r: r.age, default=None)
