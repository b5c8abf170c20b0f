"""Makes the calls of `session.run`, which every worker makes at the same place of the script."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.core.whereabouts import Place
from elastic.errors import GroupLost, StateTorn
from elastic.worker.group.losses import Losses
from elastic.worker.group.membership import Membership
from elastic.worker.group.models import Models
from elastic.worker.state.undo import Undo
from elastic.worker.steps_clock import StepsClock


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """A function that every worker calls at the same place of the script."""

    what: str
    where: str
    function: Callable[[], Any]
    state: Callable[[], str] = str
    """The digest of what must be equal on all members there, for `membership.meet`."""


class ScriptCalls:
    """Makes calls. One may change tracked objects for a while, as an evaluation with averaged
    weights does: if the group is lost meanwhile, such changes are undone."""

    def __init__(
        self,
        undo: Undo,
        models: Models,
        clock: StepsClock,
        membership: Membership,
        losses: Losses,
    ) -> None:
        self._undo = undo
        self._models = models
        self._clock = clock
        self._membership = membership
        self._losses = losses
        self.under_way: ScriptCall | None = None
        """The call that the script is inside of, if its changes can be undone."""
        self.last: ScriptCall | None = None
        """The last one since the last commit, if another group may make it again."""

    def perform(self, call: ScriptCall) -> Any:
        """Return what the call returns. Raises StateTorn if the group is lost and the changes of
        the call cannot be undone."""
        if not call.where or not self._losses.recovers or self._losses.script_is_over:
            return self._call_function(call)
        if self.last is call:
            with self._undo.as_of_call():
                return self._call_function(call)
        self._undo.begin_call(call.where)
        self.under_way = call
        try:
            with self._undo.watch_call(call.where):
                result = self._call_function(call)
        except Exception as error:
            if self._losses.is_loss(error) and not self._undo.put_back_call():
                raise StateTorn(
                    f"the group was lost in session.run at {call.where}, which had changed the "
                    "state in a way that cannot be undone"
                ) from error
            raise
        finally:
            self.under_way = None
        self._undo.end_call(call.where)
        self.last = call
        return result

    def committed(self) -> None:
        """A step was committed: no group makes the calls before it again."""
        self.last = None
        self._undo.forget_call()

    def _call_function(self, call: ScriptCall) -> Any:
        self._clock.in_call = True
        self._models.call_together(True)
        began = time.monotonic()
        self._clock.place.now = Place.RUN, began
        outside = sys.exc_info()[1]
        try:
            result = call.function()
        except Exception as error:
            loss = self._losses.behind(error, outside)
            if loss is None or loss is error:
                raise
            raise GroupLost(str(loss)) from error
        finally:
            self._clock.in_call = False
            self._models.call_together(False)
            self._clock.called(began)
        self._membership.require_group().settle()
        return result
