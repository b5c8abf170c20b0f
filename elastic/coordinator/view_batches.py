"""Hands views of many nodes to the machine together: each costs a decision about all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic.core.coordinator import events as ev
from elastic.core.membership import NodeId

_AT_ONCE = 8  # nodes of which none need wait for another
_WAIT_S_PER_NODE = 1e-5


class ViewBatches:
    """`post` takes events in order; a newer view of a node replaces one that still waits.

    The more nodes there are the longer a view waits, 10 ms for a thousand, and never behind the
    next event that is not a view.
    """

    def __init__(self, post: Callable[[ev.Event], None], nodes: Callable[[], int]) -> None:
        self._post = post
        self._nodes = nodes
        self._waiting: dict[NodeId, ev.NodeReported] = {}
        self._timer: asyncio.TimerHandle | None = None

    def post(self, event: ev.Event) -> None:
        """Hand it on, now or soon."""
        if not isinstance(event, ev.NodeReported):
            self.flush()
            self._post(event)
            return
        self._waiting.pop(event.node, None)  # the order is that of the newest
        self._waiting[event.node] = event
        if self._nodes() <= _AT_ONCE:
            self.flush()
        elif self._timer is None:
            delay_s = self._nodes() * _WAIT_S_PER_NODE
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.flush)

    def flush(self) -> None:
        """Hand on what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            reports, self._waiting = tuple(self._waiting.values()), {}
            self._post(ev.NodesReported(reports=reports))

    def close(self) -> None:
        """Hand on nothing more."""
        self._waiting.clear()
        self.flush()
