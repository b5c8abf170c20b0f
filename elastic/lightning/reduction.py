"""Reduces many small values over the group with few collectives: each waits for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Result = Callable[[], Any]
"""Returns a value over all ranks, once the reduction has been made."""

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
)
_MOST_DIMENSIONS = 8
_FORM = 2 + _MOST_DIMENSIONS
"""Numbers that describe a tensor: the index of its type, its dimensions, and their lengths."""


class Reduction:
    """One reduction: first give it values, then `make` it on every rank, then ask for results.
    All ranks give it values of the same kinds in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: list[torch.Tensor] = []
        self._most: list[torch.Tensor] = []
        self._lists: list[list[torch.Tensor]] = []
        self._sum_of: list[torch.Tensor] = []
        self._most_of: list[torch.Tensor] = []
        self._gathered: list[list[torch.Tensor]] = []

    def sum(self, value: torch.Tensor | float) -> Result:
        """Sum up a tensor or a number, with the precision of float64."""
        return self._add(self._sums, self._sum_of, value)

    def maximum(self, value: torch.Tensor | float) -> Result:
        """Find the greatest values, by element."""
        return self._add(self._most, self._most_of, value)

    def gather(self, values: list[torch.Tensor]) -> Result:
        """Collect tensors along their first dimension: one from each rank that has any."""
        index = len(self._lists)
        self._lists.append(values)
        return lambda: self._gathered[index]

    def make(self) -> None:
        """Reduce what was given. Every rank calls this."""
        self._sum_of += self._reduced(self._sums, dist.ReduceOp.SUM)
        self._most_of += self._reduced(self._most, dist.ReduceOp.MAX)
        if self._lists:
            self._gather()

    # ---- inside

    def _add(
        self, given: list[torch.Tensor], reduced: list[torch.Tensor], value: torch.Tensor | float
    ) -> Result:
        index, tensor = len(given), value
        if not isinstance(tensor, torch.Tensor):
            tensor = torch.tensor(tensor, dtype=torch.float64, device=self._device)
        given.append(tensor.double())

        def result() -> torch.Tensor:
            return reduced[index].reshape(tensor.shape).to(tensor.dtype)

        return result

    def _reduced(self, given: list[torch.Tensor], op: Any) -> list[torch.Tensor]:
        if not given:
            return []
        flat = torch.cat([each.reshape(-1) for each in given])
        dist.all_reduce(flat, op=op)
        return list(torch.split(flat, [each.numel() for each in given]))

    def _gather(self) -> None:
        own = [
            torch.cat([v.reshape(v.shape or (1,)) for v in each]) if each else None
            for each in self._lists
        ]
        form = torch.zeros(len(own), _FORM, dtype=torch.int64, device=self._device)
        contents = []
        for row, tensor in zip(form, own, strict=True):
            if tensor is not None:
                described = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
                row[: len(described)] = torch.tensor(described)
                contents.append(tensor.contiguous().reshape(-1).view(torch.uint8))
        forms = self._from_all(form)
        plain = [[(_DTYPES[f[0]], f[2 : 2 + f[1]]) for f in each.tolist()] for each in forms]
        sizes = [[_bytes_of(*described) for described in rank] for rank in plain]
        largest = max(map(sum, sizes))
        padded = torch.zeros(largest, dtype=torch.uint8, device=self._device)
        if contents:
            content = torch.cat(contents).to(self._device)
            padded[: content.numel()] = content
        self._gathered = [[] for _ in own]
        if not largest:
            return
        for rank, content in enumerate(self._from_all(padded)):
            at = 0
            for of, (dtype, shape), size in zip(
                self._gathered, plain[rank], sizes[rank], strict=True
            ):
                if size:
                    of.append(content[at : at + size].clone().view(dtype).reshape(shape))
                at += size

    def _from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        return gathered


def _bytes_of(dtype: torch.dtype, shape: list[int]) -> int:
    count = dtype.itemsize if shape else 0
    for length in shape:
        count *= length
    return count
