"""Calls that every member must make: they meet before one, and a member that does not is named.

Members meet at the group's store, where nobody blocks, so that different calls are found out before
their collectives could be mixed up.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import Store

from elastic.errors import StepMisused
from elastic.worker.group.process_group import Group

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0002, 0.02
_ASK_AFTER_S = 0.5


class Described(Protocol):
    """What can be compared between members."""

    what: str
    """The same on every member that makes the same call."""
    where: str
    """File and line of the script; empty at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where a member is that does not make a call."""

    committed: int
    doing: str


def meet(group: Group, committed: int, number: int, call: Described) -> None:
    """Return once every member has come to call `number` since step `committed`.

    Raises StepMisused naming both sides where members make different calls, or where one is
    elsewhere for good; GroupLost, or an error of the store's connection, when the group is aborted.
    """
    store = group.store
    if group.world_size == 1 or store is None:
        return
    prefix = f"call/{committed}/{number}"
    mine = json.dumps([call.what, call.where])
    store.set(f"{prefix}/{group.rank}", mine)
    before, group.met_at = group.met_at, f"{prefix}/{group.rank}"
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    began, pause_s = time.monotonic(), _FIRST_LOOK_S
    asked = False
    while not store.check([f"{prefix}/{rank}" for rank in others]):
        group.check()
        if asked:
            _raise_if_elsewhere(group, store, committed, others, call)
        elif time.monotonic() - began > _ASK_AFTER_S:
            store.set(f"asked/{committed}", mine)
            asked = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    for rank in others:
        what, where = json.loads(store.get(f"{prefix}/{rank}"))
        if what != call.what:
            raise StepMisused(
                f"the workers call different things after step {committed}: rank {group.rank} "
                f"{_at(call.what, call.where)}, rank {rank} {_at(what, where)}. Every worker must "
                "make the same calls in the same order; what the decision to call depends on must "
                "be the same everywhere, as step.ends_epoch and session.state are"
            )
    if before:  # all have come to this call, so nobody looks at the one before any more
        store.delete_key(before)


def answer(group: Group, whereabouts: Whereabouts) -> None:
    """From another thread, while the script is inside a block: tell those who wait for this member
    in a call that it will not come."""
    store = group.store
    if store is None or not store.check([f"asked/{whereabouts.committed}"]):
        return
    store.set(f"elsewhere/{whereabouts.committed}/{group.rank}", whereabouts.doing)


def _raise_if_elsewhere(
    group: Group, store: Store, committed: int, others: list[int], call: Described
) -> None:
    for rank in others:
        key = f"elsewhere/{committed}/{rank}"
        if store.check([key]):
            doing = store.get(key).decode()
            raise StepMisused(
                f"rank {group.rank} {_at(call.what, call.where)}, but rank {rank} does not: it is "
                f"{doing}. Every worker must make the same calls at the same place of the script; "
                "what the decision to call depends on must be the same everywhere, also in a "
                "worker that has just joined, as step.ends_epoch and session.state are"
            )


def _at(what: str, where: str) -> str:
    return f"{what} at {where}" if where else what
