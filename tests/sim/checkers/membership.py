"""Groups have as many members as allowed, at their former ranks, with a holder as rank 0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from elastic.core.membership import ChangeReason, Generation, Purpose
from tests.sim.journal import Journal
from tests.sim.node import LATEST_NOTICE_S

# Seconds from a member's report until the coordinator has it, on top of the messages' delays.
_REPORT_S = 0.1
# Seconds from a decision until it is in the store, at most.
_DECIDED_S = 0.05
# A worker that takes longer than this, in seconds, to find a new agent counts as stuck.
_FOUND_S = 2.0
# Faults that leave no member stuck that is in contact.
_PROBED_S = 3.0  # until probes show that a cut is over: a round, its pause, and messages
_AT_ONCE = (
    "RESTART_AGENT",
    "CUT_OFF_NODE",
    "KILL_WORKER",
    "KILL_NODE",
    "RAISE",
    "BREAK_LINK",
    "ADD_NODE",
    "DRAIN_NODE",
    "KILL_LEADER",
)


def membership(journal: Journal) -> Iterator[str]:
    least, most = journal.sizes
    completes = False
    for generation in journal.generations:
        formed_at = journal.formed_at[generation.number]
        size = generation.world_size
        hands_over = generation.reason in (ChangeReason.MEMBER_LEAVING, ChangeReason.STOPPING)
        if size > most + hands_over and generation.purpose is Purpose.TRAIN:
            yield f"generation {generation.number} has {size} members, of at most {most}"
        finished = sum(at <= formed_at for at in journal.finished_at.values())
        trains = generation.purpose is Purpose.TRAIN and size
        # Members of a call complete it among themselves; others join after that.
        completes = generation.number in journal.in_run or (completes and _grows(generation))
        if trains and size + finished < least and not (completes or journal.evaluates):
            yield f"generation {generation.number} has {size} members, of at least {least}"
        if len({(m.node, m.slot) for m in generation.members}) < size:
            yield f"two members of generation {generation.number} have the same slot"
        yield from _rank_zero_holds(journal, generation)
        yield from _for_a_reason(journal, generation)
    for claim in journal.false_claims:
        yield f"{claim} says that it holds the state"
    for worker in journal.tainted_in_vain:
        yield f"the state of {worker} does not count"
    for worker in journal.slots_wasted:
        yield f"{worker} gets a slot, though it is being ended"
    for worker in journal.hurried if not journal.evaluates else ():
        yield f"{worker}, was left out"
    groups = [g for g in journal.generations if g.members]
    for before, after in itertools.pairwise(groups):
        if after.reason is ChangeReason.MEMBER_JOINED and after.worker_ids <= before.worker_ids:
            yield f"generation {after.number} was formed for newcomers and has none"
        between = (journal.formed_at[before.number], journal.formed_at[after.number])
        if not any(between[0] < at < between[1] for at in journal.elected_at):
            yield from _ranks_kept(before, after)


def _grows(generation: Generation) -> bool:
    return generation.reason is ChangeReason.MEMBER_JOINED


def _for_a_reason(journal: Journal, generation: Generation) -> Iterator[str]:
    """No worker is forgotten, every member can hear of the generation, and its reason is true."""
    number, formed_at = generation.number, journal.formed_at[generation.number]
    if journal.unreachable[number]:
        yield f"{journal.unreachable[number]} cannot hear of {number}"
    for at, worker in journal.replaced:
        if worker in generation.worker_ids and at <= formed_at and not journal.evaluates:
            yield f"{worker} is a member of {number}, ended at {at:.4f}"
    for at, worker in journal.to_end:
        # Only the next generation counts: earlier ones were decided before the order.
        decided_then = number == min(
            (g.number for g in journal.generations if journal.formed_at[g.number] > at), default=0
        )
        # An agent's stream that breaks can lose the order: workers still there then count again.
        counts_again = formed_at >= at + journal.join_timeout_s
        if worker in generation.worker_ids and decided_then and not counts_again:
            yield f"{worker} is a member of {number}, to be ended at {at:.4f}"
    if generation.leave_after is None and generation.purpose is Purpose.TRAIN:
        for worker in journal.not_asked.get(number, ()):
            yield f"{worker} is left out of {number} by a leader that it had no time to find"
    if number in journal.all_leave and generation.reason is ChangeReason.MEMBER_LEAVING:
        yield f"{number} was formed for members that leave, and nobody takes over"
    stayed = journal.enough_stayed.get(number, ())
    finished = journal.finished_then.get(number, 0)
    below = generation.reason in (ChangeReason.BELOW_MINIMUM, ChangeReason.MEMBER_LEAVING)
    if number in journal.in_run:
        stayed = ()  # they complete a call first, without newcomers
    # Any number of survivors can save.
    least = 1 if generation.purpose is Purpose.SAVE_AND_LEAVE else journal.sizes[0]
    parted = _cut_lately(journal, formed_at)
    if below and stayed and len(stayed) + finished >= least and not parted:
        yield f"{number} has no members although {stayed} stay"
    before = max((g.number for g in journal.generations if g.number < number), default=0)
    trained = {before}  # or the group that the planned one before should replace
    trained.update(
        g.number - 1 for g in journal.generations if g.number == before and g.provisional
    )
    broke = not trained.isdisjoint(journal.broke)
    # Members that do not reach each other are freed first, by a generation without members.
    freed = any(
        g.number == before and not g.members and g.reason is ChangeReason.GROUP_BROKEN
        for g in journal.generations
    )
    if generation.reason is ChangeReason.GROUP_BROKEN and not (broke or parted or freed):
        yield f"{number} was formed because {before} broke, which it did not"
    stuck = generation.reason in (ChangeReason.STALLED, ChangeReason.JOIN_TIMED_OUT)
    if (
        stuck
        and journal.found_s <= _FOUND_S
        and not journal.evaluates
        and all(action in _AT_ONCE for at, action, _ in journal.struck if at <= formed_at)
        and not (
            generation.reason is ChangeReason.JOIN_TIMED_OUT
            and _acknowledges_in_vain(journal, before, formed_at)
        )
    ):
        yield f"{number} was formed although nobody was stuck: {generation.reason.name}"


def _cut_lately(journal: Journal, at: float) -> bool:
    """True if nodes did not reach each other, as far as probes could know."""
    return any(
        action == "CUT_PEERS" and since <= at <= since + lasted_s + _PROBED_S
        for since, action, lasted_s in journal.struck
    )


def _acknowledges_in_vain(journal: Journal, before: int, formed_at: float) -> bool:
    """True if a node was cut off while its members may have been about to acknowledge the
    generation `before`, and so shortly before the next one was formed that the cut may have gone
    unnoticed. Where news takes long, these members count as deaf."""
    said_by = journal.formed_at.get(before, -math.inf) + 2 * journal.news_s + _REPORT_S
    unnoticed_since = formed_at - LATEST_NOTICE_S - _DECIDED_S
    return any(
        action == "CUT_OFF_NODE" and unnoticed_since <= at <= min(said_by, formed_at)
        for at, action, _ in journal.struck
    )


def _ranks_kept(before: Generation, after: Generation) -> Iterator[str]:
    """Members that stay keep their ranks where these still exist. Two may swap ranks, so that a
    holder becomes rank 0."""
    moved = [
        m.worker
        for rank, m in enumerate(before.members[: after.world_size])
        if (now := after.rank_of(m.worker)) is not None and now != rank
    ]
    swapped = 0 in map(after.rank_of, moved) or 0 in map(before.rank_of, moved)
    if len(moved) > 2 or (moved and not swapped):
        yield f"{moved} have other ranks in {after.number}"


def _rank_zero_holds(journal: Journal, generation: Generation) -> Iterator[str]:
    """Rank 0 hosts the store and restores checkpoints: it holds the state if any member does."""
    contact = journal.in_contact_until[generation.number]
    formed_at = journal.formed_at[generation.number]
    dropped = {w: at for at, w in journal.dropped if at < formed_at}
    first = {
        a.worker: a.at
        for a in reversed(journal.agreed)
        if a.at > dropped.get(a.worker, -math.inf)  # before, it reported a drop of its state
    }
    if not generation.members:
        return
    first_worker = generation.members[0].worker
    ever = {a.worker for a in journal.agreed if a.at < formed_at}
    # The leader may not know what rank 0 has lost since. Or rank 0 has received the state in a
    # group that was lost before it could report that it had joined.
    if first_worker in ever or (generation.number, first_worker) in journal.declared:
        return
    for member in generation.members:
        held = (generation.number, member.worker) in journal.declared
        known_at = contact.get(member.worker, -math.inf) - _REPORT_S - 2 * journal.news_s
        if held and first.get(member.worker, known_at) < known_at:
            yield f"{member.worker} holds the state, rank 0 of {generation.number} does not"
