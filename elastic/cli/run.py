"""`elastic run`: runs coordinator, in-memory store and agent in one process, for one machine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from elastic.agent import metrics as agent_metrics
from elastic.agent.coordinator_link import FixedLeader
from elastic.agent.daemon import AGENT_SOCKET, AgentDaemon, NodeOptions
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.cli.compose import checkpoint_directory, checkpoint_place, job_options
from elastic.cli.console import JsonDisplay, LiveDisplay
from elastic.cli.http import (
    OFF,
    checkpoint_directories,
    http_sites,
    watched_over_http,
)
from elastic.cli.launch import is_classic, log_directory, require_command, worker_environment
from elastic.cli.page import page_of
from elastic.coordinator import metrics as coordinator_metrics
from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.history import JobHistory
from elastic.coordinator.job_options import JobOptions
from elastic.coordinator.leadership import lead
from elastic.coordinator.operators import Operators
from elastic.coordinator.totals import Totals
from elastic.core.agent.machine import AgentSettings
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.restarts import Backoff
from elastic.errors import ConfigurationError, ExitCode
from elastic.rpc.control import CONTROL_SERVICE, ControlServer
from elastic.rpc.control_client import ControlClient
from elastic.rpc.engine import start_engine
from elastic.rpc.health import Health
from elastic.rpc.security import Security, choose_security, stays_here, trusting
from elastic.runtime.journal import Entry, EntryCounts, Journal, RecentEntries, warnings_to
from elastic.runtime.leave_signals import (
    LEAVE_SIGNALS,
    STRAY_SIGNALS,
    SignalCount,
    on_hangup,
    unblock_signals,
)
from elastic.runtime.listening import require_listenable
from elastic.runtime.loop_watch import LoopPauses, watched_loop
from elastic.runtime.lost_directory import restore_when_lost
from elastic.runtime.metrics import Found
from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.process_metrics import ProcessParts, Watched
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import RunDirectory
from elastic.runtime.tasks import TaskSupervisor
from elastic.settings.run import OutputMode, RunSettings
from elastic.settings.shared import Console
from elastic.store.job_runs import DEFAULT_RUN
from elastic.store.memory import MemoryStore
from elastic.v1.control_pb2 import AgentHello
from elastic.v1.local_pb2 import Torchrun

_LOOPBACK = "127.0.0.1"
_NODE = "local"
_SOCKET = "coordinator.sock"
_MANY_NODES = (
    "for several machines use `elastic coordinator` and `elastic agent` (docs/MANY_NODES.md)"
)
_END_TIMEOUT_S = 0.5
"""Seconds for the coordinator to say how the job ended, once no process of the job is left."""


class Display(Protocol):
    """Shows a job to the user."""

    def entry(self, entry: Entry, /) -> None: ...
    def output(self, rank: int | None, worker: str, line: str, /) -> None: ...
    def close(self) -> None: ...


class TorchrunDisplay(Display, Protocol):
    """Shows it as torchrun does."""

    def told_to_end(self, name: str) -> None: ...
    def end(self, exit_code: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What differs when `elastic torchrun` has started the job."""

    display: TorchrunDisplay
    host: str
    """The address at which the group meets; empty: that of this machine."""
    signals: tuple[signal.Signals, ...]
    """Those that end the job, and that scripts get, too."""
    scripts: Callable[[Path], Torchrun]
    """Takes the directory of the logs."""
    executes: bool
    """The workers become another program."""
    node: str = _NODE
    """This node's name. With static rendezvous, the order of the names is that of the ranks."""
    same: str = ""
    """The options that must be the same on all nodes; empty: there is only this one."""
    listen: str = ""
    """HOST:PORT at which the coordinator listens for other nodes."""
    give_up_s: float = math.inf
    """How long the job may lack workers for a group."""

    @property
    def has_others(self) -> bool:
        """The job has other nodes."""
        return bool(self.same)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The script with its arguments, and the settings of `elastic run`."""

    settings: RunSettings
    argv: Sequence[str]
    launched: Launched | None = None

    @property
    def classic(self) -> bool:
        """Whether the script was written for torchrun."""
        return is_classic(self.argv[0], self.settings.launch, module=self.settings.module)

    @property
    def node(self) -> str:
        return self.launched.node if self.launched is not None else _NODE

    @property
    def origin(self) -> dict[str, str]:
        """The job, run and node that every event names."""
        return {"job": self.settings.job, "run": DEFAULT_RUN, "node": self.node}


class PortTaken(ConfigurationError):
    """The coordinator cannot listen for other nodes."""


def run(command: Command) -> int:
    """Run the job to its end; return the exit code.

    Raises ConfigurationError, and TransientError if a new start may succeed.
    """
    settings = command.settings
    launched = command.launched
    if launched is None or not launched.executes:
        require_command(command.argv, module=settings.module)
    if launched is None or not launched.has_others:
        _require_one_machine(settings)
    checkpoints = checkpoint_directory(settings.checkpoint_dir)
    logs = log_directory(settings.job, settings.log_dir)
    display = _display(command) if launched is None else launched.display
    set_title(
        "run" if launched is None else "torchrun", f"{settings.job}:", Path(command.argv[0]).name
    )
    try:
        exit_code = asyncio.run(_run(command, checkpoints, logs, display))
        if launched is not None:
            launched.display.end(exit_code)
        return exit_code
    finally:
        display.close()


async def _run(
    command: Command,
    checkpoints: CheckpointDirectory | None,
    logs: Path,
    display: Display,
) -> int:
    start_engine()
    settings = command.settings
    recent, pauses, totals, counts = RecentEntries(), LoopPauses(), Totals(), EntryCounts()
    history = JobHistory()
    listeners = (display.entry, recent, totals, counts, history)
    journal = Journal(*listeners, origin=command.origin)
    warnings_to(journal)
    security = choose_security(settings.job, settings.security)
    http = http_sites(settings, security)
    if settings.listen is not None:
        await require_listenable(settings.listen)
    directory = RunDirectory(settings.job)
    async with contextlib.AsyncExitStack() as ends:  # also if a later part does not start
        ends.callback(ignore_signals)
        ends.callback(directory.remove)
        adopt_orphans()
        store = MemoryStore()
        leadership = await lead(store, job=settings.job, candidate=uuid.uuid4().hex)
        coordinator = CoordinatorDaemon(
            _job_options(command, checkpoints),
            store,
            leadership,
            journal,
            totals=totals,
            history=history if settings.http_address not in (None, OFF) else None,
            pauses=pauses,
        )
        ends.push_async_callback(coordinator.close)
        await coordinator.start()
        operators = Operators(coordinator, pauses, recent)
        address = await _serve(operators, settings.listen, directory, ends)
        if command.launched is not None and command.launched.listen:
            await _serve_others(operators, command.launched.listen, security, journal, ends)
        directory.announce(address)
        journal.record("job_started", job=settings.job, pid=os.getpid(), log_dir=str(logs))
        agent = AgentDaemon(
            node_options(command, directory.path, logs),
            FixedLeader(address),
            ControlClient,
            journal,
            display.output,
            pauses,
        )
        if command.launched is not None and command.launched.has_others:
            ends.push_async_callback(coordinator.flushed)
        ends.push_async_callback(agent.close)
        watched = Watched(
            job=settings.job,
            snapshot=lambda: _collector(operators, agent, counts),
            why_not_ready=_always_ready,
            page=page_of(history, operators, operators.view),
            parts=ProcessParts(
                pauses=pauses,
                directories=checkpoint_directories(settings.checkpoint_dir, logs=str(logs)),
            ),
        )
        await ends.enter_async_context(
            watched_over_http(watched, http, journal, security, tells_of_certificates=True)
        )
        if command.launched is None:
            _handle_signals(agent)
        else:
            forward_signals(agent, command.launched)
        await agent.start()
        keeping = TaskSupervisor(agent.crashed)
        ends.push_async_callback(keeping.close)

        async def listen() -> str:
            where = address
            if settings.listen is None:
                where = await _serve(operators, None, directory, ends)
            directory.announce(where)
            await agent.move(directory.path)
            return str(directory.path)

        sockets = (AGENT_SOCKET,) if settings.listen is not None else (AGENT_SOCKET, _SOCKET)
        keeping.start(restore_when_lost(directory, sockets, listen, journal), "run-directory")
        with watched_loop(journal, pauses):
            await _wait_for_end(agent, coordinator)
        exit_code = _exit_code(agent, coordinator)
        if not coordinator.ended.done():
            committed = operators.status().progress.committed
            journal.record("job_ended", exit_code=exit_code, committed=committed)
        return exit_code


async def _serve(
    operators: Operators,
    listen: str | None,
    directory: RunDirectory,
    ends: contextlib.AsyncExitStack,
) -> str:
    """Start the server for agents and operators; return its address."""
    health = Health(_always_ready, CONTROL_SERVICE).handler()
    address = listen or f"unix:{directory.path / _SOCKET}"
    server = ControlServer(operators, address, beside=[health])
    ends.push_async_callback(server.stop, 0.2)
    return await server.start()


async def _serve_others(
    operators: Operators,
    listen: str,
    security: Security,
    journal: Journal,
    ends: contextlib.AsyncExitStack,
) -> None:
    """Start the server for the agents of other nodes."""
    try:
        await require_listenable(listen)
        server = ControlServer(
            operators, listen, security=trusting(security), report=journal.record
        )
        ends.push_async_callback(server.stop, 0.2)
        await server.start()
    except ConfigurationError as error:
        raise PortTaken(str(error)) from error


def _collector(
    operators: Operators, agent: AgentDaemon, counts: EntryCounts
) -> Callable[[Found], None]:
    """Take both daemons' figures now; return the function that adds them to the metrics."""
    job, node = operators.figures(), agent.figures(counts.by_name)

    def collect(found: Found) -> None:
        coordinator_metrics.collect(found, job)
        agent_metrics.collect(found, node)

    return collect


async def _always_ready() -> str:
    """Empty: as long as this process can be asked, its coordinator serves."""
    return ""


async def _wait_for_end(agent: AgentDaemon, coordinator: CoordinatorDaemon) -> None:
    """Return when no process is left and the coordinator has said how the job ended. It never says
    so if a signal came before there was a job, so wait for it for `_END_TIMEOUT_S` at most."""
    ends = (agent.ended, coordinator.ended)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not (coordinator.ended.done() and coordinator.ended.exception()):
        await asyncio.wait([agent.ended])
        await asyncio.wait([coordinator.ended], timeout=_END_TIMEOUT_S)


def _exit_code(agent: AgentDaemon, coordinator: CoordinatorDaemon) -> int:
    """The job's exit code, or the agent's if it was stopped before the job ended."""
    for ended in (coordinator.ended, agent.ended):
        if ended.done() and (error := ended.exception()) is not None:
            raise error
    if coordinator.ended.done():
        return coordinator.ended.result().exit_code
    return agent.ended.result()


def _handle_signals(agent: AgentDaemon) -> None:
    """First signal: save and leave at a step boundary. Second: stop at once. A closed terminal may
    send SIGHUP several times, which counts as one signal; under nohup(1) SIGHUP is ignored."""
    loop = asyncio.get_running_loop()
    count, leaves = SignalCount(), False

    def handle(number: int) -> None:
        exit_code, name = LEAVE_SIGNALS[number]
        if count.is_another(loop.time()):
            agent.stop(int(exit_code))
        else:
            leave(exit_code, name)

    def hang_up(reason: str) -> None:
        count.is_another(loop.time())
        leave(ExitCode.TERMINATED, reason)

    def leave(exit_code: ExitCode, reason: str) -> None:
        nonlocal leaves
        if not leaves:
            leaves = True
            agent.leave(int(exit_code), reason)

    for number in LEAVE_SIGNALS:
        loop.add_signal_handler(number, handle, number)
    on_hangup(
        loop,
        closed=lambda: hang_up("its terminal was closed"),
        otherwise=lambda: hang_up("SIGHUP"),
    )
    unblock_signals()


def forward_signals(agent: AgentDaemon, launched: Launched) -> None:
    """First signal: scripts get it, too, and the job ends. Second: stop at once."""
    loop = asyncio.get_running_loop()
    count = SignalCount()
    leaves = False

    def handle(number: signal.Signals) -> None:
        nonlocal leaves
        if count.is_another(loop.time()):
            agent.stop(int(ExitCode.SCRIPT_FAILED))
        elif not leaves:
            leaves = True
            launched.display.told_to_end(number.name)
            agent.leave(int(ExitCode.SCRIPT_FAILED), number.name, forwarded=number)

    for number in launched.signals:
        loop.add_signal_handler(number, handle, number)
    unblock_signals()


def ignore_signals() -> None:
    """The job has ended and only its last output remains: another signal must neither cut that off
    nor replace the exit code."""
    loop = asyncio.get_running_loop()
    for number in STRAY_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _require_one_machine(settings: RunSettings) -> None:
    """Raises ConfigurationError for options that need other nodes: `elastic run` admits none."""
    if settings.nnodes.minimum > 1:
        raise ConfigurationError(
            f"--nnodes {settings.nnodes.minimum}:{settings.nnodes.maximum} needs other nodes, and "
            f"`elastic run` uses only this one; {_MANY_NODES}"
        )
    if settings.listen is not None and not stays_here(settings.listen):
        raise ConfigurationError(
            f"--listen {settings.listen} can be reached from other machines without protection; "
            f"listen on 127.0.0.1; {_MANY_NODES}"
        )


def _display(command: Command) -> LiveDisplay | JsonDisplay:
    settings = command.settings
    live = settings.output is OutputMode.LIVE or (
        settings.output is OutputMode.AUTO
        and settings.console is not Console.JSON
        and sys.stderr.isatty()
    )
    if live:
        return LiveDisplay(settings.console)
    return JsonDisplay(settings.console, origin=command.origin)


def _job_options(command: Command, checkpoints: CheckpointDirectory | None) -> JobOptions:
    settings, launched = command.settings, command.launched
    formation = FormationPolicy(
        min_workers=settings.min_world_size,
        max_workers=settings.max_world_size,
        gather_timeout_s=settings.gather_timeout_s,
        join_timeout_s=settings.join_timeout_s,
        first_step_s=settings.first_step_timeout_s or math.inf,
        give_up_s=launched.give_up_s if launched is not None else math.inf,
    )
    options = job_options(settings, formation, checkpoints)
    return replace(options, nodes_may_fail=launched is None or not launched.has_others)


def node_options(command: Command, run_directory: Path, logs: Path) -> NodeOptions:
    settings, slots = command.settings, command.settings.nproc_per_node
    classic = command.classic
    launched = command.launched
    host = (launched.host if launched is not None else "") or _LOOPBACK
    has_others = launched is not None and launched.has_others
    follows = has_others and launched is not None and not launched.listen
    return NodeOptions(
        machine=AgentSettings(
            node=command.node,
            slots=slots,
            start=str(os.getpid()) if has_others else "",
            spares=settings.spares,
            backoff=Backoff(seed=settings.seed),
            start_timeout_s=settings.start_timeout_s,
            first_step_s=settings.first_step_timeout_s,
            classic=classic,
            end_grace_s=settings.stop_grace_s,
            leave_timeout_s=settings.stop_grace_s if follows else None,
        ),
        host=host,
        hello=AgentHello(
            node=command.node,
            host=host,
            slots=slots,
            classic=classic,
            command=launched.same if launched is not None else "",
            command_digest=launched.same if launched is not None else "",
            checkpoint_every=0 if classic else settings.checkpoint_every,
        ),
        argv=command.argv,
        settings=settings,
        run_directory=run_directory,
        log_directory=logs,
        environment=worker_environment(slots, host, classic=classic),
        checkpoint_dir=checkpoint_place(settings.checkpoint_dir),
        ledger=settings.ledger is not None,
        torchrun=launched.scripts(logs) if launched is not None else None,
        records_ends=follows,
    )
