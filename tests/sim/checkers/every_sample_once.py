"""P3: replay the ledger; the lineage that is left has each sample of an epoch exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.sim.journal import Commit, Journal
from tests.sim.replica import Replica


def every_sample_once(journal: Journal) -> Iterator[str]:
    """Each generation goes on from the step that an earlier one committed, named by both."""
    lineages: dict[int, list[Commit]] = {0: []}
    lineage: list[Commit] = []
    steps = _steps_by_generation(journal)
    for generation, start in _starts(journal).items():
        lineage = lineages[start.generation][: start.committed]
        held = lineage[-1].replica.lineage if lineage else 0
        if len(lineage) != start.committed or held != start.lineage:
            yield f"generation {generation} resumes at {start}, the ledger has {len(lineage)} steps"
            return
        lineage = lineages[generation] = lineage + steps[generation]
    yield from _check_epochs(journal, _lineage_of_result(journal) or lineage)


def _lineage_of_result(journal: Journal) -> list[Commit]:
    """The steps that the most advanced worker left at the end went through."""
    by_lineage = {c.replica.lineage: c for c in journal.commits}
    commit = by_lineage.get(journal.result.lineage) if journal.result else None
    steps: list[Commit] = []
    while commit is not None:
        steps.append(commit)
        commit = by_lineage.get(commit.before)
    return steps[::-1]


def _starts(journal: Journal) -> dict[int, Replica]:
    """The ledger's generation records: where each one resumed."""
    starts: dict[int, Replica] = {}
    for agreed in journal.agreed:
        starts.setdefault(agreed.generation, agreed.replica)
    return starts


def _steps_by_generation(journal: Journal) -> dict[int, list[Commit]]:
    """Each step once, whoever wrote it down; in the order of the steps."""
    entries: dict[int, dict[int, Commit]] = defaultdict(dict)
    for commit in journal.commits:
        entries[commit.generation].setdefault(commit.replica.committed, commit)
    steps: dict[int, list[Commit]] = defaultdict(list)
    for generation, by_step in entries.items():
        steps[generation] = [by_step[step] for step in sorted(by_step)]
    return steps


def _check_epochs(journal: Journal, lineage: list[Commit]) -> Iterator[str]:
    stops: dict[int, int] = defaultdict(int)
    for commit in lineage:
        samples = commit.samples
        if samples.start != stops[samples.epoch]:
            yield f"epoch {samples.epoch} has {samples} after {stops[samples.epoch]}"
        stops[samples.epoch] = samples.stop
    whole = journal.outcome[:2] == ("finished", 0) and journal.stopped_at is None
    finished = journal.job.epochs if whole else max(stops, default=0)
    for epoch in range(finished):
        if stops[epoch] != journal.job.length:
            yield f"epoch {epoch} ends after {stops[epoch]} of {journal.job.length} samples"
