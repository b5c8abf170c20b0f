"""The Grafana dashboards match their generator and use metrics that exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.deploy.expressions import DASHBOARDS, Expression, of_dashboards
from tests.metrics_doc import CATALOGS

METRICS = {metric.name: metric for catalog in CATALOGS for metric in catalog.metrics}
NOT_SHOWN = {
    "elastic_job_start_timestamp_seconds": "the age of a run says nothing of its health",
    "elastic_job_counts_steps": "of scripts for torchrun the panels of steps are empty",
    "elastic_samples_per_second": "the rate of what was committed is shown",
    "elastic_store_roll_back_timestamp_seconds": "an alert uses it; a panel shows how often",
    "elastic_checkpoint_interval_steps": "an alert uses it: none is missing if none is due",
    "elastic_job_resumed_timestamp_seconds": "an alert uses it: a run that is resumed has time",
    "elastic_slow_recovery_timestamp_seconds": "an alert uses it; panels show all recoveries",
    "elastic_wanted_slots": "the panels of time are shares of it",
}
"""Metrics that no dashboard shows, and why."""


def base(name: str) -> str:
    """Return the metric that a series belongs to."""
    for suffix in ("_bucket", "_count", "_sum"):
        if name not in METRICS and name.removesuffix(suffix) in METRICS:
            return name.removesuffix(suffix)
    return name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the generator's library needs Python 3.11")
def test_the_committed_dashboards_match_the_generator() -> None:
    """If this fails: python -m tests.deploy.dashboards"""
    from tests.deploy import dashboards  # noqa: PLC0415 - see above

    kept = {path.name: path.read_text() for path in DASHBOARDS}
    assert kept == dashboards.documents()


@pytest.mark.parametrize("expression", of_dashboards(), ids=lambda e: e.where)
def test_each_expression_uses_existing_metrics_of_the_selected_job(expression: Expression) -> None:
    assert expression.names
    for name in expression.names:
        assert base(name) in METRICS, name
    for selector in expression.selectors:
        assert '{job="$job"' in selector or "variable job" in expression.where


def test_every_metric_is_shown_or_left_out_with_a_reason() -> None:
    shown = {base(name) for expression in of_dashboards() for name in expression.names}
    assert set(METRICS) - shown == set(NOT_SHOWN)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_have_unique_ids(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    ids = [panel["id"] for panel in board["panels"]]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    taken = [
        (x, y)
        for panel in board["panels"]
        for where in [panel["gridPos"]]
        for x in range(where["x"], where["x"] + where["w"])
        for y in range(where["y"], where["y"] + where["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
