"""Elects the leader: a key in the store is the right to decide and guards every decision.

On winning, it reads what earlier leaders stored. It notices when the key is lost, and when the
process that holds it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from elastic.coordinator.records import Records, load_records
from elastic.core.documents import Unreadable, parse, read, to_json
from elastic.core.membership import Generation, WorkerId
from elastic.errors import ConfigurationError, ExitCode, TransientError
from elastic.rpc.codec import Codec, generation_from_pb, generation_to_pb
from elastic.runtime.off_loop import off_loop
from elastic.store.claim import Claim
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Guard, GuardFailed, Store
from elastic.store.job_documents import LeaderDocument, leader_from_json
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import DEFAULT_RUN, MOST_EXIT_CODE, claim_run
from elastic.store.leader_watch import leader_from
from elastic.store.lease_keeper import LeaseState, boot_time_s
from elastic.store.retries import retry
from elastic.timeouts import timeout
from elastic.v1 import job_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command that all nodes of a job run."""

    text: str = ""
    """The command as people read it."""
    digest: str = ""
    """Empty: unknown."""


UNKNOWN_COMMAND = Command()


@dataclass(frozen=True, kw_only=True, slots=True)
class StopOrder:
    """An order to save and leave the run, under this leader and later ones."""

    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss from which the job has not recovered yet."""

    reason: str
    """The reason that the event `recovered` shows."""
    workers: tuple[WorkerId, ...]
    incident: bytes = b""
    """The record that `elastic explain` shows; empty: unknown."""


_LOSS = Codec(Loss, pb.Loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A generation as it is in the store, with what belongs to it."""

    generation: Generation
    may_train: tuple[Generation, ...]
    """Earlier generations whose groups may still train, oldest first."""
    revision: int
    """The store's revision at which it was written."""
    command: Command
    """The command that its members run."""
    loss: Loss | None = None
    """The loss that this generation recovers from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leadership:
    """One leader's term and what it begins with.

    It lasts while the election key is the one created at `guard.created`.
    """

    job: str
    guard: Guard
    incarnation: str
    """The run's, the same under all its leaders: the running group was formed under it."""
    records: Records = field(default_factory=Records)
    """The records that earlier leaders stored."""
    last: Stored | None = None
    """The newest generation of earlier leaders; none of them can write another."""

    @property
    def last_generation(self) -> Generation | None:
        return self.last.generation if self.last is not None else None

    @property
    def newest_that_trains(self) -> Generation | None:
        """The group whose members tell what the job has done: that of the newest generation, or of
        the one before while a planned change may not have taken effect."""
        if self.last is None or self.last.generation.leave_after is None:
            return self.last_generation
        return self.last.may_train[-1] if self.last.may_train else None

    @property
    def command(self) -> Command:
        return self.last.command if self.last is not None else UNKNOWN_COMMAND

    @property
    def last_number(self) -> int:
        """0: there is no generation yet."""
        return self.last.generation.number if self.last is not None else 0


async def lead(store: Store, *, job: str, candidate: str, run_id: str = DEFAULT_RUN) -> Leadership:
    """Take the election key of `job` without a lease, so for ever. Raises TransientError if another
    coordinator holds it."""
    document = LeaderDocument(candidate=candidate, address="")
    entry = await store.create(JobKeys(job).leader, to_json(document))
    if entry is None:
        raise TransientError(f"another coordinator leads the job {job!r}")
    return await begin_term(store, job=job, candidate=candidate, run_id=run_id, elected=entry)


async def begin_term(
    store: Store, *, job: str, candidate: str, elected: Entry, run_id: str = DEFAULT_RUN
) -> Leadership:
    """Read what the leader whose election key is `elected` must know; waits out outages.

    The first leader's `candidate` becomes the run's incarnation. Raises AlreadyEnded,
    ConfigurationError if what is stored cannot be read or belongs to another run, and GuardFailed.
    """
    guard = Guard.of(elected)
    await claim_run(store, job=job, run_id=run_id, guard=guard)
    return Leadership(
        job=job,
        guard=guard,
        incarnation=await _incarnation(store, job, candidate),
        records=await retry(lambda: load_records(store, job, run_id), "load the records"),
        last=await retry(lambda: load_generation(store, job), "load the generation"),
    )


async def save_generation(
    store: Store,
    leadership: Leadership,
    generation: Generation,
    may_train: Sequence[Generation] = (),
    command: Command = UNKNOWN_COMMAND,
    loss: Loss | None = None,
) -> None:
    """Write the generation under the guard; waits out outages. Raises GuardFailed if another leads.

    Writing it twice is harmless: nobody else writes under this guard, and a leader writes one
    generation after the other.
    """
    key = JobKeys(leadership.job).generation
    document = pb.StoredGeneration(
        newest=generation_to_pb(generation),
        may_train=[generation_to_pb(g) for g in may_train],
        command=command.text,
        command_digest=command.digest,
        loss=_LOSS.to_pb(loss) if loss is not None else None,
    )
    value = document.SerializeToString(deterministic=True)
    await retry(
        lambda: store.put(key, value, guard=leadership.guard),
        f"save generation {generation.number}",
    )


async def restore_generation(store: Store, leadership: Leadership, lost: Stored) -> Leadership:
    """Write again what the store has lost; waits out outages. Raises GuardFailed."""
    await save_generation(store, leadership, lost.generation, lost.may_train, lost.command)
    key, incarnation = JobKeys(leadership.job).incarnation, lost.generation.incarnation
    await retry(
        lambda: store.put(key, incarnation.encode(), guard=leadership.guard),
        "restore the run's incarnation",
    )
    last = await retry(lambda: load_generation(store, leadership.job), "load the generation again")
    return dataclasses.replace(leadership, incarnation=incarnation, last=last)


async def load_generation(store: Store, job: str) -> Stored | None:
    """Return the newest generation, or None. Raises TransientError, and ConfigurationError if it
    cannot be read."""
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
            f"this version cannot read the generation in the store's key {key!r} ({error}); "
            "run the version that wrote it, or give this job another name with --job"
        ) from error
    return Stored(
        generation=generation,
        may_train=may_train,
        revision=entry.modified,
        command=Command(text=document.command, digest=document.command_digest),
        loss=_LOSS.from_pb(document.loss) if document.HasField("loss") else None,
    )


async def save_stop(store: Store, leadership: Leadership, order: StopOrder) -> None:
    """Store the order for later leaders; waits out outages. Raises GuardFailed if another leads."""
    key, value = JobKeys(leadership.job).stop, to_json(order)
    await retry(lambda: store.put(key, value, guard=leadership.guard), "save the order to stop")


async def load_stop(store: Store, job: str) -> StopOrder | None:
    """Return the order that an earlier leader stored, or None. Raises TransientError."""
    entry = await store.get(JobKeys(job).stop)
    if entry is None:
        return None
    try:
        order = read(StopOrder, parse(entry.value), most={"exit_code": MOST_EXIT_CODE})
        if order.exit_code > 0:
            return order
    except Unreadable:
        pass
    return StopOrder(
        reason=f"the store's key {entry.key} holds a stop order that cannot be read",
        exit_code=ExitCode.STOPPED,
    )


async def _incarnation(store: Store, job: str, proposed: str) -> str:
    key = JobKeys(job).incarnation

    async def read_or_make() -> str | None:
        entry = await store.create(key, proposed.encode()) or await store.get(key)
        return entry.value.decode(errors="backslashreplace") if entry is not None else None

    while True:
        incarnation = await retry(read_or_make, "read the job's incarnation")
        if incarnation is not None:
            return incarnation


_LOG = logging.getLogger(__name__)
LEADER_TTL_S = 3.0


class Election:
    """One candidate: `campaign` until elected, `hold` until deposed, campaign again.

    `on_change` is called with the state of the leadership that `campaign` returned. SUSPECT: others
    may lead soon; lead on, since every write is guarded. HELD: this candidate leads after all.
    GONE: step down; it comes once, and `hold` returns.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        address: str,
        on_change: Callable[[LeaseState], None],
        on_waiting: Callable[[LeaderDocument], None] = lambda _: None,
        run_id: str = DEFAULT_RUN,
        page: Callable[[], str] = str,
        ttl_s: float = LEADER_TTL_S,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        """`address`: host:port where agents and operators find this candidate. `on_waiting`: called
        once with each leader that it waits for. `page`: where people find its page."""
        self._store = store
        self._job, self._run_id = job, run_id
        self._key = JobKeys(job).leader
        self._candidate = uuid.uuid4().hex
        self._address, self._page = address, page
        self._on_waiting = on_waiting
        self._on_change = on_change
        self._leads = False
        self._told = LeaseState.HELD
        self._claim = Claim(
            store, key=self._key, ttl_s=ttl_s, on_change=self._claim_changed, clock=clock
        )

    def held(self) -> bool:
        """Return True if it is certain that nobody else leads at this moment."""
        return self._leads and self._claim.held()

    async def campaign(self, *, after_s: float = 0.0) -> Leadership:
        """Wait until nobody leads, and lead. Waits out outages. Raises AlreadyEnded and
        ConfigurationError. after_s: other candidates may go first for so long."""
        while True:
            await self._until_vacant()
            await asyncio.sleep(after_s)
            elected = await self._claim.take(self._value())
            if elected is None:
                continue
            try:
                leadership = await self._begin_term(elected)
            except BaseException:
                await self._claim.release()
                raise
            if leadership is not None:
                return leadership

    async def hold(self) -> None:
        """Return when deposed, or after `resign`. Raises ConfigurationError if the store does."""
        await self._claim.hold()
        self._leads = False

    async def resign(self) -> None:
        """Let the next leader follow at once, if the store answers. `on_change` is not called.

        Cancel `campaign` first, or it goes on.
        """
        self._leads = False
        await self._claim.release()

    async def _begin_term(self, elected: Entry) -> Leadership | None:
        """Return None if deposed meanwhile."""
        deposed = asyncio.ensure_future(self._claim.hold())
        reading = asyncio.ensure_future(
            begin_term(
                self._store,
                job=self._job,
                candidate=self._candidate,
                elected=elected,
                run_id=self._run_id,
            )
        )
        try:
            await asyncio.wait({deposed, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (deposed, reading):
                task.cancel()
            await asyncio.gather(deposed, reading, return_exceptions=True)
        if reading.cancelled():
            deposed.result()
            return None
        try:
            leadership = reading.result()
        except GuardFailed:
            return None
        if self._claim.entry is None:
            return None
        self._leads, self._told = True, LeaseState.HELD
        if not self._claim.held():
            self._tell(LeaseState.SUSPECT)
        return leadership

    async def _until_vacant(self) -> None:
        ending: asyncio.Task[None] | None = None
        told, watched = "", None
        try:
            async with aclosing(follow_key(self._store, self._key)) as entries:
                async for entry in entries:
                    if entry is None:
                        return
                    told = self._tell_who_leads(entry, told)
                    if entry == watched:  # listed again: what is known of its process stays true
                        continue
                    if ending is not None:
                        ending.cancel()
                    watched = entry
                    ending = asyncio.create_task(self._end_with_its_process(entry))
        finally:
            if ending is not None:
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

    def _value(self) -> bytes:
        document = LeaderDocument(
            candidate=self._candidate, address=self._address, run_id=self._run_id, page=self._page()
        )
        return to_json(document)

    def _tell_who_leads(self, entry: Entry, told: str) -> str:
        """Report each leader once; return its candidate. told: the candidate returned last."""
        try:
            leader = leader_from_json(entry.value)
        except Unreadable:
            return told
        if leader.address and leader.candidate not in (told, self._candidate):
            self._on_waiting(leader)
        return leader.candidate

    async def _end_with_its_process(self, entry: Entry) -> None:
        """Revoke the lease of a leader whose process is gone, instead of waiting for the lease to
        end. If the process lives after all, it is deposed as if it had lost the lease."""
        leader = leader_from(entry)
        if leader is None or not entry.lease:
            return
        await wait_until_gone(leader.address)
        _LOG.info("the leader no longer listens at %s", leader.address)
        await retry(lambda: self._store.revoke(entry.lease), "revoke the leader's lease")

    def _claim_changed(self, state: LeaseState) -> None:
        if self._leads:
            self._tell(state)

    def _tell(self, state: LeaseState) -> None:
        """Report each state once: a lease in doubt from the start is noticed twice."""
        if state is not self._told:
            self._told = state
            self._on_change(state)


_CONNECT_S = 2.0
_AGAIN_S = 0.5
_LEAST_PAUSE_S = 0.01


async def wait_until_gone(address: str) -> None:
    """Return when a process that has listened at `address` (host:port) listens no longer.

    The kernel closes the connections of a dead process and refuses new ones. A host that is silent
    or out of reach proves nothing: then this waits on. It also waits on if nobody could ever be
    reached at the address.
    """
    was_there, pause_s = False, 0.0
    while True:
        try:
            async with timeout(_CONNECT_S):
                reader, writer = await _connect(address)
        except ConnectionRefusedError:
            if was_there:
                return
            pause_s = _AGAIN_S
        except ConnectionResetError:  # it was accepted, and the process has ended since
            was_there, pause_s = True, _longer(pause_s)
        except (OSError, asyncio.TimeoutError, ValueError, RuntimeError):
            pause_s = _AGAIN_S  # RuntimeError: the system has no thread left
        else:
            was_there, began = True, time.monotonic()
            try:
                with contextlib.suppress(OSError):
                    while await reader.read(4096):
                        pass  # the server's greeting
            finally:
                writer.close()
            # A process that ends may accept once more: the kernel closes its sockets in turn. A
            # proxy whose server is gone accepts again and again.
            lasted = time.monotonic() - began >= _AGAIN_S
            pause_s = 0.0 if lasted else _longer(pause_s)
        await asyncio.sleep(pause_s)


def _longer(pause_s: float) -> float:
    return min(max(2 * pause_s, _LEAST_PAUSE_S), _AGAIN_S)


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect. A daemon thread resolves the name, since that may take long."""
    host, _, port = address.rpartition(":")
    resolve = functools.partial(
        socket.getaddrinfo, host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    (_, _, _, _, (found, *_)), *_ = await off_loop(resolve)
    return await asyncio.open_connection(str(found), int(port))
