"""`elastic agent`: one node of a job of many."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.daemon import AgentDaemon, NodeOptions
from elastic.agent.membership import LastContact, LeaderOnceRegistered, watch_isolation
from elastic.agent.preemption import until_preempted
from elastic.agent.registration import Registration
from elastic.agent.start_token import next_start, start_token
from elastic.cli.console import JsonDisplay
from elastic.cli.etcd import address_towards, host_name, open_store
from elastic.cli.launch import is_classic
from elastic.cli.run import log_directory, require_command, worker_environment
from elastic.core.agent.machine import AgentSettings
from elastic.core.restarts import Backoff
from elastic.errors import ConfigurationError, ExitCode
from elastic.rpc.control import ControlClient
from elastic.rpc.security import Security, choose_security
from elastic.runtime.journal import Journal
from elastic.runtime.loop_watch import LoopPauses, watched_loop
from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.run_directory import NodeDirectory
from elastic.runtime.tasks import TaskSupervisor
from elastic.runtime.warnings_to_journal import warnings_to
from elastic.settings.masking import masked_arguments, masked_url
from elastic.settings.node import NodeSettings, OnQuarantine
from elastic.store.interface import Store
from elastic.store.job_documents import NodeDocument
from elastic.store.job_runs import AlreadyEnded, RunEnds
from elastic.store.leader_watch import LeaderWatch
from elastic.store.lease_keeper import LeaseState
from elastic.v1.control_pb2 import AgentHello
from elastic.version import __version__

_SIGNALS = {
    signal.SIGINT: (ExitCode.INTERRUPTED, "Ctrl-C"),
    signal.SIGTERM: (ExitCode.TERMINATED, "SIGTERM"),
}
_LAUNCHED = {True: ("--launch torchrun",), False: ()}  # shown where nodes of a job differ
_TOKEN_SHOWN = 4  # characters of the start token in the names of workers


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCommand:
    """What to run on this node: the script and its arguments, and how."""

    settings: NodeSettings
    argv: Sequence[str]

    @property
    def node(self) -> str:
        """The node's name."""
        return self.settings.node_name or host_name()

    @property
    def classic(self) -> bool:
        """The script was written for torchrun."""
        return is_classic(Path(self.argv[0]), self.settings.launch)

    @property
    def text(self) -> str:
        """All that must be equal on all nodes of a job, for people: without secrets."""
        s = self.settings
        parts = [*_LAUNCHED[self.classic]]
        if s.checkpoint_dir is not None:
            parts += ["--checkpoint-dir", masked_url(s.checkpoint_dir)]
            parts += ["--checkpoint-every", str(s.checkpoint_every)]
        parts += ["--record-samples"] if s.record_samples else []
        return " ".join((*parts, *masked_arguments(self.argv)))

    @property
    def digest(self) -> str:
        """Equal on all nodes of a job."""
        s = self.settings
        same = [*self.argv, s.checkpoint_dir, s.checkpoint_every, s.record_samples, self.classic]
        return hashlib.blake2b(json.dumps(same).encode(), digest_size=16).hexdigest()


def attend(command: NodeCommand) -> int:
    """Take part until the job ends, or this node leaves it; the exit code.

    Raises ConfigurationError.
    """
    require_command(command.argv)
    logs = log_directory(command.settings.job, command.settings.log_dir)
    directory = NodeDirectory(command.settings.job, command.node, command.settings.state_dir)
    display = JsonDisplay(command.settings.console)
    adopt_orphans()
    try:
        return asyncio.run(_attend(command, directory, logs, display))
    finally:
        display.close()
        directory.close()


async def _attend(
    command: NodeCommand, directory: NodeDirectory, logs: Path, display: JsonDisplay
) -> int:
    settings = command.settings
    journal = Journal(display.entry)
    warnings_to(journal)
    security = choose_security(settings.job, settings.security)
    async with open_store(settings.store) as store:
        node = _Node(command, directory, logs, journal, display, store, security)
        try:
            with watched_loop(journal, node.pauses):
                await node.start()
                return await node.daemon.ended
        except ConfigurationError:
            node.spare_what_it_found()
            raise
        finally:
            await node.close()


class _Node:
    """The agent and its ties, put together."""

    def __init__(
        self,
        command: NodeCommand,
        directory: NodeDirectory,
        logs: Path,
        journal: Journal,
        display: JsonDisplay,
        store: Store,
        security: Security,
    ) -> None:
        settings = command.settings
        self._settings, self._journal = settings, journal
        self.pauses = LoopPauses()
        token = start_token(directory.path)
        host = settings.node_host or address_towards(settings.store)
        self._watch = LeaderWatch(store, job=settings.job)
        self._leaders = LeaderOnceRegistered(self._watch)
        self._registration = Registration(
            store,
            job=settings.job,
            node=command.node,
            document=_document(command, host, token),
            on_change=self._registration_changed,
            ttl_s=settings.node_ttl_s,
        )
        start = f"{token[:_TOKEN_SHOWN]}.{next_start(directory.path)}"
        self.daemon = AgentDaemon(
            _options(command, directory, logs, host=host, token=token, start=start),
            self._leaders,
            lambda address: ControlClient(address, security=security, report=journal.record),
            journal,
            display.output,
            self.pauses,
        )
        self.tasks = TaskSupervisor(self.daemon.crashed)
        self._store = store
        self._let_go = False
        self._contact = LastContact(directory.path / "last-contact")
        journal.record(
            "agent_started",
            job=settings.job,
            run_id=settings.run_id,
            node=command.node,
            host=host,
            log_dir=str(logs),
        )

    async def start(self) -> None:
        """Adopt or warm up workers, take the name, follow the leader."""
        self._handle_signals()
        await self.daemon.start()
        self.tasks.start(self._watch.run(), "leader")
        self.tasks.start(self._register(), "registration")
        settings = self._settings
        isolation = watch_isolation(
            self._registration,
            timeout_s=settings.isolation_timeout_s,
            in_contact=lambda: self.daemon.in_contact,
            cut_off=self.daemon.cut_off,
            contact=self._contact,
            goes_on=self.daemon.adopts,
        )
        self.tasks.start(isolation, "isolation")
        if settings.preemption_file is not None or settings.preemption_command is not None:
            self.tasks.start(self._leave_when_preempted(), "preemption")

    def spare_what_it_found(self) -> None:
        """An agent that was started wrongly does not end what a right one can adopt."""
        if self.daemon.adopts:
            self._hand_over()

    async def close(self) -> None:
        """End the workers and leave, or leave the workers to the next agent."""
        await self.daemon.close(let_go=self._let_go)
        await self.tasks.close()
        if not self._let_go:
            await self._registration.close()

    async def _register(self) -> None:
        ends = RunEnds(self._store, job=self._settings.job, run_id=self._settings.run_id)
        try:
            await ends.start()
        except AlreadyEnded as ended:
            code = ended.end.exit_code
            self._journal.record("already_ended", exit_code=code, message=str(ended))
            self.daemon.job_ended(code)
            return
        self.tasks.start(self._hear_of_end(ends), "run-end")
        await self._registration.register()
        self._leaders.registered.set()
        await self._registration.keep()

    async def _hear_of_end(self, ends: RunEnds) -> None:
        """The leader tells; but this node may have been cut off then."""
        self.daemon.job_ended((await ends.next_end()).exit_code)

    async def _leave_when_preempted(self) -> None:
        settings = self._settings
        reason = await until_preempted(
            file=settings.preemption_file,
            command=settings.preemption_command,
            interval_s=settings.preemption_interval_s,
        )
        self._journal.record("preempted", reason=reason)
        self.daemon.leave(int(ExitCode.TERMINATED), reason)

    def _registration_changed(self, state: LeaseState) -> None:
        self._journal.record(f"registration_{state.name.lower()}")

    def _handle_signals(self) -> None:
        """First signal: this node leaves at a step boundary. Second: at once. SIGHUP: the agent
        ends, its workers train on for another one to adopt."""
        loop = asyncio.get_running_loop()
        seen: list[signal.Signals] = []

        def handle(number: signal.Signals) -> None:
            exit_code, name = _SIGNALS[number]
            if seen:
                self.daemon.stop(int(exit_code))
            else:
                self.daemon.leave(int(exit_code), name)
            seen.append(number)

        for number in _SIGNALS:
            loop.add_signal_handler(number, handle, number)
        loop.add_signal_handler(signal.SIGHUP, self._hand_over)

    def _hand_over(self) -> None:
        self._journal.record("handing_over", grace_s=self._settings.grace_s)
        self._let_go = True
        self.daemon.end(ExitCode.OK)


def _document(command: NodeCommand, host: str, token: str) -> NodeDocument:
    return NodeDocument(
        start_token=token,
        host=host,
        slots=command.settings.nproc_per_node,
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
    token: str,
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
        run_directory=directory.path,
        log_directory=logs,
        environment=worker_environment(settings.nproc_per_node, host, classic=command.classic),
        job=settings.job,
        hello=AgentHello(
            node=command.node,
            host=socket.gethostname(),
            slots=settings.nproc_per_node,
            version=__version__,
            command=command.text,
            classic=command.classic,
            isolation_timeout_s=settings.isolation_timeout_s,
            command_digest=command.digest,
            start_token=token,
            run_id=settings.run_id,
            ends_in_quarantine=settings.on_quarantine is OnQuarantine.EXIT,
        ),
        grace_s=settings.grace_s,
        hold=directory.hold,
        checkpoint_dir=os.path.abspath(settings.checkpoint_dir)
        if settings.checkpoint_dir is not None and "://" not in settings.checkpoint_dir
        else settings.checkpoint_dir or "",
        checkpoint_every=settings.checkpoint_every,
        ledger=settings.record_samples,
        join_timeout_s=settings.join_timeout_s,
        silence_s=settings.hang_timeout_s,
        compiling_silence_s=settings.first_step_timeout_s,
    )
