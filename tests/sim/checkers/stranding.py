"""No script is stranded where no state fits, unless its undo missed a change, or it was left out
while others made calls or gave the state to newcomers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.sim.journal import Journal
from tests.sim.node import LEASE_IS_OVER


def stranding(journal: Journal) -> Iterator[str]:
    for worker in journal.sent_back:
        yield f"{worker} makes room for a beginning, though steps had been committed"
    if journal.undo_missed or journal.called or len(journal.job.loops()) > 1:
        return
    if not any(kind == "Stranded" for kind, _ in journal.errors):
        return
    # After the last step the others are in the calls at the end of the loop and of the script.
    # Before it, they may be on their way out of a block that another member's state completed.
    ends_at = min(
        (c.at for c in journal.commits if c.replica.complete(journal.job)), default=math.inf
    )
    for at, worker, what, *details in journal.trace:
        if (
            what != "raises"
            or details[0] != "Stranded"
            or "the job begins again" in str(details[1])
            or str(details[1]) == LEASE_IS_OVER
        ):
            continue  # the first step alone is no loss, and others have lost the rest
        declared_in = journal.declared_last[worker]
        inside = (
            at >= ends_at
            or declared_in in journal.inside_in
            or not _is_held_as_of_commit(journal, declared_in)
        )
        if not inside or not _was_left_out(journal, worker):
            yield f"stranded: {details[1]}"


def _was_left_out(journal: Journal, worker: str) -> bool:
    first = min((a.generation for a in journal.agreed if a.worker == worker), default=math.inf)
    return any(
        g.members and g.number > first and worker not in g.worker_ids for g in journal.generations
    )


def _is_held_as_of_commit(journal: Journal, generation: int) -> bool:
    """True if a member with the newest state holds it as of the commit. A state received at a begin
    mark fits no member whose block others completed."""
    held = journal.at_commit_in.get(generation, [])
    newest = max((age for age, _ in held), default=None)
    return any(at_commit for age, at_commit in held if age == newest)
