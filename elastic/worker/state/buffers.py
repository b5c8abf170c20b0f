"""Follows the buffers of tracked modules that change in shape as a script trains, or that appear
only then."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from elastic.checkpoint.documents import Json
from elastic.errors import CheckpointDamaged
from elastic.worker.state.tensor_specs import TensorSpec, describe, from_table, to_table
from elastic.worker.state.tree import memory_of

BufferKey = tuple[int, str]
"""Where a buffer is: the id of its module, and its name in that module."""


@dataclasses.dataclass(frozen=True, slots=True)
class LateBuffer:
    """A buffer that a script has registered after its module was tracked, and its first content."""

    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    content: torch.Tensor | None


class BuiltBuffers:
    """The buffers of tracked modules as the script built them, which all members must build alike.

    Buffers that are not part of a module's state (persistent=False) are not sent. If one has
    changed in shape it is a cache, which a worker that joins fills by itself and has in another
    shape until then. So members must not broadcast it, and all must leave out the same ones.

    on_late: called with the number of buffers that a script has registered later. It is negative
        if they were removed with a block that is given up.
    """

    def __init__(self, on_late: Callable[[int], None]) -> None:
        self.late: list[LateBuffer] = []
        """Those since the start of the block."""
        self._on_late = on_late
        self._inside: dict[int, nn.Module] = {}
        self.made: dict[BufferKey, torch.Tensor] = {}
        """Those that `make_room` registered, until the script does so, or a block has ended."""
        self._makes_room = False
        _call_when_registered(self)
        self._built: dict[str, TensorSpec] = {}
        self._names: set[str] = set()  # also of those that were None
        self._modules: dict[str, nn.Module] = {}
        self._layers: dict[str, dict[str, nn.Module]] = {}
        self._shapes: dict[str, torch.Size | None] = {}
        self._caches: set[str] = set()
        self._received = False

    def watch(self, name: str, module: nn.Module) -> None:
        """Note the module's buffers, once: it may be tracked again, with others by then."""
        if name in self._modules:
            return
        self._modules[name] = module
        self._layers[name] = dict(module.named_modules())
        self._inside.update((id(inner), inner) for inner in module.modules())
        self._built.update(_specs(name, module))
        self._names.update(f"{name}.{path}" for path, *_ in _buffers_of(module))
        self._shapes.update((path, _shape(owner[key])) for path, owner, key in self._left_out(name))

    def watch_again(self, name: str) -> bool:
        """Note the module's buffers again if layers were replaced since. Returns whether they
        were. Call it before any member has them."""
        module = self._modules[name]
        if dict(module.named_modules()) == self._layers[name]:
            return False
        del self._modules[name]
        for known in (self._built, self._shapes):
            for path in [p for p in known if p.startswith(f"{name}.")]:
                del known[path]
        self._names = {path for path in self._names if not path.startswith(f"{name}.")}
        self.watch(name, module)
        return True

    def registering(
        self, module: nn.Module, name: str, tensor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The script registers a buffer. Returns the tensor to register instead, if any: a worker
        that joins has received this buffer's content before its own first forward pass."""
        key = id(module), name
        if self._makes_room or key[0] not in self._inside:
            return None
        made = self.made.pop(key, None)
        if made is not None and tensor is not None and module._buffers.get(name) is made:
            return made if (made.shape, made.dtype) == (tensor.shape, tensor.dtype) else None
        if name not in module._buffers:
            content = None if tensor is None else tensor.detach().clone()
            self.late.append(LateBuffer(module, name, tensor, content))
            self._on_late(1)
        return None

    def remove_late(self, since: int = 0) -> list[nn.Module]:
        """Remove the buffers of a block that is given up, but the first `since` of them. Returns
        their modules."""
        removed, self.late[since:] = self.late[since:], []
        for late in removed:
            late.module._buffers.pop(late.name, None)
            late.module._non_persistent_buffers_set.discard(late.name)
        self._on_late(-len(removed))
        return [late.module for late in removed]

    @property
    def caches(self) -> list[str]:
        """Names of caches, for another member and for checkpoints."""
        buffers = [one for name in self._modules for one in self._left_out(name)]
        changed = {p for p, owner, key in buffers if _shape(owner[key]) != self._shapes.get(p)}
        return sorted(self._caches | changed)

    def receive_caches(self, names: Iterable[str]) -> None:
        """Take over the caches of the member whose state this one takes over."""
        self._caches, self._received = set(names), True

    def caches_of_group(self) -> frozenset[BufferKey]:
        """Return the caches that are known as a group forms: the same on all of its members."""
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
        """Return the built specs of buffers that differ by now, or are gone; None: the buffer was
        not built."""
        now = dict(pair for name, module in self._modules.items() for pair in _specs(name, module))
        names = now.keys() | self._built.keys()
        return {n: self._built.get(n) for n in sorted(names) if self._built.get(n) != now.get(n)}

    def removed(self) -> list[str]:
        """Return the names of built buffers that the script has deleted."""
        now = {f"{n}.{path}" for n, m in self._modules.items() for path, *_ in _buffers_of(m)}
        return sorted(self._names - now)

    def make_room(
        self,
        states: Mapping[str, Any],
        reshaped: Mapping[str, TensorSpec | None],
        removed: Collection[str],
    ) -> None:
        """Give each buffer the shape that it has in the states that come, which are keyed by
        module: load_state_dict() fills only what is there. A script may register buffers only in
        its first forward pass: such ones are registered, or removed, here.

        reshaped, removed: those of the sender.
        """
        rooms: dict[tuple[object, ...], torch.Tensor] = {}
        for name, module in self._modules.items():
            here = module.state_dict().keys()  # a class may leave some out
            device = next((p.device for p in module.parameters()), None)
            buffers = {path: (owner, key) for path, owner, key in _buffers_of(module)}
            for path, (owner, key) in buffers.items():
                live, saved = owner[key], states[name].get(path)
                if isinstance(saved, torch.Tensor):
                    if live is None or live.shape != saved.shape:
                        owner[key] = torch.empty_like(saved, device=device or saved.device)
                elif f"{name}.{path}" in removed:
                    del owner[key]
                elif path in here and f"{name}.{path}" not in self._names:
                    states[name][path] = live  # the sender will register it, too
                elif path in here and (
                    f"{name}.{path}" not in self._built or f"{name}.{path}" in reshaped
                ):
                    owner[key] = None
            inside = dict(module.named_modules())
            for path, saved in states[name].items():
                at, _, key = path.rpartition(".")
                is_buffer = f"{name}.{path}" in reshaped or f"{name}.{path}" in self._names
                if path not in buffers and is_buffer and at in inside:
                    room = rooms.get(memory_of(saved))
                    if room is None:
                        room = torch.empty_like(saved, device=device or saved.device)
                        rooms[memory_of(saved)] = room  # modules may share it
                    self._register(inside[at], key, room)

    def _register(self, module: nn.Module, name: str, room: torch.Tensor) -> None:
        module.__dict__.pop(name, None)  # as in `self.center = None`
        self._makes_room = True
        try:
            module.register_buffer(name, room)
        finally:
            self._makes_room = False
        self.made[id(module), name] = room
        self._on_late(1)

    def _left_out(self, name: str) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
        for path, owner, key in _buffers_of(self._modules[name], persistent=False):
            yield f"{name}.{path}", owner, key


def _call_when_registered(buffers: BuiltBuffers) -> None:
    """Call `buffers.registering` at each registration, as long as the object lives."""
    known = weakref.ref(buffers)

    def registering(
        module: nn.Module, name: str, tensor: torch.Tensor | None
    ) -> torch.Tensor | None:
        living = known()
        return None if living is None else living.registering(module, name, tensor)

    handle = register_module_buffer_registration_hook(registering)  # type: ignore[arg-type]
    weakref.finalize(buffers, handle.remove)


def as_built(
    specs: Iterable[TensorSpec], reshaped: Mapping[str, TensorSpec | None]
) -> tuple[TensorSpec, ...]:
    """Return the specs as they were before buffers were given other shapes, or removed."""
    now = {spec.name: spec for spec in specs}
    built = {**now, **reshaped}
    return tuple(spec for _, spec in sorted(built.items()) if spec is not None)


def reshaped_to_json(reshaped: Mapping[str, TensorSpec | None]) -> Json:
    """Return `reshaped` as JSON, for another member and for checkpoints."""
    return {name: to_table([spec])[0] if spec else None for name, spec in reshaped.items()}


def reshaped_from_json(document: Json) -> dict[str, TensorSpec | None]:
    """Read what `reshaped_to_json` wrote. Raises CheckpointDamaged."""
    rows = cast("Mapping[str, Any]", document)
    try:
        return {name: from_table([row])[0] if row else None for name, row in rows.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the shapes of buffers cannot be read: {error!r}") from error


def _specs(name: str, module: nn.Module) -> Iterator[tuple[str, TensorSpec]]:
    tensors = {f"{name}.{path}": owner[key] for path, owner, key in _buffers_of(module)}
    present = {path: tensor for path, tensor in tensors.items() if tensor is not None}
    return ((spec.name, spec) for spec in describe(present))


def _buffers_of(
    module: nn.Module, *, persistent: bool = True
) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
    """Yield (name in the module's state, dictionary, key) of buffers, or of non-persistent ones."""
    for path, inner in module.named_modules():
        for key in inner._buffers:
            if (key not in inner._non_persistent_buffers_set) is persistent:
                yield f"{path}.{key}" if path else key, inner._buffers, key


def _shape(buffer: torch.Tensor | None) -> torch.Size | None:
    return None if buffer is None else buffer.shape
