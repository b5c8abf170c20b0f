"""A planned change costs nothing: no step that was begun before it is begun again after it."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import ChangeReason
from elastic.core.worker.machine import HOLD_S
from tests.sim.journal import Agreed, Journal

# Seconds in which a fault can have consequences: a node is cut off for 3 s at most.
_AFTERMATH_S = 5.0
# While a member holds, three messages must arrive: the news, its acknowledgement and the answer.
_WAYS = 3
_OTHER_DELAYS_S = 0.05
# A change is planned at most this many steps ahead.
_MOST_AHEAD = 25
_RECENT = 12
# Faults after which every member that lives still hears and acknowledges.
_HEARD = ("KILL_WORKER", "KILL_NODE", "RAISE", "BREAK_LINK", "ADD_NODE", "DRAIN_NODE")


def planned_changes(journal: Journal) -> Iterator[str]:
    yield from _far_boundaries(journal)
    yield from _held_twice(journal)
    if _WAYS * journal.news_s + _OTHER_DELAYS_S > HOLD_S:
        return
    yield from _held_in_vain(journal)
    planned = {g.number: g.reason for g in journal.generations if g.leave_after is not None}
    began = _first_agreed(journal)
    ends = {c.generation for c in journal.commits if c.replica.complete(journal.job)}
    for agreed in journal.agreed:
        again = agreed.begun - agreed.replica.committed
        if again <= 0 or agreed.generation not in planned:
            continue
        before = max((g for g in began if g < agreed.generation), default=0)
        # Members at the end of the job wait for nobody, and break the group. If members that leave
        # are lost, whatever ends them, the change takes place all the same, without them.
        leaves = planned[agreed.generation] is ChangeReason.MEMBER_LEAVING
        faults = journal.struck_at if leaves else journal.disturbed_at
        disturbed = _disturbed(faults, began.get(before, 0.0), agreed)
        if before not in ends and not disturbed and not _overtaken(journal, agreed):
            yield f"{agreed.worker} begins {again} steps again in {agreed.generation}"


def _far_boundaries(journal: Journal) -> Iterator[str]:
    """A change is planned a little ahead of the present steps, not of steps that were lost."""
    for planned in journal.generations:
        formed_at = journal.formed_at[planned.number]
        if planned.leave_after is None or not planned.provisional:
            continue
        reached = 0
        for agreed in journal.agreed:
            if agreed.at <= formed_at:
                reached = agreed.replica.committed
        now = [c.replica.committed for c in journal.commits if c.at <= formed_at]
        since = [c for c in now[-_RECENT:] if c >= reached]
        reached = max(since, default=reached)
        if planned.leave_after > reached + _MOST_AHEAD:
            yield f"{planned.number} is planned for {planned.leave_after}, {reached} are done"


def _held_twice(journal: Journal) -> Iterator[str]:
    """A member that has waited in vain leaves: it does not wait again for the same change."""
    held: set[tuple[str, int]] = set()
    for at, worker, number in journal.held_in_vain:
        if (worker, number) in held:
            yield f"{worker} waits again for {number} at {at:.2f}"
        held.add((worker, number))


def _held_in_vain(journal: Journal) -> Iterator[str]:
    """A change that all members have heard of is settled, or another change follows soon."""
    for at, worker, number in journal.held_in_vain:
        struck = {action for then, action, _ in journal.struck if then <= at}
        follows = (g.number for g in journal.generations if g.number > number)
        if any(journal.formed_at[following] <= at for following in follows):
            continue  # the news of it is on its way
        if struck.issubset(_HEARD) and not _lost_out_of_contact(journal, at, number):
            yield f"{worker} waits in vain for {number} until {at:.2f}"


def _lost_out_of_contact(journal: Journal, at: float, number: int) -> bool:
    """True if all members of the planned generation are lost with their nodes. The leader only
    knows that they are out of contact, and they may train on by themselves: it forms no other group
    until the store is certain, whatever the agents' grace."""
    lost_at = {then for then, action, _ in journal.struck if action == "KILL_NODE" and then <= at}
    takes_along = next(g.worker_ids for g in journal.generations if g.number == number)
    all_lost = all(journal.gone_at.get(name) in lost_at for name in takes_along)
    return bool(takes_along) and all_lost


def _first_agreed(journal: Journal) -> dict[int, float]:
    began: dict[int, float] = {}
    for agreed in journal.agreed:
        began.setdefault(agreed.generation, agreed.at)
    return began


def _overtaken(journal: Journal, agreed: Agreed) -> bool:
    """True if an unplanned change followed before the planned one had taken place."""
    return any(
        g.number > agreed.generation
        and g.leave_after is None
        and journal.formed_at[g.number] <= agreed.at
        for g in journal.generations
    )


def _disturbed(faults: list[float], formed_at: float, agreed: Agreed) -> bool:
    """True if a fault struck the group formed at `formed_at`, or could still affect it then."""
    return any(formed_at - _AFTERMATH_S <= at <= agreed.at for at in faults)
