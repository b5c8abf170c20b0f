"""Ranks that keep the others waiting step after step: as events, as figures, for the status."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.coordinator.attendance import name_of
from elastic.core.coordinator import events as ev
from elastic.core.membership import Generation, Member, WorkerId
from elastic.core.stragglers import Part, Straggler, Stragglers, Sums, Verdict
from elastic.runtime.journal import Journal
from elastic.v1 import control_pb2, job_pb2

_MOST_REPLACED, _WITHIN_S = 2, 3600.0
"""Workers of one slot: whose place they take is slow again is the machine, not the process."""

_MOST_SLOTS = 1000  # of which that is remembered

_IN_WORDS = {
    Part.DATA: "loading data",
    Part.TRANSFER: "bringing samples to the device",
    Part.COMPUTE: "the forward and backward pass",
    Part.OPTIMIZER: "what follows the backward pass: the optimizer",
    Part.BETWEEN: "the script between two steps",
    Part.CORES: "waiting for a core that other processes take",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """One that is slow now."""

    found: Straggler
    node: str
    """The name that people know it by."""
    slot: int

    @property
    def text(self) -> str:
        """In words."""
        found = self.found
        return (
            f"rank {found.rank} (node {self.node}) holds up every step by "
            f"{found.late_s * 1000:.3g} of {found.step_s * 1000:.3g} ms, since step {found.since}, "
            f"by {_IN_WORDS[found.part]}"
        )


class SlowRanks:
    """Takes what ranks report, compares them, and has slow ones replaced if that is wanted.

    replaces: whether it is. may_replace: whether the job can do without a worker for now.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        replaces: bool,
        post: Callable[[ev.Event], None],
        current: Callable[[], Generation | None],
        may_replace: Callable[[str], bool] = lambda _worker: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._replaces, self._may_replace = replaces, may_replace
        self._post = post
        self._current = current
        self._clock = clock
        self._stragglers = Stragglers()
        self._failed = False
        self._generation: Generation | None = None
        self._members: dict[WorkerId, Member] = {}
        self._replaced: dict[tuple[str, int], deque[float]] = {}

    def heard(self, worker: WorkerId, pace: job_pb2.Pace) -> None:
        """A rank has put down sums."""
        sums = _sums(pace)
        if sums is None or self._failed:
            return
        try:
            self._follow_group()
            verdict = self._stragglers.heard(worker, pace.generation, sums)
        except Exception as error:  # noqa: BLE001 - the job can do without
            self._failed = True
            message = f"ranks are compared no more: {type(error).__name__}: {error}"
            self._journal.record("warning", source="stragglers", message=message)
            return
        self._tell(verdict)

    @property
    def now(self) -> Sequence[SlowRank]:
        """Those that are slow, by rank."""
        self._follow_group()
        return [self._slow(found) for found in self._stragglers.named]

    @property
    def worst(self) -> float:
        """By which share of a step the last rank has held up the others most recently."""
        return self._stragglers.worst

    def to_pb(self) -> list[control_pb2.SlowRank]:
        """For operators."""
        return [
            control_pb2.SlowRank(
                rank=slow.found.rank,
                worker=slow.found.worker,
                node=slow.node,
                slow_in=slow.found.part.value,
                late_s=round(slow.found.late_s, 6),
                step_s=round(slow.found.step_s, 6),
                since_step=slow.found.since,
                verdict=slow.text,
            )
            for slow in self.now
        ]

    # ---- inside

    def _follow_group(self) -> None:
        current = self._current()
        if current is None or current is self._generation:
            return
        known, self._generation = self._generation, current
        if known is not None and known.number == current.number:
            return  # another form of it
        before, self._members = self._members, {m.worker: m for m in current.members}
        verdict = self._stragglers.regroup(current.number, [m.worker for m in current.members])
        for found in verdict.over:
            self._over(found, before.get(found.worker), "it is no member of the group any more")

    def _tell(self, verdict: Verdict) -> None:
        for found in verdict.slow:
            self._named(self._slow(found))
        for found in verdict.over:
            self._over(found, self._members.get(found.worker), "it keeps up with the others")

    def _named(self, slow: SlowRank) -> None:
        found = slow.found
        replaced = self._replaces and self._is_to_be_replaced(slow)
        self._journal.record(
            "straggler",
            rank=found.rank,
            worker=found.worker,
            node=slow.node,
            slow_in=found.part.value,
            since_step=found.since,
            step=found.at,
            late_s=round(found.late_s, 6),
            step_s=round(found.step_s, 6),
            action="replace" if replaced else "report",
            verdict=slow.text,
        )
        if replaced:
            self._post(ev.StragglerFound(worker=found.worker, message=f"was slow: {slow.text}"))

    def _is_to_be_replaced(self, slow: SlowRank) -> bool:
        now, key = self._clock(), (slow.node, slow.slot)
        before = self._replaced.setdefault(key, deque(maxlen=_MOST_REPLACED))
        often = len(before) == _MOST_REPLACED and now - before[0] < _WITHIN_S
        if often or not self._may_replace(slow.found.worker):
            return False
        if len(self._replaced) > _MOST_SLOTS:
            del self._replaced[next(iter(self._replaced))]
        before.append(now)
        return True

    def _over(self, found: Straggler, member: Member | None, reason: str) -> None:
        self._journal.record(
            "straggler_over",
            rank=found.rank,
            worker=found.worker,
            node=name_of(member.node) if member is not None else "",
            reason=reason,
        )

    def _slow(self, found: Straggler) -> SlowRank:
        member = self._members[found.worker]
        return SlowRank(found=found, node=name_of(member.node), slot=member.slot)


def _sums(pace: job_pb2.Pace) -> Sums | None:
    """None if it makes no sense, or is of no group."""
    values = [value for _, value in pace.ListFields()]
    if not pace.generation or not pace.committed or not all(map(math.isfinite, values)):
        return None
    return Sums(
        committed=pace.committed,
        steps=pace.steps,
        total_s=pace.total_s,
        data_s=pace.data_s,
        transfer_s=pace.transfer_s,
        wait_s=pace.wait_s,
        after_s=pace.after_s,
        between_s=pace.between_s,
        arrivals=pace.arrivals,
        reductions=pace.reductions,
        no_core_s=pace.no_core_s,
    )
