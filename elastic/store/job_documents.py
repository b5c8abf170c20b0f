"""The JSON documents by which coordinators and agents introduce themselves in the store."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.documents import parse, read

_MOST_SLOTS = 2**32 - 1  # the most that a message's uint32 holds


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderDocument:
    """The value of the election key."""

    candidate: str
    """A unique id that tells competitors apart, even at the same address."""
    address: str
    """host:port at which agents and operators reach it."""
    run_id: str = ""
    """The run that it leads; empty: written by an older version."""
    page: str = ""
    """The URL of the job's page; empty: it serves none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDocument:
    """The value of a node's key."""

    start_token: str
    """Tells agents apart; an agent restarted on the same files keeps it."""
    host: str
    slots: int
    version: str
    command_digest: str
    started_unix_s: float
    machine: str = ""
    """The machine that the node runs on; empty: written by an older version."""
    left: bool = False
    """True: no process that the agent started is left, and the key is about to go away."""


def leader_from_json(value: bytes) -> LeaderDocument:
    """Raises Unreadable."""
    return read(LeaderDocument, parse(value), added=("run_id", "page"))


def node_from_json(value: bytes) -> NodeDocument:
    """Raises Unreadable."""
    return read(NodeDocument, parse(value), added=("machine",), most={"slots": _MOST_SLOTS})
