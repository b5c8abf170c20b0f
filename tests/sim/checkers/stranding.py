"""No script is where no state fits, unless its undo did not know of something, or it was left out
while others made calls."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.journal import Journal


def stranding(journal: Journal) -> Iterator[str]:
    for worker in journal.sent_back:
        yield f"{worker} makes room for a beginning, though steps had been committed"
    if journal.undo_missed or journal.called or len(journal.job.loops()) > 1:
        return
    for kind, message in journal.errors:
        if kind == "Stranded" and "first step" not in message:  # nothing is lost with that
            yield f"stranded: {message}"
