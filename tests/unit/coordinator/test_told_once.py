"""`ToldOnce` remembers up to which number each source was heard."""

from __future__ import annotations

from elastic.coordinator import record_keeper
from elastic.coordinator.record_keeper import ToldOnce
from elastic.v1 import control_pb2 as pb
from tests.unit.coordinator.agents import agent


def test_only_the_sources_heard_last_are_remembered() -> None:
    told, most = ToldOnce(), record_keeper._MOST_SOURCES
    stream = agent("n1")
    for number in range(most + 5):
        told.hear(pb.Once(source=f"s-{number}", number=1), stream)
        told.hear(pb.Once(source="often", number=number + 1), stream)
    assert list(told.heard()) == [*(f"s-{number}" for number in range(6, most + 5)), "often"]
