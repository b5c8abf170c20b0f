"""Brings the members of a new group to one state: declare, compare, transfer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.core.recovery import (
    Declaration,
    RecoveryPlan,
    odd_ones_out,
    plan_recovery,
    runs_to_repeat,
)
from elastic.errors import GroupLost, ModelMismatch
from elastic.worker.group.process_group import Group
from elastic.worker.group.transfer import receive_json, send_json
from elastic.worker.state.tensor_specs import TensorSpec, first_differences


def agree(
    group: Group, mine: Declaration, structure: Callable[[], tuple[TensorSpec, ...]]
) -> tuple[RecoveryPlan, int | None]:
    """Exchange declarations; decide who receives from whom, and which runs are to be repeated.

    structure: names, shapes and types of what this worker tracks; only asked for when signatures
    differ. Raises ModelMismatch on the members that differ, naming what differs.
    """
    declarations = _gather(group, mine)
    reference, odd = odd_ones_out(declarations)
    if odd:
        _explain_mismatch(group, reference, odd, structure())
        raise GroupLost(f"rank {odd[0]} tracks another model and was told so")
    return plan_recovery(declarations), runs_to_repeat(declarations)


def _gather(group: Group, mine: Declaration) -> list[Declaration]:
    device = group.backend.device
    row = torch.tensor(
        [
            mine.committed,
            mine.intact,
            mine.signature,
            mine.took_part,
            mine.committed_in,
            mine.runs_done,
            mine.in_run,
        ],
        dtype=torch.int64,
    )
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(group.world_size)]
    dist.all_gather(rows, row)
    return [
        Declaration(
            committed=committed,
            intact=bool(intact),
            signature=signature,
            took_part=bool(took_part),
            committed_in=committed_in,
            runs_done=runs_done,
            in_run=bool(in_run),
        )
        for committed, intact, signature, took_part, committed_in, runs_done, in_run in (
            r.tolist() for r in rows
        )
    ]


def _explain_mismatch(
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
