"""The agent: feeds events to its machine (core/agent) and executes the machine's effects."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from typing_extensions import assert_never

from elastic.agent.coordinator_link import CoordinatorLink, LeaderSource
from elastic.agent.isolation import Isolation
from elastic.agent.logs import LogFollower, WorkerLogs
from elastic.agent.metrics import AgentFigures
from elastic.agent.peer_probes import open_probe_port, port_of, unreached
from elastic.agent.worker_server import (
    Liveness,
    StackCollector,
    TimeReports,
    WorkerServer,
    main_stacks,
    with_place,
)
from elastic.agent.zygote_process import OutOfMemory, ZygoteProcess
from elastic.checkpoint.catalog import newest_step
from elastic.checkpoint.directory import open_directory
from elastic.core.agent import effects as fx
from elastic.core.agent import events as ev
from elastic.core.agent.machine import Agent, AgentSettings
from elastic.core.membership import Failure, FailureKind
from elastic.errors import ElasticError, ExitCode
from elastic.rpc.codec import (
    Codec,
    failure_from_pb,
    failure_to_pb,
    generation_from_pb,
    generation_to_pb,
    status_from_pb,
    status_to_pb,
)
from elastic.rpc.control_client import ControlClient
from elastic.rpc.stacks import stack_lines
from elastic.runtime.death_notice import DeathNotice
from elastic.runtime.driver import Driver
from elastic.runtime.journal import Journal
from elastic.runtime.log_retention import ZYGOTE_LOG, prune
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.off_loop import off_loop
from elastic.runtime.orphans import OrphanReaper
from elastic.runtime.tasks import TaskSupervisor
from elastic.runtime.training_lease import TrainingLease
from elastic.settings.node import NodeSettings
from elastic.settings.run import RunSettings
from elastic.store.lease_keeper import boot_time_s
from elastic.timeouts import timeout
from elastic.v1 import control_pb2, job_pb2, stacks_pb2
from elastic.v1 import local_pb2 as pb

AGENT_SOCKET = "agent.sock"
"""The socket in the run's directory at which workers report."""
_LIVENESS_INTERVAL_S = 0.5
_ANNOUNCE_S, _ANNOUNCED_LOOK_S = 0.5, 0.005
_LOG_LINES, _LOG_CHARACTERS = 100, 1 << 14  # of a running worker, for the page
_LOOK_FOR_CHECKPOINT_S = 5.0
_LOST_EXIT_S = 0.5  # for the zygote to report an exit that the pidfd has announced
_LONGEST_PROBE_S = 10.0
_REPLACE = Codec(ev.ReplaceRequested, control_pb2.Replace)
_STOP = Codec(fx.AskToStop, control_pb2.StopRequest)
_MOST_FAILED_ZYGOTE_STARTS = 3  # zygotes in a row that end before they are ready: an import fails


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """The agent's configuration: its node and its job."""

    machine: AgentSettings
    host: str
    """The address at which workers of other nodes reach this node's workers."""
    settings: RunSettings | NodeSettings
    argv: Sequence[str]
    """The script and its arguments."""
    run_directory: Path
    log_directory: Path
    environment: Mapping[str, str]
    hello: control_pb2.AgentHello
    """The agent's first message to each coordinator."""
    ports: tuple[int, int] = (0, 0)
    """The first and the last port at which workers may listen; 0: any port."""
    checkpoint_dir: str = ""
    """In the form for workers, whose working directory may differ; empty: no checkpoints."""
    answers_probes: bool = False
    """Agents of other nodes may try whether they reach a port here that the kernel chose."""
    ledger: bool = False
    grace_s: float = 0.0
    """Seconds that workers outlive an agent that is killed, so that the next one can adopt them."""
    hold: IO[str] | None = None
    """An open file whose lock must last as long as workers live: the zygote keeps it open."""
    torchrun: pb.Torchrun | None = None
    """How scripts run if `elastic torchrun` has started the job."""
    records_ends: bool = False
    """Record here, too, how scripts ended: the coordinator that records it is on another node."""


class AgentDaemon:
    """One node's agent. on_output: takes (rank or None, worker, line) of the workers' logs.

    pauses: the pauses of its event loop, which it reports to the coordinator. renewed_at: when the
    last answered renewal of the node's registration was sent, by `boot_time_s`.
    """

    def __init__(
        self,
        options: NodeOptions,
        leaders: LeaderSource,
        connect: Callable[[str], ControlClient],
        journal: Journal,
        on_output: Callable[[int | None, str, str], None],
        pauses: LoopPauses | None = None,
        renewed_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._options = options
        self._pauses = pauses if pauses is not None else LoopPauses()
        self._told_pause_s = 0.0
        self._journal = journal
        self._on_output = on_output
        self._machine = Agent(options.machine)
        self._driver: Driver[ev.Event, fx.Effect] = Driver(
            self._machine, self._execute, ev.TimerFired(), on_error=self.crashed
        )
        self._tasks = TaskSupervisor(self.crashed)
        self._pids: dict[str, int] = {}  # of every requested worker; 0 until it is forked
        self._pidfds: dict[str, int] = {}
        settings = options.settings
        self._liveness = Liveness(settings.silence_timeout_s, settings.first_step_timeout_s)
        self._compiling: set[str] = set()
        self._awaited: set[str] = set()
        """Workers for whose death a thread waits."""
        self._times = TimeReports(
            lambda found: self._link.send(worker_time=found),
            lambda found: self._link.send(worker_pace=found),
        )
        self._logs = LogFollower(self._output)
        self._log_files = WorkerLogs(options.log_directory)
        self._out_of_memory = OutOfMemory()
        self._orphans = OrphanReaper()
        self._run_directory = options.run_directory
        self._known = asyncio.Event()
        """Set once the agent knows which workers an earlier agent left."""
        self._server = WorkerServer(
            options.run_directory / AGENT_SOCKET,
            expected=lambda worker: worker in self._log_files,
            on_message=self._worker_said,
            report=journal.record,
            on_error=self.crashed,
            known=self._known,
        )
        self._stacks = StackCollector(
            lambda worker, request: self._server.send(worker, stacks=request), self._pids
        )
        self._suspected: set[str] = set()  # workers that will be ended because they hang
        self._hung: dict[str, stacks_pb2.WorkerStacks] = {}  # stacks of workers being ended
        self._failed_zygote_starts = 0  # in a row
        self._isolation = Isolation(
            timeout_s=options.hello.isolation_timeout_s,
            answered_at=lambda: max(renewed_at(), self._link.answered_at),
            ask=lambda now: self._link.send(pulse=now),
            cut_off=self._cut_off,
        )
        self._zygote = self._new_zygote()
        self._link = CoordinatorLink(
            leaders,
            connect,
            options.hello,
            on_connected=self._report_again,
            on_message=self._coordinator_said,
            on_refused=self.crashed,
            report=journal.record,
        )
        self._view: tuple[Any, ...] = ()
        self._failed: Counter[str] = Counter()  # workers, by kind
        self._leaves_because = ""
        self._ending_signal = 0  # that classic scripts get; 0: SIGTERM
        self._leave_timed_out = False
        self._restarting = False
        # This node's workers reported them: generation and step. A later generation may go back.
        self._committed, self._newest_checkpoint = (0, 0), 0
        self._probes = False
        self._probe_port: asyncio.Server | None = None
        self._stop_ordered: control_pb2.StopRequest | None = None
        self._keeps_curve = False
        self._attending = False
        self.end_of_job = ""
        """Why the job has ended; empty if there is nothing to add to its exit code."""
        self.adopts = False
        """True if it has found the zygote of an earlier agent."""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The agent's exit code when no process is left, or the error that broke the agent."""

    async def start(self) -> None:
        """Listen, find or start the zygote; attend the coordinator unless workers are adopted."""
        self._driver.post(ev.SearchStarted())  # before the first await: signals come from now on
        await self._server.start()
        if self._options.answers_probes:
            self._probe_port = await open_probe_port(self._options.host)
            self._options.hello.probe_port = port_of(self._probe_port)
        self.adopts = await self._zygote.open()
        if not self.adopts:
            self._driver.post(ev.NothingFound())
            self._known.set()
            self._attend()
            self._tasks.start(self._isolation.run(), "isolation")
        self._tasks.start(self._zygote.run(), "zygote")
        self._tasks.start(self._logs.run(), "logs")
        self._tasks.start(self._remove_earlier_logs(), "earlier-logs")
        self._tasks.start(self._watch_liveness(), "liveness")

    def _attend(self) -> None:
        """Attend the coordinator. Called once the agent knows which workers it has."""
        if not self._attending:
            self._attending = True
            self._tasks.start(self._link.run(), "coordinator-link")

    async def close(self, *, let_go: bool = False) -> None:
        """End every process, or leave them to the next agent (`let_go`); close every socket."""
        self._driver.close()
        if let_go:
            self._zygote.let_go()
        else:
            await self._zygote.close()
        self._logs.poll()
        self._logs.forget_all()
        for worker in list(self._pidfds):
            self._unwatch(worker)
        await self._server.close()
        if self._probe_port is not None:
            self._probe_port.close()
        self._link.close()
        await self._tasks.close()

    async def move(self, run_directory: Path) -> None:
        """Listen in a new run directory, since the old one was removed; new workers connect there.
        The zygote keeps its present connections and gets no others."""
        self._run_directory = run_directory
        await self._server.listen_at(run_directory / AGENT_SOCKET)

    def leave(self, exit_code: int, reason: str, forwarded: int = 0) -> None:
        """At the first signal: ask to save and leave, then end with this exit code. forwarded: the
        signal that asks classic scripts to end; 0: SIGTERM."""
        self._ending_signal = forwarded
        self._server.tell_all(node_leaves=pb.NodeLeaves())
        self._driver.post(ev.LeaveRequested(exit_code=exit_code, reason=reason))

    async def announce_restart(self) -> None:
        """Tell the coordinator, so that it waits for the next agent also while a step takes long.
        Return when it knows, or after `_ANNOUNCE_S`."""
        self._restarting = True
        self._send_view()
        asked = boot_time_s()
        self._link.send(pulse=asked)  # its answer shows that what was sent before it has arrived
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(_ANNOUNCE_S):
                while self._link.connected and self._link.answered_at < asked:
                    await asyncio.sleep(_ANNOUNCED_LOOK_S)

    def _judge_lease(self) -> None:
        """Find out whether the node was cut off for too long before anything else is done."""
        if self._known.is_set():
            self._isolation.look()

    def _cut_off(self, silent_s: float) -> None:
        """The lease to train is over. The keeper ends the workers, too, whatever happens here."""
        self._journal.record("cut_off", silent_s=round(silent_s, 1))
        self._driver.post(ev.CutOff(silent_s=silent_s))

    @property
    def in_contact(self) -> bool:
        return self._link.connected

    def figures(self, counts: Mapping[str, int], *, registered: bool | None = None) -> AgentFigures:
        """A snapshot of the node for its metrics. counts: how often each journal entry was made."""
        return AgentFigures(
            node=self._options.machine.node,
            slots=self._options.machine.slots,
            connected=self.in_contact,
            registered=registered,
            step=max((s.committed for s in self._view), default=0),
            phases=Counter(s.phase.name.lower() for s in self._view),
            failures=dict(self._failed),
            counts=dict(counts),
        )

    @property
    def step(self) -> int:
        """The newest step that a worker of this node has reported as committed."""
        return self._committed[1]

    @property
    def generation(self) -> int:
        """The number of the newest generation known, or 0."""
        newest = self._machine.generation
        return newest.number if newest is not None else 0

    def job_ended(self, exit_code: int, message: str) -> None:
        self.end_of_job = message
        self._driver.post(ev.JobEnded(exit_code=exit_code))

    def end(self, exit_code: int) -> None:
        """Resolve `ended` now, whatever still runs."""
        if not self.ended.done():
            self.ended.set_result(exit_code)

    def stop(self, exit_code: int) -> None:
        """At the second signal: end everything now."""
        self._driver.post(ev.StopRequested(exit_code=exit_code))

    # ---- the zygote

    def _new_zygote(self) -> ZygoteProcess:
        return ZygoteProcess(
            run_directory=self._run_directory,
            log=self._options.log_directory / ZYGOTE_LOG,
            environment=self._options.environment,
            on_event=self._zygote_said,
            on_lost=self._zygote_lost,
            lease=self._isolation.lease,
            grace_s=self._options.grace_s,
            hold=self._options.hold,
            passes_streams=self._options.torchrun is not None,
        )

    def _zygote_said(self, event: pb.ZygoteEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "ready":
            found = event.ready.workers
            for adopted in found:
                self._adopt(adopted)
            self._driver.post(ev.Started(workers=tuple((w.worker, w.pid) for w in found)))
            if not self._known.is_set():
                self._isolation.adopt(TrainingLease.of_process(event.ready.keeper))
                self._tasks.start(self._isolation.run(), "isolation")
            self._known.set()
        elif kind == "spawned":
            spawned = event.spawned
            self._pids[spawned.worker] = spawned.pid
            self._logs.follow(spawned.worker, self._log_files.forked(spawned))
            self._watch(spawned.worker, spawned.pid)
            self._journal.record("worker_started", worker=spawned.worker, pid=spawned.pid)
            self._driver.post(ev.WorkerSpawned(worker=spawned.worker, pid=spawned.pid))
        elif kind == "not_spawned":
            self._not_spawned(event.not_spawned.worker, event.not_spawned.reason)
        elif kind == "notice":
            self._link.send(notice=event.notice)
        elif kind == "exited":
            self._exited(event.exited.worker, event.exited.exit_code, event.exited.signal)

    def _not_spawned(self, worker: str, reason: str) -> None:
        self._pids.pop(worker, None)
        self._journal.record("worker_not_started", worker=worker, reason=reason)
        self._driver.post(ev.WorkerNotSpawned(worker=worker))
        self._forget_log(worker)

    def _adopt(self, found: pb.Spawned) -> None:
        self._pids[found.worker] = found.pid
        self._logs.follow(found.worker, self._log_files.forked(found), from_end=True)
        self._watch(found.worker, found.pid)
        self._journal.record("worker_adopted", worker=found.worker, pid=found.pid)

    def _zygote_lost(self) -> None:
        """Start another zygote. The kernel has killed the workers together with the lost one."""
        lost = self._zygote.exit_reason()
        self._journal.record("zygote_lost", reason=str(lost))
        self._failed_zygote_starts = 0 if self._zygote.was_ready else self._failed_zygote_starts + 1
        if self._failed_zygote_starts == _MOST_FAILED_ZYGOTE_STARTS:
            self.crashed(lost)
        if self.ended.done():
            return
        self._zygote = self._new_zygote()  # first: all later requests go to this one
        self._tasks.start(self._zygote.run(), "zygote")
        self._driver.post(ev.NothingFound())
        for worker in list(self._pids):
            self._exited(worker, 0, signal.SIGKILL, with_zygote=True)

    def _watch_death(self, worker: str, pid: int) -> None:
        """Wait, on a thread of its own, for the kernel to begin to end the worker."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            with contextlib.suppress(OSError, RuntimeError):  # it has ended, or this agent has
                number = DeathNotice(pid).wait()
                loop.call_soon_threadsafe(self._dying, worker, pid, number)

        with contextlib.suppress(RuntimeError):  # the system has no thread left
            threading.Thread(target=watch, name=f"death of {worker}", daemon=True).start()

    def _dying(self, worker: str, pid: int, number: int) -> None:
        """After other signals, and after the stacks of a hung worker, its log comes first."""
        killed = number == signal.SIGKILL and worker not in self._hung
        if killed and self._pids.get(worker) == pid:
            self._exited(worker, 0, number, gone=False)

    def _exited(
        self,
        worker: str,
        exit_code: int,
        number: int,
        *,
        with_zygote: bool = False,
        gone: bool = True,
    ) -> None:
        exited = ev.WorkerExited(
            worker=worker,
            exit_code=exit_code,
            signal=number,
            out_of_memory=self._out_of_memory.has_killed(time.monotonic()),
            with_zygote=with_zygote,
            gone=gone,
        )
        if gone:
            self._ended(exited)
        else:
            self._judge_lease()
            self._driver.post(exited)

    def _ended(self, exited: ev.WorkerExited) -> None:
        self._judge_lease()  # the keeper may have ended it because the node was cut off
        worker = exited.worker
        if self._pids.pop(worker, None) is None:
            return
        self._unwatch(worker)
        self._liveness.forget(worker)
        self._compiling.discard(worker)
        self._awaited.discard(worker)
        self._stacks.forget(worker)
        self._times.forget(worker, time.monotonic())
        self._driver.post(exited)
        self._hung.pop(worker, None)
        self._suspected.discard(worker)
        self._forget_log(worker)

    def _forget_log(self, worker: str) -> None:
        self._logs.forget(worker)
        self._log_files.end(worker)

    async def _remove_earlier_logs(self) -> None:
        own, settings = self._options.log_directory, self._options.settings
        kept = settings.keep_logs
        pruning = functools.partial(
            prune, own, settings.job, runs=kept.runs, size_bytes=kept.size_bytes
        )
        try:
            removed = await off_loop(pruning)
        except RuntimeError as error:  # the system has no thread left
            self._journal.record("warning", source="logs", message=str(error))
            return
        if removed.directories:
            self._journal.record(
                "logs_removed",
                directories=len(removed.directories),
                bytes=removed.size_bytes,
                oldest=str(removed.directories[-1]),
            )
        for problem in removed.problems[:1]:
            self._journal.record("warning", source="logs", message=problem)

    async def _dump_and_kill(self, worker: str) -> None:
        """Append the stacks of the worker to its output, and kill the worker."""
        try:
            (stacks,) = await self._stacks.collect([worker], dying=True)
            log = self._log_files.get(worker)
            if log is not None:
                self._hung[worker] = stacks
                log.append("".join(f"{line}\n" for line in stack_lines(stacks)))
        except (OSError, RuntimeError) as error:
            self._journal.record("warning", source="stacks", message=f"{worker}: {error!r}")
        finally:
            if worker in self._pids:
                self._zygote.kill(worker, signal.SIGKILL)

    def _tell_stacks(self, request: stacks_pb2.StacksRequest) -> None:
        """Send stacks (or time stretches, or the log) of the worker, or of all that have a slot."""
        if request.log:
            self._tell_log(request)
            return
        there = [s.worker for s in self._view if s.slot is not None and self._pids.get(s.worker)]
        asked = [w for w in there if request.worker in ("", w)]
        collecting = self._stacks.collect(asked, brief=request.brief, stretches=request.stretches)

        async def tell() -> None:
            with contextlib.suppress(OSError, RuntimeError):  # the system has no thread left
                found = await collecting
                told = stacks_pb2.NodeStacks(request=request.request, workers=found)
                self._link.send(stacks=told)

        self._tasks.start(tell(), "tell-stacks")

    def _tell_log(self, request: stacks_pb2.StacksRequest) -> None:
        log, told = self._log_files.get(request.worker), stacks_pb2.NodeStacks()
        told.request = request.request
        if log is not None:
            text = log.last_lines(_LOG_LINES)
            told.workers.add(worker=request.worker, log=text[-_LOG_CHARACTERS:])
        self._link.send(stacks=told)

    def _watch(self, worker: str, pid: int) -> None:
        """Watch the worker by pidfd too: a stopped zygote would not report its exit."""
        with contextlib.suppress(OSError):  # it has ended, or the system has no descriptor left
            descriptor = os.pidfd_open(pid)
            self._pidfds[worker] = descriptor
            loop = asyncio.get_running_loop()
            loop.add_reader(descriptor, self._pidfd_readable, worker)

    def _pidfd_readable(self, worker: str) -> None:
        self._unwatch(worker)
        loop = asyncio.get_running_loop()
        loop.call_later(_LOST_EXIT_S, self._exited_unreported, worker)

    def _exited_unreported(self, worker: str) -> None:
        self._ended(ev.WorkerExited(worker=worker, exit_code=0, unseen=True))

    def _unwatch(self, worker: str) -> None:
        descriptor = self._pidfds.pop(worker, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # ---- the workers

    def _worker_said(self, worker: str, message: pb.WorkerMessage) -> None:
        pid = self._pids.get(worker)
        if pid is None:
            return
        kind = message.WhichOneof("kind")
        if kind == "progress":
            progress = message.progress  # spares report none
            self._committed = max(self._committed, (progress.generation, progress.committed))
            self._stacks.progressed(worker, progress)
            self._note_compiling(worker, message.progress)
        if worker not in self._awaited:  # from now on it holds what tells of its death
            self._awaited.add(worker)
            self._watch_death(worker, pid)
        compiling = worker in self._compiling
        self._liveness.heard(worker, pid, time.monotonic(), compiling=compiling)
        if kind == "status":
            if message.status.phase == job_pb2.WORKER_PHASE_FINISHED:
                self._times.tell(worker, time.monotonic())
            self._driver.post(ev.WorkerReported(status=status_from_pb(message.status)))
        elif kind == "failure":
            self._driver.post(ev.WorkerReportedFailure(failure=failure_from_pb(message.failure)))
        elif kind == "progress":
            told = message.progress.probed or self._rank_of(worker) == 0
            self._times.heard(worker, message.progress.spent, time.monotonic(), told=told)
            if told:
                self._link.send(progress=message.progress)
            elif message.progress.HasField("pace"):
                self._times.heard_pace(worker, message.progress.pace)
        elif kind == "stacks":
            self._stacks.answered(worker, message.stacks)
        elif kind == "known":
            self._worker_knows(message.known)
        elif kind is not None and kind != "hello":
            if kind == "reformed":
                spent, generation = message.reformed.spent, message.reformed.generation
                self._times.heard(worker, spent, time.monotonic(), told=True)
                self._driver.post(ev.WorkerRecovered(worker=worker, generation=generation))
            self._link.send(**{kind: getattr(message, kind)})
            notice, node = message.notice, self._options.hello.node
            if notice.name == "script_ended" and self._options.records_ends:
                self._journal.record(notice.name, node=node, details=dict(notice.fields))

    def _worker_knows(self, known: job_pb2.Known) -> None:
        """Let an agent that has adopted workers learn their group from them."""
        newest = generation_from_pb(known.newest)
        if newest.is_news_after(self._machine.generation):
            if known.HasField("before"):
                before = generation_from_pb(known.before)
                self._driver.post(ev.GenerationAnnounced(generation=before))
            self._driver.post(ev.GenerationAnnounced(generation=newest))
            self._link.send(known=known)

    def _note_compiling(self, worker: str, progress: job_pb2.Progress) -> None:
        """Tell the machine repeatedly while the worker compiles, and once when it has finished."""
        if progress.compiling:
            self._compiling.add(worker)
        elif worker in self._compiling:
            self._compiling.discard(worker)
        else:
            return
        committed = progress.committed if progress.compiling else None
        self._driver.post(ev.WorkerCompiled(worker=worker, committed=committed))

    async def _watch_liveness(self) -> None:
        while True:
            await asyncio.sleep(_LIVENESS_INTERVAL_S)
            self._out_of_memory.look(time.monotonic())
            self._orphans.reap()
            for worker, silent_s in self._liveness.silent(time.monotonic()):
                self._liveness.forget(worker)
                self._suspected.add(worker)
                self._driver.post(ev.WorkerFrozen(worker=worker, silent_s=silent_s))
            if self._pauses.longest_s > self._told_pause_s:
                self._send_view()

    def _rank_of(self, worker: str) -> int | None:
        generation = self._machine.generation
        return generation.rank_of(worker) if generation is not None else None

    def _output(self, worker: str, line: str) -> None:
        self._on_output(self._rank_of(worker), worker, line)

    # ---- the coordinator

    def _coordinator_said(self, message: control_pb2.CoordinatorMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "generation":
            generation = generation_from_pb(message.generation)
            self._driver.post(ev.GenerationAnnounced(generation=generation))
        elif kind == "replace":
            replace = message.replace
            if replace.worker in self._pids:
                self._suspected.add(replace.worker)
            self._driver.post(_REPLACE.from_pb(replace))
        elif kind == "checkpoint":
            if not message.checkpoint.abandoned:
                self._newest_checkpoint = max(self._newest_checkpoint, message.checkpoint.step)
            self._server.broadcast(checkpoint=message.checkpoint)
        elif kind == "ledger_stored":
            self._server.broadcast(ledger_stored=message.ledger_stored)
        elif kind == "keep_curve":
            self._keeps_curve = message.keep_curve.keep
            self._server.broadcast(keep_curve=message.keep_curve)
        elif kind == "curve_stored":
            self._server.broadcast(curve_stored=message.curve_stored)
        elif kind == "pulse":
            self._judge_lease()
        elif kind == "dismiss":
            self._driver.post(ev.DismissRequested())
        elif kind == "job_ended":
            self.job_ended(message.job_ended.exit_code, message.job_ended.message)
        elif kind == "probe":
            self._server.broadcast(probe=pb.ProbeProgress())
        elif kind == "probe_peers":
            self._tasks.start(self._probe_peers(message.probe_peers), "probe-peers")
        elif kind == "stacks":
            self._tell_stacks(message.stacks)
        elif kind == "stop":
            self._stop_ordered = message.stop
        elif kind == "stray":
            self._driver.post(ev.IncarnationSuperseded())
        elif kind == "drain":
            self._driver.post(ev.DrainRequested(called_off=message.drain.called_off))
        elif kind == "drained":
            self._journal.record("released", reason=message.drained.reason)
            self._driver.post(ev.Drained(exit_code=message.drained.exit_code))

    async def _probe_peers(self, request: control_pb2.ProbePeers) -> None:
        if self._probes:
            return  # a name server does not answer: the coordinator does without this round, too
        self._probes = True
        endpoints = {(peer.worker, False): peer.endpoint for peer in request.peers}
        for peer in request.peers:
            if peer.other_endpoint:
                endpoints[peer.worker, True] = peer.other_endpoint
        within_s = min(max(request.within_s, 0.0), _LONGEST_PROBE_S)
        try:
            failed = await off_loop(functools.partial(unreached, endpoints, within_s))
        except (OSError, RuntimeError):  # the system has no thread or descriptor left
            return
        finally:
            self._probes = False
        told = [
            control_pb2.Unreached(worker=worker, why=why, by_port=by_port)
            for (worker, by_port), why in failed.items()
            if not (by_port and (worker, False) in failed)
        ]
        self._link.send(peers_probed=control_pb2.PeersProbed(number=request.number, unreached=told))

    def _report_again(self) -> None:
        """Send everything again: a new coordinator may know nothing of this node or the group."""
        self._judge_lease()
        newest, before = self._machine.generation, self._machine.before
        if newest is not None:
            known = job_pb2.Known(newest=generation_to_pb(newest))
            if before is not None:
                known.before.CopyFrom(generation_to_pb(before))
            self._link.send(known=known)
        if self._stop_ordered is not None:
            self._link.send(stop=self._stop_ordered)
        self._send_view()
        if self._leaves_because:
            self._link.send(leave=control_pb2.LeaveRequest(reason=self._leaves_because))
        self._server.broadcast(report_again=pb.ReportAgain())

    def _send_view(self) -> None:
        self._told_pause_s = self._pauses.longest_s
        workers = [status_to_pb(s) for s in self._view]
        self._link.send(
            view=control_pb2.NodeView(
                workers=workers,
                longest_pause_s=self._told_pause_s,
                restarting=self._restarting,
            )
        )

    # ---- the effects of the machine

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SpawnWorker():
                self._spawn_worker(effect)
            case fx.AssignSlot():
                self._assign_slot(effect)
            case fx.ForwardGeneration():
                generation = generation_to_pb(effect.generation)
                self._server.send(effect.worker, generation=generation)
            case fx.EndWorker():
                self._end_worker(effect)
            case fx.DismissWorker():
                self._server.send(effect.worker, dismiss=pb.Dismiss())
            case fx.ReportNode():
                self._report_node(effect)
            case fx.ReportFailure():
                self._report_failure(effect)
            case fx.AskToStop():
                self._link.send(stop=_STOP.to_pb(effect))
            case fx.AskToLeave():
                self._leaves_because = effect.reason
                self._link.send(leave=control_pb2.LeaveRequest(reason=effect.reason))
            case fx.TellLeaveTimedOut():
                self._tell_leave_timed_out(effect)
            case fx.SetTimer():
                self._driver.set_timer(effect.at)
            case fx.ExitAgent():
                self._exit_agent(effect)
            case _:
                assert_never(effect)

    def _spawn_worker(self, effect: fx.SpawnWorker) -> None:
        options = self._options
        log = self._log_files.begin(effect.worker)
        self._pids[effect.worker] = 0
        self._zygote.spawn(
            pb.SpawnRequest(
                worker=effect.worker,
                socket_path=str(self._run_directory / AGENT_SOCKET),
                log_path=str(log),
                argv=options.argv,
                module=options.settings.module,
                classic=options.machine.classic,
                torchrun=options.torchrun,
            )
        )

    def _assign_slot(self, effect: fx.AssignSlot) -> None:
        options = self._options
        self._server.send(
            effect.worker,
            assignment=pb.Assignment(
                slot=effect.slot,
                host=options.host,
                checkpoint_dir=options.checkpoint_dir,
                checkpoint_every=options.settings.checkpoint_every,
                ledger=options.ledger,
                join_timeout_s=options.settings.join_timeout_s,
                local_world_size=options.machine.slots,
                job=options.settings.job,
                first_port=options.ports[0],
                last_port=options.ports[1],
                curve=self._keeps_curve,
            ),
        )

    def _end_worker(self, effect: fx.EndWorker) -> None:
        if effect.how is fx.How.DUMP_AND_KILL:
            self._tasks.start(self._dump_and_kill(effect.worker), "stacks")
        elif effect.how is fx.How.TERMINATE:
            run = self._options.torchrun
            # What is executed may be a shell, whose children must hear of it as well.
            at_once = run is not None and run.executes
            group_after_s = 0.0 if at_once else self._options.machine.end_grace_s / 2
            terminate = pb.Terminate(group_after_s=group_after_s, signal=self._ending_signal)
            self._server.send(effect.worker, terminate=terminate)
        else:
            self._zygote.kill(effect.worker, signal.SIGKILL)

    def _report_node(self, effect: fx.ReportNode) -> None:
        self._view = effect.workers
        self._attend()
        self._send_view()

    def _report_failure(self, effect: fx.ReportFailure) -> None:
        failure, hung = effect.failure, self._hung.get(effect.failure.worker)
        if hung is not None and _hangs(failure, self._suspected):
            failure = with_place(failure, hung)
        self._failed[failure.kind.name.lower()] += 1
        log = self._log_files.get(failure.worker)
        message = failure_to_pb(failure)
        message.log = str(log.path) if log is not None else ""
        message.committed_in, message.committed = self._isolation.lease.newest_commit
        if hung is not None and hung.processes:
            message.log_tail = main_stacks(hung)
        elif not message.traceback and log is not None:
            message.log_tail = log.last_lines()
        self._link.send(failure=message)

    def _tell_leave_timed_out(self, effect: fx.TellLeaveTimedOut) -> None:
        self._leave_timed_out = True
        waited_s = round(effect.waited_s, 3)
        reason = (
            "its workers did not reach a step boundary"
            if self._link.connected
            else "no coordinator released its workers"
        )
        node = self._options.hello.node
        self._journal.record("leave_timed_out", node=node, waited_s=waited_s, reason=reason)
        self._link.send(leave_timed_out=control_pb2.LeaveTimedOut(waited_s=waited_s))

    def _exit_agent(self, effect: fx.ExitAgent) -> None:
        if self._pids and not self.ended.done():
            left = ", ".join(self._pids)
            why = f"no exit was reported for {left}: the zygote does not answer and is killed"
            self._journal.record("warning", source="agent", message=why)
        unheard = self._leave_timed_out and not self._link.connected
        if unheard and self._options.checkpoint_dir:
            self._tasks.start(self._end_unsaved(effect.exit_code), "last-words")
        else:
            self.end(effect.exit_code)

    async def _end_unsaved(self, exit_code: int) -> None:
        """End without a save, since no coordinator leads, and record which steps are lost."""
        url, newest = self._options.checkpoint_dir, 0
        # RuntimeError: the system has no thread left.
        with contextlib.suppress(ElasticError, RuntimeError, asyncio.TimeoutError):
            async with timeout(_LOOK_FOR_CHECKPOINT_S):
                newest = await off_loop(lambda: newest_step(open_directory(url)))
        newest = max(newest, self._newest_checkpoint)
        committed = self._committed[1]
        if committed > newest:
            self._journal.record(
                "not_saved",
                node=self._options.hello.node,
                committed=committed,
                checkpoint=newest,
                reason="no coordinator",
            )
            exit_code = int(ExitCode.NOT_SAVED)
        self.end(exit_code)

    def crashed(self, error: BaseException) -> None:
        """End the agent with an error: a bug must not look like a hang."""
        if not self.ended.done():
            self.ended.set_exception(error)


def _hangs(failure: Failure, suspected: Collection[str]) -> bool:
    """Whether it was ended for a hang, and not because its node was cut off or its group ended."""
    return failure.worker in suspected or failure.kind is FailureKind.START_TIMEOUT
