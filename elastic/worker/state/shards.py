"""The shards of a checkpoint: how the state is divided among them, and how they are written and
read.

No file is used before its digest has been compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from elastic.checkpoint import catalog, documents
from elastic.checkpoint.catalog import read_manifest, require_parent
from elastic.checkpoint.digest import Digester, FileDigest, difference
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.documents import Json
from elastic.checkpoint.layout import (
    is_structure_name,
    parse_shard_name,
    path_in_step,
    shard_name,
    structure_name,
)
from elastic.checkpoint.manifest import Manifest
from elastic.errors import CheckpointDamaged, ElasticError
from elastic.worker.state.digest import memory_to_fill
from elastic.worker.state.tensor_specs import DTYPES, REAL_PART, STORED_AS, TensorSpec

_NO_SHARD = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
)
"""Errors that readers raise for a file that `safetensors_blocks` has not written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint whose every byte matched its digests; the tensors are in host memory, and some
    may be those that `load` was given to read into."""

    manifest: Manifest
    structure: Structure
    tensors: Mapping[str, torch.Tensor]
    generators: Sequence[Json]
    """Those of each rank that saved, as `generators.states` gives them; None where the shard has
    none, because an earlier release wrote it."""


Room: TypeAlias = "Callable[[Structure], Mapping[str, torch.Tensor]]"
"""Returns the tensors, by name, that may be overwritten with those of a checkpoint."""


class NotNeeded(ElasticError):
    """The checkpoint is no longer needed, or not yet."""


def _no_room(_: Structure) -> Mapping[str, torch.Tensor]:
    return {}


def _always() -> bool:
    return True


def load(
    directory: CheckpointDirectory,
    step: int,
    room: Room = _no_room,
    is_needed: Callable[[], bool] = _always,
) -> Loaded:
    """Read a committed checkpoint, whatever its number of shards.

    Memory that was in use takes a quarter of the time of fresh memory (measured), which the kernel
    must first find and clear page by page: tensors of `room` that fit are read into directly. So
    they hold nothing of use if this raises, and must be loaded from the result or from that of
    another checkpoint.

    Raises CheckpointDamaged, which names the file, TransientError if the storage cannot be reached,
    and NotNeeded as soon as `is_needed` says so.
    """
    manifest = read_manifest(directory, step)
    where = f"{directory.url}/{path_in_step(step, '')}"
    described = [file for file in manifest.files if is_structure_name(file.name)]
    if len(described) != 1:
        raise CheckpointDamaged(
            f"{where}: the manifest lists {len(described)} structure files instead of one"
        )
    content = b"".join(map(bytes, _verified(directory, step, described[0])))
    structure = structure_from_json(content, f"{where}{described[0].name}")
    _require_plausible(manifest, structure, where)
    assembly = _Assembly(structure.specs, where, room(structure))
    shards = {parse_shard_name(file.name): file for file in manifest.files}
    for place in sorted(place for place in shards if place is not None):
        pieces = _verified(directory, step, shards[place])
        assembly.add(shards[place].name, _as_needed(pieces, is_needed))
    return Loaded(
        manifest=manifest,
        structure=structure,
        tensors=assembly.finish(),
        generators=assembly.generators,
    )


def load_latest(
    directory: CheckpointDirectory,
    on_damaged: Callable[[int, str], None],
    room: Room = _no_room,
    is_needed: Callable[[], bool] = _always,
) -> Loaded | None:
    """Load the newest checkpoint that is intact; return None if there is no checkpoint at all.

    `on_damaged` is called with step and reason for each checkpoint that is skipped. Raises
    CheckpointDamaged, which names all of them, if none is intact, and ConfigurationError if the
    directory is that of one checkpoint.
    """
    reasons: list[str] = []
    found = catalog.scan(directory)
    for step in found.committed:
        try:
            return load(directory, step, room, is_needed)
        except CheckpointDamaged as error:
            reasons.append(str(error))
            on_damaged(step, reasons[-1])
    if found.superseded and not reasons:
        raise CheckpointDamaged(
            f"the checkpoints in {directory.url} (steps {', '.join(map(str, found.superseded))}) "
            "are of a lineage that was given up: a later group has gone on from an earlier step, "
            "and its checkpoints are gone; to start from one of them, move it to an empty "
            "directory"
        )
    if not reasons:
        require_parent(directory)
        return None
    raise CheckpointDamaged(
        f"none of the {len(reasons)} checkpoints in {directory.url} is intact; restore one from a "
        f"copy, or choose an empty directory to start from the beginning: {'; '.join(reasons)}"
    )


def _require_plausible(manifest: Manifest, structure: Structure, where: str) -> None:
    """Raise CheckpointDamaged if the shards are longer than tensors and headers can make them."""
    specs = structure.specs
    shards = [file for file in manifest.files if not is_structure_name(file.name)]
    most_bytes = sum(spec.size_bytes for spec in specs) + _MOST_BYTES_OF_HEADER * len(shards)
    size_bytes = sum(file.size_bytes for file in shards)
    if size_bytes > most_bytes:
        raise CheckpointDamaged(
            f"{where}: the manifest lists shards of {size_bytes} bytes, but the tensors have "
            f"{sum(spec.size_bytes for spec in specs)}"
        )


def _verified(
    directory: CheckpointDirectory, step: int, expected: FileDigest
) -> Iterator[memoryview]:
    """Yield the content of a file, piece by piece. Raises CheckpointDamaged, at the latest after
    the last piece, if it is not what was written: what has come is of no use then."""
    where = f"{directory.url}/{path_in_step(step, expected.name)}"
    digester = Digester()
    try:
        size_bytes = directory.size_bytes(path_in_step(step, expected.name))
        if size_bytes is None:
            raise FileNotFoundError
        found = replace(expected, size_bytes=size_bytes)
        if found == expected:  # another one may be endless
            for piece in directory.chunks(path_in_step(step, expected.name)):
                digester.update(piece)
                if digester.size_bytes > size_bytes:  # it grows, perhaps without an end
                    break
                yield piece
            found = digester.result(expected.name)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{where} is missing") from error
    wrong = difference(expected, found)
    if wrong is not None:
        raise CheckpointDamaged(f"{where} is damaged: {wrong}")


def _as_needed(pieces: Iterator[memoryview], is_needed: Callable[[], bool]) -> Iterator[memoryview]:
    for piece in pieces:
        if not is_needed():
            raise NotNeeded("the checkpoint is not needed any more")
        yield piece


class _Assembly:
    """Puts tensors together from shards; `where` names the checkpoint in messages.

    into: tensors that may be overwritten, by name.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        where: str,
        into: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._where = where
        self._into = into
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}  # number of leading elements that are there
        self.generators: list[Json] = []
        """Those that each shard has, in the order of the shards."""

    def add(self, name: str, pieces: Iterator[memoryview]) -> None:
        """Take the tensors of the next shard as its content comes. Raises CheckpointDamaged if it
        does not fit."""
        try:
            self._add(_Content(pieces))
        except ElasticError:
            raise
        except _NO_SHARD as error:
            for _ in pieces:  # it is more likely to be damaged, and that is told at its end
                pass
            raise CheckpointDamaged(f"{self._where}{name} does not fit: {error!r}") from error

    def finish(self) -> dict[str, torch.Tensor]:
        """Return all tensors. Raises CheckpointDamaged if one is not complete."""
        specs = self._specs.values()
        lacking = [spec.name for spec in specs if self._filled.get(spec.name) != spec.element_count]
        if lacking:
            raise CheckpointDamaged(f"{self._where} lacks elements of {', '.join(lacking[:3])}")
        return {name: self._tensors[name] for name in self._specs}

    def _add(self, content: _Content) -> None:
        length = int.from_bytes(content.take(8), "little")
        if length > _MOST_BYTES_OF_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header: dict[str, Any] = json.loads(content.take(length))
        metadata: dict[str, str] = header.pop("__metadata__")
        slices: dict[str, list[int]] = json.loads(metadata[SLICES])
        self.generators.append(json.loads(metadata.get(GENERATORS, "null")))
        offset = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            place = memory_to_fill(self._place(self._specs[name], entry, slices.get(name)))
            if entry["data_offsets"] != [offset, offset + len(place)]:
                raise ValueError(f"{name} is at {entry['data_offsets']} and not at {offset}")
            content.fill(place)
            offset += len(place)
        content.end()

    def _place(
        self, spec: TensorSpec, entry: Mapping[str, Any], place: list[int] | None
    ) -> torch.Tensor:
        """Return the elements that a shard has of a tensor, which it describes as `entry`."""
        start, stop = place or (0, spec.element_count)
        # Slices follow each other from shard to shard: anything else is a gap or an overlap.
        if start != self._filled.get(spec.name, 0) or not start <= stop <= spec.element_count:
            raise ValueError(
                f"{spec.name} has elements {start} to {stop}, which leave a gap or overlap"
            )
        shape = [stop - start] if place else list(spec.shape)
        stored = REAL_PART.get(spec.torch_dtype, spec.torch_dtype)
        as_stored = [*shape, 2] if spec.torch_dtype in REAL_PART else shape
        if (entry["dtype"], entry["shape"]) != (STORED_AS[stored], as_stored):
            raise ValueError(f"{spec.name} is {entry['dtype']}{entry['shape']}, not {spec}")
        self._filled[spec.name] = stop
        return self._whole(spec).view(-1)[start:stop]

    def _whole(self, spec: TensorSpec) -> torch.Tensor:
        if spec.name not in self._tensors:
            live = self._into.get(spec.name)
            self._tensors[spec.name] = (
                live.detach()
                if live is not None and _can_be_read_into(live, spec)
                else torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu")
            )
        return self._tensors[spec.name]


def _can_be_read_into(live: torch.Tensor, spec: TensorSpec) -> bool:
    return (
        (tuple(live.shape), live.dtype, live.device.type) == (spec.shape, spec.torch_dtype, "cpu")
        and live.is_contiguous()
        and not (live.is_conj() or live.is_neg())
    )


class _Content:
    """The content of a file, which comes piece by piece. Raises ValueError if it ends early."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def take(self, length: int) -> bytes:
        room = bytearray(length)
        self.fill(memoryview(room))
        return bytes(room)

    def fill(self, room: memoryview) -> None:
        while room:
            if not self._left:
                self._next()
            part = self._left[: len(room)]
            room[: len(part)] = part
            room, self._left = room[len(part) :], self._left[len(part) :]

    def end(self) -> None:
        """Read to the end, which is expected here: only there is it known to be undamaged."""
        if self._left or next(self._pieces, None) is not None:
            raise ValueError("it is longer than its header says")

    def _next(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            raise ValueError("it is shorter than its header says")
        self._left = piece


_MOST_BYTES_OF_HEADER = 64 << 20

# Keys in a shard's metadata.
SLICES = "slices"  # where its flat slices [start, stop) belong, by the tensor's name
GENERATORS = "generators"  # the default generators of the rank that wrote it


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The elements [start, stop) of a tensor in row-major order; `whole` if these are all."""

    name: str
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """One member's pieces in host memory, independent of the live state.

    A whole tensor has its own shape. A slice is flat, and `slices` gives its [start, stop).
    generators: the member's default generators, see `generators.states`.
    """

    tensors: Mapping[str, torch.Tensor]
    slices: Mapping[str, tuple[int, int]]
    generators: Json = None


def plan_shards(
    specs: Sequence[TensorSpec],
    count: int,
    local: frozenset[str] = frozenset(),
    uneven: frozenset[str] = frozenset(),
) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each of `count` shards.

    local: names of tensors that may differ between members. Shard 0 has all of them whole, so that
    a checkpoint holds those of one member. The others take more of the rest: every shard is within
    one element (of the largest type) of an equal share of the bytes, unless shard 0 already has
    more. If all elements have one type, shards differ by at most one element. The plan depends on
    nothing else, so members agree on it without communication.

    uneven: names of tensors that some members lack, or have in another shape. Shard 0 has them too.
    They do not count in the division, because the cuts would then differ between members.
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

    reuse: an earlier share that has been written. Its memory is overwritten where it fits. That
    takes a fifteenth of the time of fresh memory (measured), which the kernel must first find and
    clear page by page.
    """
    buffers = reuse.tensors if reuse is not None else {}
    with torch.no_grad():
        copies = {
            piece.name: _copy(tensors[piece.name], piece, buffers.get(piece.name))
            for piece in pieces
        }
    # Copies from devices run asynchronously: wait for each device's queue once.
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

    group: the name of the group that saves; no other group's files have these names. Raises
    CheckpointWriteError if the storage refuses. If the step is committed meanwhile, the files are
    useless and harmless.
    """
    blocks = safetensors_blocks(share.tensors, _metadata(share))
    digests = [directory.write(path_in_step(step, shard_name(index, count, group)), blocks)]
    if structure is not None:
        content = structure_to_json(structure)
        digests.append(directory.write(path_in_step(step, structure_name(group)), content))
    return digests


def safetensors_blocks(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """Yield a safetensors file: header length, JSON header, then the tensors' bytes.

    Nothing is copied, unlike in the library's own writer. Format:
    https://github.com/huggingface/safetensors#format
    """
    stored = [
        (name, torch.view_as_real(tensor) if tensor.dtype in REAL_PART else tensor)
        for name, tensor in tensors.items()
    ]
    # Widest elements first, as in the library: every tensor is then aligned in the file.
    stored.sort(key=lambda entry: (-entry[1].element_size(), entry[0]))
    header = _header(stored, metadata)
    yield memoryview(len(header).to_bytes(8, "little"))
    yield memoryview(header)
    for _, tensor in stored:
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _ends(total_bytes: int, count: int, first_bytes: int) -> list[int]:
    """Return where each shard ends, in bytes. Shares are equal, but the first has at least
    `first_bytes`; what it has too much, the others have less."""
    if first_bytes * count <= total_bytes:
        return [total_bytes * (index + 1) // count for index in range(count)]
    rest, others = total_bytes - first_bytes, max(1, count - 1)
    return [first_bytes + rest * index // others for index in range(count)]


def _cut(
    spec: TensorSpec, offset: int, ends: Sequence[int], shard: int
) -> Iterator[tuple[int, Piece]]:
    """Yield (shard, piece) for the tensor at byte `offset`; shards end at the bytes `ends`."""
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
        # A device copies to page-locked memory at full speed and without waiting.
        buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=on_cuda)
    return buffer.copy_(source, non_blocking=on_cuda)


def _metadata(share: HostShare) -> dict[str, str]:
    metadata = {SLICES: json.dumps(dict(share.slices))}
    if share.generators is not None:
        metadata[GENERATORS] = json.dumps(share.generators)
    return metadata


def _header(stored: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
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


FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The document beside the shards: the table of tensors, the skeleton and the caller's JSON."""

    specs: tuple[TensorSpec, ...]
    skeleton: Json
    extra: Mapping[str, Json]


def structure_to_json(structure: Structure) -> bytes:
    """Return the document; ValueError or TypeError if `extra` is not plain, finite JSON."""
    return documents.encode(
        {
            "format_version": FORMAT_VERSION,
            "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in structure.specs],
            "skeleton": structure.skeleton,
            "extra": dict(structure.extra),
        }
    )


def structure_from_json(content: bytes, where: str) -> Structure:
    """Parse the document. Raises CheckpointDamaged, which names the file `where` and the fault."""
    document = documents.decode(content, where)
    version = documents.field(document, "format_version", int, where)
    if version != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{where} has format version {version}; this version of elastic reads only "
            f"{FORMAT_VERSION}: load it with the version that wrote it"
        )
    if "skeleton" not in document:
        raise CheckpointDamaged(f"{where} lacks 'skeleton'")
    rows = documents.field(document, "tensors", list, where)
    return Structure(
        specs=tuple(_spec(row, f"tensors[{i}] in {where}") for i, row in enumerate(rows)),
        skeleton=document["skeleton"],
        extra=documents.field(document, "extra", dict, where),
    )


def _spec(row: Json, where: str) -> TensorSpec:
    cells: list[Json] = documents.checked(row, list, where)
    if len(cells) != 3:
        raise CheckpointDamaged(f"{where} is not a name, a type and a shape")
    shape: list[Json] = documents.checked(cells[2], list, f"the shape of {where}")
    sizes = tuple(documents.checked(size, int, f"a size of {where}") for size in shape)
    dtype = documents.checked(cells[1], str, f"the type of {where}")
    if dtype not in DTYPES or any(size < 0 for size in sizes):
        raise CheckpointDamaged(f"{where} is not a valid type and shape: {dtype}{list(sizes)}")
    name = documents.checked(cells[0], str, f"the name of {where}")
    return TensorSpec(name=name, dtype=dtype, shape=sizes)
