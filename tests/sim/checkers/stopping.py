"""A job that was asked to stop has saved the last step that it committed."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.faults import STOP_EXIT_CODE
from tests.sim.journal import Journal


def stopping(journal: Journal) -> Iterator[str]:
    stopped = journal.stopped_at is not None and journal.outcome[1] == STOP_EXIT_CODE
    best = journal.best_at_end
    unfinished = best is not None and not best.complete(journal.job)
    if stopped and best is not None and unfinished and journal.newest_checkpoint.age < best.age:
        yield f"stopped at {best}, saved {journal.newest_checkpoint}"
