"""Newcomers that always fail change the group that trains only a few times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from elastic.core.coordinator.nodes import NewcomerPolicy
from elastic.core.membership import ChangeReason
from tests.sim.journal import Journal


def newcomers(journal: Journal) -> Iterator[str]:
    if not journal.newcomers_fail:
        return
    if journal.failures_differ:
        yield from _of_each_slot(journal)
        return
    policy = NewcomerPolicy()
    starts = [g for g in journal.generations if g.reason is ChangeReason.STARTED]
    joined = [g for g in journal.generations if g.reason is ChangeReason.MEMBER_JOINED]
    lasted_s = max(journal.formed_at.values(), default=0.0)
    # If the only worker that has trained is killed, others begin again: these have joined well.
    anew = len(starts) + sum(action == "KILL_WORKER" for _, action, _ in journal.struck)
    most = policy.same_failures * anew + math.floor(lasted_s / policy.refusal.base_s)
    if len(joined) > most:
        yield f"{len(joined)} groups were formed for newcomers that fail, not {most}"


def _of_each_slot(journal: Journal) -> Iterator[str]:
    """In each slot two newcomers may follow at once; then the delay doubles."""
    tries: Counter[tuple[str, int]] = Counter()
    first_at: dict[tuple[str, int], float] = {}
    base_s = NewcomerPolicy().backoff.base_s
    known: frozenset[str] = frozenset()
    for generation in journal.generations:
        at = journal.formed_at[generation.number]
        for member in generation.members:
            slot = (member.node, member.slot)
            if generation.reason is not ChangeReason.MEMBER_JOINED or member.worker in known:
                continue
            tries[slot] += 1
            lasted_s = at - first_at.setdefault(slot, at)
            most = 3 + math.floor(math.log2(1 + lasted_s / base_s))
            if tries[slot] > most:
                yield f"{tries[slot]} newcomers of {slot} in {lasted_s:.1f} s, not {most}"
        known |= generation.worker_ids
