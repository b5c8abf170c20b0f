"""Operators' commands on a job: they find its coordinator, ask it or have it act, and print the
answer as text or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from elastic.cli.console import describe
from elastic.cli.etcd import open_store
from elastic.cli.formats import print_json, print_table, require_format, say
from elastic.cli.report import UNREADABLE, accounts_of, duration, goodput_line, print_report
from elastic.cli.trace import PHASES, build_trace
from elastic.core.diagnosis import doing
from elastic.core.documents import Unreadable, parse
from elastic.core.legible import is_representable_time
from elastic.core.membership import WorkerPhase
from elastic.errors import ConfigurationError, ExitCode, TransientError, meaning_of, refusal_of
from elastic.rpc.control_client import ControlClient
from elastic.rpc.newest_certificate import WARN_BEFORE_S
from elastic.rpc.security import PLAINTEXT, choose_security, is_unix_socket, no_report
from elastic.rpc.stacks import stack_lines, whereabouts_from_pb
from elastic.runtime.journal import Entry
from elastic.runtime.run_directory import find_job, running_jobs
from elastic.settings.limits import is_address
from elastic.settings.operator import DirectSettings, LocalSettings, OperatorSettings
from elastic.store.etcd.store import EtcdStore
from elastic.store.interface import Store
from elastic.store.job_incidents import load_incidents
from elastic.store.job_runs import AlreadyEnded, JobRun, RunEnd, forget_run, list_runs, newest_end
from elastic.store.leader_watch import Leader, find_leader
from elastic.timeouts import timeout
from elastic.v1 import control_pb2 as pb
from elastic.v1 import stacks_pb2
from elastic.version import __version__

T = TypeVar("T")
_NEXT_LEADER_S = 0.25
_STORE_SHARE = 0.8  # of the time-out for an answer
_MIN_ATTEMPT_S = 2.0  # for one coordinator's answer
_OF_EVERY_EVENT = ("severity", "job", "run")
_LARGEST_NUMBER = 2**64 - 1  # of an incident, in a message
_MOST_NAMED = 10  # incidents in a refusal
_LAST_EVENTS = ("job_finished", "job_ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The job that a command is for: `job` on this machine (None: the only one), asked as `local`
    says; the coordinator at `address`, asked as `direct` says; or a job in etcd by `settings`."""

    job: str | None = None
    address: str | None = None
    local: LocalSettings = field(default_factory=LocalSettings)
    direct: DirectSettings = field(default_factory=DirectSettings)
    settings: OperatorSettings | None = None

    @property
    def job_name(self) -> str:
        """Empty if no name was given."""
        if self.settings is not None:
            return self.settings.job
        return self.direct.job if self.address is not None else self.job or ""

    @property
    def timeout_s(self) -> float:
        if self.settings is not None:
            return self.settings.timeout_s
        return self.direct.timeout_s if self.address is not None else self.local.timeout_s

    def share_of(self, left_s: float) -> float:
        """Seconds of `left_s` that one coordinator may take to answer: another one may follow a
        silent leader."""
        return left_s if self.settings is None else min(left_s, max(left_s / 4, _MIN_ATTEMPT_S))

    @asynccontextmanager
    async def client(self, timeout_s: float | None = None) -> AsyncIterator[ControlClient]:
        """A client of the leader. Raises ElasticError: AlreadyEnded if the run has ended and nobody
        leads, TransientError after `timeout_s`."""
        client = await self._find(self.timeout_s if timeout_s is None else timeout_s)
        try:
            yield client
        finally:
            await client.close()

    async def _find(self, timeout_s: float) -> ControlClient:
        settings = self.settings
        if settings is None:
            if self.address is None:
                return ControlClient(find_job(self.job).address, report=no_report)
            _require_address(self.address)
            security = choose_security(self.direct.job, self.direct.security)
            if is_unix_socket(self.address):  # `elastic run` has no certificate
                security = PLAINTEXT
            return ControlClient(self.address, security=security, report=no_report)
        security = choose_security(settings.job, settings.security)
        async with _open_store(settings, timeout_s) as store:
            try:
                async with timeout(timeout_s):
                    leader = await _leader_of(store, settings.job)
            except asyncio.TimeoutError:
                raise TransientError(_silent_etcd(settings)) from None
        if leader is None:
            raise TransientError(f"no coordinator leads the job {settings.job!r} now")
        return ControlClient(leader.address, security=security, report=no_report)


async def _leader_of(store: Store, job: str) -> Leader | None:
    """The leader; None if there is none now. Raises AlreadyEnded if the job's newest run has ended,
    so that no leader will follow, and TransientError."""
    leader = await find_leader(store, job=job)
    if leader is None and (end := await newest_end(store, job)) is not None:
        raise AlreadyEnded(job, end)
    return leader


def status(target: Target, *, output: str) -> None:
    """Print the job's status, or how it ended."""
    as_json = require_format(output)
    reply = _status_or_end(target, as_json=as_json)
    if reply is not None and as_json:
        print_json(to_document(reply))
    elif reply is not None:
        print_status(reply)


def report(target: Target, *, output: str) -> None:
    """Print where the time of the job's slots went, or how the job ended."""
    as_json = require_format(output)
    reply = _status_or_end(target, as_json=as_json)
    if reply is not None and as_json:
        print_json({"job": reply.job, **accounts_of(reply)})
    elif reply is not None:
        print_report(reply)


def _status_or_end(target: Target, *, as_json: bool) -> pb.JobStatus | None:
    """The status; None if the job has ended, after printing how."""
    try:
        return _run(target, lambda client, timeout_s: client.status(timeout_s))
    except AlreadyEnded as ended:
        if as_json:
            print_json(end_to_document(ended.job, ended.end))
        else:
            print_end(ended.job, ended.end)
        return None


def nodes(target: Target, *, clear: str | None = None, output: str) -> None:
    """Print which nodes take part, leave, or are drained or in quarantine, and why. With `clear`,
    let that drained or quarantined node take part again instead."""
    if clear is not None:
        say(_change(target, lambda client, timeout_s: client.clear(clear, timeout_s)))
        return
    as_json = require_format(output)
    try:
        reply = _run(target, lambda client, timeout_s: client.status(timeout_s))
    except AlreadyEnded as ended:
        say(f"elastic: no node takes part: {ended}", file=sys.stderr)
        reply = pb.JobStatus()
    if as_json:
        print_json(to_document(reply)["nodes"])
    else:
        columns = ("node", "machine", "state", "host", "slots", "training", "failures", "since")
        print_table((*columns, "reason"), [_node_row(node) for node in reply.nodes])
        if line := absent_line(reply):
            say(line)


def drain(target: Target, node: str, *, reason: str, future: bool = False) -> None:
    """Have a node's workers leave at a step boundary, and keep the node out."""
    say(_change(target, lambda c, timeout_s: c.drain(node, reason, timeout_s, future=future)))


def stacks(target: Target, of: str, *, output: str) -> None:
    """Print where each rank, or only the rank or worker `of`, is, and its Python stacks."""
    as_json = require_format(output)
    try:
        reply = _run(target, lambda client, timeout_s: client.stacks(of, timeout_s))
        if not reply.ranks:
            waits = "`elastic status` and `elastic nodes` show what the job waits for"
            say(f"elastic: no worker is in a group; {waits}", file=sys.stderr)
    except AlreadyEnded as ended:
        say(f"elastic: no worker runs: {ended}", file=sys.stderr)
        reply = stacks_pb2.JobStacks()
    if as_json:
        print_json(stacks_document(reply))
    else:
        print_stacks(reply)


def incidents(target: Target, *, output: str) -> None:
    """Print the job's incidents, also after its end."""
    as_json = require_format(output)
    found = _incidents(target, None)
    if as_json:
        print_json(found)
    else:
        print_incidents(found)


def explain(target: Target, incident: int | None, *, output: str) -> None:
    """Print everything about an incident, by default the newest; also after the job's end."""
    as_json = require_format(output)
    if incident is None and not _incidents(target, None):
        if as_json:
            print_json(None)
        else:
            say("no incident has been recorded")
        return
    (found,) = _incidents(target, incident or 0)
    if as_json:
        print_json(found)
    else:
        print_explained(found)


def trace(target: Target, file: Path, *, steps: int) -> None:
    """Write a trace of what each slot did in the last minutes. Raises TransientError if the file
    cannot be written now, for example to a full disk, and ConfigurationError."""

    async def ask(client: ControlClient, timeout_s: float) -> tuple[Any, list[str], list[str]]:
        timeline = await client.timeline(steps, timeout_s)
        incidents = await client.incidents(None, timeout_s)
        return timeline, incidents, [line async for line in client.events(follow=False)]

    try:
        timeline, incidents, events = _run(target, ask)
    except AlreadyEnded as ended:
        raise ConfigurationError(
            f"there is no trace, because the job does not run: {ended}"
        ) from None
    try:
        made = build_trace(
            timeline, documents_of(incidents), [event_from(line) for line in events], time.time()
        )
        document = made.to_document(job=target.job_name, version=__version__)
        text = json.dumps(document, allow_nan=False)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigurationError(
            "this version of elastic cannot read the coordinator's timeline; use the version that "
            "the coordinator has"
        ) from error
    if str(file) == "-":
        print(text)
        return
    try:
        file.write_text(text + "\n")
    except OSError as error:
        reason = f"cannot write the trace to {file}: {error.strerror}; choose another FILE"
        raise refusal_of(reason, error) from error
    told = sum(s.what == s.WHAT_STEP for one in timeline.ranks for s in one.stretches)
    silent = f"; {timeline.silent} workers did not report" if timeline.silent else ""
    say(f"{file}: {told} steps of {len(timeline.ranks)} workers{silent}")
    say("open it at https://ui.perfetto.dev or chrome://tracing")


def _incidents(target: Target, number: int | None) -> list[dict[str, Any]]:
    """All incidents in brief, or one in full (0: the newest). Raises ConfigurationError if there is
    none of that number."""
    if number is not None and number > _LARGEST_NUMBER:  # no message can ask for it
        raise _no_incident(number, [d.get("number") for d in _incidents(target, None)])
    try:
        return documents_of(_run(target, lambda c, timeout_s: c.incidents(number, timeout_s)))
    except AlreadyEnded as ended:
        if target.settings is None:
            raise
        job, run_id = target.settings.job, ended.end.run_id
        found = _ask_store(target.settings, lambda store: load_incidents(store, job, run_id))
    if number is None:
        return list(found.values())
    number = number or max(found, default=0)
    if number not in found:
        raise _no_incident(number, found)
    return [found[number]]


def _no_incident(number: int, known: Iterable[object]) -> ConfigurationError:
    shown = ", ".join(map(str, [*known][-_MOST_NAMED:])) or "none"
    return ConfigurationError(f"there is no incident {number}; known: {shown}")


def stop(target: Target, *, reason: str) -> None:
    """Have the job save, if it has a checkpoint directory, and end."""

    async def ask(client: ControlClient, timeout_s: float) -> pb.JobStatus:
        found = await client.status(timeout_s)  # first: the job may end soon after
        await client.stop(reason, int(ExitCode.STOPPED), timeout_s)
        return found

    found = _change(target, ask)
    when = (
        "at the next step boundary"
        if found.generation.members
        else "within --stop-grace-s: there is no group now, and workers that have steps may come"
    )
    if found.checkpoint_dir:
        say(f"the job saves and ends {when}")
    else:
        say(
            f"the job ends {when}; nothing is saved, because it has no checkpoint directory "
            "(--checkpoint-dir)"
        )


def jobs(settings: OperatorSettings, *, only: str | None, output: str) -> None:
    """Print the runs in the store, under way and ended; with `only`, those of that job."""
    as_json = require_format(output)
    runs = [run for run in _ask_store(settings, list_runs) if only in (None, run.job)]
    if as_json:
        print_json([dataclasses.asdict(run) | {"state": _state(run)} for run in runs])
    else:
        columns = ("job", "run", "state", "exit", "steps", "ended", "nodes", "coordinator")
        print_table(columns, [_run_row(run) for run in runs])


def local_jobs(*, only: str | None, output: str) -> bool:
    """Print the jobs of `elastic run` on this machine; with `only`, those of this name. Returns
    False, and prints nothing, if there is none."""
    as_json = require_format(output)
    jobs = running_jobs(only)
    if not jobs:
        return False
    columns = ("job", "pid", "coordinator")
    rows = [(job.job, job.pid, job.address) for job in jobs]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)
    return True


def forget(settings: OperatorSettings, run_id: str) -> None:
    """Remove what the store knows of a run. Raises ConfigurationError if it knows nothing, or if
    the run is under way."""
    job = settings.job
    if not _ask_store(settings, lambda store: forget_run(store, job=job, run_id=run_id)):
        raise ConfigurationError(
            f"the store has no run {run_id!r} of job {job!r}; `elastic jobs` lists the runs"
        )
    say(f"run {run_id!r} of job {job!r} is forgotten")


def events(target: Target, *, follow: bool, output: str) -> int:
    """Print the journal; with `follow` also each new entry, from one leader to the next. Return the
    exit code."""
    as_json = require_format(output)
    try:
        asyncio.run(_events(target, follow=follow, show=print if as_json else _show_event))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except AlreadyEnded as ended:
        say(f"elastic: coordinators keep the events, and none runs: {ended}", file=sys.stderr)
    return 0


async def _events(target: Target, *, follow: bool, show: Callable[[str], None]) -> None:
    newest, ended = 0.0, False  # newest: a new leader may send entries that were shown before
    while True:
        try:
            async with target.client() as client:
                async for line in client.events(follow=follow):
                    at, name, _ = event_from(line)
                    if at > newest:
                        show(line)
                        newest = at
                        ended = name in _LAST_EVENTS
                        if name == "deposed":
                            break
        except TransientError:
            if not ended and (not follow or not newest or target.settings is None):
                raise
        if ended or not follow:
            return
        await asyncio.sleep(_NEXT_LEADER_S)


def event_from(line: str) -> tuple[float, str, dict[str, Any]]:
    """An event's Unix time, name and fields. Raises ConfigurationError if `line` is no event."""
    try:
        fields = json.loads(line)
        at, name = float(fields.pop("time")), fields.pop("event")
        if isinstance(name, str) and is_representable_time(at):
            return at, name, fields
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    raise ConfigurationError(
        f"this version of elastic cannot read an event of the coordinator: {line[:80]!r}; use the "
        "version that the coordinator has"
    )


def _show_event(line: str) -> None:
    at, name, fields = event_from(line)
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    told = {key: value for key, value in fields.items() if key not in _OF_EVERY_EVENT}
    words = None
    with contextlib.suppress(*UNREADABLE):  # another version may give other fields
        words = describe(Entry(unix_s=at, name=name, fields=fields))
    if words is None:
        words = " ".join(f"{key}={value}" for key, value in told.items() if value not in ("", None))
    say(f"{clock} {name}: {words}" if words else f"{clock} {name}", flush=True)


_MOST_ABSENT = 10


def absent_line(reply: pb.JobStatus) -> str:
    """Name the nodes of the group whose agents are not connected; empty if all are."""
    there = {node.node for node in reply.nodes}
    absent = sorted({m.node.partition("@")[0] for m in reply.generation.members} - there)
    if not absent:
        return ""
    further = f" and {len(absent) - _MOST_ABSENT} more" if len(absent) > _MOST_ABSENT else ""
    return (
        f"no connection with the agents of {', '.join(absent[:_MOST_ABSENT])}{further}: their "
        "workers may train on, but the coordinator learns nothing of them; do these nodes reach "
        f"{reply.coordinator or 'the coordinator'}?"
    )


def _node_row(node: pb.NodeStatus) -> tuple[object, ...]:
    training = sum(w.phase == WorkerPhase.TRAINING.value for w in node.workers)
    return (
        node.node,
        node.machine or "-",
        node.state,
        node.host or "-",
        node.slots,
        training,
        node.failures,
        _instant(node.since_unix_s),
        node.reason,
    )


def _run(target: Target, ask: Callable[[ControlClient, float], Coroutine[Any, Any, T]]) -> T:
    """Ask the leader. While there is none, or it does not answer, look for the next one and ask
    again, until the target's time-out. So a request may be made twice."""

    async def asked() -> T:
        ends_at, told = time.monotonic() + target.timeout_s, False
        # The error of a shorter attempt would only hide that of the attempt before.
        least_s = max(_NEXT_LEADER_S, min(1.0, target.timeout_s / 4))
        while True:
            left_s = ends_at - time.monotonic()
            try:
                async with target.client(left_s) as client:
                    return await ask(client, target.share_of(left_s))
            except TransientError as error:
                left_s = ends_at - time.monotonic()
                if target.settings is None or left_s <= least_s:
                    raise
                if not told:
                    told = True
                    say(f"{error}; looking for a leader for {left_s:.0f} s", file=sys.stderr)
            await asyncio.sleep(_NEXT_LEADER_S)

    return asyncio.run(asked())


def _change(target: Target, ask: Callable[[ControlClient, float], Coroutine[Any, Any, T]]) -> T:
    """`_run` for a change to the job. Raises ConfigurationError if the run has ended."""
    try:
        return _run(target, ask)
    except AlreadyEnded as ended:
        meaning = meaning_of(ended.end.exit_code)
        raise ConfigurationError(
            f"nothing was changed, because the run has ended ({meaning}): {ended}"
        ) from None


def _require_address(address: str) -> None:
    """Raises ConfigurationError unless it can be a coordinator's address."""
    if not is_unix_socket(address) and not is_address(address):
        raise ConfigurationError(
            f"--address: {address!r} is not allowed; expected HOST:PORT, an IPv6 host in brackets, "
            "or unix:/PATH"
        )


def _ask_store(settings: OperatorSettings, ask: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    async def asked() -> T:
        async with _open_store(settings, settings.timeout_s) as store:
            try:
                async with timeout(settings.timeout_s):
                    return await ask(store)
            except asyncio.TimeoutError:
                raise TransientError(_silent_etcd(settings)) from None

    return asyncio.run(asked())


def _open_store(settings: OperatorSettings, timeout_s: float) -> EtcdStore:
    patience_s = _STORE_SHARE * timeout_s  # so that its error, which names the endpoint, is shown
    return open_store(settings.store, security=settings.security, total_timeout_s=patience_s)


def _silent_etcd(settings: OperatorSettings) -> str:
    return (
        f"etcd did not answer within {settings.timeout_s:g} s; check that a majority of its "
        "members run, or raise --timeout-s"
    )


def _state(run: JobRun) -> str:
    if run.end is not None:
        return "left" if run.end.left else "ended"
    return "running" if run.coordinator else "without a coordinator"


def _run_row(run: JobRun) -> tuple[object, ...]:
    state, coordinator = _state(run), run.coordinator or "-"
    if run.end is None:
        return (run.job, run.run_id, state, "-", "-", "-", run.nodes, coordinator)
    ended = _instant(run.end.ended_unix_s)
    return (run.job, run.run_id, state, run.end.exit_code, run.end.committed, ended, "-", "-")


_LONG_S, _LONG_FACTOR = 1.0, 5.0  # a step under way gets a line above both
_NO_STEP = "step not known: no member has reported to this coordinator yet"


def to_document(reply: pb.JobStatus) -> dict[str, Any]:
    """The status as JSON, with the recoveries unpacked."""
    document = _plain(reply)
    document["recoveries"] = [_recovery(r) for r in document.pop("recoveries_json")]
    del document["accounts_json"]
    document["accounts"] = accounts_of(reply)
    return document


def _plain(message: Message) -> dict[str, Any]:
    """The message as JSON, with all of its fields."""
    document: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_numbers(document, message.DESCRIPTOR)
    return document


def _restore_numbers(document: dict[str, Any], kind: Any) -> None:
    """Make 64-bit integers numbers again: protobuf writes text, which readers do not expect."""
    for one in kind.fields:
        value = document.get(one.name)
        if one.cpp_type in (one.CPPTYPE_INT64, one.CPPTYPE_UINT64):
            document[one.name] = (
                [int(n) for n in value] if isinstance(value, list) else int(value or 0)
            )
        elif one.message_type is not None and not one.message_type.GetOptions().map_entry:
            for part in value if isinstance(value, list) else filter(None, [value]):
                _restore_numbers(part, one.message_type)


def end_to_document(job: str, end: RunEnd) -> dict[str, Any]:
    """The JSON of `elastic status` for a run that has ended: without group and workers."""
    document = dataclasses.asdict(end)
    phase = "left" if document.pop("left") else "ended"
    return {"job": job, "phase": phase, "meaning": meaning_of(end.exit_code), **document}


def print_end(job: str, end: RunEnd) -> None:
    phase, meaning = "left" if end.left else "ended", meaning_of(end.exit_code)
    say(f"job {job}: {phase}, run {end.run_id}: {meaning} (exit code {end.exit_code})")
    say(f"step {end.committed}, at {_instant(end.ended_unix_s)}")
    if end.message:
        say(end.message)
    say(end.how_to_go_on(job))


def print_status(reply: pb.JobStatus) -> None:
    progress, generation = reply.progress, reply.generation
    figures = "".join(f", {name} {value:.4g}" for name, value in progress.reported.items())
    least = f" (at least {reply.min_workers})" if reply.min_workers > 1 else ""
    count = f"{len(generation.members)} of {reply.wanted_workers} workers{least}"
    say(f"job {reply.job}: {reply.phase}, {count}")
    if progress.generation or not generation.number:
        say(f"step {progress.committed}, epoch {progress.epoch}{figures}")
        say(f"{progress.samples_per_s:.0f} samples/s, {progress.step_s * 1000:.1f} ms a step")
    else:  # rank 0 has not reported to this leader
        say(f"step {progress.committed}" if progress.committed else _NO_STEP)
    if progress.in_step_s > max(_LONG_S, _LONG_FACTOR * progress.step_s):
        say(f"the current step has lasted {progress.in_step_s:.1f} s so far")
    say(f"generation {generation.number}, restarts {reply.restarts} of {reply.max_restarts}")
    if line := goodput_line(reply):
        say(line)
    if reply.coordinator:
        doubt = "" if reply.leads else " (in doubt: the store does not answer)"
        say(f"coordinator {reply.coordinator}{doubt}")
    left_s = reply.certificate_expires_unix_s - time.time()
    if reply.certificate_expires_unix_s > 0.0 and left_s < WARN_BEFORE_S[0]:
        at = _instant(reply.certificate_expires_unix_s)
        ends = f"expires at {at}: replace the files before"
        gone = f"expired at {at}: replace the files; no restart is needed"
        say(f"the coordinator's certificate {ends if left_s > 0.0 else gone}")
    if reply.verdict and is_representable_time(reply.verdict_unix_s):
        at = time.strftime("%H:%M:%S", time.localtime(reply.verdict_unix_s))
        say(f"held up at {at}: {reply.verdict}")
    for node in reply.nodes:
        if node.state == "unreachable":
            say(f"node {node.node} is left out: {node.reason}")
    if line := absent_line(reply):
        say(line)
    for slow in reply.slow:
        say(f"slow: {slow.verdict}")
    for line in _pauses(reply):
        say(line)
    if reply.checkpoint_dir:
        newest = f"step {reply.checkpoint_step}" if reply.checkpoint_step else "none yet"
        say(f"last checkpoint: {newest} in {reply.checkpoint_dir}")
    ranks = {member.worker: rank for rank, member in enumerate(generation.members)}
    rows = [
        (w.worker, node.node, ranks.get(w.worker, "-"), _phase(w.phase), w.committed, w.pid)
        for node in reply.nodes
        for w in node.workers
    ]
    print_table(("worker", "node", "rank", "phase", "step", "pid"), rows)
    for text in reply.recoveries_json[-3:]:
        recovery = _recovery(text)
        number, reason = recovery.get("generation"), recovery.get("reason")
        total_s = recovery.get("total_s")
        took = f"{total_s * 1000:.0f} ms" if isinstance(total_s, float) else "unknown"
        say(f"recovery to generation {number} ({reason}): {took}")


def _recovery(text: str) -> dict[str, Any]:
    """The recovery; empty if a coordinator of another version sent what this one cannot read."""
    try:
        return parse(text)
    except Unreadable:
        return {}


def _pauses(reply: pb.JobStatus) -> list[str]:
    """A line for each daemon whose event loop was held up."""
    nodes = [(f"the agent of {node.node}", node.longest_pause_s) for node in reply.nodes]
    found = [("the coordinator", reply.longest_pause_s), *nodes]
    return [
        f"longest pause of {who}: {pause_s * 1000:.0f} ms (events loop_paused)"
        for who, pause_s in found
        if pause_s > 0.0
    ]


def _phase(number: int) -> str:
    """The phase's name; its number if only a newer version knows it."""
    try:
        return WorkerPhase(number).name.lower()
    except ValueError:
        return f"phase {number}"


def stacks_document(reply: stacks_pb2.JobStacks) -> dict[str, Any]:
    return {"verdict": reply.verdict, "ranks": [_rank_document(one) for one in reply.ranks]}


def print_stacks(reply: stacks_pb2.JobStacks) -> None:
    """Print what each rank does in one line, with its stacks below."""
    for one in reply.ranks:
        where = whereabouts_from_pb(one.stacks, rank=one.rank, node=one.node)
        who = f"rank {one.rank}" if one.is_member else "no rank"
        step = f", step {where.committed}" if one.stacks.place else ""
        head = f"{who} (node {one.node}, worker {where.worker}){step}: {doing(where)}"
        say(head)
        for line in stack_lines(one.stacks, indent="  "):
            say(line)
        say()
    if reply.verdict:
        say(reply.verdict)


def _rank_document(one: stacks_pb2.RankStacks) -> dict[str, Any]:
    stacks = one.stacks
    where = whereabouts_from_pb(stacks, rank=one.rank, node=one.node)
    return {
        "rank": one.rank if one.is_member else None,
        "worker": stacks.worker,
        "node": one.node,
        "answer": where.answer.name.lower(),
        "place": where.place.name.lower(),
        "place_s": round(stacks.place_s, 3),
        "step": stacks.committed,
        "doing": doing(where),
        "processes": _plain(stacks)["processes"],
    }


_OUTCOMES = {
    "under_way": "under way",
    "waiting": "workers wait until there are enough of them",
    "trains_on": "the group trains on; no later checkpoint is complete yet",
    "saved_since": "the group trained on; a later checkpoint is complete",
    "job_ended": "the job ended with it",
    "unknown": "how it went on is not known: the leader changed before it was over",
}


def documents_of(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Parse incidents. Raises ConfigurationError if a text is no JSON object."""
    try:
        return [parse(text) for text in texts]
    except Unreadable as error:
        raise _unreadable() from error


def print_incidents(documents: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each incident. Raises ConfigurationError if one cannot be read here."""
    try:
        rows = [_incident_row(document) for document in documents]
    except UNREADABLE as error:
        raise _unreadable() from error
    if rows:
        print_table(("incident", "at", "step", "took", "lost", "what"), rows)
    else:
        say("no incident has been recorded")


def print_explained(document: Mapping[str, Any]) -> None:
    """Print everything about an incident. Raises ConfigurationError if it cannot be read here."""
    try:
        lines = list(_page(document))
    except UNREADABLE as error:
        raise _unreadable() from error
    for line in lines:
        say(line)


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "this version of elastic cannot read the coordinator's incidents; use the version that the "
        "coordinator has"
    )


def _incident_row(document: Mapping[str, Any]) -> tuple[object, ...]:
    recovered = document["outcome"] == "recovered"
    took = (
        duration(float(document["lasted_s"]))
        if recovered
        else str(document["outcome"]).replace("_", " ")
    )
    return (
        int(document["number"]),
        _instant(document["unix_s"]),
        int(document["committed"]),
        took,
        duration(float(document["lost_s"])),
        str(document["summary"]),
    )


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"incident {int(document['number'])}, {_instant(document['unix_s'])}"
    yield f"what failed:  {document['summary']}"
    if document["noticed_by"]:
        yield f"noticed by:   {document['noticed_by']}"
    yield from _effect(document)
    yield from _signs(document["noticed"])
    shown = {s["worker"] for s in document["hang"]["stacks"]} if document["hang"] else set()
    for process in document["processes"]:
        yield from _ended_process(process, with_log=process["worker"] not in shown)
    if document["further_processes"]:
        yield f"and {int(document['further_processes'])} more processes ended"
    if document["hang"] is not None:
        yield from _hang(document["hang"])


def _effect(document: Mapping[str, Any]) -> Iterator[str]:
    """What the incident led to, and what it cost."""
    yield f"outcome:      {_outcome(document)}"
    if document["verdict"]:
        yield f"              {document['verdict']}"
    if document["saves"] is None and document["generation"]:
        after = ""
        if document["followed_by"]:
            size, number = int(document["world_size_after"]), int(document["followed_by"])
            after = f", followed by generation {number} of {size}"
        group = f"generation {int(document['generation'])} of {int(document['world_size'])} workers"
        yield f"group:        {group}{after}"
    yield f"last commit:  step {int(document['committed'])}{_given_up(document)}"
    if document["saves_lost"]:
        steps = ", ".join(str(int(step)) for step in document["saves_lost"])
        yield f"saves:        those of step {steps} were given up because of it"
    phases = [
        f"{name} {duration(float(document['recovery'][f'{name}_s']))}"
        for name in PHASES
        if f"{name}_s" in document["recovery"]
    ]
    if phases:
        yield f"phases:       {', '.join(phases)}"
    if document["saves"] is not None:
        return  # a failed save holds up nobody
    kinds = sorted(document["seconds"].items(), key=lambda pair: -float(pair[1]))
    parts = ", ".join(f"{kind} {duration(float(s))}" for kind, s in kinds)
    lost = duration(float(document["lost_s"]))
    yield f"lost:         {lost} of slot time{f' ({parts})' if parts else ''}"


def _outcome(document: Mapping[str, Any]) -> str:
    outcome = document["outcome"]
    if outcome == "recovered":
        took = duration(float(document["lasted_s"]))
        return f"trained on {took} after the first sign"
    return _OUTCOMES.get(outcome, str(outcome))


def _given_up(document: Mapping[str, Any]) -> str:
    again, lost = int(document["steps_again"]), int(document["steps_lost"])
    samples = document["samples_given_up"]
    count = f" ({int(samples)} samples)" if samples is not None else ""
    if lost:
        return f"; {lost} committed steps were lost{count} and are computed again"
    if again:
        steps = "1 step was" if again == 1 else f"{again} steps were"
        return f"; {steps} begun and computed again{count}"
    return ""


def _signs(signs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(signs) > 1:
        yield "signs, in order:"
    for sign in signs if len(signs) > 1 else ():
        who = f"rank {sign['rank']}" if sign["rank"] is not None else str(sign["worker"])
        where = f"node {sign['node']}" if sign["node"] else "coordinator"
        detail = f": {sign['detail']}" if sign["detail"] else ""
        kind, about = str(sign["sign"]).replace("_", " "), ", ".join(filter(None, (where, who)))
        yield f"  {float(sign['after_s']):+9.3f} s  {kind}, {about}{detail}"


def _ended_process(process: Mapping[str, Any], *, with_log: bool) -> Iterator[str]:
    """with_log: show the end of its log; not needed if its stacks follow, which are in its log."""
    rank = process["rank"] if process["rank"] is not None else "-"
    label = f"{process['node']}:{rank}"
    yield ""
    verb = "raised " if process["kind"] == "exception" else ""
    yield f"{label} (worker {process['worker']}) {verb}{process['message']}"
    if process["log"]:
        yield f"  its log on that node: {process['log']}"
    for title, name in (("traceback", "traceback"), ("the end of its log", "log_tail")):
        if process[name] and (with_log or name == "traceback"):
            yield f"  {title}:"
            for line in str(process[name]).splitlines():
                yield f"    {label}| {line}"


def _hang(hang: Mapping[str, Any]) -> Iterator[str]:
    for stacks in hang["stacks"]:
        label = f"{stacks['node']}:{int(stacks['rank'])}"
        yield ""
        yield f"{label} (worker {stacks['worker']}) {stacks['doing']}"
        for line in str(stacks["text"]).splitlines():
            yield f"    {label}| {line}"


def _instant(unix_s: Any) -> str:
    at = float(unix_s)
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if is_representable_time(at) else "-"
    )
