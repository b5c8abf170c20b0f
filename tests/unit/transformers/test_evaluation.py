"""An evaluation is divided so that the results of all ranks are those of one process, in order."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.utils.data import BatchSampler

evaluation = pytest.importorskip("elastic.transformers.evaluation")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [1, 3, 4, 5, 12, 21])
def test_ranks_take_the_batches_of_one_process_in_turn(samples: int, world_size: int) -> None:
    shards = [
        evaluation.BatchShard(range(samples), 4, lambda r=rank: (r, world_size))
        for rank in range(world_size)
    ]
    batches = [list(BatchSampler(shard, 4, drop_last=False)) for shard in shards]
    rounds = shards[0].rounds(world_size)
    assert [len(of_rank) for of_rank in batches] == [rounds] * world_size
    together = []
    for at in range(rounds):
        for of_rank, size in zip(batches, shards[0].sizes(at), strict=True):
            assert len(of_rank[at]) == (size or 1), "a stand-in has one sample"
            together += of_rank[at][:size]
    assert together == list(range(samples))
    assert [len(shard) for shard in shards] == [sum(map(len, of_rank)) for of_rank in batches]


def test_nothing_imports_transformers_but_its_integration() -> None:
    code = "import elastic, sys; elastic.init, elastic.DataLoader; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "transformers" not in done.stdout.split()
