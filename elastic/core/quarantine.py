"""Which machines fail so often that they do more harm than good."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.core.membership import Failure, FailureKind

_SCRIPTS_OWN = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE)
"""Every node would fail so: the job's restart budget is for these."""


@dataclass(slots=True)
class NodeFailures:
    """Counts failures that may be the machine's own, each for `window_s` seconds; under the
    machine's name, since a node's name moves from one to another.

    after: so many put the machine into quarantine; 0: none does.
    """

    after: int
    window_s: float
    _failed_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def worker_failed(self, machine: str, failure: Failure, now: float) -> bool:
        """A worker ended badly; True if that was once too often."""
        return failure.kind not in _SCRIPTS_OWN and self._count(machine, now)

    def node_lost(self, machine: str, now: float) -> bool:
        """It is gone, with its agent, and was not to leave; True if that was once too often."""
        return self._count(machine, now)

    def failures(self, machine: str, now: float) -> int:
        """How many count now."""
        times = self._failed_at.get(machine)
        if times is None:
            return 0
        while times and times[0] <= now - self.window_s:
            times.popleft()
        if not times:
            del self._failed_at[machine]  # they come and go
        return len(times)

    def restore(self, instants: Mapping[str, Sequence[float]]) -> None:
        """Take over the instants of another one, by machine, oldest first."""
        for machine, found in instants.items():
            self._failed_at[machine].extend(found)

    def instants(self) -> Mapping[str, tuple[float, ...]]:
        """When they were, by machine, oldest first."""
        return {machine: tuple(found) for machine, found in self._failed_at.items() if found}

    def forgive(self, machine: str) -> None:
        """Begin anew."""
        self._failed_at.pop(machine, None)

    def _count(self, machine: str, now: float) -> bool:
        self._failed_at[machine].append(now)
        for other in list(self._failed_at):
            self.failures(other, now)
        return 0 < self.after <= self.failures(machine, now)
