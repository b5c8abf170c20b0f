"""Who gives its state to whom once a new group stands: pure, from what each member declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What a member says of itself on joining."""

    committed: int
    """Committed steps."""
    intact: bool
    """Its state is that of exactly `committed` steps. False for one that never took part."""
    signature: int
    """Of the names, shapes and types of what it tracks."""
    took_part: bool = False
    """It has been in a group before, so its script is where the others' scripts are."""
    committed_in: int = 0
    """The generation in which it committed its last step."""
    runs_done: int = 0
    """Calls of `session.run` completed since the last commit."""
    in_run: bool = False
    """Its script is inside such a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Rank `source` sends its state to rank `target`."""

    source: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """How the group comes to one state.

    committed: the step all agree on; None if nobody holds the state: rank 0 restores a checkpoint
    or begins, and is the source.
    """

    committed: int | None
    transfers: tuple[Transfer, ...]


def plan_recovery(declarations: Sequence[Declaration]) -> RecoveryPlan:
    """The most advanced intact members are right; everyone else receives from one of them.

    A step that only one survivor committed is therefore kept: the others had all contributed to
    it. Receivers are spread over the sources.
    """
    intact = [rank for rank, d in enumerate(declarations) if d.intact]
    if not intact:
        targets = range(1, len(declarations))
        transfers = tuple(Transfer(source=0, target=t) for t in targets)
        return RecoveryPlan(committed=None, transfers=transfers)
    newest = max(_age(declarations[rank]) for rank in intact)
    sources = [rank for rank in intact if _age(declarations[rank]) == newest]
    behind = [rank for rank in range(len(declarations)) if rank not in sources]
    return RecoveryPlan(
        committed=declarations[sources[0]].committed,
        transfers=tuple(
            Transfer(source=sources[i % len(sources)], target=rank) for i, rank in enumerate(behind)
        ),
    )


def _age(declaration: Declaration) -> tuple[int, int]:
    """Equal for equal states only, and greater for the later one.

    A count alone does not tell: a member that was cut off may have completed a step that the others
    had to repeat, with other samples. As with Raft's logs (Ongaro and Ousterhout 2014, section
    5.4.1), what the later generation committed is right.
    """
    return declaration.committed_in, declaration.committed


def runs_to_repeat(declarations: Sequence[Declaration]) -> int | None:
    """The `session.run` call, counted since the last commit, that the slowest veteran is at.

    A call can complete on one member and break on another. Those that are past it repeat it so
    that the others can complete theirs. None: a newcomer is in the group while a veteran is
    inside a call, which the newcomer's script has never reached; this group is of no use.
    """
    veterans = [d for d in declarations if d.took_part]
    if not veterans:
        return 0
    if len(veterans) < len(declarations) and any(d.in_run for d in veterans):
        return None
    newest = max(d.committed for d in veterans)
    return min(d.runs_done if d.committed == newest else 0 for d in veterans)


def odd_ones_out(declarations: Sequence[Declaration]) -> tuple[int, tuple[int, ...]]:
    """(a rank whose signature is right, the ranks that differ from it).

    Right is what an intact member tracks; while nobody is, what rank 0 tracks.
    """
    reference = next((r for r, d in enumerate(declarations) if d.intact), 0)
    expected = declarations[reference].signature
    odd = tuple(r for r, d in enumerate(declarations) if d.signature != expected)
    return reference, odd
