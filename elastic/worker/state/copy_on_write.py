"""Copies memory at the moment when it is about to be changed, at no cost for what is not.

torch hands each operation of a thread to a TorchDispatchMode first, and an operation's schema says
which of its arguments it writes to. That makes small operations about three times as long, so this
is for code that runs once, as that below a block that does not count. What passes by, such as
compiled code, NumPy and other threads, shows in version counters or in a sample of the content.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from elastic.worker.state.copied_tensors import put_content
from elastic.worker.state.signs import address_of, versions_of
from elastic.worker.state.tree import same_tensor, tensors_of

_COMMUNICATES = "c10d"  # whose schemas do not tell what they write to
_SAMPLED = 8  # elements of each tensor


class CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what the calling thread does, from `begin` to `end`.

    before_copy: called before each copy, and so before the write that it is made for.
    """

    supports_higher_order_operators = True

    def __init__(self, before_copy: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_copy = before_copy
        self._storages: dict[int, torch.UntypedStorage] = {}
        """What is held, by its C++ object and by its address: NumPy makes other objects for it."""
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._all: list[HeldTensors] = []
        self._is_over = False
        self._process = os.getpid()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch refuses to run what was compiled with fullgraph=True."""
        return True

    def begin(self) -> None:
        """Go below all modes of the thread. A script's `with` takes away the topmost one, whichever
        that is, and may have begun before this, or end after it."""
        _rearrange(lambda modes: [*modes, self])

    def end(self) -> None:
        self._is_over = True
        _rearrange(lambda modes: [mode for mode in modes if mode is not self])

    def hold(self, tensors: Sequence[torch.Tensor]) -> HeldTensors:
        """Copy the tensors' memory before the first write to it."""
        for tensor in tensors:
            if key := _storage_of(tensor):
                storage = tensor.untyped_storage()
                self._storages[key] = self._storages[storage.data_ptr()] = storage
        held = HeldTensors(tensors, self._copies)
        self._all.append(held)
        return held

    def has_missed(self) -> bool:
        """Whether a tensor was written to without a copy. Ask before any is put back."""
        return any(held.were_missed() for held in self._all)

    def keep(self, written: Any) -> None:
        """Copy what is held of the memory of these tensors, which are about to be written to."""
        for tensor in tensors_of(written):
            key = _storage_of(tensor)
            if not key:
                continue
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages.get(tensor.untyped_storage().data_ptr())
            if storage is not None and storage._cdata not in self._copies:
                self._before_copy()
                # A device may have no room for it.
                copy = storage.clone() if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
                self._copies[storage._cdata] = copy

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_over and os.getpid() == self._process:
            places, names = _written_by(func)
            for index, value in enumerate(args):
                if index in places:
                    self.keep(value)
            for name in names & kwargs.keys():
                self.keep(kwargs[name])
        return func(*args, **kwargs)


class NotedWrites(CopyOnWrite):  # type: ignore[no-untyped-call]
    """Notes what memory is written to, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._written: set[int] = set()

    def keep(self, written: Any) -> None:
        self._written.update(map(_storage_of, tensors_of(written)))

    def include(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether memory of one of these tensors was written to."""
        return not self._written.isdisjoint(filter(None, map(_storage_of, tensors)))


class HeldTensors:
    """Tensors that `CopyOnWrite.hold` holds, as `CopiedTensors` has copied ones.

    data: aliases of the memory that they had.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], copies: Mapping[int, torch.UntypedStorage]
    ) -> None:
        self._tensors = list(tensors)
        self.data = [tensor.detach() for tensor in tensors]
        self._versions = versions_of(self.data)
        self._samples = list(map(_sample, self.data))
        self._copies = copies

    def were_missed(self) -> bool:
        """Whether one was written to without a copy."""
        for tensor, data, sample, version, now in zip(
            self._tensors,
            self.data,
            self._samples,
            self._versions,
            versions_of(self.data),
            strict=True,
        ):
            if not data.numel() or _storage_of(data) in self._copies:
                continue
            # One that has moved to other memory still counts its versions together with this.
            stays = version != now and address_of(tensor) == address_of(data)
            if stays or not same_tensor(_sample(data), sample):
                return True
        return False

    def put_back(self) -> None:
        """Restore what the memory held."""
        kept = [(data, self._copies.get(_storage_of(data))) for data in self.data]
        written = [(data, copy) for data, copy in kept if copy is not None]
        for data, copy in written:
            if data.untyped_storage().nbytes() != copy.nbytes():
                data.untyped_storage().resize_(copy.nbytes())
        put_content([data for data, _ in written], [_as(data, copy) for data, copy in written])


def _rearrange(change: Callable[[list[Any]], list[Any]]) -> None:
    """Change this thread's stack of modes. The change gets and returns the topmost first."""
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    for mode in reversed(change(modes)):
        _push_mode(mode)


def _as(data: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return what `storage`, a copy, has in the place of `data`."""
    room = torch.empty(0, dtype=data.dtype, device=storage.device)
    return room.set_(storage, data.storage_offset(), data.shape, data.stride())


def _sample(data: torch.Tensor) -> torch.Tensor:
    """Return a copy of some elements, in the order of its memory as far as that is dense."""
    if not data.numel() or not _storage_of(data) or data.device.type == "meta":
        return torch.empty(0)
    size = data.untyped_storage().nbytes() // data.element_size() - data.storage_offset()
    flat = data.as_strided((min(size, data.numel()),), (1,))
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone()


@functools.cache
def _written_by(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return the places and the names of the arguments that an operation writes to."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    written = [
        (index, each.name)
        for index, each in enumerate(arguments)
        if getattr(func, "namespace", "") == _COMMUNICATES
        or (each.alias_info is not None and each.alias_info.is_write)
    ]
    return frozenset(index for index, _ in written), frozenset(name for _, name in written)


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the C++ object of the tensor's storage; 0: it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if storage.data_ptr() else 0
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, or a wrapper
        return 0
