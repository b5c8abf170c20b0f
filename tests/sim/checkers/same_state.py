"""All members hold the same state after each step: the state of an undisturbed job."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.learning_rate import retarget
from tests.sim.journal import Agreed, Commit, Journal
from tests.sim.replica import BLANK, Content, Replica, Step, after_step, evaluation, places_below


def same_state(journal: Journal) -> Iterator[str]:
    if journal.job.style.uneven:
        return  # uneven calls end the job, in whatever state
    states: dict[tuple[int, int], Replica] = {}
    for commit in journal.commits:
        key = (commit.generation, commit.replica.committed)
        if states.setdefault(key, commit.replica) != commit.replica:
            yield f"{commit.worker} holds another state after {key}"
    undisturbed = Undisturbed(journal)
    yield from undisturbed.wrong_commits()
    yield from undisturbed.wrong_starts()
    yield from undisturbed.wrong_results()
    yield from journal.torn_checkpoints
    for what in journal.differed:
        yield f"state differed: {what}"


class Undisturbed:
    """Computes the same steps without any disturbance, and finds members that differ."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._job = journal, journal.job
        self._commits: dict[int, Commit] = {}
        for commit in journal.commits:
            self._commits.setdefault(commit.replica.lineage, commit)

    def wrong_commits(self) -> Iterator[str]:
        for commit in self._commits.values():
            before = self._commits.get(commit.before)
            begin = self._places(before, commit.replica.progress.loop)[-1]
            expected = after_step(self._job.style, begin, self._step(commit, before))
            if expected != commit.replica.content:
                yield (
                    f"{commit.worker} has {commit.replica} after {commit.samples}, expected "
                    f"{tuple(expected)}"
                )
                return

    def wrong_starts(self) -> Iterator[str]:
        """Members of a group begin with the state of one step, at some place below its block."""
        starts: dict[int, Agreed] = {}
        for agreed in self._journal.agreed:
            first = starts.setdefault(agreed.generation, agreed).replica
            mine = agreed.replica
            same = (mine.committed, mine.lineage) == (first.committed, first.lineage)
            if not same or mine.progress.ramps != first.progress.ramps:
                yield f"{agreed.worker} starts generation {agreed.generation} from {mine}"
            places = self._places(self._commits.get(mine.lineage), len(self._job.loops()) - 1)
            if mine.content not in places:
                yield f"{agreed.worker} starts generation {agreed.generation} with {mine.content}"

    def wrong_results(self) -> Iterator[str]:
        for called in self._journal.called:
            commit = self._commits.get(called.lineage)
            content = commit.replica.content if commit is not None else BLANK
            if called.result != evaluation(content, called.evaluation):
                yield f"{called} returned another result than elsewhere"

    def _places(self, commit: Commit | None, loop_after: int) -> list[Content]:
        if commit is None:
            return [BLANK]
        step = self._step(commit, self._commits.get(commit.before))
        length = self._job.loaders()[commit.loader].length
        ends_epoch = commit.samples.stop == length
        content = commit.replica.content
        return list(
            places_below(self._job, content, step, ends_epoch=ends_epoch, loop_after=loop_after)
        )

    def _step(self, commit: Commit, before: Commit | None) -> Step:
        return Step(
            loop=commit.replica.progress.loop,
            loader=commit.loader,
            samples=commit.samples,
            generation=commit.generation,
            factor=self._factor(commit, before),
        )

    def _factor(self, commit: Commit, before: Commit | None) -> float:
        """The learning rate's factor, from the previous commit's ramp and the group."""
        rule = self._job.style.scaling
        if rule is None:
            return 1.0
        ramp = before.replica.progress.ramps.get("0") if before is not None else None
        loader = self._job.loaders()[commit.loader]
        ratio = loader.batch_ratio(commit.world_size, rule.reference_world)
        committed = commit.replica.committed - 1
        return retarget(ramp, rule, ratio, committed).factor(committed)
