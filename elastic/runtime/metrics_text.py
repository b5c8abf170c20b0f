"""What a scrape finds, as text: of Prometheus or OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic.runtime.metrics import Found, Kind, Metric, Sample

OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """An answer to a scrape."""

    content_type: str
    body: bytes


def write(found: Found, *, opens: bool = False, others: Iterable[Family] = ()) -> Written:
    """opens: as OpenMetrics. others: what somebody else has collected, to be added."""
    wanted = f"{OPENMETRICS}; version=1.0.0" if opens else ""
    encode, content_type = choose_encoder(wanted)
    families = [*(_family(*one) for one in found.samples.items()), *others]
    return Written(content_type=content_type, body=encode(_Collector(families)))


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind.value)
    total = "_total" if metric.kind is Kind.COUNTER else ""
    for sample in samples:
        name = f"{family.name}{sample.suffix}{total}"
        family.add_sample(name, dict(sample.labels), sample.value)
    return family


class _Collector(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return iter(self._families)
