"""Turns nested state, such as a `state_dict()`, into JSON and named tensors, and back.

JSON has fewer types than Python, so whatever it lacks is an object with one key, its type:

    None, bool, int, float, str    themselves; {"float": "nan"} where JSON has no number
    list                           [...]
    tuple, set, frozenset, size    {"tuple": [...]}
    dict, counter                  {"dict": [[key, value], ...]}: keys of any kind, order kept
    ordered                        {"ordered": [[...]], "metadata": ...}: as `nn.Module` returns
    defaultdict                    {"defaultdict": [[...]], "factory": "list"}
    tensor, array                  {"tensor": "model.conv1.weight"}: the name of a tensor
    bytes, complex, dtype, device, number (a numpy scalar)
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
"""What conversions raise of values that `flatten` does not write."""
_MAX_DEPTH = 100  # far beyond any real state; what is deeper contains itself

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
_NUMPY_KINDS = "biuf"  # bool, signed, unsigned, float


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatState:
    """A tree taken apart: `skeleton` is JSON and names the `tensors` where they belong."""

    skeleton: Json
    tensors: Mapping[str, torch.Tensor]


def flatten(state: object) -> FlatState:
    """Take a tree apart; the tensors share memory with those in it.

    Names are the dotted path ("optimizer.state.0.momentum_buffer"). A tensor that occurs twice
    (tied weights) is kept once. Raises ConfigurationError naming path and type of what is not
    supported.
    """
    flattening = _Flattening()
    skeleton = flattening.encode(state, ())
    return FlatState(skeleton=skeleton, tensors=flattening.tensors)


def unflatten(skeleton: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a tree together again from its skeleton and its tensors, which are not copied.

    Raises CheckpointDamaged if the skeleton is not one or names a tensor that is not there.
    """
    try:
        return _decode(skeleton, tensors)
    except _NO_SKELETON as error:
        raise CheckpointDamaged(f"the stored state can not be put together: {error!r}") from error


UNCHANGING = frozenset({bool, int, float, str, bytes, complex, type(None)})


def copy_tree(value: Any) -> Any:
    """The tree in memory of its own, as far as changes to it could show."""
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if kind is dict:
        return {
            key: item if type(item) in UNCHANGING else copy_tree(item)
            for key, item in value.items()
        }
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if kind in (list, tuple, set):
        return kind(copy_tree(item) for item in value)
    if isinstance(value, (dict, list, set)):
        return copy.deepcopy(value)
    return value


def trees_equal(left: Any, right: Any) -> bool:
    """Whether two trees have the same content, bit by bit."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and left.tobytes() == right.tobytes()
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(trees_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(trees_equal, left, right))
    return bool(left == right) or (left != left and right != right)


def same_tensor(left: Any, right: Any) -> bool:
    """Whether both are tensors with the same shape, type and bits."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = left.detach(), right.detach().to(left.device)
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    pair = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return bool(torch.equal(*pair))  # NaN differs from itself


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a tree, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


class _Flattening:
    """The tensors met so far on one walk through a tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._name_of: dict[tuple[object, ...], str] = {}

    def encode(self, value: object, path: tuple[str, ...]) -> Json:
        if len(path) > _MAX_DEPTH:
            raise _unsupported(path, value, "it is nested too deeply; does it contain itself?")
        kind = type(value)
        # By exact type: a subclass would come back as its base, silently losing what it adds.
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
            # Versions of the modules, by which `load_state_dict` reads older state.
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
        identity = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if tensor.numel() and identity in self._name_of:
            return self._name_of[identity]
        name = self._unused_name(".".join(path))
        self._name_of[identity] = name
        self.tensors[name] = tensor.detach()
        return name

    def _unused_name(self, name: str) -> str:
        """Two paths may read alike ({"a": {"b": x}, "a.b": y}), and safetensors keeps one name."""
        name = name.encode(errors="replace").decode()  # half a surrogate pair is no UTF-8
        candidate, attempt = name, 1
        while candidate in self.tensors or candidate == "__metadata__":
            attempt += 1
            candidate = f"{name}~{attempt}"
        return candidate


def _require_plain(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    if type(tensor) not in _TENSORS:
        raise _unsupported(path, tensor, "only plain tensors are")
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
    """Sets have no order of their own: one is chosen that is the same on every member."""
    if isinstance(items, (set, frozenset)):
        return sorted(items, key=lambda item: (type(item).__name__, repr(item)))
    return cast("Iterable[object]", items)


def _unsupported(path: tuple[str, ...], value: object, detail: str) -> ConfigurationError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shown = ".".join(path[:12]) + ("..." if len(path) > 12 else "")
    return ConfigurationError(
        f"the tracked state has an object of type {kind} at {shown or 'its root'} that can not be "
        f"stored{f' ({detail})' if detail else ''}; let its owner's state_dict() return it as "
        "tensors, numbers, strings, lists, tuples, sets or dictionaries, or leave it out"
    )


def _decode(node: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag, content = next(iter(_tagged(node)))
    if tag in ("tensor", "array"):
        tensor = tensors[cast("str", content)]
        return tensor if tag == "tensor" else tensor.numpy()
    if tag in _MAPPINGS.values():
        return _decode_mapping(tag, node, tensors)
    if tag in _SEQUENCES.values():
        items = [_decode(item, tensors) for item in cast("list[Json]", content)]
        return next(kind for kind, name in _SEQUENCES.items() if name == tag)(items)
    return _LEAVES[tag](content)


def _tagged(node: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    known = {"tensor", "array", *_MAPPINGS.values(), *_SEQUENCES.values(), *_LEAVES}
    tags = node.keys() & known
    if len(tags) != 1 or node.keys() - tags - {"factory", "metadata"}:
        raise ValueError(f"an object has the keys {sorted(node)}")
    return ((tag, node[tag]) for tag in tags)


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
