"""Decides whether and when a failed worker is restarted: budget, backoff, lack of progress."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.core.membership import Failure, FailureKind, NodeId, WorkerId
from elastic.errors import ExitCode

_NOT_THE_SCRIPTS = (FailureKind.SIGNAL, FailureKind.LEFT_OUT, FailureKind.SLOW)


class Verdict(enum.Enum):
    """What a failure means for the job."""

    RESTART = 1
    NOT_RETRYABLE = 2
    SAME_FAILURE_NO_PROGRESS = 3
    BUDGET_SPENT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Exponential backoff whose jitter comes from a seed: equal seeds give equal delays."""

    base_s: float = 0.25
    cap_s: float = 30.0
    seed: int = 0

    def delay_s(self, failures: int) -> float:
        """Seconds to wait before the next start, after `failures` failed starts in a row.

        The first restart is immediate, because a killed worker is the usual case. Later delays
        double, times a factor in [0.5, 1), so that nodes that failed together do not restart
        together.
        """
        if failures <= 1:
            return 0.0
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 32))
        digest = hashlib.blake2b(f"{self.seed}/{failures}".encode(), digest_size=8).digest()
        return float(ceiling * (0.5 + int.from_bytes(digest, "big") / 2.0**65))


@dataclass(frozen=True, slots=True)
class _Incident:
    """The first failure with one signature since the job last made progress."""

    committed: int
    cohort: frozenset[WorkerId]
    """The workers that ran at that moment: their equal failures belong to the same incident."""
    failed: set[WorkerId]
    """The workers that have failed with this signature."""
    nodes: set[NodeId] = field(default_factory=set)
    """For a hang: the nodes of the workers that hung in the first group with this hang."""
    generation: int = 0
    """For a hang: the generation of that group."""


@dataclass(slots=True)
class RestartPolicy:
    """Judges the failures of the whole job.

    At most `max_restarts` failures are allowed within `window_s` seconds. The job ends if a worker
    fails by an error of the script (exception or exit code), and a worker started afterwards fails
    in the same way before another step is committed: restarting would only repeat the error. The
    job also ends if all members of a group of several fail in the same way and no checkpoints are
    kept: a restarted job would compute the same steps again and fail at the same place.

    A worker may hang because of its machine or the storage. But if a later group hangs at the same
    place on another node without having committed a step, the script is at fault.
    """

    max_restarts: int
    window_s: float
    saves: bool = True
    """The job keeps checkpoints."""
    progress_is_known: bool = True
    """False: nobody counts the steps of the job, so only the budget bounds its restarts."""
    _failed_at: deque[float] = field(default_factory=deque)
    _incidents: dict[str, _Incident] = field(default_factory=dict)

    def judge(
        self,
        failure: Failure,
        *,
        now: float,
        committed: int,
        running: frozenset[WorkerId],
        members: frozenset[WorkerId] = frozenset(),
        node: NodeId = "",
        generation: int = 0,
    ) -> Verdict:
        """Record a failure and return what follows from it.

        now: seconds on any monotonic clock. committed: steps committed by the job so far.
        running: workers alive or starting when the failure was noticed. members: the members of
        the group. node: the node of the failed worker. generation: the last group it was in.
        """
        if not failure.retryable:
            return Verdict.NOT_RETRYABLE
        if self.progress_is_known and self._repeats_without_progress(
            failure, committed, running, members
        ):
            return Verdict.SAME_FAILURE_NO_PROGRESS
        if self._hangs_on_another_node(failure, committed, node, generation):
            return Verdict.SAME_FAILURE_NO_PROGRESS
        self._failed_at.append(now)
        if self.spent(now) > self.max_restarts:
            return Verdict.BUDGET_SPENT
        return Verdict.RESTART

    def restore(self, instants: Sequence[float]) -> None:
        """Add what `instants` of an earlier leader's policy returned."""
        self._failed_at.extend(instants)

    def instants(self) -> tuple[float, ...]:
        """When each counted failure happened, oldest first."""
        return tuple(self._failed_at)

    def spent(self, now: float) -> int:
        """How many restarts count at `now`."""
        while self._failed_at and self._failed_at[0] <= now - self.window_s:
            self._failed_at.popleft()
        return len(self._failed_at)

    def _repeats_without_progress(
        self,
        failure: Failure,
        committed: int,
        running: frozenset[WorkerId],
        members: frozenset[WorkerId],
    ) -> bool:
        if failure.kind in _NOT_THE_SCRIPTS:
            return False  # the machine may be at fault, not the script; the budget bounds it
        if failure.code == ExitCode.TEMPORARY:
            return False  # what was missing may be there the next time; the budget bounds it too
        incident = self._incidents.get(failure.signature)
        if incident is not None and committed <= incident.committed:
            incident.failed.add(failure.worker)
            nobody_is_left = len(incident.failed) > 1 and members <= incident.failed
            if nobody_is_left and members and committed > 0 and not self.saves:
                return True
            return failure.worker not in incident.cohort
        self._forget_before(committed)
        cohort = running | {failure.worker}
        self._incidents[failure.signature] = _Incident(committed, cohort, {failure.worker})
        return False

    def _hangs_on_another_node(
        self, failure: Failure, committed: int, node: NodeId, generation: int
    ) -> bool:
        """Whether a worker of an earlier group hung there on another node, with no commit since."""
        if failure.kind is not FailureKind.LEFT_OUT or not failure.place:
            return False
        known = self._incidents.get(failure.signature)
        if known is None or committed > known.committed:
            self._forget_before(committed)
            self._incidents[failure.signature] = _Incident(
                committed, frozenset(), {failure.worker}, {node}, generation
            )
            return False
        if generation > known.generation:
            return node not in known.nodes
        known.nodes.add(node)
        return False

    def _forget_before(self, committed: int) -> None:
        """Forget the failures before the job's last progress."""
        self._incidents = {s: i for s, i in self._incidents.items() if committed <= i.committed}
