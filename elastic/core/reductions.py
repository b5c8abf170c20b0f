"""Compares how many reductions members have made: a member that leaves one out, or makes one too
many, has other gradients than the rest, and nothing fails by itself.

A *reduction* is a collective that begins inside the backward pass of a block's last micro-batch.
They are counted from the forming of a group on, so members of one group have equal counts after
equal steps. The group's own number of collectives would not do: messages between two members, and
what a script sends outside of that pass, may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.recovery import Declaration


class Rhythm:
    """Expects how many reductions the next step of a group makes, from its steps so far.

    All members of a group have the same steps behind them, so they expect the same. As long as each
    of them makes what is expected, all make the same, and nobody has to ask. A member that makes
    more or fewer must compare its count with the others'. The expectation is that a count stays,
    or that it changes after as many steps as the last time, as in a script that trains a second
    model in every fifth step.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        """The reductions of the next step. None: there was no step yet."""
        self._count: int | None = None
        self._length = 0
        self._runs: dict[int, tuple[int, int]] = {}
        """By count: for how many steps it was made the last time, and the count that followed."""

    def note(self, count: int) -> None:
        """A step with `count` reductions was committed."""
        runs = self._runs
        if count == self._count:
            if self.expected != count:
                del runs[count]  # it lasts longer than the last time
            self._length += 1
        else:
            if self._count is not None:
                runs[self._count] = (self._length, count)
            self._count, self._length = count, 1
        length, following = runs.get(count, (0, 0))
        self.expected = following if length == self._length else count


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """Members of one earlier group that cannot have made the same reductions, by rank."""

    ahead: tuple[int, ...]
    """The ranks with the most committed steps."""
    odd: tuple[int, ...]
    """The ranks that do not fit these."""
    committed: int
    """The committed steps of the ranks ahead."""


def disagreement(declarations: Sequence[Declaration]) -> Disagreement | None:
    """Find members whose steps and reductions in their last group do not fit each other.

    When a group is lost, a member may be one step ahead of another, whose part of the last
    reduction never arrived. It cannot be two ahead, since each step needs every member. Nor can the
    one that is ahead have made fewer reductions than the other has begun: then it has left one out,
    and its state, which is the most advanced, is wrong.
    """
    groups: dict[int, list[int]] = {}
    for rank, declared in enumerate(declarations):
        if declared.group > 0:
            groups.setdefault(declared.group, []).append(rank)
    for ranks in groups.values():
        newest = max(declarations[rank].committed for rank in ranks)
        ahead = tuple(rank for rank in ranks if declarations[rank].committed == newest)
        reduced = declarations[ahead[0]].reduced
        odd = tuple(rank for rank in ranks if not _fits(declarations[rank], newest, reduced))
        if odd:
            rest = tuple(rank for rank in ahead if rank not in odd)
            return Disagreement(ahead=rest, odd=odd, committed=newest)
    return None


def _fits(declared: Declaration, newest: int, reduced: int) -> bool:
    """Whether a member fits those that have committed `newest` steps with `reduced` reductions."""
    if declared.committed == newest:
        return declared.reduced == reduced
    return declared.committed == newest - 1 and declared.begun <= reduced
