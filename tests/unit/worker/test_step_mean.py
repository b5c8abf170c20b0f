"""`step.mean` gives the exact mean over the global batch, at any shares, wherever it is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from elastic.errors import StepMisused
from elastic.worker.step import Means, Step
from tests.unit.worker.training_together import Peer, in_sessions, numbers, train_together

PLACES = ["before", "after backward", "after the optimizer"]


def train_with_means(peer: Peer, step: Step, place: str) -> Means:
    means: Means | None = None
    with step:
        for (inputs,) in step.batches():
            value = inputs.mean()
            if place == "before":
                means = step.mean(sample=value, square=inputs.square().mean())
            step.backward(peer.model(inputs).mean())
            if place == "after backward":
                means = step.mean(sample=value, square=inputs.square().mean())
        peer.update()
        if place == "after the optimizer":  # from the last micro-batch alone
            means = step.mean(sample=value, square=inputs.square().mean())
    assert means is not None
    return means


ONE_MICRO_BATCH = [
    {"batch_size": 2},  # 6, 6, then 1 for three: two ranks have stand-ins
    {"batch_size": 3},  # 9, then 2, 1, 1
]
SEVERAL = [
    {"batch_size": 1, "global_batch": 13},  # 5, 4, 4
    {"batch_size": 2, "global_batch": 7},
    {"batch_size": 1, "accumulate": 2},
]
# After the optimizer's step only the last micro-batch is at hand.
CASES = [(place, options) for place in PLACES for options in ONE_MICRO_BATCH] + [
    (place, options) for place in PLACES[:2] for options in SEVERAL
]


@pytest.mark.parametrize(("place", "options"), CASES, ids=str)
@in_sessions(3)
def test_the_mean_is_exact_over_all_samples_of_the_step(
    peer: Peer, place: str, options: dict[str, int]
) -> None:
    for step in peer.session.steps(numbers(13, **options), epochs=1):
        samples = range(step.samples.start, step.samples.stop)
        means = train_with_means(peer, step, place)
        exact = Fraction(sum(samples), len(samples))
        squares = Fraction(sum(n * n for n in samples), len(samples))
        assert means.sample == float(exact)
        assert math.isclose(means["square"], float(squares), rel_tol=1e-15)
        assert dict(means).keys() == {"sample", "square"}
    peer.seat.exchange("done")


@in_sessions(3)
def test_means_are_bitwise_equal_on_every_rank(peer: Peer) -> None:
    found = []
    for step in peer.session.steps(numbers(7, batch_size=1), epochs=1):
        with step:
            for (inputs,) in step.batches():
                means = step.mean(odd=float(inputs.sum()) / 3.0)
                step.backward(peer.model(inputs).mean())
        found.append(means.odd.hex())
    assert all(other == found for other in peer.seat.exchange(found))
    assert peer.session._training.state.means.keys() == {"odd"}


def alone(place: Callable[[Step, Any], object]) -> None:
    def go(peer: Peer) -> None:
        step = next(peer.session.steps(numbers(4, batch_size=2), epochs=1))
        with step:
            (inputs,) = next(step.batches())
            place(step, inputs)
            step.backward(peer.model(inputs).mean())

    train_together(go)


def test_reading_a_mean_inside_the_block_is_refused() -> None:
    def read(step: Step, inputs: torch.Tensor) -> None:
        means = step.mean(loss=inputs.mean())
        for look in (lambda: means["loss"], lambda: means.loss):
            with pytest.raises(StepMisused, match="loss"):
                look()

    alone(read)


@in_sessions(1)
def test_a_mean_does_not_keep_the_graph_and_may_be_a_number(peer: Peer) -> None:
    for step in peer.session.steps(numbers(4, batch_size=2), epochs=1):
        with step:
            for (inputs,) in step.batches():
                loss = peer.model(inputs).mean()
                means = step.mean(loss=loss, hits=3, ratio=0.25, flag=True, half=loss.half())
                step.backward(loss)
        assert (means.hits, means.ratio, means.flag) == (3.0, 0.25, 1.0)
        assert not any(t.requires_grad for _, t in step._summed)


@in_sessions(2)
def test_means_of_a_void_block_are_nan_and_those_of_its_retry_are_exact(peer: Peer) -> None:
    found: list[float] = []
    lost = False
    for step in peer.session.steps(numbers(8, batch_size=2), epochs=1):
        with step:
            for (inputs,) in step.batches():
                means = step.mean(sample=inputs.mean())
                if step.index == 1 and not lost:
                    lost = True
                    peer.announce(2)
                step.backward(peer.model(inputs).mean())
        found.append(means.sample)
        assert math.isnan(means.sample) is not step.committed
    assert [n for n in found if not math.isnan(n)] == [1.5, 5.5]
    assert len(found) == 3
