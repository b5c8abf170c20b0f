"""Computes what one kill cost, from the workers' marks alone."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.scripts.step_log import BEGIN, COMMIT, Mark


@dataclass(frozen=True, kw_only=True)
class KillFigures:
    """What one kill cost. `any_step_s`, `new_step_s` and `whole_s` count from the kill."""

    usual_step_s: float
    """The median time between two commits before the kill."""
    any_step_s: float
    """To the first step that a new group commits, even if it was committed before the kill."""
    new_step_s: float
    """To the first step that was not committed before the kill."""
    whole_s: float
    """To the first step of a group that is as large as before the kill."""
    rejoin_stall_s: float | None
    """How long the survivors waited when the replacement joined: their longest time between two
    commits around that change, less a usual step. None if there were no survivors."""
    steps_again: int
    """Steps begun in one group and begun again in the next."""
    steps_lost: int
    """Committed steps that were undone."""


def kill_figures(marks: Sequence[Mark], *, killed_at_s: float, workers: int) -> KillFigures:
    """Return the cost of a kill at `killed_at_s`. `marks` cover the kill and the full recovery."""
    commits = [mark for mark in marks if mark.what == COMMIT]
    old = max(mark.generation for mark in marks if mark.at_s <= killed_at_s)
    before = [mark for mark in commits if mark.generation <= old]
    after = [mark for mark in commits if mark.generation > old]
    newest = max(mark.step for mark in before)
    again, lost = _repeated([mark for mark in marks if mark.generation >= old])
    return KillFigures(
        usual_step_s=usual_step_s(before),
        any_step_s=after[0].at_s - killed_at_s,
        new_step_s=_first_at_s(m for m in after if m.step > newest) - killed_at_s,
        whole_s=_first_at_s(m for m in after if m.world_size == workers) - killed_at_s,
        rejoin_stall_s=_rejoin_stall_s(after, workers, usual_step_s(before)),
        steps_again=again,
        steps_lost=lost,
    )


def usual_step_s(commits: Iterable[Mark]) -> float:
    """Return the median time between consecutive commits of a worker in one group."""
    gaps = [
        later.at_s - earlier.at_s
        for own in _by_worker(commits)
        for earlier, later in pairwise(own)
        if earlier.generation == later.generation
    ]
    return statistics.median(gaps)


def _rejoin_stall_s(after: Sequence[Mark], workers: int, usual_s: float) -> float | None:
    gaps = [
        later.at_s - earlier.at_s
        for own in _by_worker(after)
        for earlier, later in pairwise(own)
        if earlier.world_size < workers == later.world_size
    ]
    return max(0.0, max(gaps) - usual_s) if gaps else None


def _repeated(marks: Sequence[Mark]) -> tuple[int, int]:
    """Return (steps begun again, committed steps undone) over all changes of group in `marks`."""
    groups = sorted({mark.generation for mark in marks if mark.what == COMMIT})
    again = lost = 0
    for old, new in pairwise(groups):
        first = min(m.step for m in marks if m.generation == new and m.what == COMMIT)
        began = max(m.step for m in marks if m.generation == old and m.what == BEGIN)
        done = max(m.step for m in marks if m.generation == old and m.what == COMMIT)
        again += max(0, began - first + 1)
        lost += max(0, done - first + 1)
    return again, lost


def _by_worker(marks: Iterable[Mark]) -> Iterable[list[Mark]]:
    own = defaultdict(list)
    for mark in marks:
        own[mark.pid].append(mark)
    return own.values()


def _first_at_s(marks: Iterable[Mark]) -> float:
    return next(mark.at_s for mark in marks)
