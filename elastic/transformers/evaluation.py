"""Divides an evaluation's batches among the group, so that its result does not depend on the group.

Rank r of n takes the batches r, r + n, r + 2 n... of one process, each whole. In each round every
rank has a batch; one without gets a stand-in of one sample, which `gather` leaves out. So losses,
predictions and labels come together in the order of one process, with nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch.nn.functional import pad
from torch.utils.data import Sampler

_PADDING = -100  # what Trainer pads predictions and labels with

Place = Callable[[], tuple[int, int]]
"""Returns this worker's rank and the world size; (0, 1): no division."""


class BatchShard(Sampler[int]):
    """The samples of this rank's batches."""

    def __init__(self, sampler: Sequence[int], batch_size: int, place: Place) -> None:
        self._sampler, self.batch_size, self._place = sampler, batch_size, place

    def __iter__(self) -> Iterator[int]:
        rank, world_size = self._place()
        indices = list(self._sampler)
        starts = range(0, len(indices), self.batch_size)
        for start in starts[rank::world_size]:
            yield from indices[start : start + self.batch_size]
        if starts and len(starts[rank::world_size]) < len(starts[::world_size]):
            yield indices[0]

    def __len__(self) -> int:
        rank, world_size = self._place()
        return sum(self.sizes(at)[rank] or 1 for at in range(self.rounds(world_size)))

    def rounds(self, world_size: int) -> int:
        """How many batches each rank has."""
        return -(-len(self._sampler) // (self.batch_size * world_size))

    def sizes(self, at: int) -> list[int]:
        """The samples of each rank in round `at`. 0: it has a stand-in."""
        world_size = self._place()[1]
        total, size = len(self._sampler), self.batch_size
        starts = [(at * world_size + rank) * size for rank in range(world_size)]
        return [max(0, min(size, total - start)) for start in starts]


class Rounds:
    """A dataloader that knows in which of its rounds it is. Other attributes are the loader's."""

    def __init__(self, loader: Any, shard: BatchShard) -> None:
        self._loader, self._shard = loader, shard
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        for self._at, batch in enumerate(self._loader):  # noqa: B020 - the present round
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def gather(self, tree: Any) -> Any:
        """What all ranks have in this round in place of each tensor, without stand-ins."""
        sizes = self._shard.sizes(self._at)
        return recursively_apply(lambda tensor: _gathered(tensor, sizes), tree)


def shard_of(loader: Any) -> BatchShard | None:
    """The sampler that divides the loader's batches. None if it has another one."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, BatchShard) else None


def _gathered(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    mine = tensor[: sizes[dist.get_rank()]]
    shape = torch.tensor(mine.shape[1:], dtype=torch.int64, device=mine.device)
    if shape.numel():  # such as the longest sequence of a batch
        dist.all_reduce(shape, op=dist.ReduceOp.MAX)
    widths = [(0, int(wide) - now) for now, wide in zip(mine.shape[1:], shape, strict=True)]
    if any(after for _, after in widths):
        mine = pad(mine, [n for width in reversed(widths) for n in width], value=_PADDING)
    rows = torch.zeros((max(sizes), *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
    rows[: len(mine)] = mine
    everyone = [torch.empty_like(rows) for _ in sizes]
    dist.all_gather([_bytes(each) for each in everyone], _bytes(rows))
    return torch.cat([each[:size] for each, size in zip(everyone, sizes, strict=True)])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)
