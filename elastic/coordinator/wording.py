"""Words the sentences that people read about incidents, refusals and the end of a job."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.coordinator.connected_agents import name_of
from elastic.core.book.incidents import Cause, Sign
from elastic.core.coordinator.connections import Unreached
from elastic.core.coordinator.effects import EndJob, PeersUnreachable, RefuseNewcomers
from elastic.core.membership import NodeId
from elastic.core.restarts import Verdict

_MOST_NAMES = 4
_PEERS_FAIL_WITHIN_S = 10.0  # a process notices the loss of a peer, and raises, within this time


def with_words(document: dict[str, Any]) -> dict[str, Any]:
    """Return an incident's document with the sentences that sum it up."""
    return {"summary": summary(document), "noticed_by": noticed_by(document), **document}


def summary(document: Mapping[str, Any]) -> str:
    """Say what struck first, in one sentence without a full stop. document: a record's."""
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
        signs = (Sign.NODE_LOST.value, Sign.NODE_GONE.value, Sign.NODE_ABSENT.value)
        lost = dict.fromkeys(n["node"] for n in document["noticed"] if n["sign"] in signs)
        return f"{_nodes(list(lost))} lost"
    if cause is Cause.LEAVE_TIMED_OUT:
        late = [n["node"] for n in document["noticed"] if n["sign"] == Sign.LEAVE_TIMED_OUT.value]
        return (
            f"node {late[0]} was told to leave, but its workers did not reach a step boundary "
            "in time"
        )
    if cause is Cause.UNREACHABLE:
        found = [n for n in document["noticed"] if n["sign"] == Sign.UNREACHABLE.value]
        told = [f"node {n['node']} did not reach {n['detail']}" for n in found]
        more = f"; {len(told) - _MOST_NAMES} more" if len(told) > _MOST_NAMES else ""
        return f"members do not reach each other: {'; '.join(told[:_MOST_NAMES])}{more}"
    if cause is Cause.GROUP_BROKEN:
        broken = next(n for n in document["noticed"] if n["sign"] == Sign.GROUP_BROKEN.value)
        detail = f": {broken['detail']}" if broken["detail"] else ""
        return f"connections between members broke, as {_who(broken)} noticed{detail}"
    return f"the group lost {', '.join(document['workers'][:_MOST_NAMES]) or 'a member'}"


def noticed_by(document: Mapping[str, Any]) -> str:
    """Say which process noticed first, and how; empty if that is unknown. Says also why the
    coordinator has noticed late, if it was stopped."""
    stopped = Sign.COORDINATOR_STOPPED.value
    signs = [n for n in document["noticed"] if n["sign"] != stopped]
    late = [n["detail"] for n in document["noticed"] if n["sign"] == stopped]
    found = [_noticed_by(signs[0], document)] if signs else []
    return "; ".join([*found, *(f"the coordinator was late: {why}" for why in late)])


def _noticed_by(first: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    sign, node = Sign(first["sign"]), first["node"]
    if sign is Sign.WORKER_ENDED:
        lived = document["cause"] == Cause.WORKER_LEFT_OUT.value
        how = "it declared the process lost" if lived else "the process ended"
        return f"the agent of node {node}: {how}"
    if sign is Sign.GROUP_BROKEN:
        detail = f" ({first['detail']})" if first["detail"] else ""
        return f"{_who(first)}: its collective failed{detail}"
    if sign is Sign.NODE_LOST:
        return f"the coordinator: its connection to the agent of node {node} broke"
    if sign is Sign.NODE_ABSENT:
        return (
            f"the coordinator: the agent of node {node} has not connected since the leader changed"
        )
    if sign is Sign.NODE_GONE:
        return f"the coordinator: all workers of node {node} have ended"
    if sign is Sign.OVERDUE:
        hang = document["hang"]
        since = f" for {hang['standing_s']:.1f} s" if hang is not None else " in time"
        return f"the coordinator: no step was committed{since}"
    if sign is Sign.UNREACHABLE:
        return f"the agent of node {node}: it did not reach {first['detail']}"
    if sign is Sign.LEAVE_TIMED_OUT:
        return f"the agent of node {node}: its time to leave ran out"
    if node:
        return f"{_who(first)}: it could not write its part of the checkpoint"
    return "the coordinator: it could not complete the checkpoint"


def _first_process(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first process; one that was ended for not answering only if there is no other.

    An exception does not kill another process, but a process that is killed makes others raise, and
    these may report first.
    """
    processes: list[Mapping[str, Any]] = document["processes"]
    found = sorted(processes, key=lambda p: (p["kind"] == "left_out", p["after_s"]))
    if not found:
        return None
    until_s = found[0]["after_s"] + _PEERS_FAIL_WITHIN_S
    killed = [p for p in found if _was_killed(p) and p["after_s"] <= until_s]
    return (killed or found)[0]


def _was_killed(process: Mapping[str, Any]) -> bool:
    """True if the process was ended by a signal that torch, NCCL and agents do not send."""
    return process["kind"] == "signal" and process["code"] not in (signal.SIGABRT, signal.SIGTERM)


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


def ending(effect: EndJob, max_restarts: int, window_s: float) -> str:
    """Say why the job ended and what to do about it; empty for a good end."""
    failure = effect.failure
    if failure is None or effect.verdict is None:
        return effect.message
    what = f"worker {failure.worker}: {failure.message}"
    log = f" Its log: {failure.log}." if failure.log else ""
    if effect.verdict is Verdict.NOT_RETRYABLE:
        return f"{what}.{log}"
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS and failure.place:
        seen = f" {effect.message}." if effect.message else ""
        return (
            f"the script hangs at the same place ({failure.place}) on different nodes before "
            f"another step is committed, so other nodes cannot help; {what}.{seen}{log}"
        )
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS:
        return (
            f"the script fails the same way again before another step is committed, so restarting "
            f"cannot help; {what}.{log}"
        )
    return (
        f"more than {max_restarts} workers failed within {window_s:g} s, the last one: {what}."
        f"{log} Raise --max-restarts if such failures are expected"
    )


def refusal(effect: RefuseNewcomers) -> str:
    """Say why newcomers are not let into the group, and what to do about it."""
    failure = effect.failure
    return (
        "workers that join fail in the same way each time, so none may join for "
        f"{effect.retry_s:.0f} s and the group trains on as it is; the last one, "
        f"{failure.worker}: {failure.message}. Fix the script or the node: the next worker that "
        "starts uses the fixed version"
    )


def unreachable(effect: PeersUnreachable) -> dict[str, Any]:
    """The fields of the event that says who cannot reach whom, and what to do about it."""
    told = [
        {
            "node": name_of(u.by),
            "peer": name_of(u.peer.node),
            "address": u.peer.endpoint,
            "reason": _why(u),
        }
        for u in effect.unreached[:_MOST_PAIRS]
    ]
    out = [name_of(node) for node in effect.left_out]
    return {
        "unreached": told,
        "left_out": out,
        "retry_s": round(effect.retry_s, 1),
        "message": _told_unreached(effect.unreached, out, effect.retry_s),
    }


def why_left_out(effect: PeersUnreachable) -> dict[NodeId, str]:
    """For each node that is left out: whom it does not reach, and who does not reach it."""
    return {
        node: unreached_in_words([u for u in effect.unreached if node in (u.by, u.peer.node)])
        for node in effect.left_out
    }


_MOST_PAIRS = 16


def _why(found: Unreached) -> str:
    if not found.by_port:
        return found.why
    return f"this port answers, but not one that the kernel chose ({found.why}): a firewall"


def _told_unreached(unreached: Sequence[Unreached], out: Sequence[str], retry_s: float) -> str:
    what = unreached_in_words(unreached)
    named = ", ".join(out[:_MOST_NAMES])
    goes_on = (
        f"; node{'s' if len(out) > 1 else ''} {named} cannot take part, which is tried again in "
        f"{retry_s:.0f} s, and the others go on"
        if out
        else ""
    )
    return f"{what}{goes_on}. {_ADVICE}"


_ADVICE = (
    "Workers connect to each other at all ports: open them between these nodes in both directions, "
    "and give an agent whose address is wrong another --node-host. `elastic doctor` on both nodes "
    "shows which ports answer"
)


def unreached_in_words(unreached: Sequence[Unreached]) -> str:
    """Say who has not reached whom, at which address."""
    told = dict.fromkeys(
        f"node {name_of(u.by)} does not reach node {name_of(u.peer.node)} at {u.peer.endpoint} "
        f"({_why(u)})"
        for u in unreached
    )
    shown = list(told)[:_MOST_NAMES]
    more = f", and {len(told) - len(shown)} more" if len(told) > len(shown) else ""
    return f"{', '.join(shown)}{more}" if shown else "members do not reach each other"
