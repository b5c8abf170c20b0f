"""The agent tells the coordinator how long its event loop has stood still."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import daemon as daemon_module
from elastic.agent.coordinator_link import FixedLeader
from elastic.agent.daemon import AgentDaemon, NodeOptions
from elastic.core.agent.machine import AgentSettings
from elastic.rpc.control import ControlClient
from elastic.runtime.journal import Journal
from elastic.runtime.loop_watch import LoopPauses
from elastic.settings.run import RunSettings
from elastic.v1 import control_pb2 as pb


async def test_each_pause_that_is_longer_than_those_before_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_LIVENESS_INTERVAL_S", 0.01)
    told: list[float] = []

    options = NodeOptions(
        machine=AgentSettings(node="n", slots=1),
        host="127.0.0.1",
        settings=RunSettings(),
        argv=["train.py"],
        run_directory=tmp_path,
        log_directory=tmp_path,
        environment={},
        hello=pb.AgentHello(node="n"),
    )
    pauses = LoopPauses()
    agent = AgentDaemon(
        options, FixedLeader("unix:none"), ControlClient, Journal(), _ignore, pauses
    )
    monkeypatch.setattr(agent._link, "send", lambda view: told.append(view.longest_pause_s))
    watching = asyncio.ensure_future(agent._watch_liveness())
    for pause_s in (0.06, 0.3):
        pauses.longest_s = pause_s
        while told[-1:] != [pause_s]:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    watching.cancel()
    assert told == [0.06, 0.3]


def _ignore(*_: Any) -> None:
    pass
