"""`step.skip` leaves a step out on all workers, whichever of them has the bad micro-batch."""

from __future__ import annotations

import math

import pytest
import torch

from elastic.errors import StepMisused
from elastic.worker.step import Step
from tests.unit.worker.together import die
from tests.unit.worker.training_together import Peer, in_sessions, numbers


def train(peer: Peer, step: Step, *, bad: bool, late: bool = False) -> torch.Tensor:
    """The step's averaged gradient, if it has one."""
    gradient: torch.Tensor | None = None
    with step:
        for (inputs,) in step.batches():
            loss = peer.model(inputs).mean() * (math.nan if bad else 1.0)
            if not late:
                step.skip(~loss.isfinite())
            means = step.mean(loss=loss)
            step.backward(loss)
            if late:
                step.skip(bad)
        peer.optimizer.step()
        gradient = peer.model.module.weight.grad  # type: ignore[union-attr,assignment]
        peer.optimizer.zero_grad()
    if step.committed:
        assert means.keys() == {"loss"}
    return gradient  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("late", "options"),
    [(False, {"batch_size": 1, "accumulate": 2}), (True, {"batch_size": 2})],
    ids=["above the backward pass", "below it"],
)
@in_sessions(3)
def test_a_bad_micro_batch_of_one_worker_leaves_the_step_out_on_all(
    peer: Peer, late: bool, options: dict[str, int]
) -> None:
    peer.optimizer.param_groups[0].update(lr=0.01, momentum=0.9, weight_decay=0.1)
    weights, skipped = [], []
    for step in peer.session.steps(numbers(24, **options), epochs=1):
        bad = (step.index == 1 and peer.seat.rank == 2) or step.index == 2
        gradient = train(peer, step, bad=bad, late=late)
        assert (gradient is None) == step.skipped
        weights.append(peer.weight[0])
        skipped.append(step.skipped)
        assert step.committed
    assert skipped == [False, True, True, False]
    assert weights[0] == weights[1] == weights[2] != weights[3]
    assert math.isfinite(weights[3])
    everything = peer.seat.exchange(weights)
    assert all(other == weights for other in everything)
    assert peer.session.committed == 4


@in_sessions(3)
def test_a_skipped_step_is_left_out_as_well_if_the_group_is_lost_in_it(peer: Peer) -> None:
    found = []
    for step in peer.session.steps(numbers(12, batch_size=1), epochs=1):
        if step.index == 2 and peer.session.world_size == 3:
            peer.seat.exchange("all are here")
            if peer.seat.rank == 2:
                die()
            peer.announce(2, 0, 1)
        train(peer, step, bad=step.index == 2 and peer.seat.rank == 0)
        if step.committed:
            found.append((step.index, step.skipped))
    assert [index for index, skipped in found if skipped] == [2]
    assert math.isfinite(peer.weight[0])
    everything = peer.seat.exchange([found, peer.weight])
    assert everything[0] == everything[1]


@in_sessions(1)
def test_skip_is_refused_where_it_comes_too_late(peer: Peer) -> None:
    for step in peer.session.steps(numbers(2, batch_size=1), epochs=1):
        with step:
            with pytest.raises(StepMisused, match="before a batch was taken"):
                step.skip(True)
            for (inputs,) in step.batches():
                step.backward(peer.model(inputs).mean())
            peer.update()
            with pytest.raises(StepMisused, match=r"after optimizer\.step"):
                step.skip(True)
        assert not step.skipped
