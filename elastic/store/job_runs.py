"""Keeps the runs of a job in the store: one at a time, each with an end that stays until an
operator has it forgotten.

A run is one training from its first step to its end, through any number of restarts of agents and
coordinators. A process that joins a run that has ended exits with the run's exit code.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

from elastic.core.documents import Unreadable, parse, read, to_json
from elastic.errors import ConfigurationError, ElasticError, ExitCode, TransientError
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Guard, Store
from elastic.store.job_documents import LeaderDocument, node_from_json
from elastic.store.job_keys import JOBS, JobKeys, job_of, node_of, run_of
from elastic.store.leader_watch import leader_from
from elastic.store.retries import retry

DEFAULT_RUN = "default"
MOST_EXIT_CODE = 255
_FORGETTING_S = 10.0  # for which nobody can lead if `forget_run` is killed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended: the value of its key in the store."""

    run_id: str
    exit_code: int
    message: str = ""
    committed: int = 0
    """Committed steps."""
    ended_unix_s: float = 0.0
    left: bool = False
    """Every node has left the run: nodes that join it again go on from its newest checkpoint."""

    def ended_message(self, job: str) -> str:
        """The message for a process that joins the run again."""
        instant = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.ended_unix_s))
        why = f": {self.message}" if self.message else ""
        return (
            f"run {self.run_id!r} of job {job!r} ended at {instant} after {self.committed} steps "
            f"with exit code {self.exit_code}{why}; {self.how_to_go_on(job)}"
        )

    def how_to_go_on(self, job: str) -> str:
        """The advice for a person who wants to train further."""
        if self.left:
            return "start it again to go on from its newest checkpoint, if it has any"
        forget = f"`elastic forget {self.run_id} --job {job}`"
        return f"train again with another --run-id, or after {forget}"


class AlreadyEnded(ElasticError):
    """A process has come to a run that has ended, and must not train it."""

    def __init__(self, job: str, end: RunEnd) -> None:
        super().__init__(end.ended_message(job))
        self.job, self.end = job, end


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """A run that the store knows of."""

    job: str
    run_id: str
    coordinator: str = ""
    """The address of its leader; empty if it has none."""
    nodes: int = 0
    """The number of registered nodes."""
    end: RunEnd | None = None
    """None: the run is under way, or was when its last leader and agents were lost."""


# ---- how a run goes


class RunEnds:
    """Waits for the end of a run: call `start`, then `next_end`."""

    def __init__(self, store: Store, *, job: str, run_id: str) -> None:
        self._store, self._job = store, job
        self._key = JobKeys(job).end(run_id)
        self._past = 0

    async def start(self) -> None:
        """Wait through outages. Raises AlreadyEnded, and ConfigurationError if the store does."""
        entry = await retry(lambda: self._store.get(self._key), f"get {self._key!r}")
        if entry is not None:
            self._past = entry.modified
            _require_going_on(self._job, _end(entry))

    async def next_end(self) -> RunEnd:
        """Wait for the run's end, of any kind; the next call waits for the end after it."""
        async with aclosing(follow_key(self._store, self._key)) as entries:
            async for entry in entries:
                if entry is not None and entry.modified != self._past:
                    self._past = entry.modified
                    return _end(entry)
        return await asyncio.Future()


async def claim_run(store: Store, *, job: str, run_id: str, guard: Guard) -> None:
    """Make this the job's current run, unless it already is; wait through outages.

    Raises AlreadyEnded, GuardFailed, and ConfigurationError if another run is under way.
    """
    keys = JobKeys(job)

    async def claim() -> None:
        end = await store.get(keys.end(run_id))
        if end is not None:
            _require_going_on(job, _end(end))
        entry = await store.get(keys.run)
        under_way = _run_id(entry) if entry is not None else None
        if under_way not in (None, run_id):
            if await store.get(keys.end(under_way)) is None:
                raise ConfigurationError(
                    f"run {under_way!r} of job {job!r} has not ended, so run {run_id!r} cannot "
                    f"start; give --run-id {under_way}, or give that run up with "
                    f"`elastic forget {under_way} --job {job}`"
                )
            await _remove_all_but_ends(store, keys, guard)  # its last leader did not get that far
        await store.put(keys.run, run_id.encode(), guard=guard)
        await _remove_incidents(store, keys.incidents, guard, but=keys.incidents_of(run_id))
        if end is not None:
            await store.delete(keys.end(run_id), guard=guard)

    await retry(claim, f"claim run {run_id!r}")


async def announce_end(store: Store, *, job: str, guard: Guard, end: RunEnd) -> None:
    """Write the end, and remove all other keys of the run except its incidents. If the
    nodes have only left it (`end.left`), drained and quarantined nodes and the records stay, too.

    Raises GuardFailed and TransientError.
    """
    keys = JobKeys(job)
    await store.put(keys.end(end.run_id), to_json(end), guard=guard)
    kept = (keys.draining, keys.quarantined, keys.records) if end.left else ()
    await _remove_all_but_ends(store, keys, guard, keys.incidents_of(end.run_id), *kept)


# ---- for operators


async def list_runs(store: Store) -> list[JobRun]:
    """The runs of all jobs, by job name; for each job the ended runs by time, then the current one.

    Raises TransientError.
    """
    by_job: dict[str, list[Entry]] = {}
    for entry in await store.list(JOBS):
        by_job.setdefault(job_of(entry.key), []).append(entry)
    return [run for job in sorted(by_job) for run in _runs(job, by_job[job])]


async def newest_end(store: Store, job: str) -> RunEnd | None:
    """How the job's newest run ended; None if it is under way, or if there is none.

    Raises TransientError.
    """
    runs = _runs(job, await store.list(JobKeys(job).folder))
    return runs[-1].end if runs else None


async def forget_run(store: Store, *, job: str, run_id: str) -> bool:
    """Remove all keys of a run; False if there were none.

    Raises ConfigurationError if the run is under way, and TransientError.
    """
    keys = JobKeys(job)
    lease = await store.grant(_FORGETTING_S)
    try:
        # While this process holds the election key, no coordinator can begin the run.
        document = LeaderDocument(candidate=uuid.uuid4().hex, address="")
        leading = await store.create(keys.leader, to_json(document), lease=lease)
        entries = await store.list(keys.folder)
        run = next((run for run in _runs(job, entries) if run.run_id == run_id), None)
        if run is None:
            return False
        if run.end is None and (run.coordinator or run.nodes):
            who = f"coordinator {run.coordinator}" if run.coordinator else f"{run.nodes} agents"
            raise ConfigurationError(
                f"run {run_id!r} of job {job!r} is under way ({who}); stop it first, with "
                f"`elastic stop --job {job}`"
            )
        if leading is not None and (run.end is None or _run_under_way(entries, keys) == run_id):
            guard = Guard.of(leading)
            await _remove_all_but_ends(store, keys, guard)
        elif run.end is None:
            raise TransientError(
                f"another coordinator is becoming leader of job {job!r}; try again"
            )
        if run.end is not None:
            await store.delete(keys.end(run_id))
            await _remove_incidents(store, keys.incidents_of(run_id))
        return True
    finally:
        await store.revoke(lease)


# ---- inside


def _require_going_on(job: str, end: RunEnd) -> None:
    if not end.left:
        raise AlreadyEnded(job, end)


def _run_id(entry: Entry) -> str:
    return entry.value.decode(errors="backslashreplace")


async def _remove_all_but_ends(store: Store, keys: JobKeys, guard: Guard, *kept: str) -> None:
    """Keep the election key and the nodes' registrations, too: they end with their holders."""
    for entry in await store.list(keys.folder):
        if not entry.key.startswith((keys.leader, keys.nodes, keys.ends, *kept)):
            await store.delete(entry.key, guard=guard)


async def _remove_incidents(
    store: Store, folder: str, guard: Guard | None = None, *, but: str = ""
) -> None:
    """Remove the incidents in the folder, except those below the folder `but`."""
    for entry in await store.list(folder):
        if not (but and entry.key.startswith(but)):
            await store.delete(entry.key, guard=guard)


def _runs(job: str, entries: Iterable[Entry]) -> list[JobRun]:
    keys, by_key = JobKeys(job), {entry.key: entry for entry in entries}
    ends = [_end(entry) for key, entry in by_key.items() if key.startswith(keys.ends)]
    runs = [
        JobRun(job=job, run_id=end.run_id, end=end)
        for end in sorted(ends, key=lambda end: (end.ended_unix_s, end.run_id))
    ]
    leader = leader_from(by_key.get(keys.leader))
    nodes = sum(_is_there(entry) for key, entry in by_key.items() if key.startswith(keys.nodes))
    run_id = _run_under_way(by_key.values(), keys) or DEFAULT_RUN
    left = any(key in by_key for key in (keys.run, keys.generation, keys.incarnation))
    under_way = left or (leader is not None and bool(leader.address)) or nodes > 0
    if under_way and all(end.run_id != run_id for end in ends):
        address = leader.address if leader is not None else ""
        runs.append(JobRun(job=job, run_id=run_id, coordinator=address, nodes=nodes))
    return runs


def _run_under_way(entries: Iterable[Entry], keys: JobKeys) -> str | None:
    found = next((entry for entry in entries if entry.key == keys.run), None)
    return _run_id(found) if found is not None else None


def _is_there(entry: Entry) -> bool:
    try:
        return not node_from_json(entry.value).left
    except Unreadable:
        return bool(node_of(entry.key))


def _end(entry: Entry) -> RunEnd:
    """The end in the entry. If it cannot be read, only the fact of the end is known."""
    run_id = run_of(entry.key)
    try:
        document = {**parse(entry.value), "run_id": run_id}
        return read(RunEnd, document, most={"exit_code": MOST_EXIT_CODE})
    except Unreadable:
        return RunEnd(run_id=run_id, exit_code=int(ExitCode.SCRIPT_FAILED))
