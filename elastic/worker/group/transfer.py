"""Moves state between two members in large flat chunks, without pickling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from elastic.worker.group.process_group import COLLECTIVE_TIMEOUT, Group
from elastic.worker.state.digest import bytes_of, digest_of
from elastic.worker.state.tensor_specs import TensorSpec, describe

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


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the digest of each tensor, which `send_tensors` needs."""
    return {name: digest_of([tensor]) for name, tensor in tensors.items()}


def send_tensors(
    group: Group, tensors: Mapping[str, torch.Tensor], rank: int, digests: Mapping[str, int]
) -> int:
    """Send to `rank`, which calls receive_tensors, those of the tensors that are not the same
    there; return their size in bytes.

    Needs memory for one more chunk.
    """
    if not tensors:
        return 0
    names = sorted(tensors)
    device = group.backend.device
    _send(group, torch.tensor([digests[name] for name in names], device=device), rank)
    lacks = torch.empty(len(names), dtype=torch.uint8, device=device)
    _receive(group, lacks, rank)
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
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the tensors of `rank`, as `specs` describes them, and the size in bytes of what came.

    A tensor of `known` that is the same is returned as it is. A tensor of `into` is overwritten if
    the one of its name has the same shape, type and place. For the others, new tensors are made on
    the host or on the group's device. So a member that passes its live state needs memory for one
    more chunk, not for a second state.

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
    mine = digests_of(alike)  # while `rank` computes its own
    theirs = torch.empty(len(by_name), dtype=torch.int64, device=device)
    _receive(group, theirs, rank)
    differs = [
        mine.get(s.name) != digest for s, digest in zip(by_name, theirs.tolist(), strict=True)
    ]
    _send(group, torch.tensor(differs, dtype=torch.uint8, device=device), rank)
    lacking = list(compress(by_name, differs))
    tensors = alike | {s.name: _target(s, device, into.get(s.name)) for s in lacking}
    total = 0
    for parts in _chunks(lacking):
        blocks = [b for p in parts for b in _blocks(tensors[p.name], p.start, p.stop)]
        total += _receive_blocks(group, blocks, rank)
    return {s.name: tensors[s.name] for s in specs}, total


def _receive_blocks(group: Group, blocks: list[torch.Tensor], rank: int) -> int:
    """Receive one chunk into these blocks; return its size in bytes."""
    whole = blocks[0]
    if len(blocks) == 1 and whole.is_contiguous() and whole.device == group.backend.device:
        _receive(group, bytes_of(whole), rank)
        return whole.numel() * whole.element_size()
    sizes = [b.numel() * b.element_size() for b in blocks]
    chunk = torch.empty(sum(sizes), dtype=torch.uint8, device=group.backend.device)
    _receive(group, chunk, rank)
    for block, part in zip(blocks, torch.split(chunk.to(whole.device), sizes), strict=True):
        if block.is_contiguous():
            bytes_of(block).copy_(part)
        else:
            block.copy_(part.clone().view(block.dtype).reshape(block.shape))
    return chunk.numel()


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
    """Return when the tensor may be overwritten: with gloo, when `rank` has received it.

    gloo never wakes a thread that waits for a partly done operation when the connection breaks or
    is shut down: `signalException` of its tcp/pair.cc handles only those not yet begun. So both
    sides first wait for a byte that follows the tensor, and only then for the tensor itself.
    """
    if group.backend.aborts:
        _exchange(group, dist.P2POp(dist.isend, tensor, rank))
        return
    end, answer = torch.zeros_like(tensor[:1]), torch.empty_like(tensor[:1])
    sending = [dist.isend(tensor, rank), dist.isend(end, rank)]
    _wait(dist.irecv(answer, rank))
    for work in sending:
        _wait(work)


def _receive(group: Group, tensor: torch.Tensor, rank: int) -> None:
    """Receive what `_send` sends. Raises GroupLost if the content may be garbage."""
    if group.backend.aborts:
        _exchange(group, dist.P2POp(dist.irecv, tensor, rank))
        return
    end = torch.empty_like(tensor[:1])
    receiving = dist.irecv(tensor, rank)
    _wait(dist.irecv(end, rank))
    _wait(receiving)
    _wait(dist.isend(end, rank))


def _exchange(group: Group, operation: dist.P2POp) -> None:
    """Run the operation in a batch. By itself, NCCL would open another connection between the two
    members, which an abort does not reach."""
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    group.settle()


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
