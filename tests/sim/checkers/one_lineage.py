"""P1: generations only grow, and no group trains once a later one has committed a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.sim.journal import Journal


def one_lineage(journal: Journal) -> Iterator[str]:
    for before, after in itertools.pairwise(g.number for g in journal.generations):
        if after <= before:
            yield f"generation {after} follows {before}"
    yield from _one_at_a_time(journal)
    yield from _only_reduced_steps(journal)


def _one_at_a_time(journal: Journal) -> Iterator[str]:
    first_commit: dict[int, float] = {}
    for commit in journal.commits:
        first_commit.setdefault(commit.generation, commit.at)
    for reduced in journal.reduced:
        later = [g for g, at in first_commit.items() if g > reduced.generation and at < reduced.at]
        if later:
            yield f"{reduced} although generation {min(later)} trains"


def _only_reduced_steps(journal: Journal) -> Iterator[str]:
    reduced_at: dict[tuple[int, int], float] = {}
    for reduced in journal.reduced:
        key = (reduced.generation, reduced.step + 1)
        if key in reduced_at:
            yield f"{reduced} for the second time"
        reduced_at[key] = reduced.at
    for commit in journal.commits:
        key = (commit.generation, commit.replica.committed)
        if reduced_at.get(key, float("inf")) > commit.at:
            yield f"{commit.worker} committed {key} without everybody's gradient"
