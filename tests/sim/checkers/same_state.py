"""Members of a generation start from one state and hold one state after each step."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.journal import Journal
from tests.sim.replica import Replica


def same_state(journal: Journal) -> Iterator[str]:
    states: dict[tuple[int, int], Replica] = {}
    for agreed in journal.agreed:
        key = (agreed.generation, -1)
        if states.setdefault(key, agreed.replica) != agreed.replica:
            yield f"{agreed.worker} starts generation {agreed.generation} from {agreed.replica}"
    for commit in journal.commits:
        key = (commit.generation, commit.replica.committed)
        if states.setdefault(key, commit.replica) != commit.replica:
            yield f"{commit.worker} holds another state after {key}"
    yield from journal.torn_checkpoints
