"""Nothing waits without need: not the next step, a leave, or the end of a stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from elastic.core.membership import ChangeReason
from elastic.core.worker.machine import HOLD_S
from tests.sim.faults import STOP_EXIT_CODE
from tests.sim.journal import Journal

# Seconds in which a loss is noticed, a group is formed and its first step taken.
_RECOVERY_S = 2.0
# Seconds from the order to leave until a node is let go: the boundary is 20 steps off at most.
_LEAVE_S = 5.0
# Seconds until a node is let go after a group without it has agreed on a state.
_LET_GO_S = 0.5
# Seconds from the end of a stop's grace until the job has ended.
_END_S = 1.0
# Seconds from the end of the last fault until a stop is complete: members save, some are left out.
_STOP_S = 7.0
# Seconds until the job ends after all members are known to have finished.
_OVER_S = 0.5
_GONE_AT_ONCE = ("KILL_WORKER", "KILL_NODE", "KILL_LEADER", "ADD_NODE")
# Faults whose duration means nothing here: it is the time until another machine takes the place.
_OVER_AT_ONCE = ("KILL_NODE", "LOSE_NODE_SILENTLY", "DRAIN_NODE")
_AT_ONCE = ("KILL_WORKER", "RAISE", "BREAK_LINK", "ADD_NODE")
_IN_CONTACT = (*_AT_ONCE, "FREEZE_SCRIPT", "FREEZE_PROCESS")
_REPORT_S = 0.1


def promptness(journal: Journal) -> Iterator[str]:
    actions = {action for _, action, _ in journal.struck}
    if journal.stopped_at is not None:
        asked_at = max([journal.stopped_at, *journal.elected_at])
        if asked_at + journal.stop_grace_s + _END_S < journal.ended_at < math.inf:
            yield f"stopped at {journal.stopped_at:.2f}, ended at {journal.ended_at:.2f}"
    yield from _gathering(journal)
    yield from _stop(journal)
    yield from _end(journal)
    if journal.evaluates or journal.compiles:
        return
    yield from _let_go(journal)
    if actions.issubset(_AT_ONCE) and journal.stopped_at is None:
        yield from _recoveries(journal)
    # Where news takes too long to settle a planned change, members go on without it, and it is
    # tried again and again.
    settles = 2 * journal.news_s <= HOLD_S
    if settles and actions.issubset(("DRAIN_NODE", "ADD_NODE")):
        # While too few stay there is no group, and a node that leaves may hold what others need.
        started = (g for g in journal.generations if g.reason is ChangeReason.STARTED)
        began_at = max((journal.formed_at[g.number] for g in started), default=0.0)
        for node, at in journal.left_from.items():
            since = max(at, began_at)
            if node not in journal.nodes_drained and since + _LEAVE_S < journal.ended_at < math.inf:
                yield f"{node} was to leave at {at:.2f} and has not until {journal.ended_at:.2f}"


def _end(journal: Journal) -> Iterator[str]:
    """The job ends soon after all workers that ever trained have finished their scripts. It does
    not wait for a newcomer that was admitted meanwhile and is gone."""
    trained = {c.worker for c in journal.commits}
    actions = {action for _, action, _ in journal.struck}
    asked = journal.stopped_at is not None or journal.drains
    if asked or not trained or not actions.issubset(_GONE_AT_ONCE):
        return
    if not trained <= journal.finished_at.keys():
        return
    since = max(
        [*journal.finished_at.values(), *(at + journal.return_s for at in journal.elected_at)]
    )
    if _are_lost_with_nodes(journal, trained):
        since = max([since, *(at for at in journal.certain_at if at <= journal.ended_at)])
    # A node may be killed before it reports the end: its agent could have come back.
    patience_s = journal.return_patience_s if journal.elected_at else journal.agent_grace_s
    grace_s = patience_s if "KILL_NODE" in actions else 0.0
    if since + grace_s + _OVER_S + 3 * journal.news_s < journal.ended_at < math.inf:
        yield f"all have finished at {since:.2f}, the job ended at {journal.ended_at:.2f}"


def _are_lost_with_nodes(journal: Journal, workers: set[str]) -> bool:
    """True if all `workers` are lost with their nodes. The end of some may not have been reported:
    as far as the coordinator knows they train on. No finished member is in contact, which would
    show that the nodes are lost and not the coordinator cut off. So the job ends when the store is
    certain, whatever the agents' grace."""
    lost_at = {at for at, action, _ in journal.struck if action == "KILL_NODE"}
    return all(journal.gone_at.get(name) in lost_at for name in workers)


def _waits_for_frozen_holder(journal: Journal) -> bool:
    """True if only frozen workers have the newest step. Nobody can know that they stand still for
    good: that is what the grace is for."""
    frozen_at = {at for at, action, _ in journal.struck if action == "FREEZE_SCRIPT"}
    held: dict[str, int] = {}
    torn_at = {worker: at for at, worker in journal.dropped}
    for holder in (*journal.commits, *journal.agreed):
        gone_at = journal.gone_at.get(holder.worker, math.inf)
        is_torn = torn_at.get(holder.worker, -math.inf) > holder.at
        if not is_torn and (gone_at in frozen_at or gone_at >= journal.ended_at):
            held[holder.worker] = max(holder.replica.committed, held.get(holder.worker, 0))
    newest = max(held.values(), default=0)
    return newest > 0 and all(
        journal.gone_at.get(worker) in frozen_at for worker, n in held.items() if n == newest
    )


def _stop(journal: Journal) -> Iterator[str]:
    """After the last fault a stop takes a while, but not all of its grace."""
    asked = [journal.stopped_at] if journal.stopped_at is not None else []
    if journal.outcome[1] == STOP_EXIT_CODE:
        asked += journal.left_from.values()
    if not asked or journal.evaluates or journal.compiles or _waits_for_frozen_holder(journal):
        return
    over = [at + (0.0 if what in _OVER_AT_ONCE else lasts) for at, what, lasts in journal.struck]
    # A step that outlasts the grace is given up only when the rest of it is needed for the save.
    over += [at + journal.stop_grace_s for at, what, _ in journal.struck if what == "STOP_IN_STEP"]
    certain = [at for at in journal.certain_at if at < journal.ended_at]
    last = max([*asked, *journal.elected_at, *over, *certain])
    patience_s = _STOP_S + (journal.first_step_s if _hangs_in_first_step(journal) else 0.0)
    if last + patience_s < journal.ended_at < math.inf:
        yield f"the stop took from {last:.2f} to {journal.ended_at:.2f}"


def _hangs_in_first_step(journal: Journal) -> bool:
    """True if a worker froze before the first step of its group. A first step may take longer, so a
    group that hangs there is given up later."""
    for at, what, _ in journal.struck:
        formed = [g for g in journal.generations if journal.formed_at[g.number] <= at]
        groups = [g.number for g in formed if g.members][-2:]
        began = {c.generation for c in journal.commits if c.at <= at}
        if what.startswith("FREEZE") and not began.issuperset(groups):
            return True
    return False


def _gathering(journal: Journal) -> Iterator[str]:
    """The first group waits for more workers than the minimum only until the timeout."""
    first = journal.generations[0] if journal.generations else None
    formed_at = journal.formed_at[first.number] if first is not None else journal.ended_at
    struck = {action for at, action, _ in journal.struck if at < formed_at}
    if journal.drains or journal.stopped_at is not None or not struck.issubset(_IN_CONTACT):
        return
    ready = sorted(
        at
        for worker, at in journal.ready_at.items()
        if at < formed_at and journal.gone_at.get(worker, math.inf) > formed_at
    )
    least = max(1, journal.sizes[0])
    if len(ready) >= least:
        until = ready[least - 1] + journal.gather_timeout_s + 3 * journal.news_s + _REPORT_S
        if formed_at > until:
            yield f"the first group was formed at {formed_at:.2f}, not until {until:.2f}"


def _let_go(journal: Journal) -> Iterator[str]:
    """A leaving node is let go soon after a group without it has agreed on a state."""
    if journal.stopped_at is not None or journal.outcome[1] != 0:
        return
    for node, left_at in journal.left_from.items():
        for before, after in itertools.pairwise([None, *journal.generations, None]):
            group, until = before, math.inf
            if after is not None:
                until = journal.formed_at[after.number]
            if group is None or not group.members or any(m.node == node for m in group.members):
                continue
            agreed = [a.at for a in journal.agreed if a.generation == group.number]
            if journal.formed_at[group.number] < left_at or len(agreed) < group.world_size:
                continue
            messages = 5 if journal.job.queues else 3
            by = max(agreed) + _LET_GO_S + messages * journal.news_s
            struck = {action for at, action, _ in journal.struck if at < by}
            others = not struck.issubset((*_AT_ONCE, "DRAIN_NODE"))
            if by > min(until, journal.ended_at) or others:
                continue
            if journal.drained_at.get(node, math.inf) > by:
                yield f"{node} was not let go until {by:.2f}, {group.number} goes on without it"


def _recoveries(journal: Journal) -> Iterator[str]:
    """Two steps follow soon on each other if enough workers of the first live until the second."""
    messages = 7 if journal.job.queues else 3  # a planned change may be taken back, too
    steps = sorted(journal.commits, key=lambda c: c.at)
    for before, after in itertools.pairwise(steps):
        if after.at - before.at <= _RECOVERY_S + messages * journal.news_s:
            continue
        present = {c.worker for c in steps if c.generation == before.generation}
        well = [w for w in present if journal.gone_at.get(w, math.inf) > after.at]
        if len(well) >= journal.sizes[0]:
            yield f"{well} waited from {before.at:.2f} to {after.at:.2f}"
