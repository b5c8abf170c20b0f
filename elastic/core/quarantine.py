"""Decides which machines fail so often that they go into quarantine."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.core.membership import Failure, FailureKind

_SCRIPTS_OWN = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE)
"""Failures that would happen on every node. The job's restart budget bounds these instead."""
_ONE_LOSS_S = 1.0


@dataclass(slots=True)
class _Repeated:
    """Equal failures since the job's newest step."""

    failed_at: dict[str, list[float]] = field(default_factory=dict)
    """When they counted, by machine."""
    is_common: bool = False
    """Several machines had it."""


@dataclass(slots=True)
class NodeFailures:
    """Counts failures that may be the machine's fault, each for `window_s` seconds.

    They are counted by machine name, since a node's name moves from one machine to another. Equal
    failures on several machines at the same step have a common cause, such as the script: none of
    them counts. Workers of one machine that fail together count once.

    after: the number of failures that puts a machine into quarantine. 0: none does.
    """

    after: int
    window_s: float
    _failed_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    _step: int = -1
    _repeated: dict[tuple[FailureKind, int], _Repeated] = field(default_factory=dict)
    """Failures since `_step`, by kind and signal."""

    def worker_failed(self, machine: str, failure: Failure, now: float, *, step: int) -> bool:
        """A worker failed. True if its machine should go into quarantine.

        step: the steps that the job has committed.
        """
        if failure.kind in _SCRIPTS_OWN:
            return False
        if step != self._step:
            self._step = step
            self._repeated.clear()
        repeated = self._repeated.setdefault((failure.kind, failure.code), _Repeated())
        own = repeated.failed_at.setdefault(machine, [])
        if len(repeated.failed_at) > 1:
            repeated.is_common = True
            self._take_back(repeated)
        if repeated.is_common or (own and now - own[-1] < _ONE_LOSS_S):
            return False
        own.append(now)
        return self._count(machine, now)

    def node_lost(self, machine: str, now: float) -> bool:
        """A node was lost with its agent. True if its machine should go into quarantine."""
        return self._count(machine, now)

    def failures(self, machine: str, now: float) -> int:
        """The number of failures within the window that ends at `now`."""
        times = self._failed_at.get(machine)
        if times is None:
            return 0
        while times and times[0] <= now - self.window_s:
            times.popleft()
        if not times:
            del self._failed_at[machine]  # machines come and go: keep none without failures
        return len(times)

    def restore(self, instants: Mapping[str, Sequence[float]]) -> None:
        """Add what `instants` of an earlier leader's object returned."""
        for machine, found in instants.items():
            self._failed_at[machine].extend(found)

    def instants(self) -> Mapping[str, tuple[float, ...]]:
        """When each counted failure happened, by machine, oldest first."""
        return {machine: tuple(found) for machine, found in self._failed_at.items() if found}

    def forgive(self, machine: str) -> None:
        self._failed_at.pop(machine, None)

    def _take_back(self, repeated: _Repeated) -> None:
        for machine, found in repeated.failed_at.items():
            for instant in found:
                if instant in self._failed_at.get(machine, ()):
                    self._failed_at[machine].remove(instant)
            found.clear()

    def _count(self, machine: str, now: float) -> bool:
        self._failed_at[machine].append(now)
        for other in list(self._failed_at):
            self.failures(other, now)
        return 0 < self.after <= self.failures(machine, now)
