"""Runs one simulated history: connects the machines, and records the facts for the checkers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.agent.machine import Agent, AgentSettings
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.view import return_patience_s
from elastic.core.invariants import InvariantBroken
from elastic.core.membership import ChangeReason, Generation
from elastic.core.worker.machine import Worker
from tests.sim.clock import Clock, Endless
from tests.sim.faults import Faults
from tests.sim.group import STEP, Group
from tests.sim.journal import Agreed, Called, Commit, Journal, Reduced
from tests.sim.leader import Leader
from tests.sim.node import LATEST_LOSS_S, LATEST_NOTICE_S, Node
from tests.sim.plan import Plan
from tests.sim.process import Process
from tests.sim.replica import Content, Replica, Samples
from tests.sim.script import Script
from tests.sim.storage import Storage

# Seconds that a history may take after its last fault: longer than all timeouts of a plan together.
SETTLING_TIME_S = 90.0
# Seconds from a decision until it is in the store, at most.
_DECIDED_S = 0.05
# Seconds from a process's end until the coordinator knows of it, on top of the messages' delays.
_LOSS_S = 0.15
Observer = Callable[[float, str, Any, Sequence[Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The classes that a history is made of; a mutation test replaces one of them."""

    coordinator: Callable[..., Coordinator] = Coordinator
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
        self.isolation_s = plan.isolation_s
        self.clock = clock or Clock(plan.seed)
        self.journal = Journal(plan.job, news_s=plan.news_s)
        self.journal.agent_grace_s = plan.coordinator.formation.agent_grace_s
        self.journal.join_timeout_s = plan.coordinator.formation.join_timeout_s
        self.journal.return_patience_s = return_patience_s(plan.coordinator.formation)
        formation = plan.coordinator.formation
        self.journal.sizes = (formation.min_workers, formation.max_workers)
        self.journal.stop_grace_s = plan.coordinator.stop_grace_s
        self.journal.first_step_s = plan.coordinator.stall.first_step_s
        self.journal.gather_timeout_s = formation.gather_timeout_s
        self.journal.isolation_s = plan.isolation_s
        self.journal.return_s = plan.pace.return_s[1]
        self.journal.found_s = plan.pace.found_s[1]
        self.journal.hopeless = any(f.lasting for f in plan.faults)
        self.journal.newcomers_fail = any(f.newcomers for f in plan.faults)
        self.journal.failures_differ = any(f.newcomers and not f.signature for f in plan.faults)
        self.journal.compiles = plan.pace.compile_s is not None
        style = plan.job.style
        self.journal.evaluates = bool(style.evaluates or style.between or style.uneven)
        self.storage = Storage()
        self.nodes: list[Node] = []
        self.processes: list[Process] = []
        """All processes of the history, also those that have ended."""
        self._stored: tuple[Generation | None, tuple[Generation, ...]] = (None, ())
        """The newest generation in the store, and the earlier ones that may train."""
        self._may_have_trained: tuple[Generation, ...] = ()
        """The earlier generations that might have been training when the leader was elected."""
        self._settings = plan.coordinator
        self.leader = Leader(self, plan.coordinator)
        self._instances: Counter[str] = Counter()
        self._gone: set[str] = set()
        self.faults = Faults(self, plan.faults)
        self.observer = observer
        """Called with each event of the coordinator's and the agents' machines, and its effects."""
        self._groups: dict[int, Group] = {}
        self._lossy: frozenset[tuple[str, str]] = frozenset()
        self._pids = 0
        self._trained: set[str] = set()
        self._formed_at: dict[int, float] = {}
        self._newest_when_decided: dict[int, Replica] = {}
        self._best_declared: dict[int, Replica] = {}
        for settings in plan.nodes:
            self.clock.after(self.clock.between(0.0, 0.5), self.add_node, settings)
        self.faults.start()

    def run(self) -> Journal:
        try:
            self.clock.run(until_s=self._deadline_s, ended=self._over)
        except InvariantBroken as broken:
            self.journal.broken_invariant = str(broken)
        except Endless:
            self.journal.broken_invariant = "the history does not come to an end"
        self.journal.left_behind = [
            f"{node.name} with {sorted(node.processes)}"
            for node in self.nodes
            if node.alive and (node.exit_code is None or node.processes)
        ]
        self.journal.torn_checkpoints = self.storage.torn
        self.journal.newest_checkpoint = self.storage.newest
        return self.journal

    def take_apart(self) -> None:
        """Break the cycles between the parts of a history that is over: the garbage collector takes
        longer to find them."""
        for process in self.processes:
            for part in (process.script, process.thread, process):
                vars(part).clear()
        for part in (self.leader, self.faults, self.clock, *self.nodes, *self._groups.values()):
            vars(part).clear()
        vars(self).clear()

    def add_node(self, settings: AgentSettings) -> None:
        """A machine joins. If its name was used before, its start token tells it from the other."""
        number = self._instances[settings.node]
        self._instances[settings.node] += 1
        node = Node(self, replace(settings, start=f"{number + 1}" if number else ""))
        self.nodes.append(node)
        node.start()

    def gone(self, name: str) -> None:
        """The store shows that certainly nothing of the node runs any more."""
        self._gone.add(name)
        self.journal.certain_at.append(self.clock.now)
        self.leader.gone(name)

    def registered(self, name: str) -> None:
        """The node's agent has registered again, so the node no longer counts as gone."""
        self._gone.discard(name)

    def kill_leader(self, vacant_s: float) -> None:
        """Kill the leader. After `vacant_s` seconds another one is elected and reads the store."""
        if self.leader.ended:
            return  # all learn of the end, from the store if necessary
        self.leader.die()
        for node in self.nodes:
            node.lose_leader()
        self.clock.after(vacant_s, self._elect)

    def _elect(self) -> None:
        if self.leader.alive:
            return
        self.leader = Leader(self, self._settings, *self._stored)
        self._may_have_trained = self._stored[1]
        self.journal.note(self.clock.now, "coordinator", "elected", self.leader.machine.committed)
        self.journal.elected_at.append(self.clock.now)
        for name in sorted(self._gone):
            self.leader.gone(name)
        for node in self.nodes:
            self.clock.after(self.clock.between(*self.pace.return_s), node.connect)
        if self.journal.stopped_at is not None:  # the request is in the store, or is repeated
            self.faults.stop_again()

    def decided(self, generation: Generation) -> None:
        """A leader has decided on the generation, which is not in the store yet."""
        self._newest_when_decided[generation.number] = self.storage.newest

    def persist(
        self, leader: Leader, generation: Generation, may_train: tuple[Generation, ...]
    ) -> bool:
        """Write the generation unless another leader was elected. Returns whether it did."""
        if leader is not self.leader:
            return False
        self._stored = (generation, may_train)
        self.exists(generation)
        self.faults.persisted()
        return True

    def cut_peers(self, pairs: tuple[tuple[str, str], ...]) -> None:
        """Lose packets from the first to the second node of each pair."""
        self._lossy |= set(pairs)

    def heal_peers(self) -> None:
        self._lossy = frozenset()
        for group in self._groups.values():
            group.heal()

    def are_connected(self, one: str, other: str) -> bool:
        """True if packets pass between these nodes both ways. Names include start tokens."""
        a, b = one.partition("@")[0], other.partition("@")[0]
        return a == b or not {(a, b), (b, a)} & self._lossy

    def unreached(self, by: str, workers: Iterable[str]) -> dict[str, str]:
        """Which of these workers the node does not reach, and why."""
        asked = set(workers)
        why = dict[str, str]()
        for process in (p for p in self.processes if p.name in asked):
            node = process.node
            if not (node.alive and self.are_connected(by, node.name)):
                why[process.name] = "no answer"
            elif not process.alive:
                why[process.name] = "refused"
        return why

    def group_of(self, generation: Generation) -> Group:
        number = generation.number
        if number not in self._groups:
            self._groups[number] = Group(
                self.clock,
                generation,
                lambda name: self._whole(number, name),
                self.are_connected,
                on_abort=self._unfrozen if self.job.queues else None,
            )
        return self._groups[number]

    def settled(self, generation: Generation) -> None:
        """The leader lets workers abort their groups. It counts only states of those that it knows
        to be frozen."""
        for process in self.processes if self.job.queues and generation.leave_after is None else ():
            status, node = process.worker.status, process.node
            knows = node.connected and status.acknowledged >= generation.number
            alone = any(
                g.number == status.generation and g.world_size == 1
                for g in self.journal.generations
            )
            if knows or alone or not process.alive:
                continue
            if 0 < status.generation < generation.number:
                process.is_doubtful = True
                process.drop()

    def _unfrozen(self, generation: Generation, names: Sequence[str]) -> None:
        """A member aborts its group while these are not frozen: their states count no more."""
        for process in self.processes:
            if process.name in names and process.alive and process.is_in(generation):
                process.is_doubtful = True
                process.drop()

    def is_newcomer(self, process: Process) -> bool:
        """True if the process has committed no step and one that has can go on without it."""
        trained = self._trained
        return process.name not in trained and any(
            p.name in trained and p.responsive
            for n in self.nodes
            if n.alive
            for p in n.processes.values()
        )

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    # ---- the record

    def exists(self, generation: Generation) -> None:
        members = " ".join(m.worker for m in generation.members)
        details = (generation.number, generation.reason, generation.leave_after, members)
        self.journal.note(self.clock.now, "coordinator", "generation", *details)
        self.journal.generations.append(generation)
        self._formed_at[generation.number] = self.clock.now
        self.journal.formed_at[generation.number] = self.clock.now
        self._note_tainted(generation)
        self._note_contact(generation)
        groups = [g.worker_ids for g in self.journal.generations if g.members][-2:]
        if any(
            self._calls_lately(p)
            for node in self.nodes
            for p in node.processes.values()
            if any(p.name in workers for workers in groups)
        ):
            self.journal.in_run.add(generation.number)

    def _note_tainted(self, generation: Generation) -> None:
        """The states of some members do not count: others may have aborted their last group when
        these were out of contact. A new leader does not know who was."""
        counts_from = {m.worker: m.counts_from for m in generation.members if m.counts_from}
        for process in self.processes:
            if process.name not in counts_from or process.replica is None:
                continue
            last = next(a for a in reversed(self.journal.agreed) if a.worker == process.name)
            if last.generation >= counts_from[process.name]:
                continue  # unknown to the leader
            node = process.node
            away_at = max([node.hung_up_at, node.connected_at, *self.journal.elected_at])
            if away_at < last.at and not process.is_doubtful:
                self.journal.tainted_in_vain.append(f"{process.name} in {generation.number}")
            process.is_doubtful = True
            process.drop()

    def _calls_lately(self, process: Process) -> bool:
        """True if the process is in session.run(), or was as far as the leader could know."""
        since = self.clock.now - 2 * self.news_s - _DECIDED_S
        told = process.worker.status.in_run or process.told_in_run
        return told or process.script.left_call_at > since

    def _note_contact(self, generation: Generation) -> None:
        """Record what the leader could know of nodes, holders and saves when it decided."""
        now, journal, chosen = self.clock.now, self.journal, generation.worker_ids
        node_of = {name: n for n in self.nodes for name in n.processes}
        known_s = 2 * self.news_s + _DECIDED_S
        journal.in_contact_until[generation.number] = {
            name: node_of[name].heard_until for name in chosen if name in node_of
        }
        journal.unreachable[generation.number] = [
            name
            for name in chosen
            if name in node_of
            and not node_of[name].connected
            and node_of[name].hung_up_at < now - LATEST_NOTICE_S - known_s
        ]
        if not generation.members:
            journal.enough_stayed[generation.number] = self._who_could_go_on(now - known_s)
            journal.finished_then[generation.number] = self._finished(now, known_s)
        leaves = [n.drains and now > journal.left_from[n.name] + known_s for n in self.nodes]
        leaving = {n.name for n, has_left in zip(self.nodes, leaves, strict=True) if has_left}
        if generation.members and all(m.node in leaving for m in generation.members):
            journal.all_leave.add(generation.number)
        known = [n for n in self.nodes if n.connected and n.connected_at < now - known_s]
        if generation.reason is ChangeReason.STARTED:
            away = [n for n in self.nodes if n not in known]
            journal.begun_without |= {p.name for n in away for p in n.processes.values()}
        done = [
            p.committed
            for n in known
            if n.alive
            for p in n.processes.values()
            if p.name not in journal.begun_without  # the job began again without these
            if p.responsive and journal.finished_at.get(p.name, math.inf) < now - known_s
        ]
        journal.done_then[generation.number] = max(done, default=0)
        patience_s = self._settings.formation.agent_grace_s - LATEST_NOTICE_S - known_s
        sought = self._nodes_that_may_come(known_s)
        journal.away[generation.number] = _best(
            *(
                p.replica
                for n in self.nodes
                if n.alive and not n.connected
                if now < n.hung_up_at + patience_s or n in sought
                for p in n.processes.values()
                if p.responsive and not p.done
            )
        )
        just_dropped = {w for at, w in journal.dropped if at > now - known_s}
        if any(
            p.responsive and (p.replica is not None or p.name in just_dropped) and p.name in chosen
            for n in self.nodes
            for p in n.processes.values()
        ):
            journal.has_holder.add(generation.number)
        journal.orphaned[generation.number] = list(self._orphaned_saves(now - known_s - _LOSS_S))
        journal.awaited[generation.number] = self._best_awaited(now, patience_s)
        journal.passed_over[generation.number] = self._best_passed_over(generation, now - known_s)
        roll_call_s = self._settings.formation.roll_call_s - _DECIDED_S
        if self.journal.elected_at and now < self.journal.elected_at[-1] + roll_call_s:
            journal.not_asked[generation.number] = [
                p.name
                for n in sought
                for p in n.processes.values()
                if p.responsive and not p.done and p.name not in chosen
                if p.name in journal.generations[-2].worker_ids
            ]

    def _finished(self, now: float, known_s: float) -> int:
        """Count the workers that had reported their end and whose nodes were not given up."""
        journal, grace_s = self.journal, self._settings.formation.agent_grace_s
        heard_until = {
            n.name: now if n.connected else n.hung_up_at - known_s
            for n in self.nodes
            if n.connected or now < n.hung_up_at + grace_s
        }
        return sum(
            journal.finished_at.get(p.name, math.inf) <= heard_until.get(p.node.name, -math.inf)
            for p in self.processes
            if journal.gone_at.get(p.name, math.inf) > now
        )

    def _orphaned_saves(self, known_by: float) -> Iterator[str]:
        """Yield the saves that wait for a writer whose end its node has had time to report."""
        generations = {g.number: g for g in self.journal.generations}
        in_contact = [
            n for n in self.nodes if n.alive and n.connected and n.connected_at < known_by
        ]
        names = {n.name for n in in_contact}
        alive = {name for n in in_contact for name in n.processes}
        for number, step, written in self.leader.unsettled_saves():
            for rank, member in enumerate(generations[number].members):
                if rank in written or member.node not in names or member.worker in alive:
                    continue
                process = next(p for p in self.processes if p.name == member.worker)
                if process.ended_at < known_by:
                    yield f"the save of step {step} waits for {member.worker}"

    def _best_awaited(self, now: float, patience_s: float) -> Replica | None:
        """The most advanced replica of the last group's members, after that group was dissolved,
        whose nodes lost contact so recently that others wait for them."""
        earlier = self.journal.generations[:-1]
        if not earlier or earlier[-1].members:
            return None
        last = next((g.worker_ids for g in reversed(earlier) if g.members), frozenset())
        return _best(
            *(
                p.replica
                for n in self.nodes
                if n.alive and not n.connected and now < n.hung_up_at + patience_s
                for p in n.processes.values()
                if p.responsive and not p.done and p.name in last
            )
        )

    def _best_passed_over(self, generation: Generation, since: float) -> Replica | None:
        """The most advanced replica of members of the last two groups that are well and in contact
        but not in `generation`: they waited for a group, or were in the lost one. Workers of
        drained nodes do not count, since they are about to end."""
        earlier, to_end = self.journal.generations[:-1], self.journal.counted_as_gone(since)
        groups = [g.worker_ids for g in earlier if g.members][-2:]
        dissolved = bool(earlier) and not earlier[-1].members
        return _best(
            *(
                p.replica
                for n in self.nodes
                if n.alive and n.connected and n.connected_at < since
                if n.name not in self.journal.nodes_drained
                for p in n.processes.values()
                if p.responsive and p.has_agent and not p.done
                if p.name not in generation.worker_ids and p.name not in to_end
                if any(p.name in workers for workers in groups)
                if p.ready_since < since or not dissolved
            )
        )

    def _nodes_that_may_come(self, known_s: float) -> list[Node]:
        """Nodes that a new leader should wait for before it forms its first group."""
        formation, journal = self._settings.formation, self.journal
        elected_at = max(journal.elected_at, default=-math.inf)
        patience_s = max(formation.agent_grace_s, formation.join_timeout_s) - known_s
        if len(journal.generations) < 2 or self.clock.now > elected_at + patience_s:
            return []
        last = journal.generations[-2]
        if journal.formed_at[last.number] > elected_at:
            return []
        groups = (last, *self._may_have_trained) if last.members else ()
        nodes = {m.node for g in groups for m in g.members}
        return [
            n
            for n in self.nodes
            if n.alive and not n.connected and n.connected_at < elected_at
            if n.name not in self._gone
            if n.name in nodes or not nodes
        ]

    def _who_could_go_on(self, since: float) -> list[str]:
        """Members of the last group that can go on, and already could at `since`."""
        groups = [g for g in self.journal.generations[:-1] if g.members]
        if not groups or any(at > since - 2.0 for at in self.journal.elected_at):
            return []
        replaced = {worker for _, worker in self.journal.replaced}
        return [
            p.name
            for n in self.nodes
            if n.connected and n.connected_at < since and not n.drains
            for p in n.processes.values()
            if p.responsive and p.has_agent and not p.done and p.name not in replaced
            if p.name in groups[-1].worker_ids and p.replica is not None
        ]

    def node_released(self, node: Node) -> None:
        """The leader lets the node go: a violation if it takes the newest state away."""
        silent = any(action == "LOSE_NODE_SILENTLY" for _, action, _ in self.journal.struck)
        unknown_since = self.clock.now - 2 * self.news_s - (LATEST_LOSS_S if silent else _LOSS_S)
        here = _best(*(p.replica for p in node.processes.values() if p.responsive and not p.done))
        gone_at = self.journal.gone_at
        elsewhere = _best(
            *(
                p.replica
                for p in self.processes
                if p.node is not node
                if p.alive or gone_at[p.name] > unknown_since
            )
        )
        if here is None or here.complete(self.job) or not here.committed:
            return
        if elsewhere is None or here.age > elsewhere.age:
            self.journal.taken_away.append(f"{node.name} is let go with {here}")

    def gave_up(self, number: int, step: int, written: set[int]) -> None:
        """The leader abandons a save: a violation if no writer that it waits for is missing."""
        generation = next((g for g in self.journal.generations if g.number == number), None)
        known_by = self.clock.now - 2 * self.news_s - LATEST_NOTICE_S
        if generation is None:
            return
        finished = any(m.worker in self.journal.finished_at for m in generation.members)
        if finished and self.journal.elected_at:
            return  # it knew the outcome of its saves; others may have missed it
        well = {
            p.name
            for n in self.nodes
            if n.connected and n.connected_at < known_by
            for p in n.processes.values()
            if p.responsive and not p.done
        }
        if all(m.worker in well or rank in written for rank, m in enumerate(generation.members)):
            self.journal.given_up.append(f"the save of step {step} in {number}")

    def replaced(self, name: str) -> None:
        """The leader has this worker ended: its group goes on without it."""
        for node in self.nodes:
            process = node.processes.get(name)
            if process is None:
                continue
            if process.replica is not None or not process.responsive:  # else it blocks others
                self.journal.to_end.append((self.clock.now, name))
            if not node.connected or not process.responsive:
                continue
            if process.replica is None:  # it blocks others: only its end makes room
                continue
            self.journal.replaced.append((self.clock.now, name))
            back_s = self.clock.now - node.connected_at
            heard_s = _DECIDED_S + 3 * self.news_s
            hurried = back_s < self._settings.formation.join_timeout_s - heard_s
            behind = process.replica.age <= self.storage.newest.age  # makes room for a fresh one
            if hurried and not behind and not self._calls_lately(process):
                self.journal.hurried.append(f"{name}, {back_s:.2f} s after its node came")

    def declared(self, process: Process, generation: Generation) -> None:
        """A member declares its state. Record it now: the group's agreement may overwrite it."""
        replica = process.replica
        if replica is not None:
            self.journal.declared.add((generation.number, process.name))
        best = self._best_declared.get(generation.number)
        if replica is not None and (best is None or replica.age > best.age):
            self._best_declared[generation.number] = replica

    def agreed(self, process: Process, generation: Generation, replica: Replica) -> None:
        self.journal.agreed.append(
            Agreed(
                at=self.clock.now,
                worker=process.name,
                generation=generation.number,
                begun=process.begun,
                replica=replica,
                best_survivor=_best(
                    self.best_survivor(known_at=self._formed_at[generation.number]),
                    self._best_declared.get(generation.number),
                ),
                checkpoint=self._newest_when_decided[generation.number],
            )
        )
        process.note("agrees", generation.number, replica.committed)

    def committed(self, process: Process, samples: Samples, before: int, replica: Replica) -> None:
        seat = process.script.part.seat
        assert seat is not None
        self._trained.add(process.name)
        self.journal.commits.append(
            Commit(
                self.clock.now,
                process.name,
                seat.generation.number,
                seat.generation.world_size,
                samples.loader,
                samples.range,
                before,
                replica,
            )
        )
        process.note("commits", seat.generation.number, replica.committed)

    def called(
        self, process: Process, content: Content, number: int, evaluation: int, result: int
    ) -> None:
        if process.is_doubtful:
            return
        self.journal.called.append(
            Called(self.clock.now, process.name, content.lineage, number, evaluation, result)
        )
        process.note("has called", number, evaluation)

    def members_elsewhere(self, generation: Generation, committed: int, for_s: float) -> bool:
        """True if a member has spent `for_s` seconds in the block of the step after `committed`, or
        in the comparison of replicas before it. It says so at its own group's store, so members
        that wait in an earlier group do not notice."""
        return any(
            p.committed == committed and min(since) <= self.clock.now - for_s
            for node in self.nodes
            for p in node.processes.values()
            if p.alive and not p.deaf and p.is_in(generation)
            if (since := [s for s in (p.in_step_since, p.compares_since) if s is not None])
        )

    def _whole(self, generation: int, name: Hashable) -> None:
        if isinstance(name, tuple) and name[0] == STEP:
            self.journal.reduced.append(Reduced(self.clock.now, generation, name[1]))

    def best_survivor(
        self, *, finished: bool = False, known_at: float = math.inf
    ) -> Replica | None:
        """The most advanced replica that can be obtained, of workers with an agent, on nodes that
        the coordinator knew at `known_at`.

        The coordinator does not ask members at the end of the job for their state (unless
        `finished`), nor workers of leaving nodes that are in no group, nor workers that are being
        ended.
        """
        to_end = self.journal.counted_as_gone(min(known_at, self.clock.now))
        groups = [g.worker_ids for g in self.journal.generations if g.members][-2:]
        held = [
            p.replica
            for node in self.nodes
            if node.alive and node.connected and node.connected_at + 2 * self.news_s < known_at
            for p in node.processes.values()
            if p.responsive and p.has_agent and p.replica is not None and p.name not in to_end
            if finished or not (p.done or p.replica.complete(self.job))
            if not node.drains or any(p.name in workers for workers in groups)
        ]
        return _best(*held)

    def somebody_holds_state(self) -> bool:
        """True if a process that can go on, and that the leader waits for, has a whole replica.

        A script that has ended cannot go on. The leader waits `agent_grace_s` for a node that is
        out of contact, and then forms the newest group without it.
        """
        grace_s = self._settings.formation.agent_grace_s
        formed = [g for g in self.journal.generations if g.members][-1:]
        until = self._formed_at[formed[0].number] if formed else self.clock.now
        return any(
            p.responsive and p.replica is not None and p.name not in self.journal.finished_at
            for n in self.nodes
            if n.connected or until - n.hung_up_at < grace_s
            for p in n.processes.values()
        )

    def note_end(self) -> None:
        """Record what could have been saved, now that the job ends.

        Nobody waits for a member that comes back after the last group was formed, which can cost a
        step that only this member completed. Members out of contact keep their places for a while.
        """
        self.journal.ended_at = self.clock.now
        self.journal.result = self.best_survivor(finished=True)
        self.journal.finished_with = self._best_finished()
        saving = [g for g in self.journal.generations if g.members][-1:]
        known_at = self._formed_at[saving[0].number] if saving else self.clock.now
        self.journal.best_at_end = self.best_survivor(finished=True, known_at=known_at)
        grace_s = self._settings.formation.agent_grace_s - LATEST_NOTICE_S
        self.journal.best_out_of_contact = _best(
            *(
                p.replica
                for n in self.nodes
                if n.alive and not n.connected and self.clock.now < n.hung_up_at + grace_s
                for p in n.processes.values()
                if p.responsive and not (p.done or (p.replica or Replica()).complete(self.job))
            )
        )
        self.journal.frozen_at_end = self._only_frozen_hold_state()

    def _best_finished(self) -> Replica | None:
        """The most advanced replica of workers whose scripts finished, without processes that ended
        so long ago that the leader must know."""
        gone_at, finished_at = self.journal.gone_at, self.journal.finished_at
        grace_s = self._settings.formation.agent_grace_s
        known_since = self.clock.now - 2 * self.news_s - LATEST_LOSS_S - grace_s
        return _best(
            *(
                p.replica
                for p in self.processes
                if p.name in finished_at and gone_at.get(p.name, math.inf) > known_since
            )
        )

    def _only_frozen_hold_state(self) -> bool:
        holders = [
            p for n in self.nodes for p in n.processes.values() if p.alive and p.replica is not None
        ]
        return bool(holders) and all(p.frozen for p in holders)

    def _deadline_s(self) -> float:
        hang_s = self._settings.stall.floor_s  # until an unexplained one is found
        return self.faults.last_at + SETTLING_TIME_S + hang_s

    def _over(self) -> bool:
        return self.leader.ended and all(
            node.exit_code is not None or not node.alive for node in self.nodes
        )


def _best(*replicas: Replica | None) -> Replica | None:
    return max((r for r in replicas if r is not None), key=lambda r: r.age, default=None)
