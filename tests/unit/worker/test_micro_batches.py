"""Ranks with different numbers of micro-batches: samples, gradients, buffers and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from elastic.errors import StepMisused
from elastic.worker.data_loader import DataLoader
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.step import Step
from tests.unit.worker.together import Seat, run_together
from tests.unit.worker.training_together import Peer, in_sessions, numbers

LENGTH = 26
UNEVEN: dict[str, Any] = {"batch_size": 1, "global_batch": 8}  # 3, 3, 2 for three; then 2: 1, 1, 0


def squares() -> DataLoader:
    """Return a shuffled loader whose sample i is (i, i * i)."""
    numbers = torch.arange(float(LENGTH), dtype=torch.float64).unsqueeze(1)
    return DataLoader(TensorDataset(numbers, numbers**2), seed=5, **UNEVEN)


@in_sessions(3)
def test_each_sample_counts_once_and_only_a_rank_without_samples_has_a_stand_in(peer: Peer) -> None:
    seen: list[tuple[int, int]] = []
    stand_ins = 0
    for step in peer.session.steps(squares(), epochs=2):
        with step:
            for name in ("counts", "positions", "indices"):
                with pytest.raises(StepMisused, match=name):
                    getattr(step, name)
            for found, square in step.batches():
                step.backward(peer.model(found).mean())
                assert step.indices == found.flatten().int().tolist()
                assert [i * i for i in step.indices] == square.flatten().tolist()
                assert set(step.positions) <= set(range(step.samples.start, step.samples.stop))
                if step.counts:
                    seen += [(step.epoch, i) for i in step.indices]
                stand_ins += not step.counts
                assert step.counts == bool(step.share)
            peer.optimizer.zero_grad()
    everyone = sorted(tuple(pair) for part in peer.seat.exchange(seen) for pair in part)
    assert everyone == [(epoch, i) for epoch in range(2) for i in range(LENGTH)]
    assert sum(peer.seat.exchange(stand_ins)) == 2  # in the last step of each epoch


class Scaled(nn.Module):
    """A model with a buffer, which DDP broadcasts, and a layer for every other sample only."""

    def __init__(self, seed: int, *, optional: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(1, 3).double(), nn.Linear(3, 1).double()
        self.optional = nn.Linear(3, 1).double() if optional else None
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs / LENGTH)) * self.scale
        outputs: torch.Tensor = self.second(hidden)
        if self.optional is not None and int(inputs.flatten()[0]) % 2:
            outputs = outputs + self.optional(hidden)
        return outputs


def losses(models: list[nn.Module], inputs: torch.Tensor) -> list[torch.Tensor]:
    """One loss of each model. The second's is that of the first's outputs, as in a GAN."""
    first = models[0](inputs)
    return [first.square().mean(), *[(m(first.detach()) - 1.0).square().mean() for m in models[1:]]]


def trained_alone(models: list[nn.Module]) -> list[torch.Tensor]:
    """The parameters after training on one process, with plain torch and whole batches."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for _ in range(2):
        samples = torch.arange(float(LENGTH), dtype=torch.float64).unsqueeze(1)
        for batch in samples.split(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for sample in batch:
                for loss in losses(models, sample.unsqueeze(0)):
                    (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
    return [p.detach() for m in models for p in m.parameters()]


@pytest.mark.parametrize("equal_passes", [False, True])
@pytest.mark.parametrize(
    ("count", "optional", "options"),
    [
        (1, False, {}),
        (1, True, {"find_unused_parameters": True}),
        (1, False, {"static_graph": True}),
        (2, False, {}),
        (2, False, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}),
    ],
    ids=["plain", "unused", "static graph", "two models", "small buckets"],
)
@in_sessions(3)
def test_the_gradient_is_exact_if_ranks_have_different_numbers_of_micro_batches(
    peer: Peer, equal_passes: bool, count: int, optional: bool, options: dict[str, Any]
) -> None:
    models = [
        peer.session.distribute(Scaled(seed, optional=optional), **options) for seed in range(count)
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    peer.session.track(
        **{f"m{i}": m for i, m in enumerate(models)},
        **{f"o{i}": o for i, o in enumerate(optimizers)},
    )
    for step in peer.session.steps(numbers(LENGTH, equal_passes=equal_passes, **UNEVEN), epochs=2):
        with step:
            for (inputs,) in step.batches():
                first = models[0](inputs)
                step.backward(first.square().mean())
                for model in models[1:]:
                    step.backward((model(first.detach()) - 1.0).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    expected = trained_alone([Scaled(seed, optional=optional) for seed in range(count)])
    found = [p.detach() for model in models for p in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@in_sessions(3)
def test_buffers_are_rank_zeros_at_the_start_of_each_step(peer: Peer) -> None:
    """As with DDP: its broadcast comes before a step's first forward pass on every rank."""
    model = peer.session.distribute(Scaled(0))
    peer.session.track(scaled=model)
    for step in peer.session.steps(numbers(LENGTH, **UNEVEN), epochs=1):
        with step:
            for number, (inputs,) in enumerate(step.batches()):
                loss = model(inputs).square().mean()
                if number == 0:
                    assert model.scale == 0.5 + step.index
                step.backward(loss)
            model.zero_grad()
            with torch.no_grad():
                model.scale += 1.0 + peer.seat.rank


@in_sessions(3)
def test_means_are_exact_if_each_micro_batch_gives_values_before_and_after_its_backward_pass(
    peer: Peer,
) -> None:
    for step in peer.session.steps(numbers(8, batch_size=1, global_batch=4), epochs=1):
        with step:
            for (inputs,) in step.batches():
                step.mean(before=inputs.mean())
                step.backward(peer.model(inputs).mean())
                means = step.mean(after=inputs.mean())
            peer.update()
        expected = (step.samples.start + step.samples.stop - 1) / 2
        assert (means.before, means.after) == (expected, expected)


@in_sessions(2)
def test_a_collective_for_a_micro_batch_is_refused_unless_numbers_are_equal(peer: Peer) -> None:
    def gather(step: Step) -> None:
        with step:
            for (inputs,) in step.batches():
                counted = torch.tensor(float(step.counts) * len(inputs))
                dist.all_reduce(counted)
                seen.append(counted.item())
                step.backward(peer.model(inputs).mean())
            peer.update()

    seen: list[float] = []
    for step in peer.session.steps(
        numbers(6, batch_size=1, equal_passes=True, global_batch=3), epochs=1
    ):
        gather(step)
    assert sum(seen) == 6.0
    step = next(peer.session.steps(numbers(6, batch_size=1, accumulate=2), epochs=1))
    with pytest.raises(StepMisused, match="equal_passes=True"):
        gather(step)  # though the numbers are equal in this step
    peer.seat.exchange("done")


@in_sessions(3)
def test_a_rank_with_more_micro_batches_does_not_look_slow(peer: Peer) -> None:
    """Its passes beyond those of the others count as a wait, like that of the others for them."""
    pace = peer.session._training.clock.pace
    for step in peer.session.steps(numbers(14, batch_size=1, global_batch=7), epochs=1):
        waited, took = pace.wait_s, []
        with step:
            for (inputs,) in step.batches():
                began = time.monotonic()
                torch.linalg.svd(torch.ones(150, 150))
                took.append(time.monotonic() - began)
                step.backward(peer.model(inputs).mean())
            peer.update()
        assert len(took) == (3 if peer.seat.rank == 0 else 2)
        if len(took) == 3:
            assert pace.wait_s - waited > sum(took) / 3 * 0.99


def test_a_module_whose_passes_communicate_is_recognised() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    assert DistributedModel(inner, {}).communicates_in_passes()
    assert not DistributedModel(nn.Sequential(nn.BatchNorm1d(2)), {}).communicates_in_passes()


def batches_of(count: int) -> DataLoader:
    """Steps of `count` micro-batches for one worker, and of one for `count` workers."""
    return numbers(12, batch_size=1, global_batch=count)


ZEROED = {
    "by the optimizer": lambda peer: peer.optimizer.zero_grad(),
    "in place": lambda peer: peer.optimizer.zero_grad(set_to_none=False),
    "by the model": lambda peer: peer.model.zero_grad(),
}


@pytest.mark.parametrize("how", ZEROED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_zeroed_for_each_micro_batch_are_refused_in_every_group(
    how: str, world_size: int
) -> None:
    """As in torch's usual loop: right with one micro-batch, and wrong with two."""

    @in_sessions(world_size)
    def go(peer: Peer) -> None:
        def train() -> None:
            for step in peer.session.steps(batches_of(2), epochs=1):
                with step:
                    for (inputs,) in step.batches():
                        ZEROED[how](peer)
                        step.backward(peer.model(inputs).mean())
                    peer.optimizer.step()

        with pytest.raises(StepMisused, match="zeroed"):
            train()
        assert peer.session.committed == (world_size == 2)
        peer.seat.exchange("done")

    go()


@pytest.mark.parametrize("place", ["above", "below"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_zeroed_outside_of_the_loop_are_allowed(place: str, world_size: int) -> None:
    @in_sessions(world_size)
    def go(peer: Peer) -> None:
        for step in peer.session.steps(batches_of(2), epochs=1):
            with step:
                if place == "above":
                    peer.optimizer.zero_grad(set_to_none=False)
                for (inputs,) in step.batches():
                    step.backward(peer.model(inputs).mean())
                peer.optimizer.step()
                if place == "below":
                    peer.optimizer.zero_grad()

    go()


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_steps_for_each_micro_batch_is_refused_in_every_group(
    world_size: int,
) -> None:
    @in_sessions(world_size)
    def go(peer: Peer) -> None:
        def train() -> None:
            for step in peer.session.steps(batches_of(2), epochs=1):
                with step:
                    for (inputs,) in step.batches():
                        step.backward(peer.model(inputs).mean())
                        peer.optimizer.step()

        with pytest.raises(StepMisused, match=r"SGD\.step\(\) was called inside of `for"):
            train()
        assert peer.session.committed == 0
        peer.seat.exchange("done")

    go()


@in_sessions(1)
def test_an_optimizer_may_step_in_a_loop_that_has_one_turn_in_every_group(peer: Peer) -> None:
    for step in peer.session.steps(numbers(4, batch_size=4, global_batch=4), epochs=2):
        with step:
            for (inputs,) in step.batches():
                peer.optimizer.zero_grad()
                step.backward(peer.model(inputs).mean())
                peer.optimizer.step()
    assert peer.session.committed == 2


@in_sessions(2)
def test_a_forward_pass_without_a_backward_pass_is_refused_or_right(peer: Peer) -> None:
    """DDP's reducer waits for gradients after it, also in a later backward pass without a sync."""

    def train(graph: bool) -> None:
        for step in peer.session.steps(numbers(LENGTH, batch_size=1, accumulate=2), epochs=1):
            with step:
                for (inputs,) in step.batches():
                    step.backward(peer.model(inputs).square().mean())
                    with torch.set_grad_enabled(graph):
                        peer.model(inputs)  # as to log predictions
                peer.update()

    train(False)
    committed = peer.session.committed
    with pytest.raises(StepMisused, match="no_grad"):
        train(True)
    assert peer.session.committed <= committed + 1
    peer.seat.exchange("done")


@in_sessions(3)
def test_two_passes_over_uneven_micro_batches_are_exact(peer: Peer) -> None:
    """As in SAM: the second pass takes the same micro-batches."""
    model = peer.session.distribute(Scaled(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peer.session.track(scaled=model, sgd=optimizer)
    for step in peer.session.steps(numbers(LENGTH, **UNEVEN), epochs=2):
        with step:
            for _ in range(2):
                for (inputs,) in step.batches():
                    step.backward(0.5 * model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    found = [p.detach() for p in model.parameters()]
    torch.testing.assert_close(found, trained_alone([Scaled(0)]), rtol=1e-12, atol=1e-14)


def test_a_worker_joins_a_group_whose_steps_have_several_micro_batches() -> None:
    """Buffers were broadcast at once in the step before, for all of its passes."""

    def script(peer: Peer, at_second: Callable[[], None]) -> None:
        peer.model.register_buffer("scale", torch.tensor(1.0))
        for step in peer.session.steps(numbers(8, batch_size=1, global_batch=4), epochs=2):
            if step.index:
                at_second()
            with step:
                for (inputs,) in step.batches():
                    step.backward(peer.model(inputs).mean())
                peer.update()
        assert peer.weight == [-14.0]

    def veteran(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(1, 0)
        script(peer, lambda: peer.announce(2))

    def newcomer(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(2)
        script(peer, lambda: None)

    run_together(veteran, newcomer)
