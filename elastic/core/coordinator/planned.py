"""At which step boundary the group is left for a planned change, so that no step is begun twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic.core.coordinator.view import Sighting
from elastic.core.membership import Generation, WorkerId, WorkerPhase, WorkerStatus


def settle(
    planned: Generation, leaving: Generation, workers: Mapping[WorkerId, Sighting]
) -> Generation | None:
    """The settled form of `planned`; None while a member of `leaving` has not heard of it, or
    there is nothing new to say.

    A member's script counts a step as committed and then looks for news; its link notes the news
    and then reads that count for the acknowledgement. So one that acknowledges n steps can have
    looked in vain after step n, and waits after step n + 1. Once all have acknowledged, nobody is
    past the furthest of these boundaries, and all can be brought to it.

    Unless one has left before it, because it has waited too long or the group broke. Then the
    others are to leave at once: they can complete no further step, and where scripts meet for a
    call no connection tells them that one will not come. Where others go on without members that
    may be the only ones that have completed the last step, an unplanned change follows.
    """
    first = planned.leave_after
    if first is None or any(m.worker not in workers for m in leaving.members):
        return None  # they leave at once, or an unplanned change follows
    statuses = [workers[m.worker].status for m in leaving.members]
    active = [s for s in statuses if s.phase is not WorkerPhase.FINISHED]
    if broke_before(planned, leaving, workers):
        return None
    left = [s for s in active if not _trains_in(s, leaving)]
    if any(planned.provisional or s.committed < first for s in left):
        return replace(planned, provisional=False, leave_after=None)
    if not planned.provisional:
        return None
    if any(s.heard < planned.number for s in active):
        return None
    furthest = max((s.committed + 1 for s in active), default=first)
    return replace(planned, provisional=False, leave_after=max(first, furthest))


def broke_before(
    planned: Generation, leaving: Generation, workers: Mapping[WorkerId, Sighting]
) -> list[Sighting]:
    """Members that lost the group before the boundary at which it is left, if others are to go on
    without some: these may have completed a step that no other has."""
    if not planned.members or leaving.worker_ids <= planned.worker_ids:
        return []
    members = [workers[m.worker] for m in leaving.members if m.worker in workers]
    return [
        w
        for w in members
        if w.status.broken
        and w.status.generation == leaving.number
        and not planned.is_due(w.status.committed)
    ]


def in_place(planned: Generation, workers: Mapping[WorkerId, Sighting]) -> bool:
    """All its members have agreed on what they go on from: the group before is of no use."""
    return not planned.provisional and all(
        m.worker in workers
        and workers[m.worker].status.generation == planned.number
        and workers[m.worker].status.phase in (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
        for m in planned.members
    )


def is_left(leaving: Generation, workers: Mapping[WorkerId, Sighting]) -> bool:
    """No member trains any more in the group that a planned change ends."""
    return not any(_trains_in(w.status, leaving) for w in workers.values())


def counts_steps(reported: int, current: Generation | None, *, leaving: bool) -> bool:
    """Is the generation `reported` the one that makes progress? While members have yet to leave
    the group before a planned change, that one is."""
    if current is None:
        return False
    return reported == current.number or (current.leave_after is not None and leaving)


def _trains_in(s: WorkerStatus, generation: Generation) -> bool:
    return s.phase is WorkerPhase.TRAINING and s.generation == generation.number
