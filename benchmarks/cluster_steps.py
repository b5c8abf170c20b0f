"""Reads the steps of a cluster's workers from their marks, and computes what a fault cost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.scripts.step_log import BEGIN, COMMIT, Mark, StepLogReader

Row = dict[str, Any]


class MarkedSteps:
    """Replaces a Cluster's `StepRecords` (tests.cluster). `host_of` maps pids to hosts."""

    def __init__(self, directory: Path, host_of: Callable[[], Mapping[int, str]]) -> None:
        self._log = StepLogReader(directory)
        self._host_of = host_of

    def marks(self, since_s: float = 0.0) -> list[Mark]:
        """Return all marks since `since_s` (CLOCK_MONOTONIC), oldest first."""
        return [mark for mark in self._log.marks() if mark.at_s >= since_s]

    def commits(self, *, since_s: float = 0.0, host: str | None = None) -> list[Row]:
        """Does what StepRecords.commits does."""
        hosts = self._host_of()
        rows = (
            {
                "at": mark.at_s,
                "step": mark.step,
                "generation": mark.generation,
                "host": hosts.get(mark.pid, ""),
            }
            for mark in self.marks(since_s)
            if mark.what == COMMIT
        )
        return [row for row in rows if host in (None, row["host"])]


def usual_step_s(rows: list[Row]) -> float:
    """Return the median time between two consecutive commits of a host in one group."""
    return statistics.median(
        later["at"] - earlier["at"]
        for own in _by_host(rows).values()
        for earlier, later in pairwise(own)
        if later["generation"] == earlier["generation"]
    )


def longest_s(rows: list[Row], *hosts: str) -> float:
    """Return the longest time between two consecutive commits of any of these hosts."""
    own = _by_host(rows)
    return max(
        later["at"] - earlier["at"] for host in hosts for earlier, later in pairwise(own[host])
    )


def steps_again(marks: list[Mark]) -> tuple[int, int]:
    """Return (steps begun again, committed steps begun again): the most that one process has."""
    begun: dict[int, set[int]] = defaultdict(set)
    done: dict[int, set[int]] = defaultdict(set)
    again: dict[int, int] = defaultdict(int)
    lost: dict[int, int] = defaultdict(int)
    for mark in marks:
        if mark.what == BEGIN:
            again[mark.pid] += mark.step in begun[mark.pid]
            lost[mark.pid] += mark.step in done[mark.pid]
            begun[mark.pid].add(mark.step)
        else:
            done[mark.pid].add(mark.step)
    return max(again.values(), default=0), max(lost.values(), default=0)


def _by_host(rows: list[Row]) -> dict[str, list[Row]]:
    own: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        own[row["host"]].append(row)
    return own
