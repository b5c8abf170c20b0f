"""Turns nested state, such as a `state_dict()`, into JSON and named tensors, and back.

JSON has fewer types than Python. A type that it lacks becomes an object whose key is the type:

    None, bool, int, float, str    themselves; {"float": "nan"} where JSON has no number
    list                           [...]
    tuple, set, frozenset, size    {"tuple": [...]}
    dict, counter                  {"dict": [[key, value], ...]}: keys of any kind, order kept
    ordered                        {"ordered": [[...]], "metadata": ...}: a module's state_dict()
    defaultdict                    {"defaultdict": [[...]], "factory": "list"}
    tensor, array                  {"tensor": "model.conv1.weight"}: the name of a tensor
    bytes, complex, dtype, device, number (a numpy scalar)
"""

from __future__ import annotations

import collections
import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from elastic.checkpoint.documents import Json
from elastic.errors import CheckpointDamaged, ConfigurationError
from elastic.worker.state.tensor_specs import REAL_PART, STORED_AS

_NO_SKELETON = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""Errors that conversions raise for values that `flatten` never writes."""
_MAX_DEPTH = 100  # far beyond any real state: a deeper one contains itself

_FACTORIES: dict[str, type | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)},
}
_FACTORY_NAMES = {kind: name for name, kind in _FACTORIES.items()}
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    collections.defaultdict: "defaultdict",
}
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_STRIDED = torch.strided
_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_KINDS = "biuf"  # bool, signed, unsigned, float


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatState:
    """A tree taken apart: `skeleton` is JSON that names each of the `tensors` at its place."""

    skeleton: Json
    tensors: Mapping[str, torch.Tensor]


def flatten(state: object, apart: frozenset[str] = frozenset()) -> FlatState:
    """Take a tree apart; the tensors share memory with those in it.

    Names are the dotted path ("optimizer.state.0.momentum_buffer"). A tensor that occurs twice
    (tied weights) is kept once. Raises ConfigurationError with path and type of what is not
    supported.

    apart: names at the root below which a tensor that occurs twice is kept under two names; the
    skeleton refers to the first. So the names do not depend on what shares memory. That may differ
    between members, as an object may make copies when it loads a state, but their shares must fit.
    """
    flattening = _Flattening(apart)
    skeleton = flattening.encode(state, ())
    return FlatState(skeleton=skeleton, tensors=flattening.tensors)


def unflatten(skeleton: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a tree together from its skeleton and its tensors, which are not copied.

    Raises CheckpointDamaged if the skeleton is malformed or names a tensor that is not there.
    """
    try:
        return _decode(skeleton, tensors)
    except _NO_SKELETON as error:
        raise CheckpointDamaged(f"the stored state cannot be rebuilt: {error!r}") from error


UNCHANGING = frozenset({bool, int, float, str, bytes, complex, type(None)})


def _cloned(tensor: torch.Tensor) -> Any:
    return tensor.detach().clone()


def copy_tree(value: Any, of_tensor: Callable[[torch.Tensor], Any] = _cloned) -> Any:
    """Copy the tree as far as later changes could show; other objects are shared.

    of_tensor: called for each tensor; its result takes the tensor's place. By default its clone.
    """
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if kind is dict:
        return {
            key: item if type(item) in UNCHANGING else copy_tree(item, of_tensor)
            for key, item in value.items()
        }
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if kind in (list, tuple, set):
        return kind(copy_tree(item, of_tensor) for item in value)
    if kind in (collections.OrderedDict, collections.defaultdict):
        twin = copy.copy(value)  # with a factory, or with versions of modules
        for key, item in value.items():
            twin[key] = copy_tree(item, of_tensor)
        return twin
    if isinstance(value, (dict, list, set)):
        return copy.deepcopy(value)
    return value


@dataclass(slots=True)  # made at every block: frozen takes twice as long
class Kept:
    """An object that may change, and its content at one time."""

    live: Any
    content: Any


def keep(value: Any) -> Any:
    """Return the tree's content and its objects, since a script may hold references to these."""
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if isinstance(value, dict) and kind in _MAPPINGS:
        return Kept(value, [(key, keep(item)) for key, item in value.items()])
    if kind in (list, tuple):
        plain = UNCHANGING.issuperset(map(type, value))
        return Kept(value, list(value) if plain else list(map(keep, value)))
    return Kept(value, copy_tree(value))


def refill(kept: Any) -> Any:
    """Return what `keep` was given, as it was then: the same objects with their content, or another
    where an object can no longer hold it."""
    if type(kept) is not Kept:
        return kept
    live, content = kept.live, kept.content
    kind = type(live)
    if kind in _MAPPINGS:
        items = {key: refill(item) for key, item in content}
        live.clear()
        live.update(items)
    elif kind is list:
        live[:] = map(refill, content)
    elif kind is tuple:
        inside = tuple(map(refill, content))
        return live if all(map(operator.is_, inside, live)) else inside
    else:
        return fill(live, content, Filling())
    return live


def unchanged(value: Any, kept: Any) -> bool:
    """Return whether `keep` would give the same for this value."""
    if type(kept) is not Kept:
        return type(value) is type(kept) and trees_equal(value, kept)
    if value is not kept.live:
        return False
    kind = type(value)
    if kind in _MAPPINGS:
        return list(value) == [key for key, _ in kept.content] and all(
            unchanged(item, of) for item, (_, of) in zip(value.values(), kept.content, strict=True)
        )
    if kind in (list, tuple):
        return len(value) == len(kept.content) and all(map(unchanged, value, kept.content))
    return trees_equal(value, kept.content)


class Copies:
    """Copies tensors, as `of_tensor` of `copy_tree`. The same elements in memory get one copy."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By address. Tensors are held, or others could be allocated at their address."""

    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not _STRIDED:  # sparse: made of several tensors
            return _cloned(tensor)
        at_address = self._copies.get(tensor.data_ptr())
        if at_address is None:
            copy_ = _cloned(tensor)
            self._copies[tensor.data_ptr()] = [(tensor, copy_)]
            return copy_
        known = self.known(tensor)
        return self.keep(tensor, _cloned(tensor)) if known is None else known

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of the same elements in the same memory; None if there is none."""
        if tensor.layout is not _STRIDED or not tensor.numel():
            return None
        at_address = self._copies.get(tensor.data_ptr(), ())
        return next((c for t, c in at_address if memory_of(t) == memory_of(tensor)), None)

    def keep(self, tensor: torch.Tensor, copy_: torch.Tensor) -> torch.Tensor:
        """Note `copy_` as the tensor's copy, and return it."""
        if tensor.layout is _STRIDED:
            self._copies.setdefault(tensor.data_ptr(), []).append((tensor, copy_))
        return copy_


@dataclass(slots=True)
class Filling:
    """What `fill` has met on one walk through a tree and its content."""

    filled: set[int] = field(default_factory=set)
    """Ids of objects, addresses of tensors: places that share one here may differ in content."""
    copies: Copies = field(default_factory=Copies)
    """The tensor that has each content: places that share one there do so here."""


def fill(live: Any, content: Any, filling: Filling) -> Any:
    """Give `live` this content, in place: other holders of it, or of an object inside of it, see
    it. Return what has the content: `live`, or a copy if another type or shape is needed."""
    kind, filled = type(live), filling.filled
    place = live.untyped_storage().data_ptr() if kind is torch.Tensor else id(live)
    if kind is not type(content) or place in filled:
        return copy_tree(content, filling.copies)
    if kind is torch.Tensor:
        if not _can_hold(live, content) or filling.copies.known(content) is not None:
            return filling.copies(content)
        with torch.inference_mode() if live.is_inference() else torch.no_grad():
            live.copy_(content)
        filling.copies.keep(content, live)
    elif kind in _MAPPINGS:
        filled.add(place)
        items = {key: fill(live.get(key), item, filling) for key, item in content.items()}
        live.clear()
        live.update(items)
    elif kind is list:
        filled.add(place)
        before = [*live[: len(content)], *[None] * (len(content) - len(live))]
        live[:] = [fill(old, item, filling) for old, item in zip(before, content, strict=True)]
    elif kind is tuple and len(live) == len(content):
        inside = tuple(fill(old, item, filling) for old, item in zip(live, content, strict=True))
        return live if all(map(operator.is_, inside, live)) else inside
    elif kind is set:
        live.clear()
        live.update(content)
    elif kind is np.ndarray and live.flags.writeable and _alike(live, content):
        live[...] = content
    else:
        return copy_tree(content, filling.copies)
    filled.add(place)
    return live


def relink(live: Any, content: Any, shared: Mapping[int, torch.Tensor]) -> Any:
    """Put tensors of `shared`, by id, into the dictionaries and lists of `live` where `content`, of
    the same form, has the tensor of that id. Return `live`, or what replaces it: a tensor, or a
    tuple that has another one in it."""
    if id(content) in shared:
        return shared[id(content)]
    if isinstance(live, dict) and isinstance(content, dict):
        for key in live.keys() & content.keys():
            live[key] = relink(live[key], content[key], shared)
    elif isinstance(live, list) and isinstance(content, list):
        for place, (old, item) in enumerate(zip(live, content, strict=False)):
            live[place] = relink(old, item, shared)
    elif type(live) is tuple and isinstance(content, tuple) and len(live) == len(content):
        inside = tuple(relink(old, item, shared) for old, item in zip(live, content, strict=True))
        return live if all(map(operator.is_, inside, live)) else inside
    return live


def _can_hold(live: torch.Tensor, content: torch.Tensor) -> bool:
    return (
        (live.shape, live.dtype, live.layout) == (content.shape, content.dtype, content.layout)
        and not live.requires_grad
        # Each element has its own memory, unlike in an expanded tensor.
        and torch.empty_like(live, device="meta").stride() == live.stride()
    )


def _alike(live: np.ndarray[Any, Any], content: np.ndarray[Any, Any]) -> bool:
    return bool(live.dtype == content.dtype and live.shape == content.shape)


def trees_equal(left: Any, right: Any) -> bool:
    """Return whether two trees have the same content, bit by bit, with the same types and order."""
    if isinstance(left, torch.Tensor):
        return same_tensor(left, right)
    kind = type(left)
    if kind is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return _alike(left, right) and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(trees_equal, left.values(), right.values()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(trees_equal, left, right))
    if kind is float and left == 0.0 == right:
        return math.copysign(1.0, left) == math.copysign(1.0, right)
    return bool(left == right) or (left != left and right != right)


def same_tensor(left: Any, right: Any) -> bool:
    """Return whether both are tensors with the same shape, type and bits."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    if left.layout is not torch.strided:
        return all(map(same_tensor, parts_of(left), parts_of(right)))
    return torch.equal(_bits(left), _bits(right).to(left.device))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor, or those that hold a sparse one's indices and values."""
    if tensor.layout is torch.sparse_coo:
        return [tensor.detach()._indices(), tensor.detach()._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.detach().values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.detach().values()]
    return [tensor]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, so that NaN equals itself and 0.0 does not equal -0.0."""
    plain = tensor.detach()
    if not (plain.is_floating_point() or plain.is_complex()):
        return plain
    plain = plain.resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_OF_WIDTH[plain.element_size()])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


class _Flattening:
    """The tensors met so far on one walk through a tree."""

    def __init__(self, apart: frozenset[str] = frozenset()) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._apart = apart
        self._name_of: dict[tuple[object, ...], str] = {}

    def encode(self, value: object, path: tuple[str, ...]) -> Json:
        if len(path) > _MAX_DEPTH:
            raise _unsupported(path, value, "it is nested too deeply; does it contain itself?")
        kind = type(value)
        # By exact type: a subclass would come back as its base and silently lose what it adds.
        if kind is list:
            return self._sequence(cast("list[object]", value), path)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._sequence(_ordered(value), path)}
        if kind in _MAPPINGS:
            return self._mapping(_MAPPINGS[kind], cast("dict[object, object]", value), path)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if kind is np.ndarray:
            return {"array": self._array(cast("np.ndarray[Any, Any]", value), path)}
        return _leaf(value, path)

    def _sequence(self, items: Iterable[object], path: tuple[str, ...]) -> list[Json]:
        return [self.encode(item, (*path, str(index))) for index, item in enumerate(items)]

    def _mapping(self, tag: str, mapping: dict[object, object], path: tuple[str, ...]) -> Json:
        encoded: dict[str, Json] = {
            tag: [
                [_key(key, path), self.encode(item, (*path, str(key)))]
                for key, item in mapping.items()
            ]
        }
        if tag == "defaultdict":
            encoded["factory"] = _factory(mapping, path)
        if tag == "ordered" and hasattr(mapping, "_metadata"):
            # Versions of the modules, which `load_state_dict` needs for older states.
            encoded["metadata"] = self.encode(mapping._metadata, (*path, "_metadata"))
        return encoded

    def _array(self, array: np.ndarray[Any, Any], path: tuple[str, ...]) -> str:
        try:
            writable = np.require(array, requirements=["C", "W"])
            return self._tensor(torch.from_numpy(writable), path)
        except (TypeError, ValueError) as error:
            raise _unsupported(path, array, f"of {array.dtype}: {error}") from error

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        _require_plain(tensor, path)
        apart = bool(path) and path[0] in self._apart
        identity = (path[0] if apart else None, *memory_of(tensor))
        known = self._name_of.get(identity) if tensor.numel() else None
        if known is not None and not apart:
            return known
        name = self._unused_name(".".join(path))
        self.tensors[name] = tensor.detach()
        if known is not None:
            return known
        self._name_of[identity] = name
        return name

    def _unused_name(self, name: str) -> str:
        """{"a": {"b": x}, "a.b": y} has two equal paths, and safetensors needs different names."""
        name = name.encode(errors="replace").decode()  # a lone surrogate is no UTF-8
        candidate, attempt = name, 1
        while candidate in self.tensors or candidate == "__metadata__":
            attempt += 1
            candidate = f"{name}~{attempt}"
        return candidate


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors with the same elements in the same memory. A
    sparse one has several places: its key is its own."""
    if tensor.layout is not torch.strided:
        return tensor.device, tensor.layout, id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _require_plain(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    if type(tensor) not in _TENSORS:
        raise _unsupported(path, tensor, "only plain tensors can be")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise _unsupported(path, tensor, f"with layout {tensor.layout} ({tensor.dtype})")
    if tensor.is_meta:
        raise _unsupported(path, tensor, "on the meta device: it has no values")
    if tensor.dtype not in STORED_AS and tensor.dtype not in REAL_PART:
        raise _unsupported(path, tensor, f"with elements of {tensor.dtype}")


def _leaf(value: object, path: tuple[str, ...]) -> Json:
    if value is None or type(value) in (bool, int, str):
        return cast("Json", value)
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [_leaf(value.real, path), _leaf(value.imag, path)]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float):
        return {"number": [value.dtype.name, _leaf(value.item(), path)]}
    raise _unsupported(path, value, "")


def _key(key: object, path: tuple[str, ...]) -> Json:
    inner = _Flattening()
    encoded = inner.encode(key, (*path, str(key)))
    if inner.tensors:
        raise _unsupported(path, key, "as the key of a dictionary")
    return encoded


def _factory(mapping: dict[object, object], path: tuple[str, ...]) -> str:
    factory = cast("collections.defaultdict[object, object]", mapping).default_factory
    name = next((name for kind, name in _FACTORY_NAMES.items() if kind is factory), None)
    if name is None:
        raise _unsupported(path, mapping, f"whose factory is {factory!r}")
    return name


def _ordered(items: object) -> Iterable[object]:
    """Return a set's items in an order that is the same on every member, others as they are."""
    if isinstance(items, (set, frozenset)):
        return sorted(items, key=lambda item: (type(item).__name__, repr(item)))
    return cast("Iterable[object]", items)


def _unsupported(path: tuple[str, ...], value: object, detail: str) -> ConfigurationError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shown = ".".join(path[:12]) + ("..." if len(path) > 12 else "")
    plain = "tensors, numbers, strings, lists, tuples, sets or dictionaries"
    if path[:1] == ("session.state",):
        advice = f"keep {plain} there, and track what has a state_dict() by session.track()"
    else:
        advice = f"let its owner's state_dict() return it as {plain}, or leave it out"
    return ConfigurationError(
        f"the tracked state has an object of type {kind} at {shown or 'its root'} that cannot be "
        f"stored{f' ({detail})' if detail else ''}; {advice}"
    )


def _decode(node: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag = _tag_of(node)
    content = node[tag]
    if tag in ("tensor", "array"):
        tensor = tensors[cast("str", content)]
        return tensor if tag == "tensor" else tensor.numpy()
    if tag in _MAPPINGS.values():
        return _decode_mapping(tag, node, tensors)
    if tag in _SEQUENCES.values():
        items = [_decode(item, tensors) for item in cast("list[Json]", content)]
        return next(kind for kind, name in _SEQUENCES.items() if name == tag)(items)
    return _LEAVES[tag](content)


def _tag_of(node: dict[str, Json]) -> str:
    known = {"tensor", "array", *_MAPPINGS.values(), *_SEQUENCES.values(), *_LEAVES}
    tags = node.keys() & known
    if len(tags) != 1 or node.keys() - tags - {"factory", "metadata"}:
        raise ValueError(f"an object has the keys {sorted(node)}")
    return next(iter(tags))


def _decode_mapping(tag: str, node: dict[str, Json], tensors: Mapping[str, torch.Tensor]) -> Any:
    pairs = cast("list[tuple[Json, Json]]", node[tag])
    items = {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
    if tag == "defaultdict":
        return collections.defaultdict(_FACTORIES[cast("str", node["factory"])], items)
    if tag != "ordered":
        return items if tag == "dict" else collections.Counter(items)
    ordered = collections.OrderedDict(items)
    if "metadata" in node:
        ordered._metadata = _decode(node["metadata"], tensors)  # type: ignore[attr-defined]
    return ordered


def _number(content: Any) -> np.generic:
    name, value = content
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"{name} is not a type of number")
    return cast("np.generic", dtype.type(_decode(value, {})))


def _dtype(content: Any) -> torch.dtype:
    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content} is not a dtype")
    return dtype


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda content: complex(*(_decode(part, {}) for part in content)),
    "bytes": bytes.fromhex,
    "dtype": _dtype,
    "device": torch.device,
    "number": _number,
}
