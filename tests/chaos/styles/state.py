"""Turns tracked objects into digests, which compare bits, and figures, which bound a difference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Leaf = tuple[str, Any]


def parts(tracked: Mapping[str, Any]) -> dict[str, list[Leaf]]:
    """The leaves of each object; a module's buffers are a part of their own, "NAME (buffers)"."""
    found: dict[str, list[Leaf]] = {}
    for name, value in tracked.items():
        if isinstance(value, nn.Module):
            found[name] = list(_parameters(name, value))
            if buffers := [(f"{name}.{k}", b) for k, b in value.named_buffers()]:
                found[f"{name} (buffers)"] = buffers
        else:
            found[name] = list(_leaves(name, value.state_dict()))
    return found


def digest(leaves: list[Leaf]) -> str:
    """A digest of names, types, shapes and bits."""
    total = hashlib.blake2b(digest_size=8)
    for path, value in leaves:
        total.update(path.encode())
        if isinstance(value, torch.Tensor):
            dense = _dense(value)
            total.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
            total.update(dense.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()


def figures(leaves: list[Leaf]) -> dict[str, Any]:
    """For each tensor [its product with fixed weights, its L1 norm]; other values as they are."""
    found: dict[str, Any] = {}
    for path, value in leaves:
        if isinstance(value, torch.Tensor):
            flat = _dense(value).view(-1).double()
            weights = torch.cos(torch.arange(len(flat), dtype=torch.float64) * 0.7 + 1.0)
            found[path] = [float(flat @ weights), float(flat.abs().sum())]
        else:
            found[path] = value
    return found


def _parameters(name: str, module: nn.Module) -> Iterator[Leaf]:
    for key, parameter in module.named_parameters():
        yield f"{name}.{key}", parameter
        yield f"{name}.{key}.requires_grad", parameter.requires_grad


def _leaves(path: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(f"{path}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{path}.{number}", inner)
    elif isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value)
    elif isinstance(value, (bool, str, bytes, torch.Tensor)) or value is None:
        yield path, value
    elif isinstance(value, (int, float, np.number)):
        yield path, float(value)
    else:
        yield path, getattr(value, "__qualname__", type(value).__name__)


def _dense(value: torch.Tensor) -> torch.Tensor:
    dense = value.detach().cpu()
    return (dense.to_dense() if dense.is_sparse else dense).contiguous()
