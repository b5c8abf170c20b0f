"""Who gets which rank: members that stay keep theirs wherever a dense numbering allows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.core.membership import Member, WorkerId


def assign_ranks(
    previous: Sequence[WorkerId], present: Iterable[Member], holders: frozenset[WorkerId]
) -> tuple[Member, ...]:
    """Order `present` into ranks.

    previous: the last group's workers by rank.
    holders: workers that have the job's state; one of them gets rank 0 if there is any.

    Survivors whose old rank still exists keep it; the others and the newcomers fill the gaps,
    survivors first, each in a fixed order, so that equal input gives equal ranks.
    """
    members = {m.worker: m for m in present}
    size = len(members)
    ranks: list[Member | None] = [None] * size
    for rank, worker in enumerate(previous[:size]):
        if worker in members:
            ranks[rank] = members.pop(worker)
    old_rank = {worker: rank for rank, worker in enumerate(previous)}
    rest = sorted(
        members.values(),
        key=lambda m: (m.worker not in holders, old_rank.get(m.worker, size), m.node, m.slot),
    )
    filling = iter(rest)
    dense = [m if m is not None else next(filling) for m in ranks]
    _put_holder_first(dense, holders)
    return tuple(dense)


def _put_holder_first(ranks: list[Member], holders: frozenset[WorkerId]) -> None:
    """Rank 0 hosts the store and reports for the group: not a task for a newcomer."""
    if not ranks or ranks[0].worker in holders:
        return
    for rank, member in enumerate(ranks):
        if member.worker in holders:
            ranks[0], ranks[rank] = member, ranks[0]
            return
