"""The agent's view of its node has the longest pause of its event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic.agent import daemon as daemon_module
from tests.unit.agent.unstarted import unstarted
from tests.waiting import until


async def test_each_pause_that_is_longer_than_those_before_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_LIVENESS_INTERVAL_S", 0.01)
    told: list[float] = []
    agent, _ = unstarted(tmp_path)
    monkeypatch.setattr(agent._link, "send", lambda view: told.append(view.longest_pause_s))
    watching = asyncio.ensure_future(agent._watch_liveness())
    for pause_s in (0.06, 0.3):
        agent._pauses.longest_s = pause_s
        await until(lambda expected=pause_s: told[-1:] == [expected])
    await asyncio.sleep(0.05)
    watching.cancel()
    assert told == [0.06, 0.3]
