"""A worker whose script no state fits any more is the price of what its undo did not know of."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.journal import Journal


def stranding(journal: Journal) -> Iterator[str]:
    if journal.undo_missed:
        return
    for kind, message in journal.errors:
        if kind == "Stranded":
            yield f"stranded: {message}"
