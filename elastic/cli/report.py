"""Prints where the time of a job's slots went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from elastic.cli.formats import print_table, say
from elastic.core.book.accounting import Kind
from elastic.core.documents import Unreadable, parse
from elastic.core.legible import is_representable_time
from elastic.errors import ConfigurationError
from elastic.v1 import control_pb2 as pb

_MOST_SHOWN = 20  # incidents and nodes; `--output json` has more of them
_MOST_NAMES = 3
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading an answer of another version may raise."""


def accounts_of(reply: pb.JobStatus) -> dict[str, Any]:
    """The accounts that the coordinator reports; empty if they cannot be read here, because it has
    another version."""
    try:
        return parse(reply.accounts_json)
    except Unreadable:
        return {}


def print_report(reply: pb.JobStatus) -> None:
    """Print the kinds of time, and the time lost by incident and by node. Raises ConfigurationError
    if the coordinator's accounts cannot be read."""
    accounts = accounts_of(reply)
    try:
        title = _title(reply.job, accounts)
        kinds = list(kind_rows(accounts["kinds"]))
        incidents = [_incident_row(i) for i in accounts["incidents"][-_MOST_SHOWN:]]
        lost = sorted(accounts["nodes"], key=lambda n: -float(n["lost_s"]))
        nodes = [_node_row(node) for node in lost[:_MOST_SHOWN] if float(node["lost_s"])]
    except UNREADABLE as error:
        raise ConfigurationError(
            "this version of elastic cannot read the coordinator's accounts of time; use the "
            "version that the coordinator has"
        ) from error
    say(title)
    print_table(("kind", "slot time", "share"), kinds)
    if incidents:
        say()
        print_table(("at", "cause", "node", "worker", "lost", "mostly"), incidents)
    if nodes:
        say()
        print_table(("node", "lost", "mostly"), nodes)


def goodput_line(reply: pb.JobStatus) -> str:
    """A line for `elastic status`; empty while no time has been booked."""
    accounts = accounts_of(reply)
    try:
        if accounts["goodput"] is None:
            return ""
        lost = {k: float(s) for k, s in accounts["kinds"].items() if k != Kind.PRODUCTIVE.value}
        most = f", lost mostly: {_mostly(lost)}" if any(lost.values()) else ""
        return f"goodput {float(accounts['goodput']):.1%}{most} (elastic report)"
    except UNREADABLE:
        return ""


def ending_lines(fields: Mapping[str, Any]) -> list[str]:
    """A small table from the event at a job's end; no lines if the event has no figures."""
    kinds = fields.get("slot_seconds")
    if not kinds:
        return []
    rows = list(kind_rows(kinds))
    wide = max(len(kind) for kind, _, _ in rows)
    return [f"{kind:<{wide}}  {spent:>9}  {share:>6}" for kind, spent, share in rows]


def kind_rows(kinds: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Kind, duration and share of each kind that has any time."""
    seconds = {str(kind): float(s) for kind, s in kinds.items()}
    total = sum(seconds.values())
    for kind, spent_s in seconds.items():
        if spent_s > 0.0:
            yield kind, duration(spent_s), f"{spent_s / total:.1%}"


def duration(seconds: float) -> str:
    """The duration as text, in s, min or h."""
    if seconds < 120.0:
        return f"{seconds:.2f} s" if seconds < 10.0 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"


def _title(job: str, accounts: Mapping[str, Any]) -> str:
    goodput = accounts["goodput"]
    share = f"goodput {float(goodput):.1%}" if goodput is not None else "no time yet"
    slots = int(accounts["wanted_slots"])
    spent = duration(float(accounts["slot_seconds"]))
    return f"job {job}: {share}, {spent} of wanted slots ({slots} now)"


def _incident_row(incident: Mapping[str, Any]) -> tuple[str, ...]:
    at = float(incident["unix_s"])
    instant = time.strftime("%H:%M:%S", time.localtime(at)) if is_representable_time(at) else "-"
    number = int(incident["generation"])
    group = f", generation {number}" if number else ""
    return (
        instant,
        f"{incident['reason'].replace('_', ' ')}{group}",
        _names(incident["nodes"]),
        _names(incident["workers"]),
        duration(float(incident["lost_s"])),
        _mostly(incident["seconds"]),
    )


def _node_row(node: Mapping[str, Any]) -> tuple[str, ...]:
    name = node["node"] or "(no node)"
    return (str(name), duration(float(node["lost_s"])), _mostly(node["kinds"]))


def _mostly(kinds: Mapping[str, Any]) -> str:
    """The kinds with the most time, largest first."""
    parts = sorted(((float(s), str(kind)) for kind, s in kinds.items()), reverse=True)
    return ", ".join(f"{kind} {duration(s)}" for s, kind in parts[:_MOST_NAMES] if s > 0.0) or "-"


def _names(names: list[Any]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(map(str, names[:_MOST_NAMES])) or "-") + more
