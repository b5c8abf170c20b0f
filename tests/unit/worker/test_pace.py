"""How long the parts of a step take, and when the last local gradient is ready."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from elastic.worker.steps_clock import Arrival, CoreWait, Pace, StepsClock, TimeSpent, window_steps


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def hooks(model: nn.Module) -> list[str]:
    return [
        n for n, p in model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)
    ]


def test_one_hook_remains_on_the_parameter_whose_gradient_comes_last() -> None:
    model, arrival = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), Arrival()
    arrival.watch(list(model.parameters()))
    assert len(hooks(model)) == 4
    backward(model)
    arrival.learned()
    (left,) = hooks(model)
    assert left.startswith("0."), "the first layer's gradients come last"
    before = time.monotonic()
    backward(model)
    assert before < arrival.at <= time.monotonic()


def test_each_backward_pass_of_a_step_has_an_arrival() -> None:
    """Otherwise a rank that computes slowly would hide behind the first of several passes."""
    models = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pace = Pace(TimeSpent())
    pace.arrival.watch([p for model in models for p in model.parameters()])
    for committed in range(3):
        for model in models:
            began = time.monotonic()
            backward(model)
            pace.reduced(began, time.monotonic())
        if pace.arrival.learning:
            pace.arrival.learned()
        assert pace.arrivals == pace.reductions == 2 * (committed + 1)
    assert [len(hooks(model)) for model in models] == [1, 1]


def test_a_model_that_is_frozen_at_the_end_of_a_step_keeps_its_hook() -> None:
    """Scripts freeze a GAN's models in turn, and a frozen parameter takes no new hook."""
    models, arrival = (nn.Linear(4, 1), nn.Linear(4, 1)), Arrival()
    arrival.watch([p for model in models for p in model.parameters()])
    for model in models:
        backward(model)
        arrival.reduced()
    models[0].requires_grad_(False)
    arrival.learned()
    models[0].requires_grad_(True)
    before = time.monotonic()
    backward(models[0])
    assert before < arrival.at


def test_the_same_parameters_are_not_learned_again_in_the_next_group() -> None:
    model, arrival = nn.Linear(4, 1), Arrival()
    arrival.watch(list(model.parameters()))
    backward(model)
    arrival.learned()
    arrival.watch(list(model.parameters()))
    assert not arrival.learning
    assert len(hooks(model)) == 1


def test_the_last_gradient_is_learned_again_after_layers_were_frozen() -> None:
    """Another gradient comes last now: no arrival is seen until each parameter has a hook again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pace = Pace(TimeSpent())
    pace.arrival.watch(list(model.parameters()))

    def step(committed: int) -> None:
        began = time.monotonic()
        backward(model)
        pace.reduced(began, time.monotonic())
        if pace.arrival.learning:
            pace.arrival.learned()
        pace.put_down(committed, 0.1, 2)

    step(8)
    assert pace.arrivals == pace.reductions == 1
    model[0].requires_grad_(False)
    step(16)
    step(24)
    step(32)
    assert (pace.arrivals, pace.reductions) == (3, 4)


def test_arrival_stops_learning_after_many_attempts() -> None:
    model, arrival = nn.Linear(4, 1), Arrival()
    arrival.watch(list(model.parameters()))
    for _ in range(20):
        arrival.look_again()
    assert not arrival.learning
    assert not hooks(model)


@pytest.mark.parametrize(
    ("step_s", "world", "steps"),
    [(0.0, 3, 8), (1.0, 3, 8), (0.075, 3, 8), (0.002, 3, 256), (0.0, 1000, 8), (0.1, 1000, 64)],
)
def test_sums_are_taken_at_most_twice_a_second(step_s: float, world: int, steps: int) -> None:
    assert window_steps(step_s, world) == steps


def test_the_sums_hold_the_time_of_each_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock, woken = StepsClock(), list[int]()
    clock.pace.on_window = lambda: woken.append(1)
    clock.entered(1, join_s=0.0, sync_s=0.0, world_size=2)
    for committed in range(1, 17):
        now[0] += 0.1  # between steps
        clock.begin()
        clock.spent.fetched(now[0], now[0] + 0.2)
        now[0] += 0.2
        clock.pace.transfer_s += 0.3
        now[0] += 0.3
        began = now[0]
        clock.pace.arrival.at = began + 0.4
        now[0] += 0.4 + 0.5
        clock.pace.reduced(began, now[0])
        now[0] += 0.6
        clock.pace.after_s += now[0] - clock.pace.reduced_at
        clock.commit(4, committed)
        if committed == 8:
            first = clock.pace.to_pb()
    last = clock.pace.to_pb()
    assert first is not None
    assert last is not None
    assert (first.committed, last.committed, last.steps - first.steps) == (8, 16, 8)
    assert len(woken) == 2
    for name, each_s in {
        "total_s": 2.1,
        "data_s": 0.2,
        "transfer_s": 0.3,
        "wait_s": 0.5,
        "after_s": 0.6,
        "between_s": 0.1,
    }.items():
        assert (getattr(last, name) - getattr(first, name)) / 8 == pytest.approx(each_s), name
    assert last.arrivals == last.reductions == 16


def test_core_wait_does_not_decrease() -> None:
    wait = CoreWait()
    before = wait.seconds()
    assert 0.0 <= before <= wait.seconds()


def test_core_wait_is_zero_without_the_kernels_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refused)
    assert CoreWait().seconds() == 0.0
