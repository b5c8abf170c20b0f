"""Makes an agent that is not started, for tests of its parts."""

from __future__ import annotations

from pathlib import Path

from elastic.agent.coordinator_link import FixedLeader
from elastic.agent.daemon import AgentDaemon, NodeOptions
from elastic.core.agent.machine import AgentSettings
from elastic.rpc.control_client import ControlClient
from elastic.runtime.journal import Entry, Journal
from elastic.settings.run import RunSettings
from elastic.v1 import control_pb2 as pb


def unstarted(
    directory: Path, checkpoint_dir: str = "", isolation_timeout_s: float = 0.0
) -> tuple[AgentDaemon, list[Entry]]:
    """An agent that is not started, and the entries of its journal."""
    entries: list[Entry] = []
    options = NodeOptions(
        machine=AgentSettings(node="n1", slots=1),
        host="127.0.0.1",
        settings=RunSettings(),
        argv=["train.py"],
        run_directory=directory,
        log_directory=directory,
        environment={},
        hello=pb.AgentHello(node="n1", isolation_timeout_s=isolation_timeout_s),
        checkpoint_dir=checkpoint_dir,
    )
    leader = FixedLeader(f"unix:{directory}/c.sock")
    journal = Journal(entries.append)
    return AgentDaemon(options, leader, ControlClient, journal, lambda *_: None), entries
