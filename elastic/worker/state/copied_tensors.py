"""Copies of tensors, in memory that is laid out once and used again in every block."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch

from elastic.worker.state.signs import ADDRESS, address_of, present
from elastic.worker.state.tree import parts_of

# map() with these takes half as long as a loop, and every block pays for it.
_SHAPE = operator.attrgetter("shape")
_STRIDES = torch.Tensor.stride
_ELEMENTS = torch.Tensor.numel
_DIMENSIONS = torch.Tensor.dim
_HAS_NO_GAPS = torch.Tensor.is_contiguous
_ALIGNED_TO = 64  # bytes, like torch's own memory
_FEW_ELEMENTS = 4096  # up to which torch.cat takes a third of the time of single copies


class CopiedTensors:
    """The content of some tensors, and aliases of the memory that they have.

    `fill` uses the room of an earlier copy again: to make room for a hundred small tensors takes
    five times as long as to copy them.

    on_host: copy tensors of a device to the host.
    data: the aliases. content: tensors with the copied values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._see(tensors)
        joins = list(map(_can_join, self.data))
        strided = [data.layout is torch.strided for data in self.data]
        self._single = [i for i, small in enumerate(joins) if strided[i] and not small]
        self._kinds = [
            [i for i, data in enumerate(self.data) if joins[i] and data.dtype is dtype]
            for dtype in {data.dtype for data in compress(self.data, joins)}
        ]
        self._together: list[torch.Tensor] = []
        self.content = self._room()
        self._prepare()
        self._copy()

    def fill(self, tensors: Sequence[torch.Tensor], *, on_host: bool = False) -> CopiedTensors:
        """Copy what the tensors hold now, into this memory if it fits, else into memory that is
        made for them. Returns the copy."""
        if on_host is not self._on_host:
            return CopiedTensors(tensors, on_host=on_host)
        if not self._are_still(tensors):
            if not self._fits(tensors):
                return CopiedTensors(tensors, on_host=on_host)
            self._see(tensors)
            self._prepare()
        self._copy()
        return self

    def put_back(self) -> None:
        """Copy the values back to the memory that they come from."""
        for index in self._sparse:
            tensor, copy = self._tensors[index], self.content[index]
            if tensor.layout is torch.sparse_coo:
                tensor.data = copy.clone()
            else:  # torch ignores that for the other kinds, and writes to them where they are
                put_content(parts_of(tensor), parts_of(copy))
        once = [
            (_once(data, data), _once(copy, data))
            for data, copy in zip(self.data, self.content, strict=True)
            if data.layout is torch.strided
        ]
        put_content([data for data, _ in once], [copy for _, copy in once])

    def _are_still(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all_same(tensors, self._tensors) and self._layout_of_all() == self._layout

    def _layout_of_all(self) -> tuple[list[object], ...]:
        """Where the tensors are, and how. None of it needs a look at their content.

        Vectors and scalars without gaps need no shape and strides, for which each takes seven times
        as long as for its address.
        """
        try:
            places: list[object] = list(map(ADDRESS, self._tensors))
        except (RuntimeError, ValueError):  # sparse ones have none, and are copied each time
            places = [address_of(t) or object() for t in self._tensors]
        return (
            places,
            list(map(_ELEMENTS, self._vectors)),
            list(map(_DIMENSIONS, self._vectors)),
            list(map(_HAS_NO_GAPS, self._vectors)),
            list(map(_SHAPE, self._others)),
            list(map(_STRIDES, self._others)),
        )

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are tensors of the same kinds, as where a script assigns another one to a
        buffer in each step."""
        return len(tensors) == len(self.data) and all(
            tensor.layout is data.layout is torch.strided
            and tensor.device == data.device
            and has_layout_of(data, tensor)
            for data, tensor in zip(self.data, tensors, strict=True)
        )

    def _see(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        dense = [t for t in tensors if t.layout is torch.strided]
        self._vectors = [t for t in dense if t.dim() < 2 and t.is_contiguous()]
        self._others = [t for t in dense if t.dim() > 1 or not t.is_contiguous()]
        self._layout = self._layout_of_all()
        self.data = [tensor.detach() for tensor in tensors]
        self._sparse = [i for i, t in enumerate(tensors) if t.layout is not torch.strided]
        """Writing to a sparse tensor may give it other memory, so these are copied as a whole."""

    def _room(self) -> list[torch.Tensor]:
        """Make memory for the copies. Small tensors of one dtype on the host follow each other, so
        that one call of torch.cat copies them."""
        rooms = dict(
            zip(
                self._single,
                _room_for([self.data[index] for index in self._single], self._on_host),
                strict=True,
            )
        )
        for indices in self._kinds:
            sizes = [self.data[index].numel() for index in indices]
            together = torch.empty(sum(sizes), dtype=self.data[indices[0]].dtype)
            self._together.append(together)
            for index, part in zip(indices, torch.split(together, sizes), strict=True):
                rooms[index] = part.view(self.data[index].shape)
        return [rooms.get(index, data) for index, data in enumerate(self.data)]

    def _prepare(self) -> None:
        """List what each call copies."""
        self._joined = [
            (together, [self.data[index].view(-1) for index in indices])
            for together, indices in zip(self._together, self._kinds, strict=True)
        ]
        self._each = (
            [self.content[index] for index in self._single],
            [self.data[index] for index in self._single],
        )

    def _copy(self) -> None:
        for index in self._sparse:
            self.content[index] = self._tensors[index].detach().clone()
        for together, parts in self._joined:
            torch.cat(parts, out=together)
        content, data = self._each
        if data:
            torch._foreach_copy_(content, data)


def put_content(
    tensors: Sequence[torch.Tensor | None], content: Sequence[torch.Tensor | None]
) -> None:
    """Copy `content` into the tensors; None stands for nothing on both sides."""
    data, content = present(tensors), present(content)
    if not data:
        return
    # A tensor that was made in inference mode can be written to only in it.
    with torch.inference_mode() if any(t.is_inference() for t in data) else torch.no_grad():
        torch._foreach_copy_(data, content)


def _once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` at one place of each dimension over which `like` is expanded:
    torch writes to no memory twice."""
    if like.layout is not torch.strided or 0 not in like.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())]


def all_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def has_layout_of(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.stride()) == (tensor.shape, tensor.dtype, tensor.stride())


def _can_join(data: torch.Tensor) -> bool:
    return (
        type(data) is torch.Tensor
        and data.device.type == "cpu"
        and data.layout is torch.strided
        and not data.is_quantized
        and 0 < data.numel() <= _FEW_ELEMENTS
        and data.is_contiguous()
    )


def _room_for(data: list[torch.Tensor], on_host: bool) -> list[torch.Tensor]:
    """Return memory for copies of the tensors. On the host it is one block, for which NumPy asks
    the kernel for huge pages: the first touch of 40 MB in small pages takes 20 ms."""
    together = [
        (on_host or t.device.type == "cpu") and t.is_contiguous() and t.numel() > 0 for t in data
    ]
    sizes = [-(-t.numel() * t.element_size() // _ALIGNED_TO) * _ALIGNED_TO for t in data]
    block = torch.from_numpy(np.empty(sum(compress(sizes, together)), np.uint8))
    stop = 0
    room = []
    for tensor, size, inside in zip(data, sizes, together, strict=True):
        if inside:
            start, stop = stop, stop + size
            memory = block[start : start + tensor.numel() * tensor.element_size()]
            room.append(memory.view(tensor.dtype).view(tensor.shape))
        else:
            room.append(torch.empty_like(tensor, device="cpu" if on_host else tensor.device))
    return room
