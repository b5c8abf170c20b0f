"""Decides which members of a new group give their state to which others, from their declarations.

A member's state has two marks. The *commit mark* is the state right after the block of the last
committed step. The *begin mark* is the state with which the next block begins: a script may change
what it tracks between two blocks (a scheduler that steps there, an average). A member whose block
was given up while others completed it leaves that block as committed, and its script runs the code
below the block: it needs the commit mark. All other receivers need the begin mark.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class Mark(enum.Enum):
    """The moment that a state is from."""

    COMMIT = 1
    BEGIN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What a member declares when it joins a group."""

    committed: int
    """The number of committed steps."""
    intact: bool
    """Its state is exactly that after `committed` steps. False if it was never in a group."""
    signature: int
    """A digest of the names, shapes and types of what it tracks."""
    took_part: bool = False
    """It has been in a group before, so its script is at the same place as the others' scripts."""
    committed_in: int = 0
    """The generation in which its last step was committed."""
    commit_digest: int = 0
    """The digest of the replicated state at the commit mark. 0: it cannot give that state."""
    begin_digest: int = 0
    """The digest of the replicated state at the begin mark. 0: it is not at that mark."""
    unread: bool = False
    """The digests leave out large state, which members compare while the next step is computed."""
    in_block: bool = False
    """Its script is inside the block of the step after `committed`."""
    loop: int = 0
    """The loop over `session.steps` that its script is in, from 0."""
    state_loop: int = 0
    """The loop that its state is from: later than `loop` if the state waits for the script."""
    runs_done: int = 0
    """Calls of `session.run` completed since the last commit."""
    in_run: bool = False
    """Its script is inside such a call, or leaves a block that another member's state has
    completed. It is not where a newcomer's script begins."""
    repeats: bool = False
    """It can repeat the last one of those calls."""
    group: int = 0
    """The generation in whose group it has reached `committed`. 0: it has received its state since,
    or was in no group."""
    reduced: int = 0
    """The reductions (core/reductions.py) of the steps that it committed in that group."""
    begun: int = 0
    """Those that it has begun, including the block that was given up."""
    doubtful: bool = False
    """Its last step made other reductions than expected, and the group was lost before the members
    had compared them."""

    @property
    def age(self) -> tuple[int, int]:
        """A key that is equal only for equal states, and greater for the later state.

        The number of steps is not enough: a member that was cut off may have completed a step that
        the others had to repeat, with other samples. The step that the later generation
        committed is right, as in Raft's logs (Ongaro and Ousterhout 2014, section 5.4.1).
        """
        return self.committed_in, self.committed

    def digest(self, mark: Mark) -> int:
        return self.commit_digest if mark is Mark.COMMIT else self.begin_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Rank `source` sends the state as of `mark`, its own or what it receives, to rank `target`."""

    source: int
    target: int
    mark: Mark = Mark.BEGIN


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """How the group comes to one state.

    committed: the step that all agree on. None if no member holds the state: then rank 0 is the
    source, and restores a checkpoint. If there is none, it begins the job, unless the job had
    `begun` before.
    differed: ranks that declared the right step, but with another state than the source's.
    stranded: ranks whose script is at a place that no received state fits: the script needs a
    commit mark that no member can give, has calls of `session.run` ahead that the others cannot
    repeat, is inside such a call that belongs to another state, or needs a begin mark while the
    others are inside such a call.
    """

    committed: int | None
    transfers: tuple[Transfer, ...]
    begun: bool = False
    differed: tuple[int, ...] = ()
    stranded: tuple[int, ...] = ()


def plan_recovery(declarations: Sequence[Declaration]) -> RecoveryPlan:
    """The most advanced intact members are right, and all others receive the state from them.

    So a step that only one survivor committed is kept: the others had all contributed to it. Where
    members of the same step differ, the majority is right, and on a tie those that agree with the
    lowest rank. Receivers are spread over the sources. Those of one source form a chain, in which
    each passes on what comes while more is on its way: the time hardly grows with their number.
    """
    intact = [rank for rank, d in enumerate(declarations) if d.intact]
    if not intact:
        return RecoveryPlan(
            committed=None,
            transfers=tuple(Transfer(source=s, target=s + 1) for s in range(len(declarations) - 1)),
            begun=any(d.took_part and d.committed > 0 for d in declarations),
            stranded=tuple(r for r, d in enumerate(declarations) if d.took_part and d.in_run),
        )
    newest = max(declarations[rank].age for rank in intact)
    held = [rank for rank in intact if declarations[rank].age == newest]
    differed = _outvoted(declarations, held)
    late = _behind_unrepeatable_call(declarations, held)
    sources = [rank for rank in held if rank not in (*differed, *late)]
    holders = [declarations[rank] for rank in sources]
    targets = [rank for rank in range(len(declarations)) if rank not in sources]
    in_blocks = [rank for rank in targets if _leaves_block(declarations[rank], holders[0])]
    can_give_commit = [rank for rank in sources if declarations[rank].commit_digest]
    can_give_begin = [rank for rank in sources if declarations[rank].begin_digest] or sources
    stranded = list(late)
    if not can_give_commit or not _await_calls(holders, newcomers=len(targets) > len(in_blocks)):
        stranded += in_blocks
    for rank in targets:
        declared = declarations[rank]
        inside = declared.in_run or not _are_at_boundary(holders)
        if declared.took_part and inside and rank not in (*in_blocks, *late):
            stranded.append(rank)
    transfers: list[Transfer] = []
    ends: dict[tuple[int, Mark], int] = {}
    for rank in targets:
        at_commit = bool(can_give_commit) and rank in in_blocks
        givers = can_give_commit if at_commit else can_give_begin
        mark = Mark.COMMIT if at_commit else Mark.BEGIN
        first = givers[len(transfers) % len(givers)]
        source = ends.get((first, mark), first)
        ends[first, mark] = rank
        transfers.append(Transfer(source=source, target=rank, mark=mark))
    return RecoveryPlan(
        committed=holders[0].committed,
        transfers=tuple(transfers),
        begun=True,
        differed=differed,
        stranded=tuple(sorted(stranded)),
    )


def _behind_unrepeatable_call(
    declarations: Sequence[Declaration], held: Sequence[int]
) -> tuple[int, ...]:
    """The ranks among `held` that are at a call which the others cannot repeat any more, because
    these ranks were out of the group for longer."""
    done = max(declarations[rank].runs_done for rank in held)
    repeats = all(declarations[r].repeats for r in held if declarations[r].runs_done == done)
    least = done - 1 if repeats else done
    return tuple(rank for rank in held if declarations[rank].runs_done < least)


def _leaves_block(receiver: Declaration, holder: Declaration) -> bool:
    """Whether the receiver's script is inside a block that the holder's state has completed.

    False for a block of an earlier loop: the receiver leaves that loop instead. False also if the
    receiver has committed as many steps in a lost lineage: the block is still ahead of both.
    """
    in_block = receiver.took_part and receiver.in_block
    return in_block and receiver.committed < holder.committed and receiver.loop == holder.state_loop


def _are_at_boundary(holders: Sequence[Declaration]) -> bool:
    """Whether no holder is inside a call or has to repeat one, so that a begin mark fits."""
    return not any(d.in_run for d in holders) and len({d.runs_done for d in holders}) == 1


def agree_so_far(declarations: Sequence[Declaration]) -> bool:
    """Whether all are at the begin mark of the same step, with no call between, and equal in what
    they have read."""
    first = declarations[0]
    return _are_at_boundary(declarations) and all(
        d.intact
        and d.age == first.age
        and d.begin_digest == first.begin_digest != 0
        and d.commit_digest in (0, first.commit_digest)
        for d in declarations
    )


def _await_calls(holders: Sequence[Declaration], *, newcomers: bool) -> bool:
    """Whether all members can make the calls that a member at the end of the block has ahead."""
    if newcomers:  # their scripts begin at a boundary, past these calls
        return all(d.runs_done == 0 for d in holders) and _are_at_boundary(holders)
    return all(d.runs_done == 0 or (d.runs_done == 1 and d.repeats) for d in holders)


def _outvoted(declarations: Sequence[Declaration], held: Sequence[int]) -> tuple[int, ...]:
    """The ranks among `held` whose state is not that of the majority, at the mark for which most of
    them have a digest."""
    mark = max(Mark, key=lambda m: sum(declarations[rank].digest(m) != 0 for rank in held))
    digests = {r: declarations[r].digest(mark) for r in held if declarations[r].digest(mark)}
    if len(set(digests.values())) < 2:
        return ()
    votes = Counter(digests.values())  # most_common keeps the order of first appearance on ties
    right = votes.most_common(1)[0][0]
    return tuple(rank for rank, digest in digests.items() if digest != right)


def runs_to_repeat(declarations: Sequence[Declaration]) -> int | None:
    """The `session.run` call, counted since the last commit, that the slowest holder is at.

    A call can complete on one member and break on another. Members that have completed it repeat it
    so that the others can complete theirs. None: the group is of no use, because it has a newcomer
    while a holder is inside a call that the newcomer's script has never reached.
    """
    holders = _holders(declarations)
    if not holders:
        return 0
    if not all(d.took_part for d in declarations) and not _are_at_boundary(holders):
        return None
    if any(_leaves_block(d, holders[0]) for d in declarations):
        return 0  # it comes to the step's end now, and to what stands below it
    return min(d.runs_done for d in holders)


def calls_done(declarations: Sequence[Declaration]) -> int:
    """The most calls of `session.run` since the last commit that any holder has completed."""
    return max((d.runs_done for d in _holders(declarations)), default=0)


def _holders(declarations: Sequence[Declaration]) -> list[Declaration]:
    """The intact members of the newest step."""
    intact = [d for d in declarations if d.intact]
    newest = max((d.age for d in intact), default=None)
    return [d for d in intact if d.age == newest]


def mismatching_ranks(declarations: Sequence[Declaration]) -> tuple[int, tuple[int, ...]]:
    """(a rank whose signature is right, the ranks that differ from it).

    The signature of an intact member is right, or that of rank 0 if no member is intact. A script
    in another loop is not compared: in an earlier one it may not have built all that it will track,
    and it is compared when it gets there.
    """
    reference = next((r for r, d in enumerate(declarations) if d.intact), 0)
    right = declarations[reference]
    odd = tuple(
        rank
        for rank, d in enumerate(declarations)
        if d.signature != right.signature and d.loop == right.loop
    )
    return reference, odd
