"""P6: the group trains on undisturbed while leaders and agents are lost and replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator

from elastic.core.membership import ChangeReason
from tests.sim.journal import Journal

# If news takes longer than this, in seconds, a new leader may take a node for lost.
_NEWS_S = 0.12
# Seconds from an agent's start until the coordinator has heard from it, on top of messages' delays.
_RETURN_S = 0.3
# Seconds until a cut-off node is noticed. A node that is back before then is not asked anything.
_NOTICE_S = 1.0
_UNHARMED = (ChangeReason.STARTED, ChangeReason.MEMBER_JOINED)


def control_plane(journal: Journal) -> Iterator[str]:
    slow = journal.evaluates or journal.news_s > _NEWS_S
    if slow or not all(_is_harmless(journal, *fault) for fault in journal.struck):
        return
    for _, worker in journal.replaced:
        yield f"{worker} was replaced"
    completed = [c.at for c in journal.commits if c.replica.complete(journal.job)]
    for generation in journal.generations:
        if journal.formed_at[generation.number] > min(completed, default=math.inf):
            return  # members at the end of the job wait for nobody
        if generation.reason not in _UNHARMED:
            yield f"generation {generation.number} was formed: {generation.reason.name}"


def _is_harmless(journal: Journal, at: float, action: str, lasts_s: float) -> bool:
    if action == "KILL_LEADER":
        return True
    back_s = lasts_s + max(_RETURN_S, journal.found_s) + 4 * journal.news_s
    if action == "CUT_OFF_NODE" and lasts_s + _RETURN_S < journal.isolation_s:
        back_s += _NOTICE_S
    elif action != "RESTART_AGENT":
        return False
    outage = action == "CUT_OFF_NODE" and at in journal.outages and journal.agent_grace_s > 0.0
    if outage and lasts_s + _NOTICE_S < journal.isolation_s:
        back_s = lasts_s + _NOTICE_S
    elif back_s > journal.agent_grace_s:
        return False
    return not any(since < at + back_s and at < until for since, until in _assemblies(journal, at))


def _assemblies(journal: Journal, at: float) -> Iterator[tuple[float, float]]:
    """Yield the periods in which a group is incomplete and does not wait for members out of
    contact. A group formed after `at` for a loss is no excuse for it, nor are those that follow."""
    for generation in journal.generations:
        formed_at = journal.formed_at[generation.number]
        if formed_at >= at and generation.reason not in _UNHARMED:
            return
        agreed = [a.at for a in journal.agreed if a.generation == generation.number]
        whole = len(agreed) == generation.world_size
        yield formed_at - _RETURN_S, max(agreed, default=0.0) + _RETURN_S if whole else math.inf
