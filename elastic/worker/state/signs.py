"""Signs of objects and tensors: equal as long as nothing shows that their content has changed."""

from __future__ import annotations

import enum
import functools
import logging
import operator
import os
import random
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, compress
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import nn

from elastic.worker.state.tree import UNCHANGING

# map() with these takes half as long as a loop, and every block pays for it.
VERSION = operator.attrgetter("_version")
ADDRESS = torch.Tensor.data_ptr
Tensors: TypeAlias = dict[int, torch.Tensor]
"""By id."""
_DEEPEST = 12
_MOST_SIGNED = 2048  # objects: more than a millisecond
_MOST_TENSORS_SIGNED = 4096  # in a list of only tensors: half a millisecond
_EMPTY_CELL = CellType()
_BY_VALUE = (bool, int, float, complex, str, bytes, np.generic, enum.Enum, os.PathLike)
_CONSTANTS = (
    type,
    ModuleType,
    logging.Logger,
    torch.dtype,
    torch.device,
    np.dtype,
    weakref.ref,
)
"""What an object may refer to without taking state from it."""
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""The attributes of every module: its tensors, which are signed apart, and hooks."""


def signs_of(tensors: list[torch.Tensor]) -> tuple[list[int], list[int], Tensors]:
    """Return the versions and addresses of tensors, and which these are. To compare two of the last
    looks at no value: the tensors stay, so none has left its id to another."""
    try:
        versions = list(map(VERSION, tensors))
    except RuntimeError:
        versions = versions_of(tensors)
    try:
        places = list(map(ADDRESS, tensors))
    except (RuntimeError, ValueError):
        places = list(map(address_of, tensors))
    return versions, places, dict(zip(map(id, tensors), tensors, strict=True))


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Return their versions, 0 for those made in torch.inference_mode(), which count none."""
    return [0 if t.is_inference() else t._version for t in tensors]


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's content begins; 0: it has no such place."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # sparse, or a parameter of a lazy module
        return 0


def present(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return how often the optimizer has stepped, as `Optimizers` counts."""
    return getattr(optimizer, "_elastic_steps", 0)


class Walk:
    """Signs an object and what it refers to: numbers by value, arrays by hash, tensors, also those
    of modules, by version.

    Tensors of modules are looked up once: a walk through a deep module takes a millisecond.

    elsewhere: ids of tensors that other cells sign. known: the walk before. Modules that this walk
    does not meet are forgotten, such as targets that copies have replaced.

    A tensor that is freed may leave its id and its memory to another one. So signs have the ids of
    weak references, which are unique as long as the walk lives, and keep no memory.
    """

    def __init__(self, elsewhere: Collection[int] = (), known: Walk | None = None) -> None:
        self._elsewhere = elsewhere
        self._before = known._met if known is not None else {}
        self._met: dict[int, tuple[nn.Module, list[Any], list[dict[str, Any]]]] = {}
        self._references: list[weakref.ref[torch.Tensor]] = []
        self._left = _MOST_SIGNED
        self.complete = True
        """False if something can have changed that no sign shows."""

    def sign(self, value: Any, depth: int = 0) -> object:
        if isinstance(value, torch.Tensor):
            return self._of_tensors([value])
        if type(value) in UNCHANGING or isinstance(value, _BY_VALUE):
            return value
        if isinstance(value, np.ndarray):
            return self._of_array(value, depth + 1)
        if isinstance(value, (set, frozenset)) and UNCHANGING.issuperset(map(type, value)):
            return frozenset(value)
        if isinstance(value, torch.optim.Optimizer):
            return steps_of(value)
        if isinstance(value, random.Random):
            return hash(value.getstate())
        if isinstance(value, nn.Module):
            return self._of_module(value, depth + 1)
        if isinstance(value, _CONSTANTS):
            return id(value)
        inner = referred_by(value)
        if inner is None or depth > _DEEPEST:
            self.complete = False
            return None
        return self._of_all(inner, depth + 1)

    def _of_all(self, inner: list[Any], depth: int) -> object:
        kinds = set(map(type, inner))
        if UNCHANGING.issuperset(kinds):
            return inner
        if kinds <= {torch.Tensor, nn.Parameter} and len(inner) <= _MOST_TENSORS_SIGNED:
            return self._of_tensors(inner)
        self._left -= len(inner)
        if self._left < 0:
            self.complete = False
            return None
        return [self.sign(item, depth) for item in inner]

    def _of_tensors(self, tensors: list[torch.Tensor]) -> object:
        references = list(map(weakref.ref, tensors))
        self._references += references
        versions, places, _ = signs_of(tensors)
        return versions, places, list(map(id, references))

    def _of_array(self, array: np.ndarray[Any, Any], depth: int) -> object:
        """Sign its content, since an array counts no versions, and that of a mask."""
        if array.dtype.hasobject:
            return self._of_all(list(array.flat), depth)
        more = vars(array) if type(array) not in (np.ndarray, np.memmap) else {}
        try:
            content = np.ascontiguousarray(array).view(np.uint8).data
        except (TypeError, ValueError):  # strings of any length are elsewhere in memory
            self.complete = False
            return None
        return (
            (array.shape, array.dtype.str, xxhash.xxh3_64_intdigest(content)),
            self._of_all(list(more.values()), depth),
        )

    def _of_module(self, module: nn.Module, depth: int) -> object:
        key = id(module)
        known = self._met.get(key) or self._before.get(key)
        if known is None:
            known = module, self._held_by(module), _with_containers(module)
        self._met[key] = known
        tensors = self._of_tensors(present(chain.from_iterable(known[1])))
        return key, tensors, [self._of_all(_containers(own), depth) for own in known[2]]

    def _held_by(self, module: nn.Module) -> list[Any]:
        """Return current views of its parameters and buffers that no other tracked module has."""
        owners = [d for m in module.modules() for d in (m._parameters, m._buffers) if d]
        own = [any(id(t) not in self._elsewhere for t in present(o.values())) for o in owners]
        return [owner.values() for owner in compress(owners, own)]


def referred_by(value: Any) -> list[Any] | None:
    """Return what the value refers to and may take its state from; None: that cannot be seen."""
    inner: list[Any] = []
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        inner += value.values()
        inner += value
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        inner += value
    elif isinstance(value, functools.partial):
        inner += (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        return [value.__self__, getattr(value, "__func__", None)]
    elif isinstance(value, FunctionType):
        return _read_by(value)
    else:
        slots = list(_slots_of(type(value)))
        if not slots and attributes is None:
            return None
        inner += (getattr(value, name, None) for name in slots)
    if attributes:
        inner += attributes.values()
    return inner


def _read_by(function: FunctionType) -> list[Any]:
    """Return the variables of other scopes that the function names: a script adapts an object by
    two lambdas that name it."""
    cells = [cell for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    known = function.__globals__
    named = [known[name] for name in function.__code__.co_names if name in known]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    own = vars(function).values()
    return [*(cell.cell_contents for cell in cells), *defaults, *named, *own]


def _slots_of(kind: type) -> Iterator[str]:
    """Yield the names of slots as attributes: Python mangles private ones."""
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            yield f"_{each.__name__.lstrip('_')}{slot}" if is_private else slot


def _with_containers(module: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of the modules in which a script keeps containers, as metrics do."""
    return [vars(m) for m in module.modules() if is_own(m) and _containers(vars(m))]


def is_own(module: nn.Module) -> bool:
    """Return whether the class is not torch's: torch's keep their state in buffers."""
    return not type(module).__module__.startswith("torch.nn.")


def _containers(attributes: dict[str, Any]) -> list[Any]:
    return [
        value
        for name, value in attributes.items()
        if isinstance(value, (list, dict, set, deque, np.ndarray)) and name not in _OF_ANY_MODULE
    ]
