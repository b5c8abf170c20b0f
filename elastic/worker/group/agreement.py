"""What the members of a new group tell each other before any state moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.recovery import Declaration
from elastic.errors import ModelMismatch
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
