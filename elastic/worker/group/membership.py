"""Keeps the script's thread in the newest group that it belongs to, and lets the members compare.

A new group's members declare their states before any state moves. Before a call that every member
must make, they meet at the group's store. Nobody blocks there, so different calls are found before
their collectives could mix, and a member that does not come is named.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastic.core.membership import Generation, WorkerStatus
from elastic.core.recovery import Declaration
from elastic.core.reductions import Made, in_words
from elastic.core.worker.machine import Effect, FreezeGroup, ReportStatus, Worker
from elastic.errors import GroupLost, ModelMismatch, StepMisused
from elastic.worker.group.process_group import Backend, Group, StoreHost, first_line
from elastic.worker.group.stuck import STUCK_S, watch_script
from elastic.worker.group.transfer import receive_json, send_json
from elastic.worker.state.tensor_specs import TensorSpec, first_differences


@dataclass(slots=True)
class Durations:
    """Seconds that each part of the way into the present group took."""

    abort_s: float = 0.0
    join_s: float = 0.0
    sync_s: float = 0.0
    ready_at: float = 0.0
    """When the group was ready to train, by time.monotonic()."""

    def since_ready_s(self) -> float:
        return time.monotonic() - self.ready_at


class Membership:
    """Runs the worker machine between two threads: the link's and the script's.

    report: sends a status to the agent; called under the lock, must not block for long.
    committed: returns the count of committed steps, for reports.
    give_up: called if the script's thread does not come out of an aborted group, with the seconds
        for which it has stood still; does not return.
    leave_block: called now and then while the job stops and is out of time, and the script's thread
        is still in an aborted group; returns whether another thread leaves the job in its place.
    """

    def __init__(
        self,
        machine: Worker,
        *,
        report: Callable[[WorkerStatus], None],
        committed: Callable[[], int],
        join_timeout_s: float = 10.0,
        give_up: Callable[[float], None] = lambda _: None,
        leave_block: Callable[[], bool] = lambda: False,
    ) -> None:
        self.machine = machine
        """The script's protocol asks it questions; this class gives it its events."""
        self._report = report
        self._committed = committed
        self.join_timeout_s = join_timeout_s
        self._give_up = give_up
        self._leave_block = leave_block
        self._changed = threading.Condition()
        self._group: Group | None = None
        self._kept: Group | None = None
        """A frozen group that the script has left. It is not aborted before the others are known to
        be frozen: they could take what an aborted operation sends."""
        self.durations = Durations()
        self._built_at = 0.0

    @property
    def group(self) -> Group | None:
        """The group that the script's thread is in or is building."""
        return self._group

    def require_group(self) -> Group:
        """Return the group. Raises GroupLost if there is none."""
        group = self._group
        if group is None:
            raise GroupLost("there is no group")
        return group

    @property
    def announced(self) -> Generation | None:
        return self.machine.announced

    # ---- on the link's thread

    def announce(self, generation: Generation) -> None:
        with self._changed:
            self._execute(self.machine.generation_announced(generation))
            self._changed.notify_all()

    def report_again(self) -> None:
        """Send the status again to an agent or a coordinator that may not know it."""
        with self._changed:
            self._report(self.machine.status)

    # ---- on the script's thread

    def attach(self) -> None:
        """The script has called elastic.init()."""
        with self._changed:
            self._execute(self.machine.attached())

    def assign(self, slot: int) -> None:
        with self._changed:
            self._execute(self.machine.assigned(slot))

    def prepare(self, endpoint: str, backend: Backend) -> None:
        """The script needs a group for the first time; its store listens at `endpoint`."""
        with self._changed:
            self._execute(self.machine.prepared(endpoint, queues=backend.queues))

    def join(self, host: StoreHost, backend: Backend) -> Group:
        """Block until there is a generation to join, and build its group. Raises GroupLost."""
        group = self._begin_join(backend)
        started = time.monotonic()
        if self._kept is not None:
            self._kept.close()
            self._kept = None
            self.durations.abort_s = time.monotonic() - started
            started = time.monotonic()
        group.build(host, self.join_timeout_s)
        self._built_at = time.monotonic()
        self.durations.join_s = self._built_at - started
        return group

    def joined(self, committed: int) -> None:
        """The group's members have one state. Raises GroupLost if it was aborted meanwhile."""
        group = self._group
        assert group is not None, "joined without a group"
        group.check()
        with self._changed:
            self._execute(self.machine.joined(group.generation, committed))
        self.durations.ready_at = time.monotonic()
        self.durations.sync_s = self.durations.ready_at - self._built_at

    def must_leave(self) -> bool:
        """Return whether the group has been superseded. For use at a step boundary."""
        return self.machine.must_leave(self._committed())

    def await_settlement(self, committed: int, timeout_s: float) -> bool:
        """Wait at the boundary of a planned change until it is settled; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.machine.must_wait(committed), timeout_s)

    def await_successor(self, timeout_s: float | None) -> None:
        """Wait until a generation after this group's is announced, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.machine.following is not None, timeout_s)

    def leave(self) -> None:
        """Leave the group at a step boundary, as planned or because it was superseded."""
        self._close_group(broken=False)
        with self._changed:
            self._execute(self.machine.group_left(self._committed()))

    def report_loss(self, error: BaseException, *, held: bool = False) -> None:
        """Free the peers, then report that the group broke. held: the state here is whole. Where
        operations queue, the next announcement frees the peers."""
        superseded = self.machine.superseded()
        self._close_group(broken=True)
        with self._changed:
            committed = self._committed()
            if superseded:
                self._execute(self.machine.group_left(committed, held=held))
            else:
                detail = first_line(error)
                self._execute(self.machine.group_broke(committed, detail, held=held))

    def drop_state(self) -> None:
        """Report that the state here no longer counts."""
        with self._changed:
            self._execute(self.machine.state_dropped())

    def finish(self) -> None:
        """Leave the group, and report that the script has ended well."""
        if self._group is not None:
            self._group.leave()
        with self._changed:
            self._execute(self.machine.finished(self._committed()))

    def abandon(self) -> None:
        """Free the peers of a failed script: they must not wait until this process has ended. Where
        operations queue, the news of its end frees them."""
        if self._group is not None and not self._group.backend.queues:
            self._group.abort()

    # ---- inside

    def _begin_join(self, backend: Backend) -> Group:
        with self._changed:
            while (generation := self.machine.joinable()) is None:
                self._changed.wait()
            rank = generation.rank_of(self.machine.status.worker)
            if rank is None:
                raise GroupLost(f"not a member of generation {generation.number}")
            self._group = Group(generation, rank, backend)
            self._execute(self.machine.join_began(generation))
            return self._group

    def _close_group(self, *, broken: bool) -> None:
        began = time.monotonic()
        group = self._group
        if group is not None and group.backend.queues:
            group.freeze()
            self._kept = group
        self._group = None
        if group is not None and self._kept is not group:
            if broken:
                group.abort()  # at once, to free the peers that wait for this member
            group.close()
        self.durations.abort_s = time.monotonic() - began

    def _execute(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReportStatus):
                self._report(effect.status)
                continue
            group = self._group or self._kept
            if group is None or group.generation.number != effect.generation:
                continue
            if isinstance(effect, FreezeGroup):
                group.freeze()
                continue
            cut = threading.Event()
            self._watch(group, cut)  # first: NCCL's abort may itself block
            group.abort()
            cut.set()

    def _leaves_block(self) -> bool:
        return self.machine.is_out_of_time and self._leave_block()

    def _watch(self, group: Group, cut: threading.Event) -> None:
        """Give the process up if the script's thread does not leave the aborted group."""
        threading.Thread(
            target=watch_script,
            args=(
                lambda: self._group is not group,
                self._give_up,
                STUCK_S,
                self._leaves_block,
                cut.is_set,
            ),
            name="elastic-stuck",
            daemon=True,
        ).start()


_FIELDS = dataclasses.fields(Declaration)


def declare(group: Group, mine: Declaration) -> tuple[Declaration, ...]:
    """Give `mine` to all members; return all declarations, by rank."""
    numbers = [int(getattr(mine, field.name)) for field in _FIELDS]
    row = torch.tensor(numbers, dtype=torch.int64, device=group.backend.device)
    rows = [torch.empty_like(row) for _ in range(group.world_size)]
    dist.all_gather(rows, row)
    group.settle()
    return tuple(_decoded(r.tolist()) for r in rows)


def _decoded(row: Sequence[int]) -> Declaration:
    flags = {field.name for field in _FIELDS if field.type == "bool"}
    named = zip((field.name for field in _FIELDS), row, strict=True)
    values: dict[str, Any] = {n: bool(v) if n in flags else v for n, v in named}
    return Declaration(**values)


def differing_parameters(
    group: Group, digest: int, names: Callable[[], Mapping[str, int]]
) -> dict[int, list[str]]:
    """Return an entry for each rank whose parameters are not those of rank 0. Only that rank itself
    gets their names: elsewhere its list is empty.

    names: digests by parameter, called only if `digest`, of all of them, differs somewhere.
    """
    mine = torch.tensor([digest], dtype=torch.int64, device=group.backend.device)
    rows = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(rows, mine)
    group.settle()
    digests = [int(row.item()) for row in rows]
    odd = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if not odd:
        return {}
    found: dict[int, list[str]] = {rank: [] for rank in odd}
    if group.rank == 0:
        for rank in odd:
            send_json(group, dict(names()), rank)
    elif group.rank in odd:
        found[group.rank] = differences(names(), receive_json(group, 0))
    return found


def differences(mine: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """The names whose digests differ, or that only one side has."""
    return [n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)]


def explain_mismatch(
    group: Group, reference: int, odd: tuple[int, ...], mine: tuple[TensorSpec, ...]
) -> None:
    """Send the reference's structure to each odd member, which raises ModelMismatch. The others go
    on, and lose the group when the odd members end."""
    if group.rank == reference:
        table = [[s.name, s.dtype, list(s.shape)] for s in mine]
        for rank in odd:
            send_json(group, table, rank)
    if group.rank not in odd:
        return
    theirs = tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
        for name, dtype, shape in receive_json(group, reference)
    )
    details = "; ".join(first_differences(mine, theirs)) or "the tracked objects differ"
    raise ModelMismatch(
        f"rank {group.rank} tracks another model than rank {reference}: {details}. Build the same "
        "model, with the same arguments, in every worker"
    )


_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0002, 0.02
_ASK_AFTER_S = 0.5
_ASKED = "asked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How far a member is in its group."""

    committed: int
    """Committed steps of the job."""
    in_block: bool
    """It is inside the block of the step after these."""
    reductions: int
    """The reductions (core/reductions.py) that it has begun in this group."""
    collectives: int
    """All collectives of this group that it has begun since the members agreed on one state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a member that waits in a meeting tells those that do not come."""

    key: str
    doing: str
    standing: Standing


class Described(Protocol):
    """A call that members can compare."""

    @property
    def what(self) -> str:
        """The same on every member that makes the same call."""
        ...

    @property
    def where(self) -> str:
        """File and line of the script; empty at the script's end."""
        ...


def meet(
    group: Group, here: Standing, number: str, call: Described, state: str = ""
) -> dict[int, str]:
    """Return once every member has come to call `number` since the last committed step.

    state: what must be equal there, such as a digest; empty: nothing. Returns that of each rank if
    two members differ in it, which all of them learn; otherwise nothing.

    Raises StepMisused, which names both sides, if members make different calls or one of them is
    elsewhere for good; GroupLost, or an error of the store's connection, if the group is aborted.
    """
    mine, doing = json.dumps([call.what, call.where, state]), _at(call.what, call.where)
    found = _come_together(group, here, f"call/{here.committed}/{number}", mine, doing)
    states = {group.rank: state}
    for rank, theirs in found.items():
        what, where, states[rank] = json.loads(theirs)
        if what != call.what:
            raise StepMisused(
                f"the workers call different things after step {here.committed}: rank {group.rank} "
                f"{doing}, rank {rank} {_at(what, where)}. Every worker must "
                "make the same calls in the same order; decide whether to call by values that are "
                "the same everywhere, such as step.ends_epoch and session.state"
            )
    return states if len({*states.values()} - {""}) > 1 else {}


def compare_reductions(group: Group, here: Standing, made: Made) -> None:
    """Return once every member has ended the block of the same step, with the same reductions.

    Raises StepMisused, which names both sides, if another member has made more or fewer of them;
    otherwise as `meet` does.
    """
    mine = in_words(made)
    doing = f"has made {mine} in step {here.committed}"
    found = _come_together(group, here, f"reductions/{here.committed}", mine, doing)
    odd = [f"rank {rank} {theirs}" for rank, theirs in found.items() if theirs != mine]
    if odd:
        raise StepMisused(f"rank {group.rank} {doing}, {', '.join(odd[:3])}. {_SAME_STEPS}")


def have_equal(group: Group, here: Standing, digest: int, *, again: bool = False) -> bool:
    """Return, once every member has come here, whether all have the same digest. Errors as of
    `meet`.

    again: all members have come here before, and found that they differ.
    """
    key = f"state/{here.committed}{'/again' if again else ''}"
    found = _come_together(group, here, key, str(digest), "compares its state with the others'")
    return all(theirs == str(digest) for theirs in found.values())


_SAME_CALLS = (
    "Every worker must make the same calls at the same place of the script; decide whether to call "
    "by values that are the same everywhere, also in a worker that has just joined, such as "
    "step.ends_epoch and session.state"
)
_SAME_STEPS = (
    "In each step, every rank must pass its losses through the same models, as often as the others "
    "do, and call the same collectives; a rank without usable samples multiplies the outputs of "
    "these models by 0"
)


def _come_together(
    group: Group, here: Standing, key: str, value: str, doing: str
) -> dict[int, str]:
    """Wait until every member has come to the meeting `key`; return the values of the others, by
    rank. doing: why this member is here, for those that will not come."""
    store = group.store
    if group.world_size == 1 or store is None:
        return {}
    store.set(f"{key}/{group.rank}", value)
    before, group.met_at = group.met_at, f"{key}/{group.rank}"
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    began, pause_s = time.monotonic(), _FIRST_LOOK_S
    asks = _Asked(key=key, doing=doing, standing=here)
    asked = False
    while not store.check([f"{key}/{rank}" for rank in others]):
        group.check()
        if asked:
            _raise_if_elsewhere(group, store, others, asks)
        elif time.monotonic() - began > _ASK_AFTER_S:
            store.set(_ASKED, json.dumps([key, doing, *dataclasses.astuple(here)]))
            asked = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    found = {rank: store.get(f"{key}/{rank}").decode() for rank in others}
    if before:  # all have come to this meeting, so nobody needs the key of the one before
        store.delete_key(before)
    return found


def answer(group: Group, here: Standing, doing: str, *, waits: bool) -> None:
    """Tell members that wait for this one that it will not come, because it is `doing` something
    else. Another thread calls this while the script is inside a block.

    waits: the script's thread seems to wait in a collective.
    """
    store = group.store
    if store is None or not store.check([_ASKED]):
        return
    asked = _read_asked(store)
    if (missed := _missed(here, asked.standing, waits=waits)) is not None:
        store.set(f"{asked.key}/elsewhere/{group.rank}", doing + missed)


def _missed(here: Standing, theirs: Standing, *, waits: bool) -> str | None:
    """Why a member that is inside of a block will not come to others that wait for it: "" if its
    place says enough. None if it may still come: it is slow, and the others have only completed
    the step's last collective before it."""
    if here.committed > theirs.committed:
        return "" if not theirs.in_block else ", which it has begun without such a comparison"
    if here.committed == theirs.committed and not theirs.in_block:
        return ""
    if here.reductions > theirs.reductions:
        return ", with a reduction that the others do not make"
    if waits and here.collectives > theirs.collectives:
        return ", in a collective that the others do not make"
    return None


def _read_asked(store: Store) -> _Asked:
    key, doing, committed, in_block, reductions, collectives = json.loads(store.get(_ASKED))
    standing = Standing(
        committed=committed,
        in_block=in_block,
        reductions=reductions,
        collectives=collectives,
    )
    return _Asked(key=key, doing=doing, standing=standing)


def _raise_if_elsewhere(group: Group, store: Store, others: list[int], mine: _Asked) -> None:
    advice = _SAME_STEPS if mine.standing.in_block else _SAME_CALLS
    for rank in others:
        key = f"{mine.key}/elsewhere/{rank}"
        if store.check([key]):
            elsewhere = store.get(key).decode()
            raise StepMisused(
                f"rank {group.rank} {mine.doing}, but rank {rank} does not: it is {elsewhere}. "
                f"{advice}"
            )
    newest = _read_asked(store)
    if newest.key != mine.key and not store.check([f"{newest.key}/{group.rank}"]):
        raise StepMisused(
            f"rank {group.rank} {mine.doing}, but another rank {newest.doing}, and they wait for "
            f"each other. {advice}"
        )


def _at(what: str, where: str) -> str:
    return f"{what} at {where}" if where else what
