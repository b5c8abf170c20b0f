"""Metric definitions follow Prometheus' conventions, and its parsers read what is written."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from elastic.core.histogram import Histogram
from elastic.runtime.http_pages import write
from elastic.runtime.metrics import Catalog, Found, Kind, Metric
from tests.metrics_doc import CATALOGS

ALL = [pytest.param(metric, id=metric.name) for c in CATALOGS for metric in c.metrics]
LABELS = {"node", "slot", "kind", "reason", "phase", "state", "name", "version", "python_version"}
NOT_BASE = ("_ms", "_milliseconds", "_minutes", "_hours", "_kb", "_mb", "_percent")


def test_no_name_is_defined_twice() -> None:
    names = [metric.name for catalog in CATALOGS for metric in catalog.metrics]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("metric", ALL)
def test_a_definition_follows_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"elastic(_[a-z0-9]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert not any(part in metric.name for part in NOT_BASE), "base units"
    assert metric.kind is not Kind.HISTOGRAM or metric.name.endswith("_seconds")
    assert metric.help.endswith(".")
    assert set(metric.labels) <= LABELS, "others have no bound"


def example() -> Found:
    catalog = Catalog("A daemon")
    steps = catalog.counter("elastic_steps_total", "Steps.")
    nodes = catalog.gauge("elastic_nodes", "Nodes.", "state")
    took = catalog.histogram("elastic_took_seconds", "How long.", "kind")
    found = Found(job="digits")
    found.set(steps, 12)
    found.set_each(nodes, "state", {"ready": 2, 'o"d\\d\n': 1})
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    found.buckets(took, histogram, kind="a")
    return found


@pytest.mark.parametrize("opens", [False, True])
def test_parsers_read_back_the_written_values(opens: bool) -> None:
    written = write(example(), opens=opens)
    assert written.content_type.startswith(
        "application/openmetrics-text" if opens else "text/plain"
    )
    families = list((openmetrics if opens else plain)(written.body.decode()))
    assert [family.type for family in families] == ["counter", "gauge", "histogram"]
    samples = {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }
    job = ("job", "digits")
    assert samples["elastic_steps_total", job] == 12
    assert samples["elastic_nodes", job, ("state", 'o"d\\d\n')] == 1
    kind = ("kind", "a")
    below = {le: samples["elastic_took_seconds_bucket", job, kind, ("le", le)] for le in LE}
    assert below == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert samples["elastic_took_seconds_count", job, kind] == 4
    assert samples["elastic_took_seconds_sum", job, kind] == pytest.approx(7.65)


LE = ("0.1", "1.0", "+Inf")


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_finite_number_is_left_out(value: float | None) -> None:
    found = Found(job="digits")
    found.set(Catalog("A daemon").gauge("elastic_value", "A value."), value)
    assert found.samples == {}


def test_a_label_value_is_escaped_and_shortened() -> None:
    found = Found(job="digits")
    metric = Catalog("A daemon").gauge("elastic_value", "A value.", "name")
    found.set(metric, 1.0, name="\udcff" + "x" * 10_000)
    (sample,) = found.samples[metric]
    assert sample.labels["name"].startswith("\\udcffxxx")
    assert len(sample.labels["name"]) == 200
    write(found)


def test_histograms_are_added_up_and_copied() -> None:
    one, two = Histogram((1.0,)), Histogram((1.0,))
    one.observe(0.5)
    two.observe(3.0)
    same = one.copy()
    one.add(two.counts, two.total)
    assert (one.counts, one.total) == ([1, 1], 3.5)
    assert (same.counts, same.total) == ([1, 0], 0.5)
