"""Newcomers that always fail cost those that train only a few changes of their group."""

from __future__ import annotations

import math
from collections.abc import Iterator

from elastic.core.coordinator.newcomers import NewcomerPolicy
from elastic.core.membership import ChangeReason
from tests.sim.journal import Journal


def newcomers(journal: Journal) -> Iterator[str]:
    if not journal.newcomers_fail:
        return
    policy = NewcomerPolicy()
    starts = [g for g in journal.generations if g.reason is ChangeReason.STARTED]
    joined = [g for g in journal.generations if g.reason is ChangeReason.MEMBER_JOINED]
    lasted_s = max(journal.formed_at.values(), default=0.0)
    # If the only one that has trained is killed, others begin anew, and have then joined well.
    anew = len(starts) + sum(action == "KILL_WORKER" for _, action, _ in journal.struck)
    most = policy.same_failures * anew + math.floor(lasted_s / policy.refusal.base_s)
    if len(joined) > most:
        yield f"{len(joined)} groups were formed for newcomers that fail, not {most}"
