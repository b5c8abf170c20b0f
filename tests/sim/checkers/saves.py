"""A save that is given up because a member was lost is soon followed by another."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import Purpose
from tests.sim.journal import Journal

# Seconds from the decision about a generation until it is in the store, at most.
_DECIDED_S = 0.05


def saves(journal: Journal) -> Iterator[str]:
    for save in journal.given_up:
        yield f"{save} was given up although nobody is missing"
    for generation in journal.generations:
        if generation.members and generation.purpose is Purpose.TRAIN:
            for save in journal.orphaned[generation.number]:
                yield f"{save}, which has ended, in {generation.number}"
    yield from _left_out(journal)
    for at, whole in journal.saves:
        if whole:
            continue
        following = [
            g
            for g in journal.generations
            if g.members
            and g.purpose is Purpose.TRAIN
            and journal.formed_at[g.number] > at + _DECIDED_S
        ]
        if not following:
            continue
        formed_at = journal.formed_at[following[0].number]
        saved = any(whole and at < then <= formed_at for then, whole in journal.saves)
        forgot = any(at < then <= formed_at for then in journal.elected_at)
        if not (saved or forgot or following[0].save_first):
            yield f"generation {following[0].number} does not save first, given up at {at:.4f}"


def _left_out(journal: Journal) -> Iterator[str]:
    """A member that goes on from a step marked for saving has first begun to save its part."""
    if journal.job.style.uneven:
        return
    first = {g.number for g in journal.generations if g.save_first}
    began = {(a.worker, a.generation): a.replica.committed for a in journal.agreed}
    every = journal.job.save_every if journal.job.saves else 0
    for commit in journal.commits:
        step = commit.replica.committed - 1
        starts = began.get((commit.worker, commit.generation)) == step
        due = (every and step % every == 0 and not starts) or (
            starts and commit.generation in first
        )
        if step and due and (commit.worker, commit.generation, step) not in journal.saving:
            yield f"{commit.worker} goes on from step {step} in {commit.generation}, not saved"
