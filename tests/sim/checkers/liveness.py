"""Once faults stop the job ends, well, and nothing is left running."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.faults import STOP_EXIT_CODE
from tests.sim.journal import Journal


def liveness(journal: Journal) -> Iterator[str]:
    if journal.broken_invariant:
        yield f"broken invariant: {journal.broken_invariant}"
    phase, exit_code, message = journal.outcome
    if phase != "finished":
        yield f"the job is {phase}, exit code {exit_code}: {message}"
    elif exit_code != 0 and not (journal.stopped_at is not None and exit_code == STOP_EXIT_CODE):
        yield f"exit code {exit_code}: {message}"
    for node in journal.left_behind:
        yield f"left running: {node}"
