"""One simulated node: the real Agent machine, its processes and its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.core.agent import effects as fx
from elastic.core.agent import events as ev
from elastic.core.agent.machine import Agent, AgentSettings
from elastic.core.coordinator import events as coordinator_events
from elastic.core.membership import WorkerId
from tests.sim.clock import Link
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World

SIGKILL = 9


class Node:
    """Does what its agent wants. A node that returns is another object of the same name."""

    def __init__(self, world: World, settings: AgentSettings) -> None:
        self.world, self.settings, self.name = world, settings, settings.node
        self.clock = world.clock
        self.agent: Agent = world.parts.agent(settings)
        self.processes: dict[WorkerId, Process] = {}
        self.alive = True
        self.exit_code: int | None = None
        self.connected = False
        self._view = fx.ReportNode(workers=())
        self._timer = 0
        self._up = self._down = Link(self.clock, 0.0, 0.0)

    def start(self) -> None:
        self.connect()
        self.tell(ev.Started())

    # ---- the connection

    def connect(self) -> None:
        """Open a stream and send the whole view."""
        if not self.alive or self.exit_code is not None:
            return
        self._up, self._down = (Link(self.clock, 0.0002, self.world.news_s) for _ in range(2))
        self.connected = True
        self._up.send(self.world.leader.connected, self)
        self._send_view()

    def cut_off(self) -> None:
        """The stream breaks; the node and its processes live on."""
        self._up.open = self._down.open = False
        self.connected = False
        self.clock.after(self.clock.between(0.0, 1.0), self.world.leader.lost, self)

    def lose(self, *, silent: bool) -> None:
        """The whole node is gone."""
        self.alive = False
        self._up.open = self._down.open = False
        for process in list(self.processes.values()):
            process.end(signal=SIGKILL, silent=silent)
        detection_s = (0.5, 1.5) if silent else (0.0, 0.1)
        self.clock.after(self.clock.between(*detection_s), self.world.leader.lost, self)

    # ---- the agent machine

    def tell(self, event: ev.Event) -> None:
        if not self.alive or self.exit_code is not None:
            return
        effects = self.agent.handle(event, self.clock.now)
        self.world.observe(self.name, event, effects)
        for effect in effects:
            self._do(effect)

    def hear(self, event: ev.Event) -> None:
        """The coordinator sends."""
        self._down.send(self.tell, event)

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SpawnWorker(worker=name):
                self._spawn(name)
            case fx.AssignSlot(worker=name, slot=slot):
                process = self.processes[name]
                process.down.send(process.assigned, slot)
            case fx.ForwardGeneration(worker=name, generation=generation):
                process = self.processes[name]
                process.down.send(process.generation_announced, generation)
            case fx.EndWorker(worker=name):
                self.clock.after(0.001, self._kill, self.processes[name])
            case fx.DismissWorker(worker=name):
                process = self.processes[name]
                process.down.send(process.dismiss)
            case fx.ReportNode():
                self._view = effect
                self._send_view()
            case fx.ReportFailure(failure=failure):
                failed = coordinator_events.WorkerFailed(node=self.name, failure=failure)
                self._up.send(self.world.leader.tell, failed)
            case fx.AskToStop(exit_code=code, reason=reason):
                stop = coordinator_events.StopRequested(exit_code=code, reason=reason)
                self._up.send(self.world.leader.tell, stop)
            case fx.SetTimer(at=at):
                self._set_timer(at)
            case fx.ExitAgent(exit_code=code):
                self._exit(code)

    # ---- what the processes do

    def exited(self, event: ev.WorkerExited) -> None:
        self.processes.pop(event.worker, None)
        self.tell(event)

    def progressed(self, event: coordinator_events.ProgressReported) -> None:
        self._up.send(self.world.leader.tell, event)

    def shard_saved(self, event: coordinator_events.ShardReported) -> None:
        self._up.send(self.world.leader.tell, event)

    def checkpoint_settled(self, step: int, abandoned: bool) -> None:
        for process in self.processes.values():
            process.down.send(process.checkpoint_settled, step, abandoned)

    def hear_of_checkpoint(self, step: int, *, abandoned: bool) -> None:
        self._down.send(self.checkpoint_settled, step, abandoned)

    # ---- inside

    def _spawn(self, name: WorkerId) -> None:
        process = Process(self.world, self, name, self.world.next_pid())
        self.processes[name] = process
        self.clock.after(self.clock.between(0.005, 0.05), self._run, process)

    def _run(self, process: Process) -> None:
        if process.alive:
            process.up.send(self.tell, ev.WorkerSpawned(worker=process.name, pid=process.pid))
            process.thread.start()

    def _kill(self, process: Process) -> None:
        process.end(signal=SIGKILL)

    def _send_view(self) -> None:
        view = coordinator_events.NodeReported(
            node=self.name, slots=self.settings.slots, workers=self._view.workers
        )
        self._up.send(self.world.leader.tell, view)

    def _set_timer(self, at: float | None) -> None:
        self._timer += 1
        if at is not None:
            self.clock.at(at, self._fire, self._timer)

    def _fire(self, timer: int) -> None:
        if timer == self._timer:
            self.tell(ev.TimerFired())

    def _exit(self, code: int) -> None:
        self.exit_code = code
        self._up.open = self._down.open = False
        self.world.journal.note(self.clock.now, self.name, "exits", code)
        self.world.leader.lost(self)
