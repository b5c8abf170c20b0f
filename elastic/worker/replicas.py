"""Compares what the members of a group hold, and names the ranks and objects that differ."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.checkpoint import documents
from elastic.core.membership import Purpose
from elastic.errors import StepMisused
from elastic.worker.group import membership
from elastic.worker.group.membership import Standing
from elastic.worker.group.process_group import Group
from elastic.worker.group.transfer import receive_json, send_json
from elastic.worker.script_calls import ScriptCall
from elastic.worker.state.digest import ReadBefore, digest_of
from elastic.worker.state.job_state import JobState
from elastic.worker.state.state_digests import StateDigests

_COMPARISON = ScriptCall(
    what="compares its parameters with the others'", where="", function=lambda: None
)


def require_same_order(group: Group, here: Standing, order: str) -> None:
    """Meet the other members. Raises StepMisused if they do not divide the same samples. order:
    what decides on the order of this member's samples, in words."""
    orders = membership.meet(group, here, "replicas", _COMPARISON, order)
    if not orders:
        return
    odd = next(rank for rank in orders if orders[rank] != orders[0])
    raise StepMisused(
        f"rank {odd} divides other samples than rank 0, so some would count twice and others "
        f"never: its elastic.DataLoader has {orders[odd]}, and rank 0's has {orders[0]}. Every "
        "worker, also one that joins later, must create it with the same arguments, the seed "
        "too, and for as many samples: make sure that all list the same files"
    )


def require_equal(
    group: Group, state: JobState, before: ReadBefore | None = None, *, saves: bool
) -> None:
    """Compare the parameters and values of all members, and, if they save them, which tensors that
    would be. Raises StepMisused with the ranks and names that differ. before: what need not be read
    again, unless it is saved."""
    digest, names = state.compared_digest(None if saves else before), state.compared_digests
    odd = membership.differing_parameters(group, digest, names)
    if odd:  # something may have been written to without a sign
        odd = membership.differing_parameters(group, state.compared_digest(), names)
    if not odd and saves:
        _require_shares_that_fit(group, state)
    if odd:
        raise StepMisused(
            f"the parameters or values of {_shown(odd, group)} differ from those of rank 0 "
            f"after step {state.committed}, although nothing was lost. Either they were changed "
            "without averaging: call the model that session.distribute() returned, make every "
            "trained nn.Parameter one of such a model, whose forward() uses it, change "
            "parameters in the same way on every rank, put only values into session.state that "
            "are the same everywhere, such as those of step.mean(), and seed what is random; "
            "session.track_local() is for what differs. Or a worker that joined lacks an "
            "object that the step uses: pass schedulers, averages and the like to "
            "session.track()"
        )


def _require_shares_that_fit(group: Group, state: JobState) -> None:
    """Raise StepMisused if members would save different tensors in the save that follows. Each
    saves a part, and a checkpoint of parts that do not fit could not be read."""
    odd = membership.differing_parameters(group, _shapes_digest(state), state.saved_shapes)
    if odd:
        raise StepMisused(
            f"{_shown(odd, group)} would save other tensors than rank 0 after step "
            f"{state.committed}, but a checkpoint has a part from each. Tracked "
            "objects must have the same tensors on every rank, session.state too: decide what "
            "to keep there by values that are the same everywhere, such as those of "
            "step.mean(), and pass what differs between ranks to session.track_local()"
        )


def have_equal_rest(group: Group, here: Standing, state: JobState, reads: StateDigests) -> bool:
    """Return, once every member has come here, whether all have equal digests of what they have
    declared as unread."""
    try:
        if membership.have_equal(group, here, reads.rest()):
            return True
        # The block may have written to something for the first time while that was read.
        return membership.have_equal(group, here, reads.rest_now(state), again=True)
    finally:
        reads.forget()


def digest_to_keep(group: Group, state: JobState, *, saves: bool) -> str:
    """Return a digest of what members must have in common before the last save, which may be of a
    step after which replicas were not compared."""
    if group.world_size == 1 or group.generation.purpose is not Purpose.TRAIN:
        return ""  # members of a group that leaves have compared all when it formed
    shapes = _shapes_digest(state) if saves else 0
    return f"{state.compared_digest():x}/{shapes:x}"


def names_that_differ(
    group: Group, state: JobState, *, odd: tuple[int, ...], right: int
) -> list[str] | None:
    """Return the names of what this member holds otherwise than rank `right`, if it is one of the
    `odd` ranks. All of these and that rank call this."""
    if group.rank == right:
        for rank in odd:
            send_json(group, state.digests(), rank)
    elif group.rank in odd:
        return membership.differences(state.digests(), receive_json(group, right))
    return None


def _shapes_digest(state: JobState) -> int:
    """A digest of the tensors that this member would save."""
    return digest_of([], documents.encode({"shapes": state.saved_shapes()}))


def _shown(odd: Mapping[int, list[str]], group: Group) -> str:
    """The ranks that differ, in words. On one of these ranks, also the names of what differs."""
    names = odd.get(group.rank) or []
    which = f" ({', '.join(names[:3])})" if names else ""
    return f"rank {', '.join(map(str, odd))}{which}"
