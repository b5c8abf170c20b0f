"""A node that leaves is let go only when none of its workers is needed, and stays out."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.journal import Journal


def drains(journal: Journal) -> Iterator[str]:
    for node, newest in journal.nodes_drained.items():
        for generation in journal.generations:
            if generation.number > newest and any(m.node == node for m in generation.members):
                yield f"{node} is a member of {generation.number}, drained after {newest}"
