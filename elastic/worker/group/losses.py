"""Finds out whether an error of the script shows the loss of its group."""

from __future__ import annotations

import re
import threading

import torch.distributed as dist

from elastic.errors import GroupLost
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import GROUPS, Group

_DEEPEST_CAUSE = 20  # the most errors in a chain of causes that are looked at


_RAISED_IN_GLOO = re.compile(r"\[[^]]*\bgloo/[^]]*:\d+\] ")
"""How the text of each of gloo's errors begins: with the place in gloo's source that raised it."""


class Losses:
    """Tells apart the loss of this worker's group and the script's own errors.

    recovers: another group can follow a lost one; else no error counts as a loss.
    """

    def __init__(self, membership: Membership, *, recovers: bool) -> None:
        self._membership = membership
        self.recovers = recovers
        self.script_is_over = False
        """Another thread has taken over the state for good. The script's thread blocks for ever if
        it returns with an error: the state is no longer its own."""

    def is_loss(self, error: BaseException) -> bool:
        """Whether the error shows that the group is lost, and another group can follow."""
        if self.script_is_over and threading.current_thread() is threading.main_thread():
            threading.Event().wait()
        return (
            isinstance(error, Exception)
            and self.recovers
            and is_group_loss(error, self._membership.group)
        )

    def behind(self, error: BaseException, outside: BaseException | None) -> Exception | None:
        """The error that shows that the group is lost: `error`, which has left the script, or one
        in its chain of causes, as with `raise MetricError(...) from error`. None: there is none.

        outside: an exception that was already being handled when the script's block or function
        began. The chain is not searched beyond it.
        """
        behind: BaseException | None = error if isinstance(error, Exception) else None
        for _ in range(_DEEPEST_CAUSE):
            if behind is None or behind is outside:
                return None
            if isinstance(behind, Exception) and self.is_loss(behind):
                return behind
            behind = behind.__cause__ or behind.__context__
        return None


def is_group_loss(error: BaseException, group: Group | None) -> bool:
    """Return whether the group is lost and this exception may follow from that.

    Any exception does once the group was aborted: torch then knows no group, or what was received
    is garbage. A frozen group is about to be aborted. Else the group's connections decide, not the
    error's text: a script has connections of its own that may break. If the script itself is at
    fault, it raises again in the next group.
    """
    if isinstance(error, GroupLost):
        return True
    if group is None or not isinstance(error, Exception):
        return False
    if group.lost:
        return True
    if not isinstance(error, RuntimeError):  # torch's errors all are
        return False
    if isinstance(error, dist.DistBackendError) or group.is_cut():
        return True
    # The connections of groups that the script has made below this one are not known.
    return len(GROUPS) > 1 and _RAISED_IN_GLOO.match(str(error)) is not None


def as_loss(error: Exception) -> GroupLost:
    """The error as the protocol takes it."""
    if isinstance(error, GroupLost):
        return error
    lost = GroupLost(str(error))
    lost.__cause__ = error
    return lost
