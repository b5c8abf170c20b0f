"""The right to decide: an election key in the store, which guards every decision written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from elastic.coordinator.records import Records, load_records
from elastic.core.legible import is_text
from elastic.core.membership import Generation
from elastic.errors import ConfigurationError, ExitCode, TransientError
from elastic.rpc.codec import generation_from_pb, generation_to_pb
from elastic.store.interface import Entry, Guard, Store
from elastic.store.job_documents import LeaderDocument, to_json
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import DEFAULT_RUN, MOST_EXIT_CODE, claim_run
from elastic.store.retries import until_answered
from elastic.v1 import job_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What the nodes of a job run: the same on all of them."""

    text: str = ""
    """For people."""
    digest: str = ""
    """Empty where it is not known."""


UNKNOWN_COMMAND = Command()


@dataclass(frozen=True, kw_only=True, slots=True)
class StopOrder:
    """The run will be saved and left, under any leader."""

    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A generation in the store."""

    generation: Generation
    may_train: tuple[Generation, ...]
    """Earlier ones whose groups may train still, oldest first."""
    revision: int
    """At which it was written."""
    command: Command
    """What its members run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leadership:
    """Held while the election key is the one created at `guard.created`."""

    job: str
    guard: Guard
    incarnation: str
    """The run's, the same under all its leaders: the running group was formed under it."""
    records: Records = field(default_factory=Records)
    """Of the leaders before."""
    last: Stored | None = None
    """The newest generation of the leaders before; none of them can write another."""

    @property
    def last_generation(self) -> Generation | None:
        """See `last`."""
        return self.last.generation if self.last is not None else None

    @property
    def command(self) -> Command:
        """What its members run."""
        return self.last.command if self.last is not None else UNKNOWN_COMMAND

    @property
    def last_number(self) -> int:
        """The number of the newest generation, or 0."""
        return self.last.generation.number if self.last is not None else 0


async def lead(store: Store, *, job: str, candidate: str, run_id: str = DEFAULT_RUN) -> Leadership:
    """Take the election key of `job` for ever; raises TransientError if somebody else holds it."""
    document = LeaderDocument(candidate=candidate, address="")
    entry = await store.create(JobKeys(job).leader, to_json(document))
    if entry is None:
        raise TransientError(f"another coordinator leads the job {job!r}")
    return await take_office(store, job=job, candidate=candidate, run_id=run_id, elected=entry)


async def take_office(
    store: Store, *, job: str, candidate: str, elected: Entry, run_id: str = DEFAULT_RUN
) -> Leadership:
    """What the leader whose election key is `elected` must know; sits out outages.

    The first leader's `candidate` becomes the run's incarnation. Raises AlreadyEnded,
    ConfigurationError if what is stored cannot be read or is of another run, and GuardFailed.
    """
    guard = Guard.of(elected)
    await claim_run(store, job=job, run_id=run_id, guard=guard)
    return Leadership(
        job=job,
        guard=guard,
        incarnation=await _incarnation(store, job, candidate),
        records=await until_answered(lambda: load_records(store, job), "load the records"),
        last=await until_answered(lambda: load_generation(store, job), "load the generation"),
    )


async def save_generation(
    store: Store,
    leadership: Leadership,
    generation: Generation,
    may_train: Sequence[Generation] = (),
    command: Command = UNKNOWN_COMMAND,
) -> None:
    """Write all of it, fenced; sits out outages. Raises GuardFailed when others lead.

    Written twice it is the same: nobody else writes under this guard, and a leader writes one
    generation after the other.
    """
    key = JobKeys(leadership.job).generation
    document = pb.StoredGeneration(
        newest=generation_to_pb(generation),
        may_train=[generation_to_pb(g) for g in may_train],
        command=command.text,
        command_digest=command.digest,
    )
    value = document.SerializeToString(deterministic=True)
    await until_answered(
        lambda: store.put(key, value, guard=leadership.guard),
        f"save generation {generation.number}",
    )


async def restore_generation(store: Store, leadership: Leadership, lost: Stored) -> Leadership:
    """Have the store know again what it has lost; sits out outages. Raises GuardFailed."""
    await save_generation(store, leadership, lost.generation, lost.may_train, lost.command)
    key, incarnation = JobKeys(leadership.job).incarnation, lost.generation.incarnation
    await until_answered(
        lambda: store.put(key, incarnation.encode(), guard=leadership.guard),
        "restore the run's incarnation",
    )
    last = await until_answered(lambda: load_generation(store, leadership.job), "load it again")
    return dataclasses.replace(leadership, incarnation=incarnation, last=last)


async def load_generation(store: Store, job: str) -> Stored | None:
    """The newest generation, or None.

    Raises TransientError, and ConfigurationError if it cannot be read.
    """
    key = JobKeys(job).generation
    entry = await store.get(key)
    if entry is None:
        return None
    try:
        document = pb.StoredGeneration.FromString(entry.value)
        generation = generation_from_pb(document.newest)
        may_train = tuple(map(generation_from_pb, document.may_train))
    except (DecodeError, ValueError) as error:
        raise ConfigurationError(
            f"the store's key {key!r} holds no generation that this version can read ({error}); "
            "run the version that wrote it, or give this job another name with --job"
        ) from error
    return Stored(
        generation=generation,
        may_train=may_train,
        revision=entry.modified,
        command=Command(text=document.command, digest=document.command_digest),
    )


async def save_stop(store: Store, leadership: Leadership, order: StopOrder) -> None:
    """Keep it for the leaders after; sits out outages. Raises GuardFailed when others lead."""
    key, value = JobKeys(leadership.job).stop, json.dumps(dataclasses.asdict(order)).encode()
    await until_answered(
        lambda: store.put(key, value, guard=leadership.guard), "save the order to stop"
    )


async def load_stop(store: Store, job: str) -> StopOrder | None:
    """What a leader before was asked for; None if nothing. Raises TransientError."""
    entry = await store.get(JobKeys(job).stop)
    if entry is None:
        return None
    try:
        document = json.loads(entry.value)
        reason, exit_code = document["reason"], document["exit_code"]
        if type(exit_code) is int and 0 < exit_code <= MOST_EXIT_CODE and is_text(reason):
            return StopOrder(reason=reason, exit_code=exit_code)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return StopOrder(
        reason=f"the store's key {entry.key} says so, and cannot be read",
        exit_code=ExitCode.STOPPED,
    )


async def _incarnation(store: Store, job: str, proposed: str) -> str:
    key = JobKeys(job).incarnation

    async def read_or_make() -> str | None:
        entry = await store.create(key, proposed.encode()) or await store.get(key)
        return entry.value.decode(errors="backslashreplace") if entry is not None else None

    while True:
        incarnation = await until_answered(read_or_make, "read the job's incarnation")
        if incarnation is not None:
            return incarnation
