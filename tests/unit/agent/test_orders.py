"""What an agent has heard from one coordinator it tells the next: the store may have lost it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.coordinator_link import FixedLeader
from elastic.agent.daemon import AgentDaemon, NodeOptions
from elastic.core.agent.machine import AgentSettings
from elastic.rpc.control import ControlClient
from elastic.runtime.journal import Entry, Journal
from elastic.v1 import control_pb2 as pb


def with_agent(directory: Path, check: Callable[[AgentDaemon], None]) -> list[Entry]:
    """`check` gets one that was not started; its entries."""
    entries: list[Entry] = []

    async def main() -> None:
        options = NodeOptions(
            machine=AgentSettings(node="n1", slots=1),
            host="127.0.0.1",
            argv=["train.py"],
            run_directory=directory,
            log_directory=directory,
            environment={},
            hello=pb.AgentHello(node="n1"),
        )
        leader = FixedLeader(f"unix:{directory}/c.sock")
        journal = Journal(entries.append)
        check(AgentDaemon(options, leader, ControlClient, journal, lambda *_: None))

    asyncio.run(main())
    return entries


def test_an_order_to_stop_is_told_to_the_next_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = pb.StopRequest(reason="maintenance", exit_code=82)

    def check(daemon: AgentDaemon) -> None:
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(daemon._link, "send", lambda **kind: sent.append(kind))
        daemon._report_again()
        assert [kind for message in sent for kind in message] == ["view"]
        daemon._coordinator_said(pb.CoordinatorMessage(stop=order))
        sent.clear()
        daemon._report_again()
        assert {"stop": order} in sent

    with_agent(tmp_path, check)
