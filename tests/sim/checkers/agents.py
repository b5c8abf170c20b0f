"""Agents pass on news, report the truth, and end their workers when they are cut off for good."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.journal import Journal


def agents(journal: Journal) -> Iterator[str]:
    for worker in journal.unheard:
        yield f"nobody told {worker}"
    for worker in journal.outlived:
        yield f"{worker} lives on although its node was cut off for good"
    for worker in journal.misreported:
        yield f"{worker} is reported as starting, which it did long ago"
