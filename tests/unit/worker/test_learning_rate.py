"""The factor is on the rates during an optimizer step, and at no other time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.core.learning_rate import LinearScaling, SqrtScaling, retarget
from elastic.worker.learning_rate import ScaledOptimizer


def one_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return parameter


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_the_step_is_scaled_and_the_rate_is_not() -> None:
    parameter = one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    ScaledOptimizer(optimizer, lambda: 3.0)
    optimizer.step()
    assert parameter.item() == -1.5
    assert rates(optimizer) == [0.5]


def test_each_group_has_its_own_rate() -> None:
    first, second = one_parameter(), one_parameter()
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    ScaledOptimizer(optimizer, lambda: 2.0)
    optimizer.step()
    assert (first.item(), second.item()) == (-1.0, -0.5)
    assert rates(optimizer) == [0.5, 0.25]


def test_schedulers_see_the_unscaled_rate() -> None:
    """One that multiplies the rate it finds would compound the factor otherwise."""
    plain = torch.optim.SGD([one_parameter()], lr=1.0)
    scaled = torch.optim.SGD([one_parameter()], lr=1.0)
    ScaledOptimizer(scaled, lambda: 7.0)
    schedulers = [
        torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
        for optimizer in (plain, scaled)
    ]
    for _ in range(3):
        for optimizer, scheduler in zip((plain, scaled), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        assert rates(scaled) == rates(plain)


@pytest.mark.parametrize("shared", [False, True])
def test_a_rate_that_is_a_tensor_stays_that_tensor(shared: bool) -> None:
    """Captured graphs read it. torch gives the same tensor to all groups without their own."""
    first, second = one_parameter(), one_parameter()
    rate = torch.tensor(0.5)
    own = {} if shared else {"lr": torch.tensor(0.25)}
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], **own}], lr=rate)
    before = [group["lr"] for group in optimizer.param_groups]
    ScaledOptimizer(optimizer, lambda: 3.0)
    for _ in range(2):
        optimizer.step()
    assert (first.item(), second.item()) == (-3.0, -3.0 if shared else -1.5)
    assert rates(optimizer) == [0.5, 0.5 if shared else 0.25]
    after = [group["lr"] for group in optimizer.param_groups]
    assert all(a is b for a, b in zip(before, after, strict=True))


class Failing(torch.optim.SGD):
    """As an optimizer whose group is lost under it."""

    fails = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("lost")
        super().step(closure)  # type: ignore[arg-type]


def test_rates_are_restored_when_the_step_raised() -> None:
    optimizer = Failing([one_parameter()], lr=0.5)
    scaled = ScaledOptimizer(optimizer, lambda: 3.0)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    scaled.restore()
    assert rates(optimizer) == [0.5]
    scaled.restore()
    assert rates(optimizer) == [0.5]


def test_a_script_that_goes_on_after_an_error_does_not_compound_the_factor() -> None:
    parameter = one_parameter()
    optimizer = Failing([parameter], lr=0.5)
    ScaledOptimizer(optimizer, lambda: 3.0)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert parameter.item() == -1.5
    assert rates(optimizer) == [0.5]


def test_the_factor_is_asked_at_each_step() -> None:
    parameter = one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    factors = iter([1.0, 2.0, 4.0])
    ScaledOptimizer(optimizer, lambda: next(factors))
    for _ in range(3):
        optimizer.step()
    assert parameter.item() == -7.0


def test_a_job_begins_at_the_unscaled_rate_and_ramps() -> None:
    ramp = retarget(None, LinearScaling(warmup_steps=10), 3.0, step=5)
    assert [ramp.factor(step) for step in (5, 10, 15, 100)] == [1.0, 2.0, 3.0, 3.0]
    later = retarget(ramp, SqrtScaling(warmup_steps=2), 4.0, step=10)
    assert [later.factor(step) for step in (10, 11, 12)] == [2.0, 2.0, 2.0]
    back = retarget(ramp, LinearScaling(warmup_steps=2), 1.0, step=10)
    assert [back.factor(step) for step in (10, 11, 12)] == [2.0, 1.5, 1.0]
    assert retarget(ramp, LinearScaling(warmup_steps=10), 3.0, step=8) is ramp
