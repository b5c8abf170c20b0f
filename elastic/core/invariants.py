"""Invariants, checked in production too: a violation ends the process and is never caught."""

from __future__ import annotations

from elastic.core.membership import Generation


class InvariantBroken(AssertionError):
    """The program has a bug. Going on could damage the job, so nothing may catch this."""


def require(condition: bool, what: str) -> None:
    """Raise InvariantBroken unless `condition` holds."""
    if not condition:
        raise InvariantBroken(what)


def check_succession(previous: Generation | None, following: Generation) -> None:
    """Promise P1 (one group at a time): generation numbers only grow, and no worker has two ranks.
    Raises InvariantBroken."""
    require(following.number > 0, f"generation {following.number} is not positive")
    if previous is not None:
        require(
            following.number > previous.number,
            f"generation {following.number} does not follow {previous.number}",
        )
    require(
        len(following.worker_ids) == following.world_size,
        f"a worker has two ranks in generation {following.number}",
    )
