"""Sentences of an incident: what struck, and who noticed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.incidents import Cause, Sign

_MOST_NAMES = 4


def summary(document: Mapping[str, Any]) -> str:
    """What struck first, in one sentence without a full stop. document: of a record."""
    cause, process = Cause(document["cause"]), _first_process(document)
    if cause is Cause.SAVE_FAILED:
        return _failed_saves(document["saves"])
    if cause is Cause.HANG and document["hang"] is not None:
        return _hang(document["hang"])
    if cause in (Cause.WORKER_FAILED, Cause.WORKER_LEFT_OUT) and process is not None:
        more = len(document["processes"]) - 1 + document["further_processes"]
        others = f"; {more} more {'process' if more == 1 else 'processes'} ended" if more else ""
        verb = "raised " if process["kind"] == "exception" else ""
        return f"{_who(process)} {verb}{process['message']}{others}"
    if cause is Cause.NODE_LOST:
        signs = (Sign.NODE_LOST.value, Sign.NODE_GONE.value)
        lost = dict.fromkeys(n["node"] for n in document["noticed"] if n["sign"] in signs)
        return f"{_nodes(list(lost))} lost"
    if cause is Cause.LEAVE_TIMED_OUT:
        late = [n["node"] for n in document["noticed"] if n["sign"] == Sign.LEAVE_TIMED_OUT.value]
        return f"node {late[0]} was to leave, and its workers came to no step boundary in time"
    if cause is Cause.GROUP_BROKEN:
        broken = next(n for n in document["noticed"] if n["sign"] == Sign.GROUP_BROKEN.value)
        detail = f": {broken['detail']}" if broken["detail"] else ""
        return f"connections between members broke, as {_who(broken)} noticed{detail}"
    return f"the group lost {', '.join(document['workers'][:_MOST_NAMES]) or 'a member'}"


def noticed_by(document: Mapping[str, Any]) -> str:
    """The process that noticed first, and by what; empty if that is not known."""
    if not document["noticed"]:
        return ""
    first = document["noticed"][0]
    sign, node = Sign(first["sign"]), first["node"]
    if sign is Sign.WORKER_ENDED:
        return f"the agent of node {node}: the process ended"
    if sign is Sign.GROUP_BROKEN:
        detail = f" ({first['detail']})" if first["detail"] else ""
        return f"{_who(first)}: its collective failed{detail}"
    if sign is Sign.NODE_LOST:
        return f"the coordinator: its connection to the agent of node {node} broke"
    if sign is Sign.NODE_GONE:
        return f"the coordinator: the registration of node {node} is gone"
    if sign is Sign.OVERDUE:
        hang = document["hang"]
        since = f" for {hang['standing_s']:.1f} s" if hang is not None else " in time"
        return f"the coordinator: nothing was committed{since}"
    if sign is Sign.LEAVE_TIMED_OUT:
        return f"the agent of node {node}: its time to leave was over"
    if node:
        return f"{_who(first)}: it could not write its part"
    return "the coordinator: it could not complete the checkpoint"


def _first_process(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """One that was ended for not answering only if there is no other."""
    found = sorted(document["processes"], key=lambda p: (p["kind"] == "left_out", p["after_s"]))
    return found[0] if found else None


def _who(found: Mapping[str, Any]) -> str:
    if found["rank"] is None:
        return f"worker {found['worker']} (node {found['node']})"
    return f"rank {found['rank']} (node {found['node']}, worker {found['worker']})"


def _nodes(names: list[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]} was"
    shown = ", ".join(names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"nodes {shown}{more} were"


def _hang(hang: Mapping[str, Any]) -> str:
    stood = f"the group stood still at step {hang['step']} for {hang['standing_s']:.1f} s"
    return f"{stood}: {hang['verdict']}" if hang["verdict"] else stood


def _failed_saves(saves: Mapping[str, Any]) -> str:
    if saves["count"] == 1:
        which = f"the checkpoint of step {saves['first_step']} was"
    else:
        steps = f"steps {saves['first_step']} to {saves['last_step']}"
        which = f"{saves['count']} checkpoints, of {steps}, were"
    return f"{which} not saved: {saves['message']}"
