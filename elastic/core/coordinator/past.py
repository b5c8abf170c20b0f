"""The generations that are not long past, and what failures of their members count for."""

from __future__ import annotations

from elastic.core.coordinator.decisions import Form
from elastic.core.membership import Failure, FailureKind, Generation, Member, WorkerId

_REMEMBERED = 16


class PastGenerations:
    """Up to the newest, which is the last."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._failed = 0

    def remember(self, generation: Generation) -> None:
        """It exists, perhaps in another form than before."""
        self._generations[generation.number] = generation
        for number in list(self._generations)[:-_REMEMBERED]:
            del self._generations[number]

    def get(self, number: int) -> Generation | None:
        """One that is not long past."""
        return self._generations.get(number)

    def last_members(self) -> tuple[Member, ...]:
        """Those of the last group."""
        return next((g.members for g in reversed(self._generations.values()) if g.members), ())

    def spent(self) -> frozenset[WorkerId]:
        """The members of every one of them."""
        return frozenset(m.worker for g in self._generations.values() for m in g.members)

    def restart_count(self, decision: Form) -> int:
        """Of the generation that follows from this: every group but the first is a restart."""
        newest = max(self._generations, default=None)
        if newest is None:
            return 0
        return self._generations[newest].restart_count + bool(decision.members)

    def breaks_another(self, failure: Failure) -> bool:
        """Where all workers restart together: False for what follows from an earlier failure.

        The first failure in a group breaks it for the others, who may fail of that. Once the group
        is dissolved, for whatever reason, its members are being ended.
        """
        numbers = [n for n, g in self._generations.items() if failure.worker in g.worker_ids]
        if not numbers or failure.kind is FailureKind.LEFT_OUT:
            return True
        if numbers[-1] != max(self._generations) or numbers[-1] == self._failed:
            return False
        self._failed = numbers[-1]
        return True
