"""Defines metrics and collects their samples for a scrape.

A scrape takes the values from a snapshot of the code that knows them; nothing else keeps counts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic.core.histogram import Histogram

_MOST_LABEL = 200  # characters of a value


class Kind(enum.Enum):
    """How a metric behaves, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """The definition of a metric. A job's metrics have the label `job` besides their own."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Catalog:
    """The metrics that one module defines, in order, below a title for the documentation."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.metrics: list[Metric] = []

    def counter(self, name: str, help_text: str, *labels: str) -> Metric:
        return self._define(Kind.COUNTER, name, help_text, labels)

    def gauge(self, name: str, help_text: str, *labels: str) -> Metric:
        return self._define(Kind.GAUGE, name, help_text, labels)

    def histogram(self, name: str, help_text: str, *labels: str) -> Metric:
        return self._define(Kind.HISTOGRAM, name, help_text, labels)

    def _define(self, kind: Kind, name: str, help_text: str, labels: tuple[str, ...]) -> Metric:
        metric = Metric(name=name, kind=kind, help=help_text, labels=labels)
        self.metrics.append(metric)
        return metric


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric. A histogram has several samples, which `suffix` tells apart."""

    suffix: str
    labels: Mapping[str, str]
    value: float


class Found:
    """The samples of one scrape. All of them have the `common` labels."""

    def __init__(self, **common: str) -> None:
        self._common = common
        self.samples: dict[Metric, list[Sample]] = {}

    def set(self, metric: Metric, value: float | None, **labels: str) -> None:
        """Add a sample of a counter or a gauge, unless it is None or not finite."""
        if value is None or not math.isfinite(value):
            return
        self._add(metric, "", self._labels(metric, labels), float(value))

    def set_each(self, metric: Metric, label: str, values: Mapping[str, float]) -> None:
        """Add a sample for each of `values`, with its key as the value of `label`."""
        for name, value in values.items():
            self.set(metric, value, **{label: name})

    def buckets(self, metric: Metric, histogram: Histogram, **labels: str) -> None:
        named, below = self._labels(metric, labels), 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            below += count
            self._add(metric, "_bucket", {**named, "le": _shown(bound)}, below)
        self._add(metric, "_count", named, below)
        self._add(metric, "_sum", named, histogram.total)

    def _add(self, metric: Metric, suffix: str, labels: Mapping[str, str], value: float) -> None:
        self.samples.setdefault(metric, []).append(Sample(suffix, labels, value))

    def _labels(self, metric: Metric, labels: Mapping[str, str]) -> dict[str, str]:
        assert set(labels) == set(metric.labels), (metric.name, labels)
        shown = {name: _legible(value) for name, value in labels.items()}
        return {**self._common, **shown}


def _shown(bound: float) -> str:
    return "+Inf" if bound == math.inf else repr(float(bound))


def _legible(value: str) -> str:
    """Return text that a peer may have chosen as a short label in valid UTF-8."""
    return value.encode(errors="backslashreplace").decode()[:_MOST_LABEL]


Collect = Callable[[Found], None]
"""Adds the samples of a snapshot to a scrape."""
