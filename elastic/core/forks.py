"""Tells which saved states belong to the job's lineage.

A group goes on from a step that its members agree on, or restore. From the moment at which it has
committed a step of its own, what other groups have saved beyond that step is of a lineage that was
given up: it does not count, whenever it comes to light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_FORKS = 64
"""The number of forks that are remembered. What older ones rule out was removed long ago."""


@dataclass(frozen=True, slots=True)
class Fork:
    """The group of `generation` of `run` has gone on from `step`, in committed steps."""

    run: str
    generation: int
    step: int


def counts(forks: Sequence[Fork], run: str, generation: int, step: int) -> bool:
    """Whether a state of `step`, saved by the group of `generation` of `run`, is of the lineage.

    forks: of the directory or the job, oldest first. A run without a fork among them is older than
    all of them.
    """
    may_be_beyond = False
    for fork in reversed(forks):
        may_be_beyond = may_be_beyond or (fork.run == run and fork.generation <= generation)
        if step > fork.step and not may_be_beyond:
            return False
    return True


def with_fork(forks: Iterable[Fork], fork: Fork) -> tuple[Fork, ...]:
    """Return the forks with one more, which is ignored if one of a later group is known."""
    known = tuple(forks)
    if any(f.run == fork.run and f.generation >= fork.generation for f in known):
        return known
    return (*known, fork)[-MOST_FORKS:]
