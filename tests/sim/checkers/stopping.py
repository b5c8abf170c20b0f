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
    """Those who had saved later steps are gone, and others went on from what they held, which was
    less: they have not come as far again. Of a step that is saved already the first checkpoint
    stands, and the job can begin again with more than its members had."""
    saved = journal.newest_checkpoint
    return saved.committed >= best.committed and any(
        a.replica.origin < saved.origin <= a.checkpoint.origin
        for a in journal.agreed
        if a.generation == best.content.committed_in
    )


def _lost_others(journal: Journal) -> bool:
    """Members were lost while the job stopped: who was out of contact then is not waited for."""
    asked_at = journal.stopped_at if journal.stopped_at is not None else 0.0
    return any(
        journal.formed_at[g.number] >= asked_at
        and g.reason not in (ChangeReason.STOPPING, ChangeReason.BELOW_MINIMUM)
        for g in journal.generations
    )


def _is_far_behind(saved: Replica, held: Replica) -> bool:
    """By more than the last step, which others in contact may not have completed."""
    return (
        saved.content.committed_in <= held.content.committed_in
        and saved.committed + 1 < held.committed
    )
