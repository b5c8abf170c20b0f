"""`elastic agent`: runs one node of a job of many nodes."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.daemon import AGENT_SOCKET, AgentDaemon, NodeOptions
from elastic.agent.metrics import collect
from elastic.agent.registration import (
    LeaderOnceRegistered,
    Registration,
    StartToken,
    next_start,
    start_token,
    until_preempted,
)
from elastic.cli.compose import checkpoint_place
from elastic.cli.console import JsonDisplay
from elastic.cli.etcd import address_towards, host_name, open_store
from elastic.cli.http import (
    checkpoint_directories,
    http_sites,
    watched_over_http,
)
from elastic.cli.launch import is_classic, log_directory, require_command, worker_environment
from elastic.core.agent.machine import AgentSettings
from elastic.core.restarts import Backoff
from elastic.errors import ConfigurationError, ExitCode, TransientError, meaning_of
from elastic.rpc.control_client import ControlClient
from elastic.rpc.engine import start_engine
from elastic.rpc.security import Security, choose_security
from elastic.runtime.journal import EntryCounts, Journal, warnings_to
from elastic.runtime.leave_signals import (
    HANGUP_IGNORED,
    LEAVE_SIGNALS,
    RESTART_SIGNAL,
    SignalCount,
    on_hangup,
    unblock_signals,
)
from elastic.runtime.loop_watch import LoopPauses, watched_loop
from elastic.runtime.lost_directory import restore_when_lost
from elastic.runtime.metrics import Found
from elastic.runtime.network import require_own_address
from elastic.runtime.off_loop import off_loop
from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.process_metrics import ProcessParts, Watched
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import NodeDirectory
from elastic.runtime.service_notice import Condition, ServiceNotice
from elastic.runtime.tasks import TaskSupervisor
from elastic.settings.limits import require_node_name
from elastic.settings.masking import masked_arguments, masked_url
from elastic.settings.node import NodeSettings
from elastic.settings.shared import Launch, OnQuarantine
from elastic.store.interface import Store
from elastic.store.job_documents import NodeDocument
from elastic.store.job_runs import AlreadyEnded, RunEnds
from elastic.store.leader_watch import LeaderWatch
from elastic.store.measured import MeasuredStore, StoreCalls
from elastic.v1.control_pb2 import AgentHello
from elastic.version import __version__

_LAUNCHED = {True: ("--launch torchrun",), False: ()}  # shown if the nodes of a job differ
_TOKEN_SHOWN = 4  # characters of the start token in the names of workers
STOP_MARGIN_S = 20.0
"""Seconds beyond the drain time-out that an agent takes at most to leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCommand:
    """The script with its arguments, and the settings of `elastic agent`."""

    settings: NodeSettings
    argv: Sequence[str]

    @property
    def node(self) -> str:
        return self.settings.node_name or host_name()

    @property
    def machine(self) -> str:
        """The machine's name. Raises ConfigurationError if it is not a valid name."""
        name = self.settings.machine or socket.gethostname()
        try:
            require_node_name(name, "machine")
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; give a valid one with --machine") from error
        return name

    @property
    def origin(self) -> dict[str, str]:
        """The job, run and node that every event and line of output names."""
        return {"job": self.settings.job, "run": self.settings.run_id, "node": self.node}

    @property
    def classic(self) -> bool:
        """Whether the script was written for torchrun."""
        return _is_classic(self.argv[0], self.settings.launch, self.settings.module)

    @property
    def text(self) -> str:
        """The settings that must be equal on all nodes of a job, for people: without values that
        may be secrets."""
        s = self.settings
        parts = [*_LAUNCHED[self.classic]]
        if s.checkpoint_dir is not None:
            parts += ["--checkpoint-dir", masked_url(s.checkpoint_dir)]
            parts += ["--checkpoint-every", str(s.checkpoint_every)]
        parts += ["--record-samples"] if s.record_samples else []
        parts += ["-m"] if s.module else []
        return " ".join((*parts, *masked_arguments(self.argv[0], self.argv[1:])))

    @property
    def digest(self) -> str:
        """A hash of the settings that must be equal on all nodes of a job."""
        s = self.settings
        same = [*self.argv, s.checkpoint_dir, s.checkpoint_every, s.record_samples, self.classic]
        same += ["module"] if s.module else []  # as in older versions for a script
        return hashlib.blake2b(json.dumps(same).encode(), digest_size=16).hexdigest()


@functools.cache
def _is_classic(program: str, launch: Launch, module: bool) -> bool:
    """Cached: a package may have many files to read, and every answer must be the same."""
    return is_classic(program, launch, module=module)


def attend(command: NodeCommand) -> int:
    """Take part until the job ends or this node leaves it; return the exit code.

    Raises ConfigurationError, and TransientError if a new start may succeed.
    """
    notice = ServiceNotice.of_environment(os.environ)
    settings = command.settings
    require_command(command.argv, module=settings.module)
    unsure = _require_reachable(settings.node_host)
    if settings.worker_port_range is not None:
        _require_right_to(settings.worker_port_range.first)
    logs = log_directory(settings.job, settings.log_dir)
    directory = NodeDirectory(settings.job, command.node, settings.state_dir)
    display = JsonDisplay(settings.console, origin=command.origin)
    adopt_orphans()
    set_title("agent", command.node)
    try:
        return asyncio.run(_attend(command, directory, logs, display, notice, unsure=unsure))
    finally:
        display.close()
        directory.close()


async def _attend(
    command: NodeCommand,
    directory: NodeDirectory,
    logs: Path,
    display: JsonDisplay,
    notice: ServiceNotice,
    *,
    unsure: str,
) -> int:
    start_engine()
    settings = command.settings
    counts, calls = EntryCounts(), StoreCalls()
    journal = Journal(display.entry, counts, origin=command.origin)
    warnings_to(journal)
    if unsure:
        journal.record("warning", source="node_host", message=unsure)
    security = choose_security(settings.job, settings.security)
    http = http_sites(settings, security)
    host = settings.node_host
    if host is None:
        host = await off_loop(lambda: address_towards(settings.store))
    environment = await off_loop(
        functools.partial(
            worker_environment, settings.nproc_per_node, host, classic=command.classic
        )
    )
    async with open_store(settings.store, security=settings.security) as etcd:
        store = MeasuredStore(etcd, calls)
        node = _Node(
            command,
            directory,
            logs,
            journal,
            display,
            store,
            security,
            notice,
            host=host,
            environment=environment,
        )
        watched = Watched(
            job=settings.job,
            snapshot=functools.partial(node.collector, counts),
            why_not_ready=node.why_not_ready,
            parts=ProcessParts(
                pauses=node.pauses,
                directories=checkpoint_directories(settings.checkpoint_dir, logs=str(logs)),
                store=calls,
            ),
        )
        serving = watched_over_http(watched, http, journal, security)
        with notice.telling(node.condition):
            try:
                async with serving:
                    with watched_loop(journal, node.pauses):
                        await node.start()
                        code = await node.daemon.ended
                        node.record_end(code)
                        return code
            except ConfigurationError:
                node.keep_adopted_workers()
                raise
            finally:
                await node.close()


def _code_of_ended(run_code: int) -> int:
    """Return the exit code of an agent that comes to a run which has ended with `run_code`.

    78 and 84 may also be due to this node alone, and a controller that starts agents must be able
    to tell. So the agent says 82 instead, which always concerns the whole run.
    """
    return run_code if run_code in (ExitCode.OK, ExitCode.SCRIPT_FAILED) else int(ExitCode.STOPPED)


def _require_reachable(node_host: str | None) -> str:
    """Why it cannot be found out now whether `node_host` reaches this machine; empty if it does.

    Raises ConfigurationError if it does not: other nodes' workers would wait for this node's.
    """
    if node_host is None:
        return ""
    try:
        asyncio.run(require_own_address(node_host))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--node-host {node_host!r}: {error}; give a name or an address at which other nodes "
            "reach this machine, or leave the option out"
        ) from error
    except TransientError as error:
        # Other nodes resolve the name only when they connect, so an agent that starts at boot
        # before the network is up must not end here.
        return f"--node-host {node_host!r} cannot be checked now: {error}"
    return ""


def _require_right_to(port: int) -> None:
    """Raises ConfigurationError for a port that needs a privilege which this process lacks."""
    try:
        socket.create_server(("", port)).close()
    except PermissionError as error:
        raise ConfigurationError(
            f"--worker-port-range: this user may not use port {port}, nor any port below 1024 "
            "(CAP_NET_BIND_SERVICE); give a range from 1024 on"
        ) from error
    except OSError:
        return  # the port is in use: workers skip it


class _Node:
    """The agent daemon with its registration, leader watch, signals and service manager."""

    def __init__(
        self,
        command: NodeCommand,
        directory: NodeDirectory,
        logs: Path,
        journal: Journal,
        display: JsonDisplay,
        store: Store,
        security: Security,
        notice: ServiceNotice,
        *,
        host: str,
        environment: Mapping[str, str],
    ) -> None:
        settings = command.settings
        self._settings, self._journal, self._directory = settings, journal, directory
        self._notice = notice
        self.pauses = LoopPauses()
        token = start_token(directory.path)
        self._watch = LeaderWatch(store, job=settings.job)
        self._leaders = LeaderOnceRegistered(self._watch)
        self._registration = Registration(
            store,
            job=settings.job,
            node=command.node,
            document=_document(command, host, token.token),
            on_change=lambda state: journal.record(f"registration_{state.name.lower()}"),
            on_waiting=lambda owner, at_most_s: journal.record(
                "registration_waiting", owner=owner, at_most_s=round(at_most_s, 1)
            ),
            ttl_s=settings.node_ttl_s,
        )
        start = f"{token.token[:_TOKEN_SHOWN]}.{next_start(directory.path)}"
        self.daemon = AgentDaemon(
            _options(
                command,
                directory,
                logs,
                host=host,
                environment=environment,
                token=token,
                start=start,
            ),
            self._leaders,
            lambda address: ControlClient(address, security=security, report=journal.record),
            journal,
            display.output,
            self.pauses,
            renewed_at=lambda: self._registration.renewed_at_s,
        )
        self.tasks = TaskSupervisor(self.daemon.crashed)
        self._store = store
        self._keeps_workers = False
        self._had_ended = False  # the run had ended before this agent started
        self._leaves_because = ""
        self._leaves = self._restarts = False
        self._signals = SignalCount()  # signals that ask it to leave
        self._about = {
            "job": settings.job,
            "run_id": settings.run_id,
            "node": command.node,
            "machine": command.machine,
            "host": host,
            "log_dir": str(logs),
        }

    async def start(self) -> None:
        """Adopt or start workers, register the node, and follow the leader."""
        self._handle_signals()
        self._journal.record("agent_started", **self._about)
        await self.daemon.start()
        keeping = restore_when_lost(
            self._directory, (AGENT_SOCKET,), self._listen_again, self._journal
        )
        self.tasks.start(keeping, "run-directory")
        self.tasks.start(self._watch.run(), "leader")
        self.tasks.start(self._register(), "registration")
        settings = self._settings
        if settings.preemption_file is not None or settings.preemption_command is not None:
            self.tasks.start(self._leave_when_preempted(), "preemption")

    async def _listen_again(self) -> str:
        await self.daemon.move(self._directory.path)
        return str(self._directory.path)

    def keep_adopted_workers(self) -> None:
        """Leave adopted workers to the next agent: only this one's settings are wrong."""
        if self.daemon.adopts:
            self._hand_over("its configuration is wrong")

    def _hand_over(self, reason: str) -> None:
        self._journal.record("handing_over", reason=reason, grace_s=self._settings.grace_s)
        self._keeps_workers = True

    def condition(self) -> Condition:
        """Ready, for the service manager, once the node is registered or the run has ended."""
        return Condition(
            ready=self._leaders.registered.is_set() or self._had_ended, status=self._status()
        )

    def _status(self) -> str:
        if self._had_ended:
            return "the run has ended"
        if self._leaves_because:
            return f"leaving: {self._leaves_because}"
        if not self._leaders.registered.is_set():
            return "registering in etcd"
        generation, step = self.daemon.generation, self.daemon.step
        group = f"generation {generation}, step {step}" if generation else "waiting for a group"
        return group if self.daemon.in_contact else f"{group}, without a coordinator"

    async def close(self) -> None:
        """End the workers and leave, or leave the workers to the next agent."""
        self._notice.stopping(STOP_MARGIN_S)
        await self.daemon.close(let_go=self._keeps_workers)
        await self.tasks.close()
        if not self._keeps_workers:
            await self._registration.close()

    def record_end(self, exit_code: int) -> None:
        """Record why the agent ended, for a reader who has only this log."""
        if self._keeps_workers:
            return  # `handing_over` says it
        self._journal.record(
            "agent_ended",
            exit_code=exit_code,
            meaning=meaning_of(exit_code),
            message=self.daemon.end_of_job,
        )

    def collector(self, counts: EntryCounts) -> Callable[[Found], None]:
        """Take the node's figures now; return the function that adds them to the metrics."""
        registered = self._registration.held()
        figures = self.daemon.figures(counts.by_name, registered=registered)
        return functools.partial(collect, figures=figures)

    async def why_not_ready(self) -> str:
        """Empty once the node is registered and a coordinator answers."""
        if not self._registration.held():
            return "etcd has not confirmed that this node is registered"
        return "" if self.daemon.in_contact else "no coordinator answers"

    async def _register(self) -> None:
        ends = RunEnds(self._store, job=self._settings.job, run_id=self._settings.run_id)
        try:
            await ends.start()
        except AlreadyEnded as ended:
            code = ended.end.exit_code
            self._journal.record("already_ended", exit_code=code, message=str(ended))
            self._had_ended = True
            self.daemon.job_ended(_code_of_ended(code), ended.end.message)
            return
        self.tasks.start(self._watch_run_end(ends), "run-end")
        await self._registration.register()
        self._leaders.registered.set()
        await self._registration.keep()

    async def _watch_run_end(self, ends: RunEnds) -> None:
        """Watch the store for the run's end: this node may be cut off when the leader tells it.

        If all other nodes have left, the run has not ended for a node that waits to register.
        """
        while (end := await ends.next_end()).left and not self._leaders.registered.is_set():
            pass
        self.daemon.job_ended(end.exit_code, end.message)

    async def _leave_when_preempted(self) -> None:
        settings = self._settings
        reason = await until_preempted(
            file=settings.preemption_file,
            command=settings.preemption_command,
            interval_s=settings.preemption_interval_s,
            on_problem=lambda why: self._journal.record(
                "warning", source="preemption", message=why
            ),
        )
        self._journal.record("preempted", reason=reason)
        self._leave(int(ExitCode.TERMINATED), reason)

    def _handle_signals(self) -> None:
        """First signal: the node leaves at a step boundary. Second: at once. RESTART_SIGNAL: this
        agent ends, and leaves the workers to the next one."""
        loop = asyncio.get_running_loop()
        for number, meaning in LEAVE_SIGNALS.items():
            loop.add_signal_handler(number, self._end, *meaning)
        if self._settings.grace_s > 0.0:  # else no worker would live until the next agent comes
            loop.add_signal_handler(RESTART_SIGNAL, self._restart)
        on_hangup(
            loop,
            closed=self._terminal_closed,
            otherwise=lambda: self._journal.record(
                "warning", source="signals", message=HANGUP_IGNORED
            ),
        )
        unblock_signals()

    def _end(self, exit_code: ExitCode, reason: str) -> None:
        again = self._signals.is_another(asyncio.get_running_loop().time())
        if not self._leaves:
            self._leave(int(exit_code), reason)
        elif again:
            self.daemon.stop(int(exit_code))

    def _terminal_closed(self) -> None:
        """It may send several SIGHUP, which count as one."""
        self._signals.is_another(asyncio.get_running_loop().time())
        if not self._leaves:
            self._leave(int(ExitCode.TERMINATED), "its terminal was closed")

    def _leave(self, exit_code: int, reason: str) -> None:
        self._leaves, self._leaves_because = True, reason
        self._notice.stopping(self._settings.drain_timeout_s + STOP_MARGIN_S)
        self.daemon.leave(exit_code, reason)

    def _restart(self) -> None:
        if not self._restarts:
            self._restarts = True
            self.tasks.start(self._end_for_the_next_agent(), "restart")

    async def _end_for_the_next_agent(self) -> None:
        await self.daemon.announce_restart()
        if not self._leaves and not self.daemon.ended.done():  # else no agent shall follow
            self._hand_over(LEAVE_SIGNALS[RESTART_SIGNAL][1])
            self.daemon.end(ExitCode.TEMPORARY)


def _document(command: NodeCommand, host: str, token: str) -> NodeDocument:
    return NodeDocument(
        start_token=token,
        host=host,
        slots=command.settings.nproc_per_node,
        machine=command.machine,
        version=__version__,
        command_digest=command.digest,
        started_unix_s=time.time(),
    )


def _options(
    command: NodeCommand,
    directory: NodeDirectory,
    logs: Path,
    *,
    host: str,
    environment: Mapping[str, str],
    token: StartToken,
    start: str,
) -> NodeOptions:
    settings = command.settings
    return NodeOptions(
        machine=AgentSettings(
            node=command.node,
            slots=settings.nproc_per_node,
            start=start,
            spares=settings.spares,
            backoff=Backoff(seed=settings.seed),
            start_timeout_s=settings.start_timeout_s,
            first_step_s=settings.first_step_timeout_s,
            leave_timeout_s=settings.drain_timeout_s,
            classic=command.classic,
            end_grace_s=settings.drain_timeout_s,
        ),
        host=host,
        argv=command.argv,
        settings=settings,
        run_directory=directory.path,
        log_directory=logs,
        environment=environment,
        ports=settings.worker_port_range or (0, 0),
        hello=AgentHello(
            node=command.node,
            host=socket.gethostname(),
            slots=settings.nproc_per_node,
            version=__version__,
            command=command.text,
            classic=command.classic,
            isolation_timeout_s=settings.isolation_timeout_s,
            command_digest=command.digest,
            start_token=token.token,
            start_secret=token.secret,
            run_id=settings.run_id,
            machine=command.machine,
            saves=settings.checkpoint_dir is not None,
            checkpoint_every=0 if command.classic else settings.checkpoint_every,
            ends_in_quarantine=settings.on_quarantine is OnQuarantine.EXIT,
        ),
        grace_s=settings.grace_s,
        hold=directory.hold,
        answers_probes=True,
        checkpoint_dir=checkpoint_place(settings.checkpoint_dir),
        ledger=settings.record_samples,
    )
