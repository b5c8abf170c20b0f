"""A job that was asked to stop has saved the last step that it committed."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.faults import STOP_EXIT_CODE
from tests.sim.journal import Journal
from tests.sim.replica import Replica


def stopping(journal: Journal) -> Iterator[str]:
    stopped = journal.outcome[1] == STOP_EXIT_CODE
    best = journal.best_at_end
    unfinished = best is not None and not best.complete(journal.job)
    if stopped and best is not None and unfinished and journal.newest_checkpoint.age < best.age:
        yield f"stopped at {best}, saved {journal.newest_checkpoint}"
    silent = journal.best_out_of_contact
    if stopped and silent is not None and _is_far_behind(journal.newest_checkpoint, silent):
        yield f"stopped without waiting for {silent}, saved {journal.newest_checkpoint}"


def _is_far_behind(saved: Replica, held: Replica) -> bool:
    """By more than the last step, which others in contact may not have completed."""
    return saved.generation <= held.generation and saved.committed + 1 < held.committed
