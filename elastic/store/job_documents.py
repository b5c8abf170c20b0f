"""The JSON documents by which coordinators and agents introduce themselves in the store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from elastic.core.legible import is_representable_time, is_utf8_encodable

_MOST_SLOTS = 2**32 - 1  # the most that a message's uint32 holds


class Unreadable(ValueError):
    """Not a document of this kind: another version or another program has written it."""


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


def to_json(document: LeaderDocument | NodeDocument) -> bytes:
    return json.dumps(dataclasses.asdict(document), sort_keys=True).encode()


def leader_from_json(value: bytes) -> LeaderDocument:
    """Raises Unreadable."""
    fields = _fields(value)
    return LeaderDocument(
        candidate=_text(fields, "candidate"),
        address=_text(fields, "address"),
        run_id=_text(fields, "run_id", ""),
        page=_text(fields, "page", ""),
    )


def node_from_json(value: bytes) -> NodeDocument:
    """Raises Unreadable."""
    fields = _fields(value)
    return NodeDocument(
        start_token=_text(fields, "start_token"),
        host=_text(fields, "host"),
        slots=_slots(fields),
        version=_text(fields, "version"),
        command_digest=_text(fields, "command_digest"),
        started_unix_s=_instant(fields, "started_unix_s"),
        machine=_text(fields, "machine", ""),
        left=_field(fields, "left", bool),
    )


def _fields(value: bytes) -> dict[str, Any]:
    """All fields, including those that a newer version has added. Raises Unreadable."""
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {value[:80]!r}") from error
    if not isinstance(fields, dict):
        raise Unreadable(f"not a JSON object: {value[:80]!r}")
    return fields


def _field(fields: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    found = fields.get(name)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise Unreadable(f"its {name} is {found!r}")
    return found


def _text(fields: dict[str, Any], name: str, otherwise: str | None = None) -> str:
    """otherwise: the value if an older version has not written the field."""
    text: str = _field({name: otherwise, **fields}, name, str)
    if not is_utf8_encodable(text):
        raise Unreadable(f"its {name} is {text!r}")
    return text


def _slots(fields: dict[str, Any]) -> int:
    slots: int = _field(fields, "slots", int)
    if not 0 <= slots <= _MOST_SLOTS:
        raise Unreadable(f"its slots are {slots}")
    return slots


def _instant(fields: dict[str, Any], name: str) -> float:
    unix_s: float = _field(fields, name, (int, float))
    if not is_representable_time(unix_s):
        raise Unreadable(f"its {name} is {unix_s}")
    return float(unix_s)
