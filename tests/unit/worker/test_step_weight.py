"""`step.backward(loss, weight=n)` gives the gradient of the exact mean over what n counts, such as
tokens, at any shares, numbers of micro-batches and kinds of gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.errors import StepMisused
from elastic.worker.step import Step
from tests.unit.worker.training_together import Peer, in_sessions, numbers, train_together

LENGTHS = [random.Random(7).choice((0, 1, 1, 2, 5, 30)) for _ in range(40)]
"""The tokens of each sample."""
OPTIONS = [
    {"batch_size": 2},
    {"batch_size": 3},
    {"batch_size": 1, "global_batch": 13},
    {"batch_size": 2, "global_batch": 7},
    {"batch_size": 1, "accumulate": 3},
]


def tokens_of(samples: list[int]) -> list[float]:
    """The value of each token of these samples."""
    return [math.sin(1.0 + 7 * n + t) for n in samples for t in range(LENGTHS[n])]


def token_loss(model: Any, samples: list[int]) -> tuple[torch.Tensor, int]:
    """The mean over the tokens of a micro-batch, and their number."""
    tokens = torch.tensor(tokens_of(samples), dtype=torch.float64).view(-1, 1)
    if not len(tokens):
        return (model(torch.zeros(1, 1, dtype=torch.float64)) * 0).sum(), 0
    return model(tokens).mean(), len(tokens)


def samples_in(inputs: torch.Tensor) -> list[int]:
    return [int(n) for n in inputs.flatten().tolist()]


def right_gradient(step: Step) -> float:
    """The gradient of the mean over all tokens of the global batch."""
    tokens = tokens_of(list(range(step.samples.start, step.samples.stop)))
    return math.fsum(tokens) / len(tokens) if tokens else 0.0


def gradient(peer: Peer) -> float:
    found = peer.model.module.weight.grad  # type: ignore[union-attr]
    assert isinstance(found, torch.Tensor)
    return float(found)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@in_sessions(3)
def test_the_gradient_is_that_of_the_mean_over_all_tokens(
    peer: Peer, options: dict[str, int]
) -> None:
    for step in peer.session.steps(numbers(40, shuffle=False, **options), epochs=2):
        with step:
            for (inputs,) in step.batches():
                loss, count = token_loss(peer.model, samples_in(inputs))
                means = step.mean(loss=loss, weight=count)
                step.backward(loss, weight=torch.tensor(count) if step.index % 2 else count)
            assert abs(gradient(peer) - right_gradient(step)) < 1e-12
            mean = right_gradient(step) * peer.weight[0]
            peer.update()
        assert means.keys() == {"loss"}
        if right_gradient(step):
            assert abs(means.loss - mean) < 1e-12
        else:
            assert math.isnan(means.loss)
    weights = peer.seat.exchange(peer.weight)
    assert all(other == weights[0] for other in weights)


@in_sessions(2)
def test_a_weighted_loss_needs_one_small_reduction_beside_the_gradients(peer: Peer) -> None:
    counts = []
    for step in peer.session.steps(numbers(8, batch_size=2), epochs=1):
        with step:
            for (inputs,) in step.batches():
                loss = peer.model(inputs).mean()
                if step.index:
                    step.mean(loss=loss)
                before = peer.session._training.collectives()
                step.backward(loss, weight=2)
                assert before is not None
                counts.append((peer.session._training.collectives() or 0) - before)
            peer.update()
    assert counts == [2, 2]


@in_sessions(2)
def test_gradients_are_of_the_usual_size_while_they_are_reduced(peer: Peer) -> None:
    """From the second step on: fp16 hooks and scaled losses stay in range."""
    sizes = []

    def hook(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        sizes.append(float(bucket.buffer().abs().max()))
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        work.wait()  # type: ignore[union-attr]
        found.set_result(bucket.buffer())
        return found

    hook.__annotations__.clear()  # torch knows its own types only
    peer.model.register_comm_hook(None, hook)  # type: ignore[operator]
    for step in peer.session.steps(numbers(12, batch_size=2), epochs=1):
        with step:
            for (inputs,) in step.batches():
                step.backward(peer.model(torch.ones_like(inputs)).mean(), weight=4096)
            assert gradient(peer) == 1.0
            peer.update()
    assert sizes == [2048.0, 1.0, 1.0]


@in_sessions(2)
def test_only_the_model_of_the_pass_has_its_gradients_corrected(peer: Peer) -> None:
    other = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(other.weight)
    second = peer.session.distribute(other)
    peer.session.track(second=second)
    rank = peer.seat.rank
    for step in peer.session.steps(numbers(8, batch_size=2, shuffle=False), epochs=1):
        with step:
            for (inputs,) in step.batches():
                step.backward(peer.model(torch.ones_like(inputs)).mean(), weight=1 + 2 * rank)
            for (inputs,) in step.batches():
                step.backward(second(torch.full_like(inputs, 1.0 + rank)).mean(), weight=3 - rank)
            assert gradient(peer) == 1.0
            assert math.isclose(float(other.weight.grad), (3 * 1.0 + 2 * 2.0) / 5)  # type: ignore[arg-type]
            peer.update()
            other.weight.grad = None


@in_sessions(2)
def test_a_step_without_tokens_has_a_gradient_of_zero(peer: Peer) -> None:
    for step in peer.session.steps(numbers(8, batch_size=2), epochs=1):
        with step:
            for (inputs,) in step.batches():
                means = step.mean(loss=math.nan, weight=0)
                step.backward(peer.model(inputs).mean(), weight=0)
            assert gradient(peer) == 0.0
            peer.update()
        assert math.isnan(means.loss)


@in_sessions(2)
def test_steps_with_and_without_weights_may_follow_each_other(peer: Peer) -> None:
    for step in peer.session.steps(numbers(24, batch_size=2), epochs=1):
        with step:
            for (inputs,) in step.batches():
                options = {"weight": 100.0} if step.index % 3 else {}
                step.backward(peer.model(torch.ones_like(inputs)).mean(), **options)
            assert gradient(peer) == 1.0
            peer.update()


def refused(match: str, *weights: Any, prepare: Callable[[Peer], object] = lambda _: None) -> None:
    def go(peer: Peer) -> None:
        data = numbers(4, batch_size=1, accumulate=len(weights))
        step = next(peer.session.steps(data, epochs=1))

        def do() -> None:
            with step:
                prepare(peer)
                for weight, (inputs,) in zip(weights, step.batches(), strict=True):
                    options = {} if weight is None else {"weight": weight}
                    step.backward(peer.model(inputs).mean(), **options)

        with pytest.raises(StepMisused, match=match):
            do()

    train_together(go)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "many", torch.tensor([-2.0])], ids=str)
def test_a_weight_that_is_no_count_is_refused(weight: Any) -> None:
    refused("finite and not negative", weight)


def test_a_weight_of_several_elements_is_refused() -> None:
    refused(r"of shape \(3,\)", torch.ones(3))


@pytest.mark.parametrize("weights", [(1, None), (None, 1)])
def test_a_weight_for_some_micro_batches_only_is_refused(weights: tuple[Any, ...]) -> None:
    refused("for each, or for none", *weights)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_weighted_losses_of_one_micro_batch_are_refused(micro_batches: int) -> None:
    def go(peer: Peer) -> None:
        step = next(
            peer.session.steps(numbers(4, batch_size=1, accumulate=micro_batches), epochs=1)
        )

        def do() -> None:
            with step:
                for (inputs,) in step.batches():
                    step.backward(peer.model(inputs).mean(), weight=2)
                    step.backward(peer.model(inputs).mean(), weight=2)

        with pytest.raises(StepMisused, match="two losses of one micro-batch"):
            do()

    train_together(go)


def test_a_weight_is_refused_while_gradients_of_an_earlier_step_are_left() -> None:
    def leave(peer: Peer) -> None:
        weight = peer.model.module.weight  # type: ignore[union-attr]
        weight.grad = torch.ones_like(weight)  # type: ignore[arg-type,assignment]

    refused("zero_grad", 1, prepare=leave)


def test_gradients_that_were_set_to_zero_are_not_left_over() -> None:
    def go(peer: Peer) -> None:
        weight = peer.model.module.weight  # type: ignore[union-attr]
        for step in peer.session.steps(numbers(4, batch_size=2), epochs=1):
            weight.grad = torch.zeros_like(weight)  # type: ignore[arg-type,assignment]
            with step:
                for (inputs,) in step.batches():
                    step.backward(peer.model(torch.ones_like(inputs)).mean(), weight=3)
                assert gradient(peer) == 1.0
                peer.optimizer.step()

    train_together(go)
