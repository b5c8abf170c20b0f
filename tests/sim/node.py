"""One simulated node: the real Agent machine, its processes and its connection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.coordinator.node_registry import GONE_MARGIN_S
from elastic.core.agent import effects as fx
from elastic.core.agent import events as ev
from elastic.core.agent.machine import Agent, AgentSettings
from elastic.core.coordinator import events as coordinator_events
from elastic.core.membership import WorkerId, WorkerPhase
from elastic.runtime.training_lease import LAPSE_S
from tests.sim.clock import Link, Timer
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World

SIGKILL = 9
LEASE_IS_OVER = "the lease to train is over"
LATEST_NOTICE_S = 1.0
HEARD_WITHIN_S = 0.5
REPORTED_WITHIN_S = 0.1  # on top of the messages' delays
ENDED_WITHIN_S = 0.5
ADOPTED_WITHIN_S = 2.0  # workers that an agent has found connect to it, or count as new
LATEST_LOSS_S = 1.5  # until it is noticed that a node has lost its power


class Node:
    """Carries out its agent's effects. A node that returns is another object with its settings."""

    def __init__(self, world: World, settings: AgentSettings) -> None:
        self.world, self.settings = world, settings
        self.name = f"{settings.node}@{settings.start}" if settings.start else settings.node
        self.clock = world.clock
        self.agent: Agent = world.parts.agent(settings)
        self.processes: dict[WorkerId, Process] = {}
        self.alive = True
        self.exit_code: int | None = None
        self.drains = False
        self.connected, self.connected_at, self.hung_up_at = False, 0.0, -math.inf
        self._heard_until = -math.inf
        self.is_known = False
        """The leader knows of its stream."""
        self._agents = 1
        self._agent_since = self.clock.now
        self._agent_runs = True
        self._knows_its_workers = True
        self._newest = 0
        self._cut = False
        self._stopped: list[ev.Event] | None = None
        """What a stopped agent will hear when it goes on; None: it is not stopped."""
        self._silent_since: float | None = None
        """Since when neither leader nor store has answered the agent."""
        self._silences = 0
        self.epoch = 1
        """Of the lease to train; only processes that were started in it may train."""
        self._view = fx.ReportNode(workers=())
        self._timer = Timer(self.clock, lambda: self.tell(ev.TimerFired()))
        self._up = self._down = Link(self.clock, 0.0, 0.0)
        self._up.open = False  # until there is a leader to connect to

    def start(self) -> None:
        self.connect()
        self.tell(ev.SearchStarted())
        self.tell(ev.NothingFound())
        self.tell(ev.Started())

    # ---- the connection

    def connect(self) -> None:
        """Open a stream and send the whole view."""
        if not self.alive or self.exit_code is not None or self.connected or self._cut:
            return
        if not self.world.leader.alive or not self._agent_runs or not self._knows_its_workers:
            return  # tried again later
        if self._stopped is not None:
            return
        self._up, self._down = (Link(self.clock, 0.0002, self.world.news_s) for _ in range(2))
        self.connected, self.connected_at = True, self.clock.now
        self.is_known = False
        self.world.registered(self.name)
        self._up.send(self.world.leader.connected, self)
        self._send_view()
        for process in self.processes.values():
            process.down.send(process.report_again)

    def cut_off(self) -> None:
        """Break the stream and the connection to the store; the node and its processes live on."""
        self._cut = True
        self._hang_up((0.0, LATEST_NOTICE_S))
        self._fall_silent()

    def stop_agent(self, lasts_s: float) -> None:
        """Stop the agent, and in half of all cases the keeper; they go on after a while."""
        if not self._agent_runs or self._stopped is not None or self.exit_code is not None:
            return
        self._stopped = []
        self._hang_up((0.5, LATEST_NOTICE_S))
        self._fall_silent(keeper=self.clock.chance(0.5))
        self.clock.after(lasts_s, self._go_on)

    def _go_on(self) -> None:
        heard, self._stopped = self._stopped or [], None
        if not self.alive:
            return
        silent_since = self._silent_since
        if silent_since is not None and self.clock.now >= self._valid_until() + LAPSE_S:
            self._lease_is_over()
        for event in heard:
            if isinstance(event, ev.WorkerExited):
                self.exited(event)
            else:
                self.tell(event)
        self._be_heard()
        self.connect()

    # ---- the lease to train

    def may_train(self, process: Process) -> bool:
        """Whether the process may begin or commit a step."""
        return process.epoch == self.epoch and self.clock.now < self._valid_until()

    def _valid_until(self) -> float:
        since = self._silent_since
        return math.inf if since is None else since + self.world.isolation_s

    def _fall_silent(self, *, keeper: bool = True) -> None:
        """Nobody answers the agent any more. keeper: the keeper runs."""
        if self._silent_since is not None:
            return
        self._silent_since = self.clock.now
        self._silences += 1
        isolation_s = self.world.isolation_s
        self.clock.after(isolation_s + LAPSE_S, self._isolated, self._silences, keeper)
        self.clock.after(isolation_s + GONE_MARGIN_S, self._given_up, self._silences)

    def _be_heard(self) -> None:
        if not self._cut and self._stopped is None:
            self._silent_since = None

    def _is_silent(self, silence: int) -> bool:
        return self._silent_since is not None and silence == self._silences and self.alive

    @property
    def is_cut_off(self) -> bool:
        return self._cut

    def heal(self) -> None:
        self._cut = False
        self._be_heard()
        self.connect()

    @property
    def heard_until(self) -> float:
        """Until when a leader has heard what happens here. It hears nothing while the node is out
        of contact, and a stream that breaks soon after it was opened may have carried nothing."""
        opened_by = self.clock.now - 2 * self.world.news_s - REPORTED_WITHIN_S
        is_heard = self.connected and self.connected_at < opened_by
        return self.clock.now if is_heard else self._heard_until

    def _lose_contact(self) -> None:
        """The leader does not know of a stream on which nothing has come through."""
        self._heard_until = self.heard_until
        if self.is_known:
            self.hung_up_at = self.clock.now

    def lose_leader(self) -> None:
        if self.connected:
            self._lose_contact()
        self._up.open = self._down.open = False
        self.connected = False

    def restart_agent(self, after_s: float) -> None:
        """Kill the agent and start another one after `after_s` seconds; the processes live on."""
        if not self._agent_runs or self.exit_code is not None or self._stopped is not None:
            return
        self._agent_runs = False
        for process in self.processes.values():
            process.has_agent = False
        self._timer.set(None)
        self._hang_up((0.0, 0.1))
        self.clock.after(after_s, self._return_agent)

    def _return_agent(self) -> None:
        if not self.alive:
            return
        self._agents += 1
        self._agent_since = self.clock.now
        start = f"{self.settings.start}r{self._agents}"
        self.agent = self.world.parts.agent(replace(self.settings, start=start))
        self._agent_runs, self._knows_its_workers = True, False
        self._newest = 0
        self.tell(ev.SearchStarted())
        found = tuple((p.name, p.pid) for p in self.processes.values())
        self.tell(ev.Started(workers=found))
        for process in self.processes.values():  # once they have found its socket
            found_s = self.clock.between(*self.world.pace.found_s)
            self.clock.after(found_s, process.find_agent, self._agents)

    def is_agent(self, agents: int) -> bool:
        """True if the agent with this number runs; the node's first one is 1."""
        return self._agent_runs and agents == self._agents

    def _hang_up(self, notice_s: tuple[float, float]) -> None:
        if self.connected:
            self._lose_contact()
        self._up.open = self._down.open = False
        self.connected = False
        self.clock.after(self.clock.between(*notice_s), self.world.leader.lost, self)

    def _isolated(self, silence: int, keeper: bool) -> None:
        """The lease is over. The agent ends its workers, and the keeper does if it runs. Soon the
        others are certain of that."""
        if not self._is_silent(silence):
            return
        if self._agent_runs and self._stopped is None:
            self._lease_is_over()
        elif keeper:
            for process in list(self.processes.values()):
                process.end(signal=SIGKILL)

    def _lease_is_over(self) -> None:
        self.epoch += 1
        doomed = tuple(self.processes.values())
        self.tell(ev.CutOff(silent_s=self.world.isolation_s))
        self.clock.after(ENDED_WITHIN_S, self._must_have_ended, doomed, self._agents)

    def _given_up(self, silence: int) -> None:
        if self._is_silent(silence):
            self.world.gone(self.name)

    def drain(self) -> None:
        self.drains = self.world.journal.drains = True
        self.world.journal.left_from.setdefault(self.name, self.clock.now)
        if self.connected:
            leaving = coordinator_events.NodeLeaving(node=self.name, reason="drained")
            self.world.leader.tell(leaving)

    def lose(self, *, silent: bool) -> None:
        """The whole node is lost. `silent`: by a power loss, which peers do not see."""
        self.alive = False
        self._up.open = self._down.open = False
        for process in list(self.processes.values()):
            process.end(signal=SIGKILL, silent=silent)
        detection_s = (0.5, LATEST_LOSS_S) if silent else (0.0, 0.1)
        self.clock.after(self.clock.between(*detection_s), self.world.leader.lost, self)
        self.clock.after(self.world.isolation_s + GONE_MARGIN_S, self.world.gone, self.name)

    # ---- the agent machine

    def tell(self, event: ev.Event) -> None:
        if not self.alive or self.exit_code is not None or not self._agent_runs:
            return
        if self._stopped is not None:
            self._stopped.append(event)
            return
        if isinstance(event, ev.Drained):
            self.world.journal.heard_of_drain.add(self.name)
        if isinstance(event, ev.WorkerReported):
            self._note_first_report(event.status.worker)
        if isinstance(event, ev.GenerationAnnounced):
            self._newest = max(self._newest, event.generation.number)
            self._look_who_has_heard()
        effects = self.agent.handle(event, self.clock.now)
        if self.world.observer is not None:
            self.world.observer(self.clock.now, self.name, event, effects)
        for effect in effects:
            self._do(effect)

    def hear(self, event: ev.Event) -> None:
        """Deliver what the coordinator sends."""
        self._down.send(self.tell, event)

    def _do(self, effect: fx.Effect) -> None:
        match effect:  # the most frequent ones first
            case fx.SetTimer(at=at):
                self._timer.set(at)
            case fx.ReportNode():
                self._must_be_true(effect)
                self._view = effect
                self._knows_its_workers = True
                self._send_view()
                self.connect()
            case fx.ForwardGeneration(worker=name, generation=generation):
                process = self.processes[name]
                process.down.send(process.generation_announced, generation)
            case fx.SpawnWorker(worker=name):
                self._spawn(name)
            case fx.AssignSlot(worker=name, slot=slot):
                process = self.processes[name]
                if process.to_end:
                    self.world.journal.slots_wasted.append(f"{name} at {self.clock.now:.4f}")
                process.down.send(process.assigned, slot)
                self._look_who_has_heard()
            case fx.EndWorker(worker=name):
                self.processes[name].to_end = True
                self.clock.after(0.001, self._kill, self.processes[name])
            case fx.DismissWorker(worker=name):
                process = self.processes[name]
                process.down.send(process.dismiss)
            case fx.ReportFailure(failure=failure):
                failed = coordinator_events.WorkerFailed(node=self.name, failure=failure)
                self._up.send(self.world.leader.tell, failed)
            case fx.AskToStop(exit_code=code, reason=reason):
                stop = coordinator_events.StopRequested(exit_code=code, reason=reason)
                self._up.send(self.world.leader.tell, stop)
            case fx.TellLeaveTimedOut():
                pass  # for the record
            case fx.ExitAgent(exit_code=code):
                self._exit(code)

    # ---- what the processes do

    def exited(self, event: ev.WorkerExited) -> None:
        if self._stopped is not None:
            self._stopped.append(event)
            return
        if event.gone:
            self.processes.pop(event.worker, None)
        self.tell(event)  # an agent that comes later does not find it

    def progressed(self, event: coordinator_events.ProgressReported) -> None:
        self._up.send(self.world.leader.tell, event)

    def shard_saved(self, event: coordinator_events.ShardReported) -> None:
        self._up.send(self.world.leader.shard_saved, self, event)

    def hear_probe(self) -> None:
        self._down.send(self._probe)

    def hear_peers(self, number: int, workers: tuple[WorkerId, ...], within_s: float) -> None:
        self._down.send(self._probe_peers, number, workers, within_s)

    def _probe_peers(self, number: int, workers: tuple[WorkerId, ...], within_s: float) -> None:
        if not self._agent_runs:
            return
        unreached = self.world.unreached(self.name, workers)
        silent = "no answer" in unreached.values()
        took_s = within_s if silent else self.clock.between(0.0005, 0.005)
        told = coordinator_events.PeersProbed(node=self.name, number=number, unreached=unreached)
        self.clock.after(took_s, self._tell_probed, told)

    def _tell_probed(self, told: coordinator_events.PeersProbed) -> None:
        if self._agent_runs:
            self._up.send(self.world.leader.tell, told)

    def _probe(self) -> None:
        for process in self.processes.values():
            process.down.send(process.answer_probe)

    def checkpoint_settled(self, step: int, abandoned: bool, generation: int) -> None:
        for process in self.processes.values():
            process.down.send(process.checkpoint_settled, step, abandoned, generation)

    def hear_of_checkpoint(self, step: int, generation: int, *, abandoned: bool) -> None:
        self._down.send(self.checkpoint_settled, step, abandoned, generation)

    # ---- what must be true of it

    def _look_who_has_heard(self) -> None:
        self.clock.after(HEARD_WITHIN_S, self._must_have_heard, self._newest, self._agents)

    def _note_first_report(self, worker: WorkerId) -> None:
        """From a worker's first report on, check that it gets this agent's news."""
        process = self.processes.get(worker)
        if process is not None and process.known_to != self._agents:
            process.known_to, process.known_since = self._agents, self.clock.now
            self._look_who_has_heard()

    def _knows(self, process: Process) -> bool:
        """True if the process has known this agent for HEARD_WITHIN_S or longer."""
        since = self.clock.now - HEARD_WITHIN_S
        return process.known_to == self._agents and process.known_since <= since

    def _must_have_heard(self, number: int, agents: int) -> None:
        """Each worker with a slot, a possible member, knows of this generation or a later one."""
        if agents != self._agents or not self._agent_runs or not self.alive:
            return
        for process in self.processes.values():
            announced = process.worker.announced
            known = announced.number if announced is not None else 0
            hears = process.responsive and not process.deaf and not process.to_end
            had_time = process.assigned_at <= self.clock.now - HEARD_WITHIN_S
            if hears and had_time and known < number and self._knows(process):
                self.world.journal.unheard.append(f"{process.name} of {number}")

    def _must_have_ended(self, doomed: tuple[Process, ...], agents: int) -> None:
        """The agent has ended all workers that ran here when the node was cut off."""
        if agents == self._agents:
            self.world.journal.outlived += [p.name for p in doomed if p.alive]

    def _must_be_true(self, view: fx.ReportNode) -> None:
        """No worker that called elastic.init() long ago is reported as starting, unless it was late
        in finding this agent."""
        new = self.clock.now < self._agent_since + ADOPTED_WITHIN_S
        for status in view.workers:
            process = self.processes.get(status.worker)
            if status.phase is not WorkerPhase.STARTING or process is None:
                continue
            if not (new or self._knows(process)):
                continue
            if process.responsive and process.attached_at <= self.clock.now - HEARD_WITHIN_S:
                self.world.journal.misreported.append(f"{process.name} at {self.clock.now:.4f}")

    # ---- inside

    def _spawn(self, name: WorkerId) -> None:
        process = Process(self.world, self, name, self.world.next_pid())
        self.processes[name] = process
        self.world.processes.append(process)
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

    def _exit(self, code: int) -> None:
        self.exit_code = code
        self._up.open = self._down.open = self.connected = False
        self.world.journal.note(self.clock.now, self.name, "exits", code)
        self.world.leader.lost(self)
        self.world.gone(self.name)
