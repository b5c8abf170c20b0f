"""Checks promises P1 to P4 of a cluster's job from outside: by ledgers, records and weights."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from examples.ledger_check import audit
from tests.chaos import problem, records
from tests.cluster import Cluster

Rows = dict[str, list[records.Record]]


def check_lineage(cluster: Cluster) -> list[dict[str, Any]]:
    """Check P1 to P3; returns the surviving steps. The job may run, but not change its leader."""
    lines = merged_ledger(cluster)
    found = audit(lines, samples=problem.SAMPLES)
    assert not found.problems, found.problems
    steps = check_nothing_lost(lines)
    check_one_lineage(cluster.steps.by_process(), {s["step"]: s["generation"] for s in steps})
    return steps


def check_all(cluster: Cluster) -> None:
    """Check P1 to P4."""
    steps = check_lineage(cluster)
    check_weights(cluster.out, cluster.steps.by_process(), steps)


def merged_ledger(cluster: Cluster) -> list[str]:
    """The lines of all coordinators' ledgers, in the order of their terms."""
    terms: list[tuple[float, list[str]]] = []
    for name in cluster.coordinators:
        elected = [e for e in cluster.events("elected") if e["coordinator"] == name]
        sections = list(_sections(cluster.ledger(name)))
        assert len(sections) == len(elected), (name, len(sections), elected)
        terms += [(e["time"], lines) for e, lines in zip(elected, sections, strict=True)]
    return [line for _, lines in sorted(terms) for line in lines]


def check_nothing_lost(lines: list[str]) -> list[dict[str, Any]]:
    """Check P2: a group goes back by one step at most, which none of its members had completed.

    Steps that members report again to a new leader do not count. Returns the surviving steps.
    """
    steps: list[dict[str, Any]] = []
    dropped: dict[int, dict[str, Any]] = {}
    redone: dict[int, list[int]] = defaultdict(list)
    for record in _records(lines):
        if "resume" in record:
            dropped |= {s["step"]: s for s in steps if s["step"] >= record["resume"]}
            steps = [s for s in steps if s["step"] < record["resume"]]
        elif "step" in record:
            steps.append(record)
            before = dropped.pop(record["step"], record)
            if before != record:
                redone[record["generation"]].append(record["step"])
    assert all(len(again) <= 1 for again in redone.values()), redone
    assert not dropped, f"steps {sorted(dropped)} were given up"
    return steps


def check_one_lineage(rows: Rows, ledger: dict[int, int]) -> None:
    """Check P1 and P2: after each step that counts, all members have the same weights.

    ledger: the generation of each step that counts. A member that left its group in the middle of a
    step may have completed this one step with other weights than those that stayed.
    """
    digests: dict[int, set[str]] = defaultdict(set)
    commits = {
        process: [r for r in own if r["kind"] == "commit" and r["step"] in ledger]
        for process, own in rows.items()
    }
    for own in commits.values():
        for row in own:
            if row["generation"] == ledger[row["step"]]:
                digests[row["step"]].add(row["digest"])
    different = [step for step, found in digests.items() if len(found) > 1]
    assert digests, "no step"
    assert not different, f"weights differ after steps {different}"
    for process, own in commits.items():
        last = {r["generation"]: r["step"] for r in own}
        for row in own:
            if row["digest"] not in digests[row["step"]]:
                assert row["step"] == last[row["generation"]], (process, row, "another lineage")


def check_weights(out: Path, rows: Rows, steps: list[dict[str, Any]]) -> None:
    """Check P3, P4: one process with whole batches gets these weights from the ledger's steps."""
    generations = {s["step"]: s["generation"] for s in steps}
    saved = {
        step: path
        for path in out.glob("weights-*.pt")
        for step, generation in [map(int, path.stem.split("-")[1:])]
        if generations.get(step) == generation
    }
    last = max(saved)
    (initial,) = (
        torch.load(path, weights_only=True)
        for path in out.glob("initial-*.pt")
        if any(r["rank"] == 0 and r["step"] == 0 for r in rows[f"steps-{path.stem.split('-')[1]}"])
    )
    taken = [s for s in steps if s["step"] <= last]
    expected = problem.solve(initial, taken, records.factors(rows))
    for name, value in torch.load(saved[last], weights_only=True).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10)


def _records(lines: list[str]) -> Iterator[dict[str, Any]]:
    """All records, without the half line of a coordinator that was killed while it wrote."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _sections(path: Path) -> Iterator[list[str]]:
    """The lines of each term, without a line that is still being written."""
    text = path.read_text() if path.exists() else ""
    section: list[str] = []
    for line in text.split("\n")[:-1]:
        if line.startswith('{"incarnation"') and section:
            yield section
            section = []
        section.append(line)
    if section:
        yield section
