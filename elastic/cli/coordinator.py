"""`elastic coordinator`: runs one candidate for the leadership of a job of many nodes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from elastic.checkpoint.directory import CheckpointDirectory
from elastic.cli.compose import checkpoint_directory, job_options
from elastic.cli.etcd import address_towards, open_store
from elastic.cli.http import (
    COORDINATOR_DEFAULT,
    checkpoint_directories,
    http_sites,
    watched_over_http,
)
from elastic.cli.page import page_of, reached_at
from elastic.coordinator.candidate import Candidate
from elastic.coordinator.history import JobHistory
from elastic.coordinator.job_options import JobOptions
from elastic.coordinator.metrics import collect
from elastic.coordinator.page import standby
from elastic.coordinator.totals import Totals
from elastic.core.coordinator.view import FormationPolicy
from elastic.errors import ElasticError, ExitCode, TransientError, refusal_of
from elastic.rpc.admission import peer_names
from elastic.rpc.control import CONTROL_SERVICE, ControlServer
from elastic.rpc.engine import start_engine
from elastic.rpc.health import Health
from elastic.rpc.identity import registers_only
from elastic.rpc.security import Security, Tls, choose_security
from elastic.runtime.journal import Journal, JsonLines, RecentEntries, warnings_to
from elastic.runtime.leave_signals import (
    HANGUP_IGNORED,
    LEAVE_SIGNALS,
    SignalCount,
    on_hangup,
    unblock_signals,
)
from elastic.runtime.listening import allow_many_connections, require_listenable
from elastic.runtime.loop_watch import LoopPauses, watched_loop
from elastic.runtime.network import reachable_address
from elastic.runtime.off_loop import off_loop
from elastic.runtime.output import Output, Stream
from elastic.runtime.process_metrics import ProcessParts, Watched
from elastic.runtime.process_title import set_title
from elastic.runtime.service_notice import Condition, ServiceNotice
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.shared import AfterEnd
from elastic.settings.store import StoreKind
from elastic.store.etcd.server import EtcdService, Rights
from elastic.store.interface import Store
from elastic.store.job_keys import JobKeys
from elastic.store.measured import MeasuredStore, StoreCalls
from elastic.store.memory import MemoryStore
from elastic.timeouts import timeout
from elastic.version import __version__

_NO_LIMIT = 1 << 20
_LEFT = {exit_code for exit_code, _ in LEAVE_SIGNALS.values()}
_PROBE_S = 0.5  # for a connection between two nodes
_STOP_GRACE_S = 0.5
_CAMPAIGN_AGAIN_S = 5.0
"""Seconds before this coordinator campaigns again for a run that all nodes have left. The next
leader removes the run's end from etcd, and a late watch would not show that end to an agent."""
_STORE_WITHIN_S = 1.0
STOP_TIMEOUT_S = 10.0
"""Seconds that a coordinator that makes way for another one takes at most."""


def coordinate(settings: CoordinatorSettings) -> int:
    """Follow and lead until the job ends or a signal comes; return the exit code.

    Raises ConfigurationError, and TransientError if a new start may succeed.
    """
    notice = ServiceNotice.of_environment(os.environ)
    checkpoints = checkpoint_directory(settings.checkpoint_dir)
    set_title("coordinator", settings.job)
    allow_many_connections()
    with _events(settings) as stream:
        return asyncio.run(_coordinate(settings, checkpoints, stream, notice))


async def _coordinate(
    settings: CoordinatorSettings,
    checkpoints: CheckpointDirectory | None,
    stream: Stream,
    notice: ServiceNotice,
) -> int:
    start_engine()
    recent, pauses, totals, calls = RecentEntries(), LoopPauses(), Totals(), StoreCalls()
    history = JobHistory()
    journal = Journal(
        JsonLines(stream, quiet=frozenset({"progress"})),
        recent,
        totals,
        history,
        origin={"job": settings.job, "run": settings.run_id, "node": None},
    )
    warnings_to(journal)
    security = choose_security(settings.job, settings.security)
    http = http_sites(settings, security, COORDINATOR_DEFAULT)
    await require_listenable(settings.listen)
    async with _store_of(settings, security) as (kept, beside):
        store = MeasuredStore(kept, calls)
        address = await off_loop(lambda: _advertised(settings))
        candidate = Candidate(
            replace(
                _job_options(settings, checkpoints, address),
                certificate_expires=lambda: _expires_unix_s(security),
            ),
            store,
            journal,
            recent,
            leader_ttl_s=settings.leader_ttl_s,
            pauses=pauses,
            totals=totals,
            history=history,
        )
        why_not_ready = functools.partial(_why_not_ready, candidate, store, settings.job)
        server = ControlServer(
            candidate,
            settings.listen,
            security=security,
            report=journal.record,
            beside=[*beside, Health(why_not_ready, CONTROL_SERVICE).handler()],
        )
        await server.start()
        journal.record(
            "coordinator_started",
            job=settings.job,
            run_id=settings.run_id,
            address=address,
            store=settings.store.store.value,
        )
        parts = ProcessParts(
            pauses=pauses, directories=checkpoint_directories(settings.checkpoint_dir), store=calls
        )
        watched = Watched(
            job=settings.job,
            snapshot=lambda: functools.partial(
                collect, figures=candidate.figures(), exit_code=candidate.exit_code
            ),
            why_not_ready=why_not_ready,
            parts=parts,
            page=page_of(
                history,
                candidate,
                candidate.view,
                lambda: standby(settings.job, settings.run_id, candidate.address, candidate.leader),
            ),
        )
        serving = watched_over_http(watched, http, journal, security)
        with notice.telling(lambda: _condition(candidate)):
            try:
                async with serving as served:
                    candidate.page = reached_at(served, address)
                    with watched_loop(journal, pauses):
                        ends: list[int] = []
                        work = _work(candidate, journal, settings.after_end, ends)
                        working = asyncio.ensure_future(_while_reachable(work, server, address))
                        return await _until_signalled(working, ends, journal, notice)
            finally:
                notice.stopping(STOP_TIMEOUT_S)
                await server.stop(_STOP_GRACE_S)


@contextlib.asynccontextmanager
async def _store_of(
    settings: CoordinatorSettings, security: Security
) -> AsyncIterator[tuple[Store, Sequence[grpc.GenericRpcHandler]]]:
    """The store; if this process keeps it in memory, also the gRPC handlers that serve it."""
    if settings.store.store is StoreKind.ETCD:
        async with open_store(settings.store, security=settings.security) as etcd:
            yield etcd, ()
        return
    # Revisions begin at the time in ms. The store of an earlier process has not reached them: it
    # would have had to write once a millisecond. So nobody mistakes one store for the other.
    memory = MemoryStore(revision=time.time_ns() // 1_000_000)
    rights_of = store_rights(security)
    yield memory, EtcdService(memory, version=__version__, rights_of=rights_of).handlers()


def _expires_unix_s(security: Security) -> float:
    """When the first of the certificates in use expires; 0 if there are none."""
    kept = security.kept.values() if isinstance(security, Tls) else ()
    return min((certificate.not_after_s for certificate in list(kept)), default=0.0)


def store_rights(
    security: Security,
) -> Callable[[grpc.aio.ServicerContext[Any, Any]], Rights | None]:
    """How a store in memory finds out what a client may write there."""
    if not isinstance(security, Tls):
        return lambda _: None
    job, folder = security.job, JobKeys(security.job).nodes

    def rights_of(context: grpc.aio.ServicerContext[Any, Any]) -> Rights | None:
        hosts = registers_only(peer_names(context), job)
        return Rights(folder, hosts) if hosts is not None else None

    return rights_of


async def _why_not_ready(candidate: Candidate, store: Store, job: str) -> str:
    if reason := candidate.why_not_ready():
        return reason
    try:
        async with timeout(_STORE_WITHIN_S):
            await store.get(JobKeys(job).leader)
    except asyncio.TimeoutError:
        return f"etcd has not answered within {_STORE_WITHIN_S:g} s"
    except ElasticError as error:
        return f"etcd does not answer: {' '.join(str(error).split())}"
    return ""


def _condition(candidate: Candidate) -> Condition:
    """Ready, for the service manager, once it campaigns or the run has ended."""
    led = candidate.group
    if led is None:
        status = "follows" if candidate.has_campaigned else "waits for etcd"
    elif led.generation == 0:
        status = "leads, no group yet"
    else:
        status = f"leads, generation {led.generation}, {led.world_size} workers, step {led.step}"
    return Condition(ready=candidate.has_campaigned, status=status)


async def _until_signalled(
    working: asyncio.Future[int], ends: list[int], journal: Journal, notice: ServiceNotice
) -> int:
    """Wait for `working`. A signal cancels it: another coordinator leads, and the job goes on."""
    loop = asyncio.get_running_loop()
    codes: list[ExitCode] = []
    count = SignalCount()

    def leave(exit_code: ExitCode, reason: str) -> None:
        again = count.is_another(loop.time())
        if codes and not again:
            return  # `working` is already being cancelled, and gives up its election key
        codes.append(exit_code)
        journal.record("leaving", reason=reason)
        notice.stopping(STOP_TIMEOUT_S)
        working.cancel()

    for number, meaning in LEAVE_SIGNALS.items():
        loop.add_signal_handler(number, leave, *meaning)
    on_hangup(
        loop,
        closed=lambda: leave(ExitCode.TERMINATED, "its terminal was closed"),
        otherwise=lambda: journal.record("warning", source="signals", message=HANGUP_IGNORED),
    )
    unblock_signals()
    try:
        return await working
    except asyncio.CancelledError:
        if not codes:
            raise
        return ends[0] if ends else int(codes[0])


async def _while_reachable(
    work: Coroutine[Any, Any, int], server: ControlServer, address: str
) -> int:
    """Run `work` as long as agents can connect. Raises TransientError when they no longer can, so
    that another coordinator leads, or this one after a restart."""
    working = asyncio.ensure_future(work)
    unreachable = asyncio.ensure_future(server.until_unreachable())
    try:
        await asyncio.wait({working, unreachable}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        unreachable.result()
        raise TransientError(
            f"{address} no longer accepts connections, so no agent can reach this coordinator; "
            "start it again (gRPC does not say why: there may be no file descriptors left on this "
            "machine, see /proc/sys/fs/file-nr)"
        )
    finally:
        for task in (working, unreachable):
            task.cancel()
        await asyncio.gather(working, unreachable, return_exceptions=True)


async def _work(
    candidate: Candidate, journal: Journal, after_end: AfterEnd, ends: list[int]
) -> int:
    """The run's exit code. With `serve` it goes into `ends`, and only a signal ends this."""
    while True:
        exit_code = await candidate.run()
        if after_end is AfterEnd.EXIT:
            return exit_code
        if exit_code not in _LEFT:  # else all nodes left, and may return
            ends.append(exit_code)
            journal.record("serving_after_end", exit_code=exit_code)
            await asyncio.Future()
        await asyncio.sleep(_CAMPAIGN_AGAIN_S)


def _advertised(settings: CoordinatorSettings) -> str:
    if settings.advertised is not None:
        return settings.advertised
    in_memory = settings.store.store is StoreKind.MEMORY
    host = reachable_address() if in_memory else address_towards(settings.store)
    port = settings.port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def _events(settings: CoordinatorSettings) -> Iterator[Stream]:
    if settings.events_file is None:
        yield sys.stdout
        return
    try:
        stream = settings.events_file.open("ab", buffering=0)
    except OSError as error:
        raise refusal_of(
            f"cannot write the events file {settings.events_file}: {error.strerror}; choose "
            "another with --events-file",
            error,
        ) from error
    with stream:
        output = Output(stream.fileno(), path=settings.events_file)
        try:
            yield output
        finally:
            output.end()


def _job_options(
    settings: CoordinatorSettings, checkpoints: CheckpointDirectory | None, address: str
) -> JobOptions:
    formation = FormationPolicy(
        min_workers=settings.min_workers,
        max_workers=settings.max_workers or _NO_LIMIT,
        gather_timeout_s=settings.gather_timeout_s,
        join_timeout_s=settings.join_timeout_s,
        first_step_s=settings.first_step_timeout_s or math.inf,
        agent_grace_s=settings.agent_grace_s,
        probe_s=_PROBE_S,
        planned_interval_s=settings.planned_interval_s,
        join_debounce_s=settings.join_debounce_s,
    )
    return replace(
        job_options(settings, formation, checkpoints),
        run_id=settings.run_id,
        quarantine_after=settings.quarantine_after,
        quarantine_window_s=settings.quarantine_window_s,
        isolation_timeout_s=settings.isolation_timeout_s,
        address=address,
    )
