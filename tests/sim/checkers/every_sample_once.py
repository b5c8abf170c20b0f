"""P3: in a replay of the ledger the final lineage has each sample of an epoch exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.sim.journal import Commit, Journal
from tests.sim.replica import Replica


def every_sample_once(journal: Journal) -> Iterator[str]:
    by_lineage = {c.replica.lineage: c for c in journal.commits}
    lineage: list[Commit] = []
    for generation, start in _starts(journal).items():
        lineage = _steps_to(start.lineage, by_lineage)
        if len(lineage) != start.committed:
            yield f"generation {generation} resumes at {start}, the ledger has {len(lineage)} steps"
            return
        following = [c for c in journal.commits if c.generation == generation]
        if following:
            lineage = _steps_to(following[-1].replica.lineage, by_lineage)
    # The member that completed the job may be gone a moment later, when only members with less are
    # left. Or it was out of contact while others later went on from less.
    ends = [r for r in (journal.result, journal.finished_with) if r is not None]
    ends.sort(key=lambda r: (r.complete(journal.job), r.age))
    result = _steps_to(ends[-1].lineage, by_lineage) if ends else []
    yield from _check_epochs(journal, result or lineage)


def _steps_to(lineage: int, by_lineage: dict[int, Commit]) -> list[Commit]:
    """The committed steps that led to a state, in order."""
    steps: list[Commit] = []
    commit = by_lineage.get(lineage)
    while commit is not None:
        steps.append(commit)
        commit = by_lineage.get(commit.before)
    return steps[::-1]


def _starts(journal: Journal) -> dict[int, Replica]:
    """The replica from which each generation resumed, as the ledger's generation records tell."""
    starts: dict[int, Replica] = {}
    for agreed in journal.agreed:
        starts.setdefault(agreed.generation, agreed.replica)
    return starts


def _check_epochs(journal: Journal, lineage: list[Commit]) -> Iterator[str]:
    stops: dict[tuple[int, int], int] = defaultdict(int)
    for commit in lineage:
        samples, epoch = commit.samples, (commit.loader, commit.samples.epoch)
        if samples.start != stops[epoch]:
            yield f"epoch {epoch} has {samples} after {stops[epoch]}"
        stops[epoch] = samples.stop
    if not (journal.outcome[:2] == ("finished", 0) and journal.stopped_at is None):
        return
    for loop in journal.job.loops():
        for epoch in range(loop.epochs):
            stop, length = stops[loop.loader, epoch], journal.job.loaders()[loop.loader].length
            if stop != length:
                yield f"epoch {epoch} of {loop} ends after {stop} of {length} samples"
