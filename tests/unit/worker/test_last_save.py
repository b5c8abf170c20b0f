"""The last save is of one state: members compare theirs before it, whatever the step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.checkpoint.directory import open_directory
from elastic.errors import StepMisused
from elastic.worker.state.checkpointing import Checkpointing
from tests.unit.worker.together import Seat, run_together
from tests.unit.worker.training_together import Peer, numbers

STEPS = 3  # the step between two comparisons, which come after 1, 2, 4... steps


def with_saves(root: Path, part: Callable[[Peer, list[str]], None], *, every: int = 1000) -> None:
    """Run it in two processes, with the kinds of messages that each has sent of its saves."""

    def member(seat: Seat) -> None:
        sent: list[str] = []

        def send(**kind: Any) -> None:
            sent.extend(kind)

        directory = open_directory(str(root))
        peer = Peer(seat, checkpoints=Checkpointing(directory, every=every, send=send))
        peer.announce(1)
        part(peer, sent)
        seat.exchange("done")

    run_together(member, member)


def train(peer: Peer, *, drifts: bool, steps: int = STEPS) -> None:
    for step in peer.session.steps(numbers(2 * steps, global_batch=2), epochs=1):
        with step:
            for (batch,) in step.batches():
                step.backward(peer.model(batch).mean())
            peer.update()
            if drifts and step.index == STEPS - 1 and peer.seat.rank == 1:
                change(peer)
        if step.index == STEPS - 1 and steps > STEPS:
            break


def change(peer: Peer) -> None:
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.add_(1.0)


def test_members_that_differ_after_the_last_step_of_a_loop_save_nothing(tmp_path: Path) -> None:
    def part(peer: Peer, sent: list[str]) -> None:
        with pytest.raises(
            StepMisused, match=r"of rank 1.* differ from those of rank 0 after step"
        ):
            train(peer, drifts=True)
        assert sent == []

    with_saves(tmp_path, part)


def test_members_that_differ_at_the_end_of_a_script_that_has_left_its_loop_save_nothing(
    tmp_path: Path,
) -> None:
    def part(peer: Peer, sent: list[str]) -> None:
        train(peer, drifts=True, steps=STEPS + 1)
        with pytest.raises(
            StepMisused, match=r"of rank 1.* differ from those of rank 0 after step"
        ):
            peer.session._training.finish()
        assert sent == []

    with_saves(tmp_path, part)


def test_one_rank_may_change_its_model_when_the_loop_is_over(tmp_path: Path) -> None:
    """As to evaluate an average: the save has begun with the loop's end, though it may last."""

    def part(peer: Peer, sent: list[str]) -> None:
        train(peer, drifts=False)
        if peer.seat.rank == 0:
            change(peer)
        late = threading.Timer(0.2, peer.control.checkpoints.settle, [STEPS], {"committed": True})
        late.start()
        peer.session._training.finish()
        late.join()
        assert sent == ["shard_saved"]

    with_saves(tmp_path, part)


def test_a_difference_in_large_frozen_weights_that_no_sign_shows_is_found_before_a_save(
    tmp_path: Path,
) -> None:
    """Between saves, what nothing is seen to write to is not read again."""

    def part(peer: Peer, sent: list[str]) -> None:
        torch.manual_seed(0)
        frozen = torch.nn.Linear(600, 600)
        peer.session.track(frozen=frozen)

        def train_on() -> None:
            for step in peer.session.steps(numbers(40, global_batch=2), epochs=1):
                with step:
                    for (batch,) in step.batches():
                        step.backward(peer.model(batch).mean())
                    peer.update()
                if step.index == 5 and peer.seat.rank == 1:
                    frozen.weight.detach().numpy()[1, 1] += 1.0

        with pytest.raises(StepMisused, match=r"of rank 1.* differ .* after step 13"):
            train_on()
        assert sent == []

    with_saves(tmp_path, part, every=13)
