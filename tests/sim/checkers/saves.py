"""A save that is given up because a member was lost is followed by another, soon."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import Purpose
from tests.sim.journal import Journal

# From the decision about a generation until it is in the store.
_DECIDED_S = 0.05


def saves(journal: Journal) -> Iterator[str]:
    for save in journal.given_up:
        yield f"{save} was given up although nobody is missing"
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
