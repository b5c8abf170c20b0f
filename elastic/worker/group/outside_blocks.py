"""Refuses collectives that the script calls outside of `with step:` and of `session.run`."""

from __future__ import annotations

from elastic.errors import StepMisused
from elastic.worker.group.process_group import GROUPS, Group

_UNKNOWN = -1


class OutsideBlocks:
    """Counts the collectives of the group while the script runs outside of blocks. They work until
    the group changes, but then they meet other collectives of members that join."""

    def __init__(self) -> None:
        self.group: Group | None = None
        """The group whose collectives are counted."""
        self._before = _UNKNOWN
        """How many it had begun when elastic returned to the script. Unknown inside of a block, and
        after one that the script has left by an exception."""

    def script_goes_on(self, group: Group | None) -> int:
        """Elastic returns to the script. Returns how many collectives `group` has begun."""
        self.group = group
        self._before = group.collectives() if group is not None else 0
        return self._before

    def script_comes_back(self, committed: int) -> int | None:
        """Raise StepMisused if the script has called collectives since `script_goes_on`. Returns
        how many the group has begun, or None if that is not known for this group alone."""
        group, before = self.group, self._before
        self._before = _UNKNOWN
        if group is None:
            return None
        count = group.collectives()
        if group.lost or not group.counts_collectives:
            return None
        if before in (_UNKNOWN, count):
            return count if len(GROUPS) < 2 else None
        raise StepMisused(
            "a collective of torch.distributed was called outside of `with step:` (steps committed "
            f"so far: {committed}); when a worker is lost or joins, it would "
            "fail, or match another collective of that worker. Call it inside of the block, or "
            "pass the function that calls it to session.run(); step.mean() returns means over all "
            "workers without a further collective"
        )
