"""Reads a checkpoint back, trusting no file before its digest has been compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch

from elastic.checkpoint.catalog import list_checkpoints, read_manifest
from elastic.checkpoint.digest import FileDigest, difference, digest_of
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.layout import is_structure_name, parse_shard_name, path_in_step
from elastic.checkpoint.manifest import Manifest
from elastic.errors import CheckpointDamaged
from elastic.worker.state import structure as structures
from elastic.worker.state.shards import SLICES
from elastic.worker.state.structure import Structure
from elastic.worker.state.tensor_specs import REAL_PART, TensorSpec

_NO_SHARD = (
    safetensors.SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
)
"""What readers raise of a file that was not written as `shards` writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint whose every byte matched its digests; the tensors are in host memory."""

    manifest: Manifest
    structure: Structure
    tensors: Mapping[str, torch.Tensor]


def load(directory: CheckpointDirectory, step: int) -> Loaded:
    """Read a committed checkpoint, whatever the number of its shards.

    Holds one shard beside the tensors while it reads. Raises CheckpointDamaged naming the file,
    TransientError if the storage cannot be reached.
    """
    manifest = read_manifest(directory, step)
    where = f"{directory.url}/{path_in_step(step, '')}"
    described = [file for file in manifest.files if is_structure_name(file.name)]
    if len(described) != 1:
        raise CheckpointDamaged(
            f"{where}: the manifest lists {len(described)} structure files instead of one"
        )
    content = _read_verified(directory, step, described[0])
    structure = structures.from_json(content, f"{where}{described[0].name}")
    assembly = _Assembly(structure.specs, where)
    shards = {parse_shard_name(file.name): file for file in manifest.files}
    for place in sorted(place for place in shards if place is not None):
        assembly.add(shards[place].name, _read_verified(directory, step, shards[place]))
    return Loaded(manifest=manifest, structure=structure, tensors=assembly.finish())


def load_latest(
    directory: CheckpointDirectory, on_damaged: Callable[[int, str], None]
) -> Loaded | None:
    """Load the newest checkpoint that is intact; None if there is no checkpoint at all.

    `on_damaged` is told the step and what is wrong of each that had to be passed over. Raises
    CheckpointDamaged, naming all of them, if none is intact.
    """
    reasons: list[str] = []
    for step in list_checkpoints(directory):
        found = _loaded_or_reason(directory, step)
        if isinstance(found, Loaded):
            return found
        reasons.append(found)
        on_damaged(step, found)
    if not reasons:
        return None
    raise CheckpointDamaged(
        f"none of the {len(reasons)} checkpoints in {directory.url} is intact; restore one from a "
        f"copy, or choose an empty directory to start anew: {'; '.join(reasons)}"
    )


def _loaded_or_reason(directory: CheckpointDirectory, step: int) -> Loaded | str:
    try:
        return load(directory, step)
    except CheckpointDamaged as error:
        return str(error)


def _read_verified(directory: CheckpointDirectory, step: int, expected: FileDigest) -> bytes:
    relative = path_in_step(step, expected.name)
    try:
        content = directory.read(relative)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{directory.url}/{relative} is missing") from error
    wrong = difference(expected, digest_of(expected.name, content))
    if wrong is not None:
        raise CheckpointDamaged(f"{directory.url}/{relative} is damaged: {wrong}")
    return content


class _Assembly:
    """Tensors being put together from shards; `where` is the checkpoint, for messages."""

    def __init__(self, specs: tuple[TensorSpec, ...], where: str) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._where = where
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}  # elements there so far, from the first one on

    def add(self, name: str, content: bytes) -> None:
        """Take what the next shard has; CheckpointDamaged if it does not fit the structure."""
        try:
            slices = _slices(content)
            for tensor_name, tensor in safetensors.torch.load(content).items():
                self._place(self._specs[tensor_name], tensor, slices.get(tensor_name))
        except _NO_SHARD as error:
            raise CheckpointDamaged(f"{self._where}{name} does not fit: {error!r}") from error

    def finish(self) -> dict[str, torch.Tensor]:
        """Return all tensors; CheckpointDamaged if any is not complete."""
        specs = self._specs.values()
        lacking = [spec.name for spec in specs if self._filled.get(spec.name) != spec.element_count]
        if lacking:
            raise CheckpointDamaged(f"{self._where} lacks elements of {', '.join(lacking[:3])}")
        return {name: self._tensors[name] for name in self._specs}

    def _place(self, spec: TensorSpec, stored: torch.Tensor, place: list[int] | None) -> None:
        tensor = torch.view_as_complex(stored) if spec.torch_dtype in REAL_PART else stored
        start, stop = place or (0, spec.element_count)
        shape = (stop - start,) if place else spec.shape
        if tensor.dtype != spec.torch_dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{spec.name} is {tensor.dtype}{tuple(tensor.shape)}, not {spec}")
        # Slices follow each other from shard to shard: anything else is a gap or an overlap.
        if start != self._filled.get(spec.name, 0) or stop > spec.element_count:
            raise ValueError(f"{spec.name} has elements {start} to {stop} out of turn")
        if place:
            self._whole(spec).view(-1)[start:stop] = tensor
        else:
            self._tensors[spec.name] = tensor
        self._filled[spec.name] = stop

    def _whole(self, spec: TensorSpec) -> torch.Tensor:
        if spec.name not in self._tensors:
            self._tensors[spec.name] = torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu")
        return self._tensors[spec.name]


def _slices(content: bytes) -> dict[str, list[int]]:
    """Return where a shard's flat slices [start, stop) belong, as its metadata says."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    slices: dict[str, list[int]] = json.loads(header["__metadata__"][SLICES])
    return slices
