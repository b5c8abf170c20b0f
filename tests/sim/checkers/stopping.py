"""A job that was asked to stop has saved the last step that it committed."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import ChangeReason
from tests.sim.faults import STOP_EXIT_CODE
from tests.sim.journal import Journal
from tests.sim.replica import Replica


def stopping(journal: Journal) -> Iterator[str]:
    stopped = journal.outcome[1] == STOP_EXIT_CODE and not journal.overdue
    best = journal.best_at_end
    done = journal.result is not None and journal.result.complete(journal.job)
    unfinished = best is not None and not best.complete(journal.job) and not done
    if (
        stopped
        and best is not None
        and unfinished
        and journal.newest_checkpoint.origin < best.origin
        and not _went_on_from_less(journal, best)
    ):
        yield f"stopped at {best}, saved {journal.newest_checkpoint}"
    silent = journal.best_out_of_contact
    complete = best is not None and best.complete(journal.job)
    if complete or done or _lost_others(journal):
        return
    if stopped and silent is not None and _is_far_behind(journal.newest_checkpoint, silent):
        yield f"stopped without waiting for {silent}, saved {journal.newest_checkpoint}"


def _went_on_from_less(journal: Journal, best: Replica) -> bool:
    """True if the members that saved later steps are gone, and others went on from earlier steps
    and have not come as far again. The first checkpoint of a step stays, so the job can resume with
    more than its members had."""
    saved = journal.newest_checkpoint
    return saved.committed >= best.committed and any(
        a.replica.origin < saved.origin <= a.checkpoint.origin
        for a in journal.agreed
        if a.generation == best.content.committed_in
    )


def _lost_others(journal: Journal) -> bool:
    """True if members were lost while the job stopped: it waits for nobody out of contact then."""
    asked_at = journal.stopped_at if journal.stopped_at is not None else 0.0
    return any(
        journal.formed_at[g.number] >= asked_at
        and g.reason not in (ChangeReason.STOPPING, ChangeReason.BELOW_MINIMUM)
        for g in journal.generations
    )


def _is_far_behind(saved: Replica, held: Replica) -> bool:
    """True if `saved` lacks more than the last step, which others may not have completed."""
    return (
        saved.content.committed_in <= held.content.committed_in
        and saved.committed + 1 < held.committed
    )
