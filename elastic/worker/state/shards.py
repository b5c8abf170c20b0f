"""Deals the bytes of a replicated state out to n writers, and writes one writer's share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic.checkpoint.catalog import is_committed
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.layout import path_in_step, shard_name, structure_name
from elastic.errors import CheckpointWriteError
from elastic.worker.state import structure as structures
from elastic.worker.state.structure import Structure
from elastic.worker.state.tensor_specs import REAL_PART, STORED_AS, TensorSpec

SLICES = "slices"  # the key of a shard's metadata under which it says where its slices belong


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The elements [start, stop) of a tensor in row-major order; `whole` if that is all of it."""

    name: str
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """One writer's pieces in host memory, independent of the live state.

    A whole tensor has its own shape. A slice is flat, and `slices` gives its [start, stop).
    """

    tensors: Mapping[str, torch.Tensor]
    slices: Mapping[str, tuple[int, int]]


def plan_shards(
    specs: Sequence[TensorSpec],
    count: int,
    local: frozenset[str] = frozenset(),
    uneven: frozenset[str] = frozenset(),
) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each of `count` shards.

    local: the names of tensors that may differ between the writers. Shard 0 has all of them whole,
    so that a checkpoint holds those of one writer. The others make up for it: every shard is within
    one element (of the largest type) of an equal share of the bytes, unless shard 0 has more than
    that already. If all elements have one type, shards differ by at most one element. Depends on
    nothing else, so writers need not talk to agree on it.

    uneven: the names of those that not even every writer has, or with the same shape. Shard 0 has
    them too, and they count for nothing: what they did to the cuts would differ between writers.
    """
    assert count >= 1, f"a checkpoint has at least one shard, not {count}"
    extra = [
        Piece(name=spec.name, start=0, stop=spec.element_count, whole=True)
        for spec in specs
        if spec.name in uneven
    ]
    specs = [spec for spec in specs if spec.name not in uneven]
    in_order = sorted(specs, key=lambda spec: spec.name not in local)
    local_bytes = sum(spec.size_bytes for spec in specs if spec.name in local)
    ends = _ends(sum(spec.size_bytes for spec in specs), count, local_bytes)
    shards: list[list[Piece]] = [extra, *([] for _ in range(count - 1))]
    shard, offset = 0, 0
    for spec in in_order:
        for owner, piece in _cut(spec, offset, ends, shard):
            shards[owner].append(piece)
            shard = owner
        offset += spec.size_bytes
    return tuple(tuple(pieces) for pieces in shards)


def copy_share(
    tensors: Mapping[str, torch.Tensor],
    pieces: Sequence[Piece],
    reuse: HostShare | None = None,
) -> HostShare:
    """Copy one shard's pieces to host memory; training may go on when this returns.

    `reuse` is an earlier share whose writing has ended: its memory is overwritten wherever it
    fits. That takes a fifteenth of the time of fresh memory (measured), which the kernel must
    first find and clear page by page.
    """
    buffers = reuse.tensors if reuse is not None else {}
    with torch.no_grad():
        copies = {
            piece.name: _copy(tensors[piece.name], piece, buffers.get(piece.name))
            for piece in pieces
        }
    # Copies from devices run behind this thread: each device's queue is waited for once.
    for device in {tensors[piece.name].device for piece in pieces}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    slices = {piece.name: (piece.start, piece.stop) for piece in pieces if not piece.whole}
    return HostShare(tensors=copies, slices=slices)


def write_share(
    directory: CheckpointDirectory,
    step: int,
    group: str,
    index: int,
    count: int,
    share: HostShare,
    structure: Structure | None,
) -> list[FileDigest]:
    """Write shard `index` of `count`, and the structure if one is given; return their digests.

    group: the name of those who save together; no other group's files have these names. Raises
    CheckpointWriteError if the storage refuses, or if the step is already committed. Where that is
    found out too late, the files are of no use and do no harm.
    """
    if is_committed(directory, step):
        raise CheckpointWriteError(
            f"step {step} in {directory.url} is already committed; shard {index} of {count} came "
            "too late and was not written"
        )
    blocks = safetensors_blocks(share)
    digests = [directory.write(path_in_step(step, shard_name(index, count, group)), blocks)]
    if structure is not None:
        content = structures.to_json(structure)
        digests.append(directory.write(path_in_step(step, structure_name(group)), content))
    return digests


def safetensors_blocks(share: HostShare) -> Iterator[memoryview]:
    """Yield a share as a safetensors file: header length, JSON header, then the tensors' bytes.

    Nothing is copied, unlike in the library's own writer. Format:
    https://github.com/huggingface/safetensors#format
    """
    stored = [(name, _as_real(tensor)) for name, tensor in share.tensors.items()]
    # Widest elements first, as the library does: every tensor is then aligned in the file.
    stored.sort(key=lambda entry: (-entry[1].element_size(), entry[0]))
    header = _header(stored, share.slices)
    yield memoryview(len(header).to_bytes(8, "little"))
    yield memoryview(header)
    for _, tensor in stored:
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _ends(total_bytes: int, count: int, first_bytes: int) -> list[int]:
    """Where each shard ends, in bytes: equal shares, of which the first has `first_bytes` or more.

    What it has too much, the others have less.
    """
    if first_bytes * count <= total_bytes:
        return [total_bytes * (index + 1) // count for index in range(count)]
    rest, others = total_bytes - first_bytes, max(1, count - 1)
    return [first_bytes + rest * index // others for index in range(count)]


def _cut(
    spec: TensorSpec, offset: int, ends: Sequence[int], shard: int
) -> Iterator[tuple[int, Piece]]:
    """Yield (shard, piece) for the tensor at byte `offset`; `ends` are the shards' last bytes."""
    start, count = 0, spec.element_count
    while True:
        room = max((ends[shard] - offset) // spec.element_bytes, start)
        stop = count if shard == len(ends) - 1 else min(count, room)
        if stop > start or count == 0:
            whole = stop - start == count
            yield shard, Piece(name=spec.name, start=start, stop=stop, whole=whole)
        if stop == count:
            return
        start, shard = stop, shard + 1


def _copy(tensor: torch.Tensor, piece: Piece, buffer: torch.Tensor | None) -> torch.Tensor:
    source = tensor.detach().resolve_conj().resolve_neg()
    if not piece.whole:
        source = source.reshape(-1)[piece.start : piece.stop]
    on_cuda = source.device.type == "cuda"
    if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
        # Page-locked memory is what a device can copy to at full speed and without waiting.
        buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=on_cuda)
    return buffer.copy_(source, non_blocking=on_cuda)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.dtype in REAL_PART else tensor


def _header(
    stored: Sequence[tuple[str, torch.Tensor]], slices: Mapping[str, tuple[int, int]]
) -> bytes:
    header: dict[str, object] = {"__metadata__": {SLICES: json.dumps(dict(slices))}}
    offset = 0
    for name, tensor in stored:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": STORED_AS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    content = json.dumps(header, separators=(",", ":")).encode()
    return content + b" " * (-len(content) % 8)
