"""Members on the node of rank 0 read the checkpoint that it restores, and receive what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.checkpoint.directory import open_directory
from elastic.checkpoint.layout import path_in_step, shard_name
from elastic.core.worker.participation import Progress
from elastic.worker.state.checkpointing import Checkpointing
from elastic.worker.state.job_state import JobState
from tests.unit.worker.saving import GROUP, save
from tests.unit.worker.state.job_states import At
from tests.unit.worker.together import Seat, run_together
from tests.unit.worker.training_together import Peer, numbers

FEATURES = 1000
BYTES = 8 * FEATURES


def write(
    root: Path | str, step: int, value: float, *, loop: int = 0, momentum: float = 0.0
) -> None:
    """Save a job of that step in that loop, whose weights have this value."""
    state, net = JobState(), torch.nn.Linear(FEATURES, 1, bias=False).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum)
    if momentum:
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    torch.nn.init.constant_(net.weight, value)
    state.track({"model": net, "optimizer": optimizer})
    state.job = At(Progress(committed=step, committed_in=1, loop=loop))
    save(open_directory(str(root)), step, state, 2)


def resume(root: Path, *roots: Path, nodes: str = "nnn") -> tuple[list[list[float]], list[int]]:
    """Resume in a group of three with these directories. Return what each member's weights are, and
    how many bytes it has received."""
    weights, received = root / "weights", root / "received"

    def part(seat: Seat) -> None:
        directory = open_directory(str(roots[seat.rank]))
        peer = Peer(seat, features=FEATURES, checkpoints=Checkpointing(directory))
        torch.nn.init.constant_(next(peer.model.parameters()), seat.rank)
        whole = seat.generation(1).members
        members = tuple(replace(m, node=n) for m, n in zip(whole, nodes, strict=True))
        peer.control.membership.announce(seat.generation(1, members=members))
        for _ in peer.session.steps(numbers(64, batch_size=1, global_batch=6), epochs=1):
            break
        outcome = peer.session._training.exchange.outcome
        of_all = seat.exchange([[min(peer.weight), max(peer.weight)], outcome.bytes_received])
        if seat.rank == 0:
            weights.write_text(json.dumps([each for each, _ in of_all]))
            received.write_text(json.dumps([each for _, each in of_all]))

    run_together(part, part, part)
    return json.loads(weights.read_text()), json.loads(received.read_text())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "saved"
    write(root, 3, 30.0)
    write(root, 6, 60.0)
    return root


def test_members_on_the_node_of_rank_0_read_the_checkpoint_themselves(
    saved: Path, tmp_path: Path
) -> None:
    assert resume(tmp_path, saved, saved, saved) == ([[60.0, 60.0]] * 3, [0, 0, 0])


def test_members_do_not_receive_what_they_have_read_into_memory_of_its_own(tmp_path: Path) -> None:
    """A fresh worker's optimizer has no state yet into which it could be read."""
    root = tmp_path / "saved"
    write(root, 6, 60.0, momentum=0.5)
    _, received = resume(tmp_path, root, root, root)
    assert received == [0, 0, 0]


def test_members_on_other_nodes_receive_it(saved: Path, tmp_path: Path) -> None:
    """Rank 1 passes it on to rank 2, so it comes through rank 1."""
    found = resume(tmp_path, saved, saved, saved, nodes="nnm")
    assert found == ([[60.0, 60.0]] * 3, [0, BYTES, BYTES])


def test_members_receive_what_they_cannot_read(saved: Path, tmp_path: Path) -> None:
    damaged, older = tmp_path / "damaged", tmp_path / "older"
    write(damaged, 6, 60.0)
    path = damaged / path_in_step(6, shard_name(1, 2, GROUP))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    write(older, 3, 30.0)
    found = resume(tmp_path, saved, damaged, older)
    assert found == ([[60.0, 60.0]] * 3, [0, BYTES, BYTES])


def test_a_checkpoint_that_rank_0_does_not_have_is_not_taken(saved: Path, tmp_path: Path) -> None:
    found = resume(tmp_path, tmp_path / "none", saved, saved)
    assert found == ([[0.0, 0.0]] * 3, [0, BYTES, BYTES])


def test_a_damaged_checkpoint_is_passed_over_by_all(saved: Path, tmp_path: Path) -> None:
    path = saved / path_in_step(6, shard_name(1, 2, GROUP))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert resume(tmp_path, saved, saved, saved) == ([[30.0, 30.0]] * 3, [0, 0, 0])


def test_remote_storage_is_read_by_rank_0_only(saved: Path) -> None:
    found = [Checkpointing(open_directory(f"{at}{saved}")) for at in ("file://", "memory://")]
    write(f"memory://{saved}", 6, 60.0)
    assert [len(each.read(lambda _: {}, lambda: True)) for each in found] == [1, 0]


def test_a_member_stops_reading_when_its_group_is_lost(saved: Path) -> None:
    seen: list[str] = []

    def is_needed() -> bool:
        seen.append("asked")
        return False

    found = Checkpointing(open_directory(str(saved))).read(lambda _: {}, is_needed)
    assert (found, seen) == ({}, ["asked"])


def test_a_checkpoint_of_a_later_loop_waits_until_the_script_is_there(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    write(root, 6, 60.0, loop=1)
    weights, received = resume(tmp_path, root, root, root)
    assert [set(each) for each in weights] == [{0.0}, {1.0}, {2.0}]  # until the script is there
    assert received == [0, BYTES, BYTES]
