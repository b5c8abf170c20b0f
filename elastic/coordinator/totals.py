"""Counts what happens in a run, across leaders."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from elastic.core.book.accounting import read_name, read_number
from elastic.core.histogram import PHASE_BOUNDS_S, SAVE_BOUNDS_S, STEP_BOUNDS_S, Histogram
from elastic.runtime.journal import Entry
from elastic.v1 import job_pb2 as pb

PHASES = ("detect", "persist", "notify", "abort", "join", "sync", "first_step")
_MOST_NAMES = 1000

_COUNTED = {  # entries of the journal, and the field by which they are counted apart
    "worker_failed": "kind",
    "generation_formed": "reason",
    "recovered": "reason",
    "elected": "",
    "store_rolled_back": "",
    "leadership_in_doubt": "",
    "node_lost": "",
    "node_quarantined": "",
    "node_drained": "",
    "newcomers_refused": "",
    "step_was_slow": "",
    "checkpoint_committed": "",
    "checkpoint_abandoned": "reason",
    "state_differed": "",
    "ledger_failed": "",
    "straggler": "slow_in",
}


SLOW_RECOVERY_S = 10.0
"""Somebody should look at a recovery that takes longer."""


class Totals:
    """Counts of this run, from the leader's journal and rank 0's progress.

    `adopt` takes over the counts of earlier leaders. What these counted after they last stored them
    is lost, except steps, which follow from their numbers.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], float] = {}
        """How often something was recorded, by the entry's name and its field in _COUNTED."""
        self.steps_committed = 0
        self.steps_lost = 0
        """Steps that were committed and then lost: the job went back to a checkpoint."""
        self.steps_recomputed = 0
        """Steps that were begun again because the group was lost in them."""
        self.samples = 0
        self.checkpoint_bytes = 0
        self.steps = Histogram(STEP_BOUNDS_S)
        self.recoveries: dict[str, Histogram] = {}
        """Durations of recoveries, by reason."""
        self.phases = {phase: Histogram(PHASE_BOUNDS_S) for phase in PHASES}
        """Durations of the phases of recoveries."""
        self.save_stalls = Histogram(SAVE_BOUNDS_S)
        self.saves = Histogram(SAVE_BOUNDS_S)
        self.committed = 0
        """The job's steps; decreases when the job goes back to a checkpoint."""
        self.last_commit_unix_s = 0.0
        """When the newest step was committed, as far as is known; 0: none was."""
        self.last_checkpoint_unix_s = 0.0
        self.last_roll_back_unix_s = 0.0
        """When a leader last found that the store had been emptied or restored; 0: never."""
        self.last_slow_recovery_unix_s = 0.0
        """When a recovery of more than SLOW_RECOVERY_S last ended; 0: none has."""
        self.resumed_unix_s = 0.0
        """When nodes last came back to a run that all nodes had left; 0: never."""
        self.weight = 0
        """Grows with every counted event: of two totals of a run, the one with more is newer."""
        self._reporter = _Reporter()
        self._recomputed_in = 0
        self._goes_back: tuple[int, int] | None = None
        """The generation that is in its first step, after fewer committed steps than the job had,
        and how many."""

    def copy(self) -> Totals:
        return copy.deepcopy(self)

    # ---- what happens

    def __call__(self, entry: Entry) -> None:
        by = _COUNTED.get(entry.name)
        if by is None or entry.fields.get("as_wanted"):
            return
        told_apart = str(entry.fields.get(by, "")) if by else ""
        key = (entry.name, told_apart)
        self.events[key] = self.events.get(key, 0) + 1
        self.weight += 1
        if entry.name == "recovered":
            self._recovered(told_apart, entry.fields)
            if entry.fields["total_s"] > SLOW_RECOVERY_S:
                self.last_slow_recovery_unix_s = entry.unix_s
        elif entry.name == "checkpoint_committed":
            self.checkpoint_bytes += int(entry.fields["bytes"])
            self.last_checkpoint_unix_s = entry.unix_s
            if "save_s" in entry.fields:
                self.saves.observe(entry.fields["save_s"])
                self.save_stalls.observe(entry.fields["stall_s"])
        elif entry.name == "store_rolled_back":
            self.last_roll_back_unix_s = entry.unix_s

    def progressed(self, progress: pb.Progress, now_unix_s: float) -> None:
        """Take a report of rank 0 of the present group. Steps are lost only when a group has
        committed one without them: until then, a member that comes back may still hold them."""
        goes_back, fresh = self._goes_back, 0
        if progress.first_step and progress.committed < self.committed:
            self._goes_back = progress.generation, progress.committed
        else:
            self._goes_back, kept = None, min(self.committed, progress.committed)
            if goes_back is not None and goes_back[0] == progress.generation:
                kept = min(kept, goes_back[1])
            self.steps_lost += self.committed - kept
            fresh = progress.committed - kept
            self.steps_committed += fresh
            self.committed = progress.committed
        if fresh > 0:
            self.last_commit_unix_s = now_unix_s - progress.in_step_s
        self.samples += self._reporter.samples(progress, fresh)
        self._reporter.steps(progress, self.steps)

    def reformed(self, report: pb.Reformed) -> None:
        """Count the steps that a group computed again, once for all its members' reports."""
        if report.recomputed and report.generation > self._recomputed_in:
            self._recomputed_in = report.generation
            self.steps_recomputed += report.recomputed

    def _recovered(self, reason: str, fields: Mapping[str, Any]) -> None:
        histogram = self.recoveries.setdefault(reason, Histogram(PHASE_BOUNDS_S))
        histogram.observe(fields["total_s"])
        for phase, durations in self.phases.items():
            durations.observe(fields[f"{phase}_s"])

    # ---- from leader to leader

    def to_document(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "counts": {name: getattr(self, name) for name in _NUMBERS},
            "instants": {name: round(getattr(self, name), 3) for name in _INSTANTS},
            "events": [[name, by, count] for (name, by), count in self.events.items()],
            "histograms": [
                [name, by, [*h.counts], round(h.total, 6)] for name, by, h in self._histograms()
            ],
        }

    def adopt(self, document: Mapping[str, Any]) -> None:
        """Go on from the totals of an earlier leader, unless more is known here.

        More is known here if the store was emptied and this process led before. Of each instant
        the later one is right in any case. A malformed document changes nothing.
        """
        found = Totals()
        try:
            found._read(document)
        except Exception:  # noqa: BLE001 - the document may be malformed in any way
            return
        for name in _INSTANTS:
            setattr(self, name, max(getattr(self, name), getattr(found, name)))
        if found.weight >= self.weight:
            for name in (*_NUMBERS, *_TABLES, "weight"):
                setattr(self, name, getattr(found, name))
            self._reporter = _Reporter()

    def _read(self, document: Mapping[str, Any]) -> None:
        self.weight = int(read_number(document["weight"]))
        for name in _NUMBERS:
            setattr(self, name, int(read_number(document["counts"][name])))
        for name in _INSTANTS:
            setattr(self, name, read_number(document["instants"].get(name, 0.0)))
        for name, by, count in document["events"][:_MOST_NAMES]:
            self.events[read_name(name), read_name(by)] = read_number(count)
        for name, by, counts, total in document["histograms"][:_MOST_NAMES]:
            histogram = self._named(read_name(name), read_name(by))
            if histogram is not None and len(counts) == len(histogram.counts):
                histogram.add([int(read_number(count)) for count in counts], read_number(total))

    def _histograms(self) -> list[tuple[str, str, Histogram]]:
        return [
            ("steps", "", self.steps),
            ("save_stalls", "", self.save_stalls),
            ("saves", "", self.saves),
            *(("recoveries", reason, h) for reason, h in self.recoveries.items()),
            *(("phases", phase, h) for phase, h in self.phases.items()),
        ]

    def _named(self, name: str, by: str) -> Histogram | None:
        if name == "recoveries":
            return self.recoveries.setdefault(by, Histogram(PHASE_BOUNDS_S))
        if name == "phases":
            return self.phases.get(by)
        return {n: h for n, b, h in self._histograms() if not b}.get(name)


_NUMBERS = (
    *("steps_committed", "steps_lost", "steps_recomputed", "samples", "checkpoint_bytes"),
    "committed",
)
_INSTANTS = (
    *("last_commit_unix_s", "last_checkpoint_unix_s"),
    *("last_roll_back_unix_s", "last_slow_recovery_unix_s", "resumed_unix_s"),
)
_TABLES = ("events", "steps", "recoveries", "phases", "save_stalls", "saves")


class _Reporter:
    """Turns a worker's cumulative figures into differences; another worker's begin a new series."""

    def __init__(self) -> None:
        self._worker = ""
        self._samples = 0
        self._counts: list[int] = []
        self._total_s = 0.0

    def samples(self, progress: pb.Progress, fresh_steps: int) -> int:
        """Samples since the last report; for another worker, estimated from its newest step."""
        if progress.worker == self._worker:
            more = max(0, progress.samples - self._samples)
        else:
            each = progress.global_batch or progress.step_s * progress.samples_per_s
            more = round(fresh_steps * each)
            self._worker, self._counts = progress.worker, []
        self._samples = progress.samples
        return more

    def steps(self, progress: pb.Progress, into: Histogram) -> None:
        """Add the durations of steps since the last report; call it after `samples`."""
        counts, total_s = list(progress.step_counts), progress.steps_total_s
        if len(counts) != len(into.counts):
            return  # the worker has another version
        fresh = [new - old for new, old in zip(counts, self._counts or counts, strict=True)]
        if self._counts and min(fresh) >= 0:
            into.add(fresh, max(0.0, total_s - self._total_s))
        self._counts, self._total_s = counts, total_s
