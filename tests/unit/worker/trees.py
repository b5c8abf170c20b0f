"""State trees for tests: how to compare them, and how to make arbitrary ones."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from elastic.worker.state.tensor_specs import REAL_PART, STORED_AS

DTYPES = [*STORED_AS, *REAL_PART]


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of arbitrary bits, so that any wrong conversion changes them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare type, shape and bits: NaNs with different payloads differ."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    pair = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return left.numel() == 0 or torch.equal(*pair)


def same(left: Any, right: Any) -> bool:
    """Deep equality that also compares types, order of keys, and tensors bit by bit."""
    if type(left) is not type(right):
        return False
    match left:
        case torch.Tensor():
            return same_tensor(left, right)
        case np.ndarray():
            return left.dtype == right.dtype and left.tobytes() == right.tobytes()
        case dict():
            return (
                len(left) == len(right)
                and all(map(same, left, right))
                and all(map(same, left.values(), right.values()))
                and same(getattr(left, "_metadata", None), getattr(right, "_metadata", None))
                and getattr(left, "default_factory", 0) == getattr(right, "default_factory", 0)
            )
        case list() | tuple():
            return len(left) == len(right) and all(map(same, left, right))
        case float() | complex() | np.generic():
            return repr(left) == repr(right)
        case _:
            return bool(left == right)


_keys = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text()),
)
_tensors = st.builds(
    make_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 1000),
)
_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3])]),
    st.sampled_from([np.float64("nan"), np.float32(0.1), np.int8(-3), np.bool_(True)]),
    st.sampled_from([np.arange(6).reshape(2, 3), np.arange(9.0)[::-2], np.array(5)]),
    st.sets(st.integers() | st.text()),
    st.frozensets(st.booleans() | st.binary()),
    st.dictionaries(st.integers(), st.integers()).map(collections.Counter),
    _tensors,
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(_keys, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        mappings,
        mappings.map(collections.OrderedDict),
        st.builds(collections.defaultdict, st.sampled_from([None, list, dict, int]), mappings),
    )


trees = st.recursive(_leaves, _containers, max_leaves=12)
