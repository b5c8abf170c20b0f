"""Where the time of each recovery went, phase by phase (P8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.coordinator.effects import Lost
from elastic.core.membership import Generation, NodeId, WorkerId
from elastic.v1 import job_pb2 as pb

_KEPT = 20


@dataclass(slots=True)
class _Recovery:
    sign_at: float
    decided_at: float
    reason: str
    lost: tuple[str, ...]
    generation: int | None = None
    """The one that followed; None while it is not announced."""
    persisted_at: float = 0.0


class Recoveries:
    """Follows a loss until the new group has committed its first step. Instants: the loop's clock.

    detect: first sign to decision; of a hang, from the begin of the step in which the group stood
    still; of a node whose time to leave was over, from the last commit. persist: the generation
    written. join, sync, first step: as measured by the member that was first to commit. notify: the
    rest, messages and waiting for the last member. These add up to the total; abort overlaps them,
    as members free themselves.
    """

    def __init__(self, finished: Iterable[Mapping[str, Any]] = ()) -> None:
        """finished: those of leaders before, newest last."""
        self._signs: dict[NodeId, float] = {}
        """By the node that is out of contact; those of other kinds under no name."""
        self._under_way: _Recovery | None = None
        self.finished: deque[Mapping[str, Any]] = deque(finished, maxlen=_KEPT)

    @property
    def under_way_since(self) -> float | None:
        """The first sign of the loss that is being recovered from; None: of none."""
        return self._under_way.sign_at if self._under_way is not None else None

    def sign(self, now: float, *, silent: NodeId = "") -> None:
        """A first hint: a broken collective, a dead member, the broken stream of a node."""
        self._signs.setdefault(silent, now)

    def reported(self, node: NodeId, workers: Iterable[WorkerId], current: Generation) -> None:
        """These live on a node: if it was silent and has all of its members still, that was no sign
        of a loss."""
        if node in self._signs and current.workers_on(node).issubset(workers):
            del self._signs[node]

    def left_late(self, since: float, now: float, current: Generation | None) -> None:
        """A member ends that was to leave at a step boundary: no step was committed since then.

        The group without it may be planned already; else it is `lost`.
        """
        earlier = self._under_way
        recovery = earlier or _Recovery(since, now, "leave_timed_out", ())
        recovery.sign_at = min(since, recovery.sign_at)
        if earlier is None and current is not None and current.leave_after is not None:
            recovery.generation, recovery.persisted_at = current.number, now
        self._under_way = recovery

    def lost(self, effect: Lost) -> None:
        """The coordinator has decided to go on without these workers."""
        earlier = self._under_way
        sign_at = min(self._signs.values(), default=effect.at)
        if effect.standing_since is not None:
            sign_at = min(sign_at, effect.standing_since)
        if earlier is not None:  # struck again before the first step: one recovery
            sign_at = min(sign_at, earlier.sign_at)
        lost = (*(earlier.lost if earlier else ()), *effect.workers)
        self._under_way = _Recovery(sign_at, effect.at, effect.reason.name.lower(), lost)
        self._signs.clear()

    def announced(self, generation: Generation, now: float) -> None:
        """A generation exists."""
        self._signs.clear()
        if self._under_way is not None and generation.leave_after is None:
            self._under_way.generation = generation.number
            self._under_way.persisted_at = now

    def reformed(self, report: pb.Reformed, now: float) -> dict[str, Any] | None:
        """A member has committed its first step; the finished record if it was the first to."""
        recovery = self._under_way
        if recovery is None or recovery.generation is None:
            return None
        if report.generation < recovery.generation:
            return None  # of the group that was lost, overtaken by the news of its loss
        self._under_way = None
        record = _record(recovery, report, now)
        self.finished.append(record)
        return record


def _record(recovery: _Recovery, report: pb.Reformed, now: float) -> dict[str, Any]:
    phases = {
        "detect_s": recovery.decided_at - recovery.sign_at,
        "persist_s": max(0.0, recovery.persisted_at - recovery.decided_at),
        "abort_s": report.abort_s,
        "join_s": report.join_s,
        "sync_s": report.sync_s,
        "first_step_s": report.first_step_s,
    }
    total_s = now - recovery.sign_at
    measured = sum(phases.values()) - report.abort_s  # freed while the decision was made
    phases["notify_s"] = max(0.0, total_s - measured)
    return {
        "generation": report.generation,
        "reason": recovery.reason,
        "lost": list(recovery.lost),
        "committed": report.committed,
        "total_s": round(total_s, 6),
        **{name: round(value, 6) for name, value in phases.items()},
    }
