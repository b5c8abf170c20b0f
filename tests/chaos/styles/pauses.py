"""Slows a script's steps down, so that a kill can hit each phase of a step.

A member pauses for random times before and after each backward and each optimizer's step, and at
both ends of the block, until the file OUT/calm exists.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import elastic

_PART = 0.4  # the largest share that a pause takes of the time that the step has left for pauses
_SLOWER = ((0.5, 4.0), (0.75, 16.0), (0.875, 64.0))
"""(share of the steps, factor): once this share is done, pauses are longer by the factor."""


class Pauses:
    """The pauses of this process.

    pace_s: the most that the pauses of one step add up to at first.
    steps: how many the job has. Pauses grow towards the end, so that the job does not end before
    its last kill or before a slow newcomer joins.
    """

    def __init__(self, out: Path, pace_s: float, steps: int) -> None:
        self._calm = str(out / "calm")
        self._pace_s, self._steps = pace_s, max(1, steps)
        self._left_s = 0.0
        self._random = random.Random(os.getpid())

    def begin(self, step: elastic.Step) -> None:
        calm = os.path.exists(self._calm)
        done = step.index / self._steps
        slower = max((times for share, times in _SLOWER if done >= share), default=1.0)
        self._left_s = 0.0 if calm else self._pace_s * slower

    def pause(self, *_: Any) -> None:
        while_s = self._random.uniform(0.0, _PART * self._left_s)
        self._left_s -= while_s
        if while_s:
            time.sleep(while_s)


def install(pauses: Pauses) -> None:
    """Make every step of this process pause."""
    enter, leave = elastic.Step.__enter__, elastic.Step.__exit__
    backward = elastic.Step.backward

    def paused_enter(self: elastic.Step) -> elastic.Step:
        pauses.begin(self)
        entered = enter(self)
        pauses.pause()
        return entered

    def paused_exit(self: elastic.Step, *error: Any) -> bool:
        if error[0] is None:
            pauses.pause()
        return leave(self, *error)

    def paused_backward(self: elastic.Step, *arguments: Any, **named: Any) -> None:
        pauses.pause()
        backward(self, *arguments, **named)
        pauses.pause()

    elastic.Step.__enter__ = paused_enter  # type: ignore[method-assign]
    elastic.Step.__exit__ = paused_exit  # type: ignore[method-assign]
    elastic.Step.backward = paused_backward  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(pauses.pause)
    register_optimizer_step_post_hook(pauses.pause)
