"""Reads and checks the records that the workers of tests/chaos/scripts write."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(out: Path) -> dict[str, list[Record]]:
    """The records of each process, oldest first, without a line that a kill has cut short."""
    records: dict[str, list[Record]] = {}
    for path in sorted(out.glob("steps-*.jsonl")):
        lines = path.read_text().split("\n")[:-1]
        records[path.stem] = [json.loads(line) for line in lines]
    return records


def newest_step(out: Path) -> int:
    """The highest committed step index so far; -1 before the first."""
    commits = [r["step"] for rows in read(out).values() for r in rows if r["kind"] == "commit"]
    return max(commits, default=-1)


def members_at_work(out: Path) -> int:
    """How many processes have committed a step in the newest generation that has any."""
    newest = [
        rows[-1]["generation"]
        for rows in ([r for r in rows if r["kind"] == "commit"] for rows in read(out).values())
        if rows
    ]
    return newest.count(max(newest)) if newest else 0


def factors(records: dict[str, list[Record]]) -> dict[int, float]:
    """The learning-rate factor of each step, from its newest generation."""
    newest: dict[int, Record] = {}
    for rows in records.values():
        for row in rows:
            if (
                row["kind"] == "commit"
                and row["generation"] >= newest.get(row["step"], {"generation": -1})["generation"]
            ):
                newest[row["step"]] = row
    return {step: row["lr_factor"] for step, row in newest.items()}


def check_equal_weights(records: dict[str, list[Record]]) -> int:
    """Check that all members hold bit-identical weights after each step; the number of commits."""
    digests: dict[int, set[str]] = defaultdict(set)
    compared = 0
    for rows in records.values():
        for row in rows:
            if row["kind"] == "commit":
                digests[row["step"]].add(row["digest"])
                compared += 1
    different = [step for step, found in digests.items() if len(found) > 1]
    assert not different, f"weights differ after steps {different}"
    return compared


def check_nothing_lost(records: dict[str, list[Record]], formed: list[Record]) -> None:
    """Check P2 in every process: commits are consecutive, an unplanned change of the group costs
    at most one step that is computed again, and a planned change costs none.

    formed: the job's events `generation_formed`.
    """
    unplanned = [e["generation"] for e in formed if e["after_step"] is None][1:]
    for process, rows in records.items():
        commits = [r["step"] for r in rows if r["kind"] == "commit"]
        first = commits[0] if commits else 0
        assert commits == list(range(first, first + len(commits))), (process, commits)
        again = list(_attempted_again([r for r in rows if r["kind"] == "attempt"]))
        for step, before, after in again:
            at_fault = [g for g in unplanned if before < g <= after]
            assert at_fault, (process, f"step {step} again in generation {after}, as planned")
        assert len(again) <= len(unplanned), (process, again, unplanned)


def _attempted_again(attempts: list[Record]) -> Iterator[tuple[int, int, int]]:
    """(step, generation before, generation after) of each step that was begun twice."""
    last: dict[int, int] = {}
    for row in attempts:
        step, generation = row["step"], row["generation"]
        if step in last:
            yield step, last[step], generation
        last[step] = generation
