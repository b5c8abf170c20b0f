"""Compares how many reductions members have made: a member that leaves one out, or makes one too
many, has other gradients than the rest, and nothing fails by itself.

A *reduction* is a collective that begins inside the backward pass of a block's last micro-batch.
They are counted from the forming of a group on, so members of one group have equal counts after
equal steps. The group's own number of collectives would not do: messages between two members, and
what a script sends outside of that pass, may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from elastic.core.recovery import Declaration

MOST_MODELS = 64

Made: TypeAlias = tuple[tuple[int, int], ...]
"""Each backward pass of a block that averages gradients: the number of its reductions, and which of
several models they were of, with a bit for each (none: the script has one model). Above these
`MOST_MODELS` bits is a digest of which of their parameters are frozen. A negative number: so many
collectives began outside of these passes, where the script called a model once more."""


def in_words(made: Made) -> str:
    """What a member has made, in words that are equal only for equal reductions."""
    counts = "+".join(str(count) for count, bits in made if bits >= 0) or "0"
    models = ", then ".join(
        "model " + " and ".join(str(n + 1) for n in range(MOST_MODELS) if bits >> n & 1)
        for _, bits in made
        if bits > 0 and bits % (1 << MOST_MODELS)
    )
    frozen = "+".join(f"{bits >> MOST_MODELS:x}" for _, bits in made if bits >> MOST_MODELS > 0)
    outside = sum(-bits for _, bits in made if bits < 0)
    return (
        f"{counts} reductions"
        + (f" (of {models})" if models else "")
        + (f" with the frozen parameters {frozen}" if frozen else "")
        + (f" and {outside} other collectives, as by loss.backward()" if outside else "")
    )


class Rhythm:
    """Expects which reductions the next step of a group makes, from its steps so far.

    All members of a group have the same steps behind them, so they expect the same. As long as each
    of them makes what is expected, all make the same, and nobody has to ask. A member that makes
    more or fewer must compare them with the others. The expectation is that the next step makes
    the same, or that this changes after as many steps as the last time, as in a script that trains
    a second model in every fifth step.
    """

    def __init__(self) -> None:
        self.expected: Made | None = None
        """What the next step makes. None: there was no step yet."""
        self.length = 0
        """The steps since the last change, which made the same."""
        self.is_steady = False
        """The last step made what was expected, and nothing is known to follow it: to note another
        one like it, counting it in `length` is enough."""
        self._made: Made | None = None
        self._runs: dict[Made, tuple[int, Made]] = {}
        """For how many steps this was made the last time, and what followed."""

    def note(self, made: Made) -> None:
        """A step that made these reductions was committed."""
        runs = self._runs
        if made == self._made:
            if self.expected != made:
                del runs[made]  # it lasts longer than the last time
            self.length += 1
        else:
            if self._made is not None:
                runs[self._made] = (self.length, made)
            self._made, self.length = made, 1
        length, following = runs.get(made, (0, made))
        self.expected = following if length == self.length else made
        self.is_steady = made not in runs


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


def without_doubtful(declarations: Sequence[Declaration]) -> tuple[Declaration, ...]:
    """The declarations, in which a state does not count if its last step is in doubt and another
    member of the same group holds the state before that step: the step is computed again."""
    before = {(d.group, d.committed + 1) for d in declarations if d.intact and d.group}
    return tuple(
        replace(d, intact=False) if d.doubtful and (d.group, d.committed) in before else d
        for d in declarations
    )


def _fits(declared: Declaration, newest: int, reduced: int) -> bool:
    """Whether a member fits those that have committed `newest` steps with `reduced` reductions."""
    if declared.committed == newest:
        return declared.reduced == reduced
    return declared.committed == newest - 1 and declared.begun <= reduced
