"""Moves state between two members in large flat chunks; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic.worker.group.process_group import COLLECTIVE_TIMEOUT, Group
from elastic.worker.state.tensor_specs import TensorSpec

CHUNK_BYTES = 32 * 2**20


def send_json(group: Group, document: Any, rank: int) -> None:
    """Send a JSON document to `rank`, which calls receive_json."""
    content = json.dumps(document).encode()
    device = group.backend.device
    _send(torch.tensor([len(content)], dtype=torch.int64, device=device), rank)
    _send(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device), rank)


def receive_json(group: Group, rank: int) -> Any:
    """The document that `rank` sends."""
    device = group.backend.device
    length = torch.empty(1, dtype=torch.int64, device=device)
    _receive(length, rank)
    content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    _receive(content, rank)
    return json.loads(content.cpu().numpy().tobytes())


def send_tensors(group: Group, tensors: Mapping[str, torch.Tensor], rank: int) -> int:
    """Send the tensors' bytes in their order; return how many."""
    total = 0
    for pieces in _chunks([_bytes_of(t) for t in tensors.values()]):
        chunk = torch.cat([p.to(group.backend.device) for p in pieces])
        _send(chunk, rank)
        total += chunk.numel()
    return total


def receive_tensors(
    group: Group, specs: Sequence[TensorSpec], rank: int
) -> tuple[dict[str, torch.Tensor], int]:
    """New tensors on the host or the group's device, as described by `specs`; and their bytes."""
    tensors = {
        s.name: torch.empty(s.shape, dtype=s.torch_dtype, device=group.backend.device)
        for s in specs
    }
    total = 0
    for pieces in _chunks([_bytes_of(t) for t in tensors.values()]):
        chunk = torch.empty(
            sum(p.numel() for p in pieces), dtype=torch.uint8, device=group.backend.device
        )
        _receive(chunk, rank)
        sizes = [p.numel() for p in pieces]
        for piece, part in zip(pieces, torch.split(chunk, sizes), strict=True):
            piece.copy_(part)
        total += chunk.numel()
    return tensors, total


def _send(tensor: torch.Tensor, rank: int) -> None:
    """Return when `rank` has received it.

    gloo never wakes whoever waits for an operation of which a part was done when the connection
    broke or was shut down: `signalException` of its tcp/pair.cc knows only of those not yet begun.
    So both sides first wait for a byte that follows it, and only then for the tensor itself.
    """
    end, answer = torch.zeros_like(tensor[:1]), torch.empty_like(tensor[:1])
    sending = [dist.isend(tensor, rank), dist.isend(end, rank)]
    _wait(dist.irecv(answer, rank))
    for work in sending:
        _wait(work)


def _receive(tensor: torch.Tensor, rank: int) -> None:
    """The other side of `_send`."""
    end = torch.empty_like(tensor[:1])
    receiving = dist.irecv(tensor, rank)
    _wait(dist.irecv(end, rank))
    _wait(receiving)
    _wait(dist.isend(end, rank))


def _wait(work: dist.Work | None) -> None:
    """With the patience of a collective. That of dist.send() with gloo is that of forming the
    group, whatever is set later: the other member may have to load a checkpoint first."""
    assert work is not None, "both are members of the group"
    work.wait(COLLECTIVE_TIMEOUT)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 tensor; shares it if contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def _chunks(flat: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group and split uint8 tensors so that each chunk has CHUNK_BYTES, but for the last."""
    chunk: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for tensor in flat:
        rest = tensor
        while rest.numel() >= room:
            chunk.append(rest[:room])
            rest = rest[room:]
            yield chunk
            chunk, room = [], CHUNK_BYTES
        if rest.numel():
            chunk.append(rest)
            room -= rest.numel()
    if chunk:
        yield chunk
