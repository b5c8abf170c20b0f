"""Buffers of modules that change in shape as a script trains, as statistics of a quantizer do or a
cache for longer sequences, or that come to be only then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from elastic.checkpoint.documents import Json
from elastic.errors import CheckpointDamaged
from elastic.worker.state.tensor_specs import TensorSpec, describe, from_table, to_table

Slot = tuple[int, str]
"""Where a buffer is: the id of its module, and its name in that."""


class BuiltBuffers:
    """The buffers of tracked modules as the script has built them, by which two members tell
    whether they have built the same.

    Those that are not part of a module's state (persistent=False) are nobody's to give. One of them
    that has changed in shape is a cache, which a worker that joins fills by itself, and has in
    another shape until then: members must not broadcast it. All have to leave out the same.
    """

    def __init__(self) -> None:
        self._built: dict[str, TensorSpec] = {}
        self._modules: dict[str, nn.Module] = {}
        self._shapes: dict[str, torch.Size | None] = {}
        self._caches: set[str] = set()
        self._received = False

    def watch(self, name: str, module: nn.Module) -> None:
        """Note what there is now; a module may be tracked again, and be another by then."""
        if name in self._modules:
            return
        self._modules[name] = module
        self._built.update(_specs(name, module))
        self._shapes.update((path, _shape(owner[key])) for path, owner, key in self._left_out(name))

    @property
    def caches(self) -> list[str]:
        """By name, for another member, and for checkpoints."""
        slots = [slot for name in self._modules for slot in self._left_out(name)]
        changed = {p for p, owner, key in slots if _shape(owner[key]) != self._shapes.get(p)}
        return sorted(self._caches | changed)

    def receive_caches(self, names: Iterable[str]) -> None:
        """Those of the member whose state this one takes over."""
        self._caches, self._received = set(names), True

    def caches_of_group(self) -> frozenset[Slot]:
        """Those that are known as a group forms: the same on all of its members."""
        if not self._received:
            self._caches.update(self.caches)
        self._received = False
        return frozenset(
            (id(inner), key)
            for name, module in self._modules.items()
            for path, inner in module.named_modules(prefix=name)
            for key in inner._buffers
            if f"{path}.{key}" in self._caches
        )

    def reshaped(self) -> dict[str, TensorSpec | None]:
        """What those were built as that are other ones by now; None: not there."""
        now = [pair for name, module in self._modules.items() for pair in _specs(name, module)]
        return {name: self._built.get(name) for name, s in now if self._built.get(name) != s}

    def make_room(self, states: Mapping[str, Any]) -> None:
        """Give each the shape that it has in the states that come, by the modules' names:
        load_state_dict() fills only what is there."""
        for name, module in self._modules.items():
            here = module.state_dict().keys()  # a class may leave some out
            for path, owner, key in _slots(module):
                live, saved = owner[key], states[name].get(path)
                if isinstance(saved, torch.Tensor):
                    if live is None or live.shape != saved.shape:
                        owner[key] = torch.empty_like(saved, device=_device_of(module, saved))
                elif f"{name}.{path}" not in self._built and path in here:
                    owner[key] = None

    def _left_out(self, name: str) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
        for path, owner, key in _slots(self._modules[name], persistent=False):
            yield f"{name}.{path}", owner, key


def as_built(
    specs: Iterable[TensorSpec], reshaped: Mapping[str, TensorSpec | None]
) -> tuple[TensorSpec, ...]:
    """The table before buffers were given other shapes."""
    built = (reshaped.get(spec.name, spec) for spec in specs)
    return tuple(spec for spec in built if spec is not None)


def to_json(reshaped: Mapping[str, TensorSpec | None]) -> Json:
    """For another member, and for checkpoints."""
    return {name: to_table([spec])[0] if spec else None for name, spec in reshaped.items()}


def from_json(document: Json) -> dict[str, TensorSpec | None]:
    """What `to_json` has written. Raises CheckpointDamaged."""
    rows = cast("Mapping[str, Any]", document)
    try:
        return {name: from_table([row])[0] if row else None for name, row in rows.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the shapes of buffers cannot be read: {error!r}") from error


def _specs(name: str, module: nn.Module) -> Iterator[tuple[str, TensorSpec]]:
    tensors = {f"{name}.{path}": owner[key] for path, owner, key in _slots(module)}
    present = {path: tensor for path, tensor in tensors.items() if tensor is not None}
    return ((spec.name, spec) for spec in describe(present))


def _slots(
    module: nn.Module, *, persistent: bool = True
) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
    """The names in its state of the buffers that are part of that, or those of the others, and
    where each of them is."""
    for path, inner in module.named_modules():
        for key in inner._buffers:
            if (key not in inner._non_persistent_buffers_set) is persistent:
                yield f"{path}.{key}" if path else key, inner._buffers, key


def _shape(buffer: torch.Tensor | None) -> torch.Size | None:
    return None if buffer is None else buffer.shape


def _device_of(module: nn.Module, otherwise: torch.Tensor) -> torch.device:
    return next((p.device for p in module.parameters()), otherwise.device)
