"""A leaving node is let go only when none of its workers is needed, and joins no later group."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import Purpose
from tests.sim.journal import Journal


def drains(journal: Journal) -> Iterator[str]:
    yield from journal.taken_away
    for node in sorted(journal.heard_of_drain):
        newest = journal.nodes_drained[node]
        for generation in journal.generations:
            if generation.purpose is Purpose.SAVE_AND_LEAVE:
                continue  # asked once more, the node may be gone by then
            if generation.number > newest and any(m.node == node for m in generation.members):
                yield f"{node} is a member of {generation.number}, drained after {newest}"
