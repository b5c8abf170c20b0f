"""What metrics are: their definitions, and what one scrape finds of them.

Values are collected from snapshots when somebody asks; nothing counts beside the code that knows.
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
    """A definition. Every metric of a job bears the label `job` besides its own."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Catalog:
    """The definitions of one module, in their order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.metrics: list[Metric] = []

    def counter(self, name: str, help_text: str, *labels: str) -> Metric:
        """Define one that only grows."""
        return self._define(Kind.COUNTER, name, help_text, labels)

    def gauge(self, name: str, help_text: str, *labels: str) -> Metric:
        """Define one that goes up and down."""
        return self._define(Kind.GAUGE, name, help_text, labels)

    def histogram(self, name: str, help_text: str, *labels: str) -> Metric:
        """Define one that has buckets."""
        return self._define(Kind.HISTOGRAM, name, help_text, labels)

    def _define(self, kind: Kind, name: str, help_text: str, labels: tuple[str, ...]) -> Metric:
        metric = Metric(name=name, kind=kind, help=help_text, labels=labels)
        self.metrics.append(metric)
        return metric


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric; of a histogram one of several, told apart by `suffix`."""

    suffix: str
    labels: Mapping[str, str]
    value: float


class Found:
    """The samples of one scrape. `common` labels are borne by all of them."""

    def __init__(self, **common: str) -> None:
        self._common = common
        self.samples: dict[Metric, list[Sample]] = {}

    def set(self, metric: Metric, value: float | None, **labels: str) -> None:
        """One sample of a counter or a gauge. None, and what is no finite number, is left out."""
        if value is None or not math.isfinite(value):
            return
        self._add(metric, "", self._labels(metric, labels), float(value))

    def set_each(self, metric: Metric, label: str, values: Mapping[str, float]) -> None:
        """A sample for each value of the one label."""
        for name, value in values.items():
            self.set(metric, value, **{label: name})

    def buckets(self, metric: Metric, histogram: Histogram, **labels: str) -> None:
        """The samples of a histogram."""
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
    """As a label of a bucket."""
    return "+Inf" if bound == math.inf else repr(float(bound))


def _legible(value: str) -> str:
    """What a peer may have named, as a label takes it."""
    return value.encode(errors="backslashreplace").decode()[:_MOST_LABEL]


Collect = Callable[[Found], None]
"""Adds the samples of what it knows."""
