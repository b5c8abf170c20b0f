"""Views of many nodes wait a little and are handled together."""

from __future__ import annotations

import asyncio

from elastic.coordinator.connected_agents import ViewBatches
from elastic.core.coordinator import events as ev


def report(node: str, slots: int = 1) -> ev.NodeReported:
    return ev.NodeReported(node=node, slots=slots, workers=())


async def test_a_view_of_few_nodes_does_not_wait() -> None:
    batches = ViewBatches(lambda: 8, lambda _: None)
    assert batches.batch(report("a")) == ev.NodesReported(reports=(report("a"),))
    assert batches.take() == ()


async def test_the_newest_views_of_many_nodes_come_together_and_soon() -> None:
    due: list[ev.NodesReported] = []
    batches = ViewBatches(lambda: 9, due.append)
    for each in (report("a"), report("b"), report("a", slots=2)):
        assert batches.batch(each) is None
    while not due:
        await asyncio.sleep(0.001)
    assert due == [ev.NodesReported(reports=(report("b"), report("a", slots=2)))]


async def test_views_that_were_taken_do_not_come_again() -> None:
    due: list[ev.NodesReported] = []
    batches = ViewBatches(lambda: 9, due.append)
    batches.batch(report("a"))
    assert batches.take() == (ev.NodesReported(reports=(report("a"),)),)
    await asyncio.sleep(0.01)
    assert due == []
