"""Lets the planned faults strike, at their instants or at points that scripts reach."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from elastic.core.agent import events as agent_events
from elastic.core.coordinator import events as coordinator_events
from tests.sim.plan import PERSISTED, Action, Fault, agent_settings
from tests.sim.process import Process, Struck
from tests.sim.thread import ScriptError

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

SIGKILL = 9
STOP_EXIT_CODE = 143
# Seconds from a worker's start until the coordinator knows it.
_KNOWN_S = 0.5
# After these faults a process does not go on from the point at which it was struck.
_FATAL = (
    Action.KILL_WORKER,
    Action.KILL_NODE,
    Action.LOSE_NODE_SILENTLY,
    Action.FREEZE_SCRIPT,
    Action.FREEZE_PROCESS,
)
# After these faults a member cannot hear of a planned change in time, or its group breaks before
# it. After any other the change does not take place: the members that are left form another group.
_DISTURBING = (
    Action.FREEZE_PROCESS,
    Action.BREAK_LINK,
    Action.CUT_OFF_NODE,
    Action.KILL_LEADER,
    Action.RESTART_AGENT,
    Action.STOP_AGENT,
    Action.CUT_PEERS,
)


class Faults:
    """The faults of one history."""

    def __init__(self, world: World, faults: tuple[Fault, ...]) -> None:
        self._world = world
        self._timed = [f for f in faults if f.at_s is not None]
        self.points: dict[str, list[Fault]] = defaultdict(list)
        """Points of scripts, and the faults that may strike there."""
        for fault in faults:
            if fault.at_s is None:
                self.points[fault.point].append(fault)
        self._reached: Counter[str] = Counter()
        self._late: Counter[int] = Counter()
        """By the fault's id, how often its point was reached from `since_s` on."""
        self._struck_at: dict[str, float] = {}
        self.last_at = 0.0

    def start(self) -> None:
        for fault in self._timed:
            self.last_at = max(self.last_at, fault.at_s or 0.0)
            self._world.clock.at(fault.at_s or 0.0, self._strike_someone, fault)

    def reached(self, process: Process, point: str) -> None:
        """`process` is at `point`. Raises ScriptError or Struck if a fault stops it there."""
        pending = self.points.get(point)
        if not pending:
            return
        self._reached[point] += 1
        for fault in pending:
            if self._is_due(fault, self._times_reached(fault), process):
                if fault.other:
                    self._strike_another(fault, process)
                    continue
                self._strike(fault, process)
                if fault.action is Action.RAISE:
                    raise ScriptError(fault.signature or f"{process.name} at {point}")
                if fault.action in _FATAL:
                    raise Struck

    def _times_reached(self, fault: Fault) -> int:
        """How often the fault's point was reached from `since_s` on, including now."""
        if fault.since_s == 0.0:
            return self._reached[fault.point]
        number = self._late[id(fault)] = self._late[id(fault)] + (
            self._world.clock.now >= fault.since_s
        )
        return number

    def _is_due(self, fault: Fault, reached: int, process: Process) -> bool:
        if fault.newcomers:
            return self._world.is_newcomer(process)
        if fault.lasting:
            return reached >= fault.nth
        if reached != fault.nth:
            return False
        if not fault.together:
            return True
        first_at = self._struck_at.setdefault(fault.signature, self._world.clock.now)
        return process.started_at < first_at - _KNOWN_S

    def persisted(self) -> None:
        """A generation is in the store, and its leader does not know that yet."""
        self._reached[PERSISTED] += 1
        for fault in self.points.get(PERSISTED, ()):
            if fault.nth == self._reached[PERSISTED]:
                self._record(fault, "")
                self._kill_leader(fault)

    def _strike_someone(self, fault: Fault) -> None:
        world = self._world
        alive = [p for n in world.nodes if n.alive for p in n.processes.values() if p.alive]
        if fault.action is Action.ADD_NODE:
            self._record(fault, "")
            world.add_node(agent_settings(f"x{len(world.nodes)}", slots=1, spares=0))
        elif alive:
            named = [p for p in alive if p.name == fault.worker]
            if fault.only and not named:
                return
            of_node = fault.action is Action.DRAIN_NODE or fault.worker.endswith("-")
            if of_node and not named:  # any worker of the node will do
                named = [p for p in alive if p.node.name == fault.worker.partition("-")[0]]
            self._strike(fault, named[0] if named else world.clock.random.choice(alive))

    def _strike_another(self, fault: Fault, process: Process) -> None:
        """Strike the first other member by name, so that several faults can strike the same one."""
        members = process.group.generation.worker_ids - {process.name}
        others = [
            p
            for n in self._world.nodes
            if n.alive and n is not process.node
            for p in n.processes.values()
            if p.name in members
        ]
        if others:
            self._strike(fault, min(others, key=lambda p: p.name))

    def _record(self, fault: Fault, whom: str) -> None:
        world = self._world
        if world.leader.ended:
            return
        self.last_at = max(self.last_at, world.clock.now)
        world.journal.note(world.clock.now, "fault", fault.action.name, whom)
        if fault.action not in (Action.ADD_NODE, Action.DRAIN_NODE):
            world.journal.struck_at.append(world.clock.now)
        lasts_s = fault.returns_after_s or 0.0
        world.journal.struck.append((world.clock.now, fault.action.name, lasts_s))
        if fault.action in _DISTURBING:
            world.journal.disturbed_at.append(world.clock.now)

    def _strike(self, fault: Fault, process: Process) -> None:
        self._record(fault, process.name)
        match fault.action:
            case Action.KILL_WORKER:
                process.end(signal=SIGKILL)
            case Action.KILL_NODE | Action.LOSE_NODE_SILENTLY:
                silent = fault.action is Action.LOSE_NODE_SILENTLY
                process.node.lose(silent=silent)
                self._return_later(fault, process.node)
            case Action.FREEZE_SCRIPT:
                process.freeze(deaf=False)
            case Action.FREEZE_PROCESS:
                process.freeze(deaf=True)
                self._notice_silence(process)
            case Action.BREAK_LINK:
                process.break_link()
            case Action.CUT_OFF_NODE:
                process.node.cut_off()
                if all(n.is_cut_off for n in self._world.nodes if n.alive):
                    self._world.journal.outages.add(self._world.clock.now)
                self._world.clock.after(fault.returns_after_s or 0.0, process.node.heal)
                self.last_at += fault.returns_after_s or 0.0
            case Action.KILL_LEADER:
                self._kill_leader(fault)
            case Action.RESTART_AGENT:
                process.node.restart_agent(fault.returns_after_s or 0.0)
                self.last_at += fault.returns_after_s or 0.0
            case Action.STOP_AGENT:
                process.node.stop_agent(fault.returns_after_s or 0.0)
                self.last_at += fault.returns_after_s or 0.0
            case Action.DRAIN_NODE:
                process.node.drain()
                self._return_later(fault, process.node)
            case Action.STOP:
                self._stop()
            case Action.STOP_IN_STEP:
                process.slow_s = 10 * self._world.journal.stop_grace_s
                self._world.clock.after(fault.returns_after_s or 0.0, self._stop)
            case Action.CUT_PEERS:
                self._world.cut_peers(fault.pairs)
                self._world.clock.after(fault.returns_after_s or 0.0, self._world.heal_peers)
                self.last_at += fault.returns_after_s or 0.0

    def _kill_leader(self, fault: Fault) -> None:
        self._world.kill_leader(fault.returns_after_s or 0.0)
        self.last_at += fault.returns_after_s or 0.0

    def _notice_silence(self, process: Process) -> None:
        """The agent notices after a while that the worker gives no signs of life."""
        silent_s = self._world.clock.between(*self._world.pace.silence_s)
        frozen = agent_events.WorkerFrozen(worker=process.name, silent_s=silent_s)
        self._world.clock.after(silent_s, process.node.tell, frozen)

    def _return_later(self, fault: Fault, node: Node) -> None:
        delay_s = fault.returns_after_s
        if delay_s is None:
            return
        self.last_at = max(self.last_at, self._world.clock.now + delay_s)
        self._world.clock.after(delay_s, self._world.add_node, node.settings)

    def _stop(self) -> None:
        journal = self._world.journal
        if journal.stopped_at is None:
            journal.stopped_at = self._world.clock.now
            journal.note(journal.stopped_at, "fault", "stop")
            self.stop_again()

    def stop_again(self) -> None:
        stop = coordinator_events.StopRequested(exit_code=STOP_EXIT_CODE, reason="the test")
        self._world.leader.tell(stop)
