"""Trains as `elastic_train.py` does, and writes down where elastic's own time of a step goes.

The calls by which the script, torch and elastic's parts enter each other are timed, each without
the calls inside of it. What DDP, autograd and the loader take is not elastic's own.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import elastic
from benchmarks.scripts import elastic_train
from benchmarks.scripts.arguments import parse
from elastic.worker.data_loader import BatchPlanner
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.reductions import Reductions
from elastic.worker.state.undo import Undo
from elastic.worker.step import Step
from elastic.worker.steps_clock import StepsClock
from elastic.worker.training import Training

FILE = "own_time.json"
"""Seconds by part, in the directory of --log-dir."""
_NOT_OWN = "not elastic's"
_SKIPPED = 150  # steps, which learn more often than later ones
_PARTS: list[tuple[type[Any], str, str]] = [
    (Undo, "begin", "undo: begin"),
    (Undo, "before_backward", "undo: gradients"),
    (Undo, "reduced", "undo: look"),
    (Undo, "end", "undo: commit"),
    *((Reductions, n, "reductions") for n in ("begin_block", "begin_pass", "end_pass")),
    *((Reductions, n, "reductions") for n in ("are_usual", "end_block")),
    (Training, "next_plan", "next step"),
    (Training, "_optimizer_steps", "optimizer hooks"),
    (Training, "_optimizer_stepped", "optimizer hooks"),
    (StepsClock, "commit", "clock"),
    (StepsClock, "begin", "clock"),
    (Step, "__init__", "next step"),
    (Step, "__enter__", "enter"),
    (Step, "__exit__", "commit"),
    (Step, "backward", "backward"),
    (Step, "report", "report"),
    (DistributedModel, "forward", "forward"),
    (BatchPlanner, "fetch", _NOT_OWN),
    (DistributedDataParallel, "forward", _NOT_OWN),
    (torch.Tensor, "backward", _NOT_OWN),
]


class Probes:
    """Times of parts, by step, in seconds."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, inside = time.perf_counter, self._inside

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            now = clock()
            if inside:
                self._spent[inside[-1]] += now - self._since
            inside.append(part)
            self._since = clock()
            try:
                return function(*arguments, **named)
            finally:
                now = clock()
                self._spent[part] += now - self._since
                inside.pop()
                self._since = clock()

        return call

    def step_ends(self) -> None:
        self.steps.append(dict(self._spent))
        self._spent.clear()


def main() -> None:
    probes = Probes()
    for owner, method, part in _PARTS:
        setattr(owner, method, probes.timed(part, getattr(owner, method)))
    enter: Any = Step.__enter__

    def enter_and_count(step: Step) -> Step:
        probes.step_ends()
        entered: Step = enter(step)
        return entered

    Step.__enter__ = enter_and_count  # type: ignore[method-assign]
    elastic_train.main()
    if elastic.init().rank == 0:
        steps = probes.steps[_SKIPPED:]
        parts = {part: statistics.median(s.get(part, 0.0) for s in steps) for part in steps[-1]}
        parts.pop(_NOT_OWN)
        (parse(__doc__).log_dir / FILE).write_text(json.dumps(parts))


if __name__ == "__main__":
    main()
