"""After the last fault the job ends successfully, and nothing is left running."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.faults import STOP_EXIT_CODE
from tests.sim.journal import Journal

# Tries of a script that always fails: all slots of the largest cluster and their spares, twice.
_MOST_TRIES = 40


def liveness(journal: Journal) -> Iterator[str]:
    if journal.broken_invariant:
        yield f"broken invariant: {journal.broken_invariant}"
    phase, exit_code, message = journal.outcome
    if any(kind == "StepMisused" for kind, _ in journal.errors):
        if not journal.job.style.uneven or phase not in ("failed", "finished"):
            yield f"the job is {phase} because of a call that members did not make alike"
        return
    # No member could undo its block, or the last holder died while it sent its state to others and
    # overwrote theirs. P2 promises only steps that a survivor holds, and nothing was saved.
    lost = journal.undo_missed or journal.nobody_held_state
    if lost and any(kind == "StateLost" for kind, _ in journal.errors):
        return
    if journal.hopeless:
        if phase not in ("failed", "finished"):
            yield f"a script that always fails is {phase}"
        elif phase == "failed" and len(journal.struck) > _MOST_TRIES:
            yield f"a script that always fails was tried {len(journal.struck)} times"
        return
    given_up = phase == "failed" and _was_to_stop(journal)
    given_up = given_up and (journal.frozen_at_end or journal.overdue)
    if phase != "finished" and not given_up:  # nobody can save what a frozen script holds
        yield f"the job is {phase}, exit code {exit_code}: {message}"
    elif exit_code != 0 and not (_was_to_stop(journal) and exit_code == STOP_EXIT_CODE):
        yield f"exit code {exit_code}: {message}"
    for node in journal.left_behind:
        yield f"left running: {node}"


def _was_to_stop(journal: Journal) -> bool:
    return journal.stopped_at is not None or journal.drains
