"""What the members of a group tell each other: a new one before any state moves, and each one
before a call that every member must make.

They meet before such a call at the group's store, where nobody blocks, so that different calls are
found out before their collectives could be mixed up, and a member that does not come is named.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastic.core.recovery import Declaration
from elastic.errors import ModelMismatch, StepMisused
from elastic.worker.group.process_group import Group
from elastic.worker.group.transfer import receive_json, send_json
from elastic.worker.state.tensor_specs import TensorSpec, first_differences

_FIELDS = dataclasses.fields(Declaration)


def declare(group: Group, mine: Declaration) -> tuple[Declaration, ...]:
    """Give `mine` to all; return everybody's, by rank."""
    numbers = [_encoded(mine, field) for field in _FIELDS]
    row = torch.tensor(numbers, dtype=torch.int64, device=group.backend.device)
    rows = [torch.empty_like(row) for _ in range(group.world_size)]
    dist.all_gather(rows, row)
    group.settle()
    return tuple(_decoded(r.tolist()) for r in rows)


def _encoded(declaration: Declaration, field: dataclasses.Field[Any]) -> int:
    return int(getattr(declaration, field.name))


def _decoded(row: Sequence[int]) -> Declaration:
    flags = {field.name for field in _FIELDS if field.type == "bool"}
    named = zip((field.name for field in _FIELDS), row, strict=True)
    values: dict[str, Any] = {n: bool(v) if n in flags else v for n, v in named}
    return Declaration(**values)


def differing_parameters(
    group: Group, digest: int, names: Callable[[], Mapping[str, int]]
) -> dict[int, list[str]]:
    """The parameters of each rank that are not those of rank 0; none where all are alike.

    names: digests by parameter, only asked for where `digest`, of all of them, differs somewhere.
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
    """The reference sends its structure to each odd member, which raises; the others go on and
    lose the group when the odd members end."""
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


class Described(Protocol):
    """What can be compared between members."""

    what: str
    """The same on every member that makes the same call."""
    where: str
    """File and line of the script; empty at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where a member is that does not make a call."""

    committed: int
    doing: str


def meet(group: Group, committed: int, number: int, call: Described) -> None:
    """Return once every member has come to call `number` since step `committed`.

    Raises StepMisused naming both sides where members make different calls, or where one is
    elsewhere for good; GroupLost, or an error of the store's connection, when the group is aborted.
    """
    store = group.store
    if group.world_size == 1 or store is None:
        return
    prefix = f"call/{committed}/{number}"
    mine = json.dumps([call.what, call.where])
    store.set(f"{prefix}/{group.rank}", mine)
    before, group.met_at = group.met_at, f"{prefix}/{group.rank}"
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    began, pause_s = time.monotonic(), _FIRST_LOOK_S
    asked = False
    while not store.check([f"{prefix}/{rank}" for rank in others]):
        group.check()
        if asked:
            _raise_if_elsewhere(group, store, committed, others, call)
        elif time.monotonic() - began > _ASK_AFTER_S:
            store.set(f"asked/{committed}", mine)
            asked = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    for rank in others:
        what, where = json.loads(store.get(f"{prefix}/{rank}"))
        if what != call.what:
            raise StepMisused(
                f"the workers call different things after step {committed}: rank {group.rank} "
                f"{_at(call.what, call.where)}, rank {rank} {_at(what, where)}. Every worker must "
                "make the same calls in the same order; what the decision to call depends on must "
                "be the same everywhere, as step.ends_epoch and session.state are"
            )
    if before:  # all have come to this call, so nobody looks at the one before any more
        store.delete_key(before)


def answer(group: Group, whereabouts: Whereabouts) -> None:
    """From another thread, while the script is inside a block: tell those who wait for this member
    in a call that it will not come."""
    store = group.store
    if store is None or not store.check([f"asked/{whereabouts.committed}"]):
        return
    store.set(f"elsewhere/{whereabouts.committed}/{group.rank}", whereabouts.doing)


def _raise_if_elsewhere(
    group: Group, store: Store, committed: int, others: list[int], call: Described
) -> None:
    for rank in others:
        key = f"elsewhere/{committed}/{rank}"
        if store.check([key]):
            doing = store.get(key).decode()
            raise StepMisused(
                f"rank {group.rank} {_at(call.what, call.where)}, but rank {rank} does not: it is "
                f"{doing}. Every worker must make the same calls at the same place of the script; "
                "what the decision to call depends on must be the same everywhere, also in a "
                "worker that has just joined, as step.ends_epoch and session.state are"
            )


def _at(what: str, where: str) -> str:
    return f"{what} at {where}" if where else what
