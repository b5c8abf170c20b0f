"""No worker is replaced because steps take long while a member compiles."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import ChangeReason
from tests.sim.journal import Journal

_IMPATIENT = (ChangeReason.STALLED, ChangeReason.JOIN_TIMED_OUT)


def slow_steps(journal: Journal) -> Iterator[str]:
    if not journal.compiles:
        return
    for _, worker in journal.replaced:
        yield f"{worker} was replaced"
    for generation in journal.generations:
        if generation.reason in _IMPATIENT:
            yield f"generation {generation.number} was formed: {generation.reason.name}"
