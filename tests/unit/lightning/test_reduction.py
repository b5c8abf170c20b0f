"""Values are reduced over the ranks of a group, also where some have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from elastic.lightning.reduction import Reduction


def on_ranks(world: int, path: Path, function: Callable[[int], None]) -> None:
    """Run the function on so many processes that form a group."""
    processes.start_processes(
        _one, (world, str(path / "store"), function), nprocs=world, start_method="fork"
    )


def _one(rank: int, world: int, path: str, function: Callable[[int], None]) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    function(rank)
    dist.barrier()
    dist.destroy_process_group()


def reduces(rank: int) -> None:
    reduction = Reduction(torch.device("cpu"))
    count = reduction.sum(torch.tensor([rank, 2]))
    mean = reduction.sum(0.1 * rank)
    most = reduction.maximum(torch.tensor(-float(rank)))
    labels = reduction.gather([torch.arange(rank), torch.tensor(7)] if rank else [])
    rows = reduction.gather([torch.full((1, 2), rank, dtype=torch.bfloat16)])
    none = reduction.gather([])
    reduction.make()
    assert count().tolist() == [3, 6]
    assert count().dtype == torch.int64
    assert abs(mean().item() - 0.3) < 1e-15
    assert most().item() == 0.0
    assert [each.tolist() for each in labels()] == [[0, 7], [0, 1, 7]]
    assert torch.cat(rows()).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert torch.cat(rows()).dtype == torch.bfloat16
    assert none() == []


def test_values_are_summed_found_and_gathered_over_all_ranks(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, reduces)
