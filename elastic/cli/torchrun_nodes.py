"""Several nodes of `elastic torchrun`: one hosts the coordinator, which the others attend."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from dataclasses import replace
from pathlib import Path

from elastic.agent.coordinator_link import FixedLeader
from elastic.agent.daemon import AGENT_SOCKET, AgentDaemon
from elastic.agent.metrics import collect
from elastic.cli.etcd import address_on_route, host_name
from elastic.cli.http import checkpoint_directories, http_sites, watched_over_http
from elastic.cli.launch import log_directory, require_command
from elastic.cli.run import (
    Command,
    PortTaken,
    forward_signals,
    ignore_signals,
    node_options,
    run,
)
from elastic.errors import ConfigurationError, ExitCode, NodeRefused, meaning_of
from elastic.rpc.control_client import ControlClient
from elastic.rpc.engine import start_engine
from elastic.rpc.security import choose_security, stays_here, trusting
from elastic.runtime import network
from elastic.runtime.journal import EntryCounts, Journal, warnings_to
from elastic.runtime.loop_watch import LoopPauses, watched_loop
from elastic.runtime.lost_directory import restore_when_lost
from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.process_metrics import ProcessParts, Watched
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import RunDirectory
from elastic.runtime.tasks import TaskSupervisor
from elastic.settings.limits import EVERY_INTERFACE
from elastic.settings.torchrun import Rendezvous

_LOST_S = 10.0
"""How long this node waits for a coordinator that it has lost. Its memory is gone if it has ended,
so it comes back only after a fault of the network."""
_LOOK_S, _TOLD_AFTER_S = 0.2, 5.0
_PID_DIGITS = 7  # proc(5): at most 4194304


def run_with_others(command: Command, meets: Rendezvous) -> int:
    """Run this node's part of the job to its end; return the exit code. Raises as `run`.

    As under torchrun, several launchers may be on the machine of the endpoint: the first of them
    hosts the coordinator.
    """
    address = _joined(meets.host, meets.port)
    is_here = network.is_own(meets.host)
    command = _as_node(command, meets)
    if meets.is_host or (meets.is_host is None and is_here):
        listen = address if stays_here(address) else f"{EVERY_INTERFACE}:{meets.port}"
        try:
            return run(_with(command, listen=listen))
        except PortTaken as error:
            if meets.is_host is not None:
                raise ConfigurationError(
                    f"{str(error).partition(';')[0]} ({meets.given_by}), where all nodes meet; end "
                    "what has the port, such as another node with this --node-rank, or give all "
                    "nodes another port"
                ) from error
    return _attend_from_here(command, meets, address)


def _as_node(command: Command, meets: Rendezvous) -> Command:
    """Name this node. Names are in the order of ranks: torchrun's without --node-rank is that of
    the hosts' names and then of the launchers' pids."""
    if meets.node_rank is None:
        node = f"{host_name()}-{os.getpid():0{_PID_DIGITS}}"
    else:
        node = f"rank-{meets.node_rank:0{len(str(meets.most - 1))}}"
    same = f"{meets.same} --nproc-per-node {command.settings.nproc_per_node}"
    return _with(
        command,
        node=node,
        same=same,
        give_up_s=meets.join_timeout_s,
        host=meets.local_addr or _own_address(meets),
    )


def _with(command: Command, **changes: object) -> Command:
    assert command.launched is not None
    return replace(command, launched=replace(command.launched, **changes))  # type: ignore[arg-type]


def _own_address(meets: Rendezvous) -> str:
    with contextlib.suppress(OSError):  # its name may not be known yet, as in Kubernetes
        return address_on_route(meets.host, meets.port)
    return network.reachable_address()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _attend_from_here(command: Command, meets: Rendezvous, address: str) -> int:
    """Run this node's workers until the job ends, or the coordinator at `address` is missing."""
    launched, settings = command.launched, command.settings
    assert launched is not None
    if not launched.executes:
        require_command(command.argv, module=settings.module)
    logs = log_directory(settings.job, settings.log_dir)
    set_title("torchrun", f"{settings.job}:", Path(command.argv[0]).name)
    try:
        exit_code = asyncio.run(_attend(command, meets, address, logs))
    except NodeRefused as error:
        raise NodeRefused(
            f"{error}; --nnodes, --nproc-per-node, --max-restarts, --rdzv-backend and --rdzv-id "
            "must be the same on all nodes, and each --node-rank may be used once"
        ) from error
    launched.display.end(exit_code)
    return exit_code


async def _attend(command: Command, meets: Rendezvous, address: str, logs: Path) -> int:
    start_engine()
    launched, settings = command.launched, command.settings
    assert launched is not None
    pauses, counts = LoopPauses(), EntryCounts()
    journal = Journal(launched.display.entry, counts, origin=command.origin)
    warnings_to(journal)
    chosen = choose_security(settings.job, settings.security)
    security, http = trusting(chosen), http_sites(settings, chosen)
    directory = RunDirectory(settings.job)
    async with contextlib.AsyncExitStack() as ends:
        ends.callback(ignore_signals)
        ends.callback(directory.remove)
        adopt_orphans()
        directory.announce(address)
        agent = AgentDaemon(
            node_options(command, directory.path, logs),
            FixedLeader(address),
            lambda at: ControlClient(at, security=security, report=journal.record),
            journal,
            launched.display.output,
            pauses,
        )
        ends.push_async_callback(agent.close)
        watched = Watched(
            job=settings.job,
            snapshot=lambda: functools.partial(collect, figures=agent.figures(counts.by_name)),
            why_not_ready=lambda: _why_not_ready(agent),
            parts=ProcessParts(
                pauses=pauses, directories=checkpoint_directories(None, logs=str(logs))
            ),
        )
        await ends.enter_async_context(watched_over_http(watched, http, journal, security))
        forward_signals(agent, launched)
        await agent.start()
        tasks = TaskSupervisor(agent.crashed)
        ends.push_async_callback(tasks.close)

        async def listen() -> str:
            directory.announce(address)
            await agent.move(directory.path)
            return str(directory.path)

        keeping = restore_when_lost(directory, (AGENT_SOCKET,), listen, journal)
        tasks.start(keeping, "run-directory")
        tasks.start(_end_without_coordinator(agent, meets, address, journal), "coordinator")
        with watched_loop(journal, pauses):
            code = await agent.ended
        meaning, message = meaning_of(code), agent.end_of_job
        journal.record("agent_ended", exit_code=code, meaning=meaning, message=message)
        return code


async def _why_not_ready(agent: AgentDaemon) -> str:
    return "" if agent.in_contact else "no coordinator answers"


async def _end_without_coordinator(
    agent: AgentDaemon, meets: Rendezvous, address: str, journal: Journal
) -> None:
    """End the node's workers if the coordinator does not come in time, or does not come back."""
    last, found, told = time.monotonic(), False, False
    while True:
        await asyncio.sleep(_LOOK_S)
        silent_s = time.monotonic() - last
        if agent.in_contact:
            last, found = time.monotonic(), True
        elif silent_s > (_LOST_S if found else meets.join_timeout_s):
            break
        elif silent_s > _TOLD_AFTER_S and not (found or told):
            told = True
            waits = f"waits for a coordinator at {address}, {meets.join_timeout_s:g} s at most"
            journal.record("warning", source="coordinator", message=waits)
    if found:
        why = f"the node of the coordinator, at {address}, is lost, and with it the job"
    else:
        why = (
            f"no coordinator has answered at {address} ({meets.given_by}) within "
            f"{meets.join_timeout_s:g} s: start the node with that address as well, and let this "
            "one reach its port, which no other program may have; --rdzv-conf sets how long to wait"
        )
    agent.job_ended(int(ExitCode.SCRIPT_FAILED), why)
