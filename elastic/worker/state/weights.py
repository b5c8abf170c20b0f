"""Weights as plain safetensors files: written out of a checkpoint, and read into models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import open_directory
from elastic.errors import CheckpointMismatch, ConfigurationError, refusal_of
from elastic.worker.state.shards import load, load_latest, safetensors_blocks
from elastic.worker.state.tensor_specs import STORED_AS, describe, first_differences
from elastic.worker.state.tree import memory_of, unflatten

_DTYPES = {stored: dtype for dtype, stored in STORED_AS.items()}
_METADATA = {"format": "pt"}  # which some libraries ask for
_MOST_TOLD = 5  # differences in a message


def export(
    url: str, file: Path, *, step: int | None, name: str | None, on_damaged: Callable[[str], None]
) -> tuple[int, int]:
    """Write the tensors of a checkpoint to a new safetensors file; return the checkpoint's step and
    the number of tensors.

    step: None for the newest intact one; `on_damaged` gets the reason for each that is skipped.
    name: only the tracked object of this name, whose entries then lack it: `load_state_dict` of the
    plain module takes them. Raises ElasticError.
    """
    if os.path.lexists(file):
        raise ConfigurationError(f"{file} exists already; choose another file, or move it away")
    step, states = _checkpoint(url, step, on_damaged)
    if name is not None:
        tensors = dict(_entries(_state_of(name, states, f"the checkpoint of step {step}")))
    else:
        tensors = dict(_entries(states))
    if not tensors:
        raise ConfigurationError(
            f"the checkpoint of step {step} has no tensors{f' of {name}' if name else ''}"
        )
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("xb") as out:
            out.writelines(safetensors_blocks(tensors, _METADATA))
            out.flush()
            os.fsync(out.fileno())
        partial.rename(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise refusal_of(
            f"cannot write {file}: {error.strerror}; choose another place with --out", error
        ) from error
    return step, len(tensors)


def load_into(modules: Mapping[str, nn.Module], source: str, *, strict: bool) -> list[str]:
    """Load the modules' tensors, by the names of the modules, from a safetensors file or the newest
    intact checkpoint of a directory; return the names of those that keep their values.

    strict: raise CheckpointMismatch if names or shapes differ. Raises ElasticError.
    """
    if os.path.isfile(source):
        tensors = _read(source)
        alone = len(modules) == 1
        found = {n: _entries_of(n, tensors, m if alone else None) for n, m in modules.items()}
    elif "://" not in source and not os.path.exists(source):
        raise ConfigurationError(
            f"{source} does not exist; give a safetensors file, or a checkpoint directory"
        )
    else:
        step, states = _checkpoint(source, None, lambda _: None)
        where = f"the checkpoint of step {step} in {source}"
        found = {name: dict(_entries(_state_of(name, states, where))) for name in modules}
    kept: list[str] = []
    fitting: dict[str, dict[str, torch.Tensor]] = {}
    for name, module in modules.items():  # all are compared before one is changed
        theirs = found[name]
        mine = _without_tied(dict(_entries(module.state_dict())), theirs)
        theirs = {key: _as_complex(tensor, mine.get(key)) for key, tensor in theirs.items()}
        if strict:
            _require_alike(f"{source} does not fit {name}", mine, theirs)
        fitting[name] = {
            key: theirs[key]
            for key, tensor in mine.items()
            if key in theirs and theirs[key].shape == tensor.shape
        }
        if mine and not fitting[name]:
            _require_alike(f"nothing in {source} fits {name}", mine, theirs)
        kept.extend(f"{name}.{key}" for key in mine if key not in fitting[name])
    for name, module in modules.items():
        module.load_state_dict(fitting[name], strict=False)
    return kept


def _checkpoint(
    url: str, step: int | None, on_damaged: Callable[[str], None]
) -> tuple[int, Mapping[str, Any]]:
    """The step of a checkpoint, and the states that the script tracked, by name."""
    directory = open_directory(url)
    if step is None:
        loaded = load_latest(directory, lambda _, reason: on_damaged(reason))
    else:
        known = catalog.list_checkpoints(directory)
        if step not in known:
            raise ConfigurationError(
                f"no committed checkpoint of step {step} in {directory.url}; found: "
                f"{', '.join(map(str, known)) or 'none'}"
            )
        loaded = load(directory, step)
    if loaded is None:
        raise ConfigurationError(f"there is no checkpoint in {directory.url}; check the path")
    states = unflatten(loaded.structure.skeleton, loaded.tensors)
    return loaded.manifest.step, {n: state for n, state in states.items() if "." not in n}


def _state_of(name: str, states: Mapping[str, Any], where: str) -> Any:
    if name not in states:
        raise ConfigurationError(
            f"{where} has nothing that was tracked as {name!r}; it has {', '.join(states)}"
        )
    return states[name]


def _entries(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a state, by their path."""
    if isinstance(state, torch.Tensor):
        yield path, state.detach()
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from _entries(item, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        yield from _entries(dict(enumerate(state)), path)


def _entries_of(
    name: str, tensors: Mapping[str, torch.Tensor], alone: nn.Module | None
) -> Mapping[str, torch.Tensor]:
    """A file's entries for one object: those under its name. alone: the only module to load, for
    which the file may have been written without a name. The names in it may begin with this one
    all the same, as in a language model that has its layers in `self.model`."""
    mine = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")}
    if alone is None:
        return mine
    keys = alone.state_dict().keys()
    return mine if mine and len(keys & mine.keys()) >= len(keys & tensors.keys()) else tensors


def _without_tied(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Leave out names that a file lacks because their tensor is in it under another name."""
    there = {memory_of(tensor) for key, tensor in mine.items() if tensor.numel() and key in theirs}
    return {n: t for n, t in mine.items() if n in theirs or memory_of(t) not in there}


def _as_complex(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A file has complex numbers as pairs."""
    if like is not None and like.is_complex() and tensor.shape == (*like.shape, 2):
        return torch.view_as_complex(tensor.contiguous())
    return tensor


def _require_alike(
    what: str, mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    """Raise CheckpointMismatch if names or shapes differ; types may, since loading converts."""
    ours, others = (
        [replace(spec, dtype="tensor") for spec in describe(some)] for some in (mine, theirs)
    )
    differences = first_differences(ours, others, _MOST_TOLD)
    if differences:
        raise CheckpointMismatch(
            f"{what}: {'; '.join(differences)} ('here' is the model). With strict=False "
            "session.load() leaves out what does not fit"
        )


def _read(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, which is mapped into memory."""
    try:
        size = os.path.getsize(path)
        content = np.memmap(path, dtype=np.uint8, mode="c") if size else np.empty(0, np.uint8)
        return dict(_tensors_in(content))
    except OSError as error:
        raise refusal_of(f"cannot read {path}: {error.strerror}", error) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not a whole safetensors file ({error}); what torch.save has written is "
            "another format: load it with torch.load() and model.load_state_dict() above the loop"
        ) from error


def _tensors_in(content: np.ndarray[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    length = int.from_bytes(content[:8].tobytes(), "little")
    begin = 8 + length
    if not 2 <= length <= len(content) - 8:
        raise ValueError("it has no header")
    header = json.loads(content[8:begin].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        shape: Sequence[int] = entry["shape"]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has elements of type {entry['dtype']}")
        dtype = _DTYPES[entry["dtype"]]
        if not (
            0 <= start <= stop <= len(content) - begin
            and all(size >= 0 for size in shape)
            and stop - start == math.prod(shape) * dtype.itemsize
        ):
            raise ValueError(f"{name} does not fit its place")
        raw = content[begin + start : begin + stop]
        if not len(raw):
            yield name, torch.empty(tuple(shape), dtype=dtype)
            continue
        if (begin + start) % dtype.itemsize:
            raw = np.array(raw)
        yield name, torch.from_numpy(raw).view(dtype).reshape(tuple(shape))
