"""The rules scale the learning rate by the batch ratio, and a ramp never jumps."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.learning_rate import LinearScaling, NoScaling, Ramp, ScalingRule, SqrtScaling

FACTORS = st.floats(min_value=1e-3, max_value=1e3)
RAMPS = st.builds(
    Ramp,
    start_factor=FACTORS,
    end_factor=FACTORS,
    start_step=st.integers(0, 50),
    steps=st.integers(0, 50),
)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(LinearScaling(), 4.0), (SqrtScaling(), 2.0), (NoScaling(), 1.0)],
)
def test_each_rule_scales_by_a_valid_batch_ratio(rule: ScalingRule, expected: float) -> None:
    assert rule.factor(4.0) == expected
    assert rule.factor(1.0) == 1.0
    for not_a_ratio in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="batch_ratio"):
            rule.factor(not_a_ratio)


def test_no_scaling_needs_no_warm_up() -> None:
    assert (NoScaling().reference_world, NoScaling().warmup_steps) == (1, 0)


@given(ramp=RAMPS, step=st.integers(0, 120))
def test_a_ramp_runs_from_start_to_end_in_equal_parts(ramp: Ramp, step: int) -> None:
    end_step = ramp.start_step + ramp.steps
    if step >= end_step:
        assert ramp.factor(step) == ramp.end_factor
    elif step <= ramp.start_step:
        assert ramp.factor(step) == ramp.start_factor
    else:
        change = ramp.factor(step) - ramp.factor(step - 1)
        assert change == pytest.approx((ramp.end_factor - ramp.start_factor) / ramp.steps, abs=1e-9)


@given(ramp=RAMPS, step=st.integers(0, 120), end_factor=FACTORS, steps=st.integers(1, 50))
def test_a_new_target_continues_from_the_factor_in_force(
    ramp: Ramp, step: int, end_factor: float, steps: int
) -> None:
    turned = ramp.retarget(step, end_factor=end_factor, steps=steps)
    assert turned.factor(step) == ramp.factor(step)
    assert turned.factor(max(step, ramp.start_step + ramp.steps) + steps) == end_factor


@given(ramp=RAMPS, step=st.integers(0, 120))
def test_an_unchanged_target_does_not_delay_a_ramp(ramp: Ramp, step: int) -> None:
    assert ramp.retarget(step, end_factor=ramp.end_factor, steps=10) is ramp


def test_without_warm_up_a_new_target_is_in_force_at_once() -> None:
    ramp = Ramp(start_factor=1.0, end_factor=1.0, start_step=0, steps=0)
    assert ramp.retarget(7, end_factor=4.0, steps=0).factor(7) == 4.0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: LinearScaling(reference_world=0), "reference_world"),
        (lambda: LinearScaling(warmup_steps=-1), "warmup_steps"),
        (lambda: SqrtScaling(reference_world=0), "reference_world"),
        (lambda: SqrtScaling(warmup_steps=-1), "warmup_steps"),
        (lambda: Ramp(start_factor=0.0, end_factor=1.0, start_step=0, steps=1), "start_factor"),
        (lambda: Ramp(start_factor=1.0, end_factor=math.inf, start_step=0, steps=1), "end_factor"),
        (lambda: Ramp(start_factor=1.0, end_factor=1.0, start_step=-1, steps=1), "start_step"),
        (lambda: Ramp(start_factor=1.0, end_factor=1.0, start_step=0, steps=-1), "steps"),
    ],
)
def test_an_error_names_the_impossible_argument(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} must"):
        call()
