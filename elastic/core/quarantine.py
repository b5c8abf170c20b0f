"""Which nodes fail so often that they do more harm than good."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.core.membership import Failure, FailureKind

_SCRIPTS_OWN = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE)
"""Every node would fail so: the job's restart budget is for these."""


@dataclass(slots=True)
class NodeFailures:
    """Counts failures that may be the node's own, each for `window_s` seconds.

    after: so many put the node into quarantine; 0: none does.
    """

    after: int
    window_s: float
    _failed_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def worker_failed(self, node: str, failure: Failure, now: float) -> bool:
        """A worker ended badly; True if that was once too often."""
        return failure.kind not in _SCRIPTS_OWN and self._count(node, now)

    def node_lost(self, node: str, now: float) -> bool:
        """It is gone, with its agent, and was not to leave; True if that was once too often."""
        return self._count(node, now)

    def failures(self, node: str, now: float) -> int:
        """How many count now."""
        times = self._failed_at.get(node)
        if times is None:
            return 0
        while times and times[0] <= now - self.window_s:
            times.popleft()
        if not times:
            del self._failed_at[node]  # nodes come and go
        return len(times)

    def restore(self, instants: Mapping[str, Sequence[float]]) -> None:
        """Those of which another one has known, by node, oldest first."""
        for node, found in instants.items():
            self._failed_at[node].extend(found)

    def instants(self) -> Mapping[str, tuple[float, ...]]:
        """When they were, by node, oldest first."""
        return {node: tuple(found) for node, found in self._failed_at.items() if found}

    def forgive(self, node: str) -> None:
        """Begin anew."""
        self._failed_at.pop(node, None)

    def _count(self, node: str, now: float) -> bool:
        self._failed_at[node].append(now)
        for other in list(self._failed_at):
            self.failures(other, now)
        return 0 < self.after <= self.failures(node, now)
