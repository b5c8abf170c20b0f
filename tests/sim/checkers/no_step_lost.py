"""P2: what a survivor holds is never lost, and at most one step per recovery is computed again."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.core.membership import ChangeReason, Purpose
from tests.sim.journal import Agreed, Journal
from tests.sim.replica import Replica

# Groups for these reasons take all members that are left: none is too late for them.
_WITH_ALL_THAT_LIVE = (ChangeReason.STARTED, ChangeReason.MEMBER_LOST, ChangeReason.GROUP_BROKEN)


def no_step_lost(journal: Journal) -> Iterator[str]:
    seen: set[int] = set()
    for agreed in journal.agreed:
        again = agreed.begun - agreed.replica.committed
        if again > 1:
            yield f"{agreed.worker} computes {again} steps again in {agreed.generation}"
        if agreed.generation in seen:
            continue  # the first member to agree speaks for all: others may have trained on
        seen.add(agreed.generation)
        done = journal.done_then[agreed.generation]
        if agreed.replica.committed < done - 1 and _purpose(journal, agreed) is Purpose.TRAIN:
            yield f"generation {agreed.generation} begins {agreed.replica}, {done} steps are done"
        best = agreed.best_survivor
        if best is not None and best.age > agreed.replica.age:
            yield f"generation {agreed.generation} starts from {agreed.replica}, {best} survived"
        # A restored state counts as the later one from then on, even with fewer steps.
        restored = agreed.replica.progress.committed_in == agreed.generation
        if best is not None and restored and best.origin > agreed.replica.origin:
            yield f"generation {agreed.generation} begins with {agreed.replica}, {best} survived"
        # Only if restored: a holder that receives another's first state, of a later begin, is torn
        # meanwhile.
        if agreed.generation in journal.torn_in and restored and agreed.replica.committed == 0:
            yield f"generation {agreed.generation} begins anew with what is left of a torn state"
        held = any((agreed.generation, w) in journal.declared for w in _members(journal, agreed))
        away = journal.away[agreed.generation]
        # A change that the undo missed can cost a member its state after others were left behind.
        torn = journal.undo_missed and agreed.generation in journal.has_holder
        if restored and away is not None and away.origin > agreed.replica.origin and not torn:
            yield f"generation {agreed.generation} begins without waiting for {away}"
        if not held and away is not None and away.age > agreed.replica.age:
            yield f"generation {agreed.generation} does not wait for {away}"
        awaited = journal.awaited[agreed.generation]
        if (
            _reason(journal, agreed) is ChangeReason.STARTED
            and awaited is not None
            and awaited.age > agreed.replica.age
        ):
            yield f"generation {agreed.generation} begins {agreed.replica} without {awaited}"
        passed_over = journal.passed_over[agreed.generation]
        if (
            _reason(journal, agreed) in _WITH_ALL_THAT_LIVE
            and passed_over is not None
            and _is_ahead(passed_over, agreed.replica, restored=restored)
        ):
            yield f"generation {agreed.generation} goes on without {passed_over}, in contact"
        # A new leader does not know what was saved under the leader before.
        knows_checkpoint = best is None or not journal.elected_at
        trains = _purpose(journal, agreed) is Purpose.TRAIN
        if knows_checkpoint and trains and agreed.checkpoint.origin > agreed.replica.origin:
            yield f"generation {agreed.generation} starts before {agreed.checkpoint}"


def _is_ahead(held: Replica, start: Replica, *, restored: bool) -> bool:
    return held.origin > start.origin if restored else held.age > start.age


def _reason(journal: Journal, agreed: Agreed) -> ChangeReason:
    return next(g.reason for g in journal.generations if g.number == agreed.generation)


def _purpose(journal: Journal, agreed: Agreed) -> Purpose:
    return next(g.purpose for g in journal.generations if g.number == agreed.generation)


def _members(journal: Journal, agreed: Agreed) -> frozenset[str]:
    return next(g.worker_ids for g in journal.generations if g.number == agreed.generation)
