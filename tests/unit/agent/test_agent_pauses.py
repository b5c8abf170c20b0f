"""The agent's view of its node has the longest pause of its event loop, and that it restarts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("answers", [True, False])
async def test_a_restart_is_announced_until_the_coordinator_knows_it_or_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    monkeypatch.setattr(daemon_module, "_ANNOUNCE_S", 0.2)
    agent, _ = unstarted(tmp_path)
    told: list[str] = []

    def send(**kind: Any) -> None:
        (name,) = kind
        told.append(name)
        if name == "view":
            assert kind["view"].restarting
        elif answers:
            later = asyncio.get_running_loop().call_later
            later(0.02, setattr, agent._link, "answered_at", kind["pulse"])

    monkeypatch.setattr(agent._link, "send", send)
    agent._link.connected = True
    began_at = time.monotonic()
    await agent.announce_restart()
    took_s = time.monotonic() - began_at
    assert told == ["view", "pulse"], "the answer to the second shows that the first has arrived"
    assert took_s >= (0.02 if answers else 0.2)
    agent._link.connected = False
    await agent.announce_restart()
