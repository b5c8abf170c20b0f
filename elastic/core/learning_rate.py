"""Scales the learning rate with the global batch: scaling rules, and ramps between their factors.

Every result is a factor on the learning rate that the user or the user's scheduler has set.

No momentum correction is applied, and torch.optim.SGD needs none. Goyal et al. 2017
(arXiv:1706.02677, section 3, "Momentum correction") write momentum in two ways: equation 9 keeps
the learning rate out of the velocity (u = m*u + g; w -= lr*u), equation 10 absorbs it
(v = m*v + lr*g; w -= v), and only the second must rescale v when lr changes (their remark 2).
PyTorch implements equation 9, so its velocity holds gradients alone and a new lr applies in full
from the next step on. Adam's moments do not contain lr either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scaling:
    reference_world: int = 1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_at_least("reference_world", self.reference_world, 1)
        _require_at_least("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling(_Scaling):
    """k times the global batch means k times the learning rate: the usual rule for SGD.

    Pass it to `session.scale_lr`. The rule is that of Goyal et al. 2017, arXiv:1706.02677,
    section 2.1; the ramp is their gradual warm-up of section 2.2.

    reference_world: the world size that the learning rate was chosen for, at least 1.
    warmup_steps: the steps that the ramp takes after every change of the factor, at least 0. With 0
    the new rate applies at once.

    Raises ValueError if an argument is too small.
    """

    def factor(self, batch_ratio: float) -> float:
        """The factor for `batch_ratio` = global batch now / global batch at `reference_world`.
        ValueError unless that is positive and finite."""
        _require_positive("batch_ratio", batch_ratio)
        return batch_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class SqrtScaling(_Scaling):
    """k times the global batch means sqrt(k) times the learning rate: the variance of an update
    stays the same.

    Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741. The arguments and errors
    are those of LinearScaling.
    """

    def factor(self, batch_ratio: float) -> float:
        """The factor for `batch_ratio` = global batch now / global batch at `reference_world`.
        ValueError unless that is positive and finite."""
        _require_positive("batch_ratio", batch_ratio)
        return math.sqrt(batch_ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoScaling:
    """The learning rate does not depend on the global batch."""

    reference_world: ClassVar[int] = 1
    warmup_steps: ClassVar[int] = 0

    def factor(self, batch_ratio: float) -> float:
        """1.0. ValueError unless `batch_ratio` is positive and finite."""
        _require_positive("batch_ratio", batch_ratio)
        return 1.0


ScalingRule: TypeAlias = LinearScaling | SqrtScaling | NoScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class Ramp:
    """A factor that changes linearly from one value to another, and is constant before and after.

    It is `start_factor` up to step `start_step`, and `end_factor` from `start_step + steps` on.
    Raises ValueError unless both factors are positive and finite, and both step counts at least 0.
    """

    start_factor: float
    end_factor: float
    start_step: int
    steps: int

    def __post_init__(self) -> None:
        _require_positive("start_factor", self.start_factor)
        _require_positive("end_factor", self.end_factor)
        _require_at_least("start_step", self.start_step, 0)
        _require_at_least("steps", self.steps, 0)

    def factor(self, step: int) -> float:
        """The factor that applies at step `step`."""
        elapsed = step - self.start_step
        if elapsed >= self.steps:
            return self.end_factor
        if elapsed <= 0:
            return self.start_factor
        return self.start_factor + (self.end_factor - self.start_factor) * elapsed / self.steps

    def retarget(self, step: int, *, end_factor: float, steps: int) -> Ramp:
        """The ramp from the factor that applies at `step` to `end_factor`, within `steps` steps.

        Returns this ramp itself if it leads to `end_factor` already: a change that does not move
        the target must not delay it. Raises ValueError as the constructor does.
        """
        if end_factor == self.end_factor:
            return self
        return Ramp(
            start_factor=self.factor(step), end_factor=end_factor, start_step=step, steps=steps
        )


def retarget(ramp: Ramp | None, rule: ScalingRule, batch_ratio: float, step: int) -> Ramp:
    """The ramp to follow from `step` on.

    batch_ratio: the present global batch / the global batch at the rule's `reference_world`.
    ramp: the ramp followed so far; None at the start of a job, which begins at the unscaled rate.
    """
    if ramp is None:
        ramp = Ramp(start_factor=1.0, end_factor=1.0, start_step=step, steps=0)
    return ramp.retarget(step, end_factor=rule.factor(batch_ratio), steps=rule.warmup_steps)


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}")
