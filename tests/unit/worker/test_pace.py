"""What the parts of a step take, and when the last local gradient is ready."""

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


def test_one_hook_is_left_on_the_gradient_that_comes_last() -> None:
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


def test_each_of_several_backward_passes_of_a_step_has_an_arrival() -> None:
    """Else a rank that computes slowly would hide behind the first of them."""
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


def test_a_model_that_takes_no_gradients_at_the_end_of_a_step_keeps_its_hook() -> None:
    """Scripts toggle a GAN's models in turn: no new hook can be had of one that is off."""
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


def test_the_same_parameters_in_another_group_are_not_learned_again() -> None:
    model, arrival = nn.Linear(4, 1), Arrival()
    arrival.watch(list(model.parameters()))
    backward(model)
    arrival.learned()
    arrival.watch(list(model.parameters()))
    assert not arrival.learning
    assert len(hooks(model)) == 1


def test_frozen_layers_are_noticed_and_learned_anew() -> None:
    """Which gradient comes last has changed: no arrival is seen, until it is looked for again."""
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


def test_a_model_whose_last_gradient_is_never_the_same_is_let_be() -> None:
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
def test_sums_are_put_down_twice_a_second_at_most(step_s: float, world: int, steps: int) -> None:
    assert window_steps(step_s, world) == steps


def test_sums_are_of_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_kernel_tells_for_how_long_there_was_no_core() -> None:
    wait = CoreWait()
    before = wait.seconds()
    assert 0.0 <= before <= wait.seconds()


def test_without_the_kernels_word_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refused)
    assert CoreWait().seconds() == 0.0
