"""Moves state from member to member in large flat chunks, without pickling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from elastic.worker.group.process_group import COLLECTIVE_TIMEOUT, Group
from elastic.worker.state.digest import bytes_of, digest_of, memory_to_fill
from elastic.worker.state.tensor_specs import TensorSpec, describe, from_table, to_table
from elastic.worker.state.tree import flatten, unflatten

CHUNK_BYTES = 32 * 2**20


def send_json(group: Group, document: Any, rank: int) -> None:
    """Send a JSON document to `rank`, which calls receive_json."""
    content = json.dumps(document).encode()
    device = group.backend.device
    _send(group, torch.tensor([len(content)], dtype=torch.int64, device=device), rank)
    _send(group, torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device), rank)


def receive_json(group: Group, rank: int) -> Any:
    """Return the document that `rank` sends."""
    device = group.backend.device
    length = torch.empty(1, dtype=torch.int64, device=device)
    _receive(group, length, rank)
    content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    _receive(group, content, rank)
    return json.loads(content.cpu().numpy().tobytes())


def send_tensors(group: Group, tensors: Mapping[str, torch.Tensor], rank: int) -> int:
    """Send to `rank`, which calls receive_tensors, those of the tensors that are not the same
    there, or at a member that it passes them on to; return their size in bytes.

    Needs memory for one more chunk.
    """
    if not tensors:
        return 0
    names = sorted(tensors)
    device = group.backend.device
    digests = [digest_of([tensors[name]]) for name in names]
    _send(group, torch.tensor(digests, device=device), rank)
    lacks = torch.empty(len(names), dtype=torch.uint8, device=device)
    _receive(group, lacks, rank)
    _send(group, lacks, rank)  # to all that it is passed on to: each knows only of its own
    wanted = {name: tensors[name] for name in compress(names, lacks.tolist())}
    total = 0
    for parts in _chunks(describe(wanted)):
        pieces = [bytes_of(b) for p in parts for b in _blocks(tensors[p.name], p.start, p.stop)]
        chunk = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        _send(group, chunk.to(group.backend.device), rank)
        total += chunk.numel()
    return total


def receive_tensors(
    group: Group,
    specs: Sequence[TensorSpec],
    rank: int,
    into: Mapping[str, torch.Tensor] = MappingProxyType({}),
    *,
    known: Mapping[str, torch.Tensor] = MappingProxyType({}),
    then: int | None = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the tensors of `rank`, as `specs` describes them, and the size in bytes of what came.

    then: a member that calls receive_tensors for this one. Each chunk is passed on to it while the
    next one comes, so a chain of members takes hardly longer than one.

    A tensor of `known` that is the same is returned as it is. A tensor of `into` is overwritten if
    the one of its name has the same shape, type and place. For the others, new tensors are made on
    the host or on the group's device. So a member that passes its live state needs memory for one
    more chunk, or two if it passes them on, not for a second state.

    Before a call with `into`, the caller must have declared that it holds no state that others can
    use (dropped, not intact). From the first byte on, the tensors of `into` are neither the old
    state nor the new one, and they stay so if the group is lost. Afterwards the caller must load
    the result: what is not in `into`, such as what a state_dict() has computed, is no live object.
    """
    if not specs:
        return {}, 0
    device = group.backend.device
    by_name = sorted(specs, key=lambda s: s.name)
    alike = {s.name: known[s.name] for s in specs if _is_like(s, device, known.get(s.name))}
    mine = {name: digest_of([tensor]) for name, tensor in alike.items()}  # while `rank` does so
    digests = torch.empty(len(by_name), dtype=torch.int64, device=device)
    _receive(group, digests, rank)
    differs = [mine.get(s.name) != d for s, d in zip(by_name, digests.tolist(), strict=True)]
    wanted = torch.tensor(differs, dtype=torch.uint8, device=device)
    if then is not None:
        _send(group, digests, then)
        lacks = torch.empty_like(wanted)
        _receive(group, lacks, then)
        wanted |= lacks
    _send(group, wanted, rank)
    _receive(group, wanted, rank)
    if then is not None:
        _send(group, wanted, then)
    lacking = list(compress(by_name, differs))
    tensors = alike | {s.name: _target(s, device, into.get(s.name)) for s in lacking}
    total = _receive_chunks(
        group,
        list(compress(by_name, wanted.tolist())),
        {s.name: tensors[s.name] for s in lacking},
        rank,
        then,
    )
    return {s.name: tensors[s.name] for s in specs}, total


def gather_bytes(group: Group, content: bytes) -> list[bytes]:
    """Return what each member gives, in the order of ranks. All must call it together."""
    if group.world_size == 1:
        return [content]
    device = group.backend.device
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(group.world_size)]
    dist.all_gather(lengths, length)
    group.settle()
    found = []
    for rank, size in enumerate(int(each.item()) for each in lengths):
        if rank == group.rank or not size:
            found.append(content if size else b"")
        if not size:
            continue
        memory = bytearray(content if rank == group.rank else size)
        on_device = torch.frombuffer(memory, dtype=torch.uint8).to(device)
        dist.broadcast(on_device, src=rank)
        group.settle()
        if rank != group.rank:
            found.append(on_device.cpu().numpy().tobytes())
    return found


def pack(value: object) -> bytes:
    """Turn a tree of plain values and tensors into bytes. Raises ConfigurationError for others."""
    flat = flatten({"": value})
    specs = describe(flat.tensors)
    head = json.dumps([flat.skeleton, to_table(specs)]).encode()
    parts = [bytes_of(flat.tensors[spec.name]).cpu().numpy().tobytes() for spec in specs]
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def unpack(content: bytes) -> Any:
    """Return what `pack` was given; its tensors are on the CPU."""
    begin = 8 + int.from_bytes(content[:8], "little")
    skeleton, table = json.loads(content[8:begin])
    tensors = {}
    for spec in from_table(table):
        tensors[spec.name] = torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu")
        end = begin + spec.size_bytes
        if end > begin:
            memory_to_fill(tensors[spec.name])[:] = content[begin:end]
        begin = end
    return unflatten(skeleton, tensors)[""]


def _receive_chunks(
    group: Group,
    specs: Sequence[TensorSpec],
    targets: Mapping[str, torch.Tensor],
    rank: int,
    then: int | None,
) -> int:
    """Receive the tensors that `specs` describes, into `targets` as far as these have them, and
    pass them on to `then`. Returns their size in bytes."""
    device = group.backend.device
    sizes = {spec.name: spec.element_bytes for spec in specs}
    total = 0
    passes_on: _Message | None = None
    for parts in _chunks(specs):
        size = sum((p.stop - p.start) * sizes[p.name] for p in parts)
        chunk = _memory_of(parts, targets, device)
        is_copied = chunk is None
        if chunk is None:
            chunk = torch.empty(size, dtype=torch.uint8, device=device)
        _exchange(group, sends=passes_on, receives=(chunk, rank))
        if is_copied:
            _unpack(chunk, parts, sizes, targets)
        passes_on = (chunk, then) if then is not None else None
        total += size
    if passes_on is not None:
        _exchange(group, sends=passes_on)
    return total


def _memory_of(
    parts: Sequence[_Part], targets: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """Return the memory into which this chunk can come as it is; None: there is no such place."""
    if len(parts) > 1 or (target := targets.get(parts[0].name)) is None:
        return None
    blocks = list(_blocks(target, parts[0].start, parts[0].stop))
    if len(blocks) > 1 or not blocks[0].is_contiguous() or target.device != device:
        return None
    return bytes_of(blocks[0])


def _unpack(
    chunk: torch.Tensor,
    parts: Sequence[_Part],
    sizes: Mapping[str, int],
    targets: Mapping[str, torch.Tensor],
) -> None:
    """Copy what a chunk has into `targets`. sizes: bytes of one element."""
    lengths = [(part.stop - part.start) * sizes[part.name] for part in parts]
    for part, content in zip(parts, torch.split(chunk, lengths), strict=True):
        if (target := targets.get(part.name)) is None:
            continue
        blocks = list(_blocks(target, part.start, part.stop))
        lengths = [b.numel() * b.element_size() for b in blocks]
        pieces = torch.split(content.to(target.device), lengths)
        for block, piece in zip(blocks, pieces, strict=True):
            if block.is_contiguous():
                bytes_of(block).copy_(piece)
            else:
                block.copy_(piece.clone().view(block.dtype).reshape(block.shape))


def _target(spec: TensorSpec, device: torch.device, live: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor to receive into: the live one if it fits, else a new one."""
    if live is not None and _is_like(spec, device, live) and _can_be_overwritten(live):
        return live.detach()
    return torch.empty(spec.shape, dtype=spec.torch_dtype, device=_place(spec, device))


def _place(spec: TensorSpec, device: torch.device) -> torch.device:
    return torch.device("cpu") if spec.place == "cpu" else device


def _is_like(spec: TensorSpec, device: torch.device, live: torch.Tensor | None) -> bool:
    return live is not None and (tuple(live.shape), live.dtype, live.device) == (
        spec.shape,
        spec.torch_dtype,
        _place(spec, device),
    )


def _can_be_overwritten(live: torch.Tensor) -> bool:
    return (
        not live.is_inference()
        and not (live.is_conj() or live.is_neg())
        # Each element has its own memory, unlike in an expanded tensor.
        and torch.empty_like(live, device="meta").stride() == live.stride()
    )


def _send(group: Group, tensor: torch.Tensor, rank: int) -> None:
    _exchange(group, sends=(tensor, rank))


def _receive(group: Group, tensor: torch.Tensor, rank: int) -> None:
    _exchange(group, receives=(tensor, rank))


_Message: TypeAlias = tuple[torch.Tensor, int]
"""A tensor, and the rank that it comes from or goes to."""


def _exchange(
    group: Group, *, sends: _Message | None = None, receives: _Message | None = None
) -> None:
    """Send and receive at the same time. Returns when the one tensor may be overwritten, with gloo
    when its receiver has it, and the other one has come. Raises GroupLost if it may be garbage.

    gloo never wakes a thread that waits for a partly done operation when the connection breaks or
    is shut down: `signalException` of its tcp/pair.cc handles only those not yet begun. So both
    sides first wait for a byte that follows the tensor, and only then for the tensor itself.

    With NCCL the operations are a batch. By themselves, NCCL would open another connection between
    two members, which an abort does not reach.
    """
    if group.backend.aborts:
        operations = [dist.P2POp(dist.isend, *sends)] if sends is not None else []
        operations += [dist.P2POp(dist.irecv, *receives)] if receives is not None else []
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        group.settle()
        return
    receiving = [_receive_one(*receives)] if receives is not None else []
    sending = [_send_one(*sends)] if sends is not None else []
    for finish in (*receiving, *sending):
        finish()


def _send_one(tensor: torch.Tensor, rank: int) -> Callable[[], None]:
    """Begin to send with gloo. Returns what waits until it is done."""
    end, answer = torch.zeros_like(tensor[:1]), torch.empty_like(tensor[:1])
    sending = [dist.isend(tensor, rank), dist.isend(end, rank)]

    def finish() -> None:
        _wait(dist.irecv(answer, rank))
        for work in sending:
            _wait(work)

    return finish


def _receive_one(tensor: torch.Tensor, rank: int) -> Callable[[], None]:
    """Begin to receive with gloo what `_send_one` sends. Returns what waits until it is done."""
    end = torch.empty_like(tensor[:1])
    receiving, ending = dist.irecv(tensor, rank), dist.irecv(end, rank)

    def finish() -> None:
        _wait(ending)
        _wait(receiving)
        _wait(dist.isend(end, rank))

    return finish


def _wait(work: dist.Work | None) -> None:
    """Wait as long as for a collective, since the other member may have to load a checkpoint first.
    With gloo, dist.send() keeps to the time-out of forming the group, whatever is set later."""
    assert work is not None, "both are members of the group"
    work.wait(COLLECTIVE_TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements from `start` to `stop` of a tensor, row by row."""

    name: str
    start: int
    stop: int


def _chunks(specs: Sequence[TensorSpec]) -> Iterator[list[_Part]]:
    """Cut the tensors into chunks of CHUNK_BYTES, in the same way on both sides.

    Host tensors come first and share no chunk with the others, because a chunk is moved at once.
    Only the last chunk of a place is smaller, or one that has no room for another element.
    """
    by_name = sorted(specs, key=lambda s: s.name)
    for place in ("cpu", "device"):
        chunk: list[_Part] = []
        room = CHUNK_BYTES
        for spec in (s for s in by_name if s.place == place):
            start = 0
            while start < spec.element_count:
                if chunk and room < spec.element_bytes:
                    yield chunk
                    chunk, room = [], CHUNK_BYTES
                count = max(1, min(spec.element_count - start, room // spec.element_bytes))
                chunk.append(_Part(spec.name, start, start + count))
                room -= count * spec.element_bytes
                start += count
        if chunk:
            yield chunk


def _blocks(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield views of these elements in order, whatever the tensor's layout in memory."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor[0].numel()
    first, last = start // row, stop // row
    if start % row:
        yield from _blocks(tensor[first], start % row, min(stop - first * row, row))
        first += 1
    if first < last:
        yield tensor[first:last]
    if first <= last and stop % row:
        yield from _blocks(tensor[last], 0, stop % row)
