"""Makes a script's steps last, so that a kill can come in each phase of one.

A member pauses before and after each backward and each optimizer's step, and at the ends of the
block, each time for another while, until the file OUT/calm exists.
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

_PART = 0.4  # of what is left of a step's time, at most, at each pause
_SLOWER = ((0.5, 4.0), (0.75, 16.0), (0.875, 64.0))
"""From which share of the steps on pauses are so many times longer."""


class Pauses:
    """Of this process.

    pace_s: most of what the pauses of one step add up to.
    steps: how many there are. The more of them are done, the longer the pauses, lest the job end
    before its last kill, or before a newcomer that takes long to come.
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
    """Have every step of this process pause."""
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
