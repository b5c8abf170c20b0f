"""Whether workers that are new may join the group, after others like them have failed in it.

Each newcomer that fails while it joins costs the group two changes. The steps that the others
commit in between say nothing about newcomers, so their failures are counted apart: those of a
slot, which delay the next newcomer from there, and those that are the same in several groups, from
any slot: then no newcomer can join at present, and none is let in for long.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.coordinator.view import Sighting
from elastic.core.membership import Failure, FailureKind, Generation, NodeId, WorkerId
from elastic.core.restarts import Backoff

_NAMED_BY_SIGNATURE = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.SIGNAL)
"""Those of other kinds name instants and generations."""

_MOST_KINDS = 1000  # of failures that are told apart: a message may differ every time


@dataclass(frozen=True, kw_only=True, slots=True)
class NewcomerPolicy:
    """Patience with newcomers that fail."""

    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=2.0, cap_s=300.0))
    """Between two newcomers of one slot, by its failures in a row."""
    same_failures: int = 3
    """The same failure in so many groups, and none joined well between them: newcomers are
    refused."""
    same_signals: int = 6
    """The same for deaths by one signal: each may have a cause of its own."""
    refusal: Backoff = field(default_factory=lambda: Backoff(base_s=60.0, cap_s=3600.0))
    """For how long, by the refusals in a row."""


class Newcomers:
    """A worker is new until a group has committed a step with it."""

    def __init__(self, policy: NewcomerPolicy) -> None:
        self._policy = policy
        self._trained: set[WorkerId] = set()
        self._group: Generation | None = None
        """The newest one in which all members have arrived."""
        self._began_at = 0
        """Steps committed when it had."""
        self._failures: Counter[tuple[NodeId, int]] = Counter()
        self._not_before: dict[tuple[NodeId, int], float] = {}
        self._failed_in: dict[str, set[int]] = defaultdict(set)
        """By failure: generations that it has cost a newcomer since one has last joined well."""
        self._told: set[str] = set()
        self._refusals = 0
        self._refused_until = -math.inf

    # ---- what is known

    def is_new(self, worker: WorkerId) -> bool:
        """No group has committed a step with it."""
        return worker not in self._trained

    def held_back(self, workers: Iterable[Sighting]) -> dict[WorkerId, float]:
        """Instants before which workers are not to be let into a group that trains."""
        if not self._not_before and self._refusals == 0:
            return {}
        until = {
            w.status.worker: max(self._not_before.get(_slot(w), -math.inf), self._refused_until)
            for w in workers
            if self.is_new(w.status.worker)
        }
        return {worker: at for worker, at in until.items() if at > -math.inf}

    def awaits(self, generation: Generation) -> bool:
        """It is not known that all members have arrived."""
        return self._group is None or self._group.number != generation.number

    # ---- what becomes known

    def presume_trained(self, generation: Generation) -> None:
        """An earlier coordinator formed it: it trains, for all that is known."""
        self._trained |= generation.worker_ids

    def arrived(self, generation: Generation, workers: Mapping[WorkerId, Sighting]) -> None:
        """All members of `generation` train."""
        self._group = generation
        counts = [workers[m.worker].status.committed for m in generation.members]
        self._began_at = max(counts, default=0)
        self._trained &= workers.keys()

    def committed(self, generation: int, committed: int) -> None:
        """A member of `generation` has so many steps: did they commit one together?"""
        group = self._group
        if group is None or generation != group.number or committed <= self._began_at:
            return
        new = [m for m in group.members if self.is_new(m.worker)]
        for member in new:
            self._failures.pop((member.node, member.slot), None)
            self._not_before.pop((member.node, member.slot), None)
        if new:
            self._trained |= group.worker_ids
            self._accept()

    def failed(self, worker: Sighting, generation: int, failure: Failure, now: float) -> float:
        """A worker that is new has ended badly, in the group of `generation` or (0) before it was
        in any. Returns for how long no newcomer is let in from now on if that is news, else 0.
        """
        slot = _slot(worker)
        self._failures[slot] += 1
        self._not_before[slot] = now + self._policy.backoff.delay_s(self._failures[slot])
        if generation == 0:
            return 0.0
        by_signature = failure.kind in _NAMED_BY_SIGNATURE
        failed_as = failure.signature if by_signature else failure.kind.name
        if failed_as not in self._failed_in and len(self._failed_in) >= _MOST_KINDS:
            self._told.discard(oldest := next(iter(self._failed_in)))
            del self._failed_in[oldest]
        failed_in = self._failed_in[failed_as]
        is_counted = generation in failed_in
        failed_in.add(generation)
        by_signal = failure.kind is FailureKind.SIGNAL
        most = self._policy.same_signals if by_signal else self._policy.same_failures
        hopeless = len(failed_in) >= most or not failure.retryable
        if is_counted or not hopeless:
            return 0.0
        self._refusals += 1
        delay_s = self._policy.refusal.delay_s(self._refusals + 1)
        self._refused_until = now + delay_s
        is_news = failed_as not in self._told
        self._told.add(failed_as)
        return delay_s if is_news else 0.0

    def node_gone(self, node: NodeId) -> None:
        """Nothing of the node runs any more."""
        for slot in [slot for slot in self._failures if slot[0] == node]:
            del self._failures[slot], self._not_before[slot]

    def _accept(self) -> None:
        """One has joined well: what was is of no account."""
        self._refusals, self._refused_until = 0, -math.inf
        self._failed_in.clear()
        self._told.clear()


def _slot(worker: Sighting) -> tuple[NodeId, int]:
    slot = worker.status.slot
    return worker.node, -1 if slot is None else slot
