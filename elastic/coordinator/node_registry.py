"""Which nodes have an agent, and which have certainly no worker of theirs left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Protocol

from elastic.coordinator.attendance import name_of, node_id
from elastic.core.membership import NodeId
from elastic.store.follow import follow
from elastic.store.interface import Entry, Listing, Store
from elastic.store.job_documents import NodeDocument, Unreadable, node_from_json
from elastic.store.job_keys import JobKeys, node_of

_LOG = logging.getLogger(__name__)
GONE_MARGIN_S = 3.0
"""In which an agent that is cut off has found that out (it looks twice a second) and ended its
workers (0.3 s for their stacks), on a busy machine too."""

_Instance = tuple[str, str | None]
"""A node and the start token of its agent; None: whichever agent it had before this leader."""


class NodeHandler(Protocol):
    """What the coordinator does with what it hears; called on its event loop."""

    def node_registered(self, node: str, document: NodeDocument) -> None:
        """An agent has taken the name; again when its document changes."""
        ...

    def node_vanished(self, node: str, at: float) -> None:
        """Its registration is lost (`at`: monotonic seconds); its workers may train on for now."""
        ...

    def node_gone(self, node: str, start_token: str | None) -> None:
        """Nothing runs any more that was started by the agent of this token.

        None: by any agent that this node had before this leader was elected, except one that is
        registered or connected now.
        """
        ...


class NodeRegistry:
    """Start `run` once; say who is connected.

    An agent ends its workers when, for `isolation_timeout_s`, neither its lease was renewed nor a
    coordinator was in contact with it. So they are gone that long, and a
    margin, after its key has gone and its connection has, unless it registers again.
    """

    def __init__(
        self,
        store: Store,
        handler: NodeHandler,
        *,
        job: str,
        isolation_timeout_s: float,
        expected: Iterable[NodeId] = (),
        as_of: int = 0,
        margin_s: float = GONE_MARGIN_S,
    ) -> None:
        """`expected`: the nodes of the newest generation, which was written at revision `as_of`,
        and of earlier ones that may train.

        Those whose registration is younger, missing or another agent's count as vanished when `run`
        first looks.
        """
        self._store = store
        self._handler = handler
        self._folder = JobKeys(job).nodes
        self._gone_after_s = isolation_timeout_s + margin_s
        self._expected = frozenset(expected)
        self._as_of = as_of
        self._registered: dict[str, NodeDocument] = {}
        self._vanished: dict[_Instance, asyncio.TimerHandle | None] = {}
        self._connected: set[_Instance] = set()

    async def run(self) -> None:
        """Follow until cancelled. Raises ConfigurationError if the store does."""
        try:
            async with aclosing(follow(self._store, self._folder)) as news:
                async for item in news:
                    if isinstance(item, Listing):
                        self._listed({node_of(e.key): e for e in item.entries})
                    else:
                        self._now(node_of(item.key), item.entry)
        finally:
            for timer in self._vanished.values():
                if timer is not None:
                    timer.cancel()

    def holder(self, node: str) -> str | None:
        """The start token of the agent that the registration of this name is of, if there is one:
        it is the node."""
        document = self._registered.get(node)
        return document.start_token if document is not None and not document.left else None

    def connected(self, node: str, start_token: str) -> None:
        """The agent has opened its stream to us: it is not cut off."""
        self._connected.add((node, start_token))

    def disconnected(self, node: str, start_token: str) -> None:
        """Its stream has ended."""
        instance = (node, start_token)
        self._connected.discard(instance)
        if instance in self._vanished:
            self._count_down(instance)

    def _listed(self, entries: Mapping[str, Entry]) -> None:
        expected, self._expected = self._expected, frozenset()
        for node in sorted({name_of(node) for node in expected}):
            entry = entries.get(node)
            if entry is None or entry.created > self._as_of or not _is_of(expected, node, entry):
                self._vanish(node, None)
        for node in sorted({*self._registered, *entries}):
            self._now(node, entries.get(node))

    def _now(self, node: str, entry: Entry | None) -> None:
        """The whole truth about a node."""
        before = self._registered.pop(node, None)
        document = _document(entry)
        if before is not None and not before.left and not _same_agent(before, document):
            self._vanish(node, before.start_token)
        if document is None:
            return
        self._registered[node] = document
        if document == before:
            return
        self._cancel((node, document.start_token))
        if document.left:
            self._handler.node_gone(node, document.start_token)
        else:
            self._handler.node_registered(node, document)

    def _vanish(self, node: str, start_token: str | None) -> None:
        self._handler.node_vanished(node, time.monotonic())
        self._count_down((node, start_token))

    def _count_down(self, instance: _Instance) -> None:
        self._cancel(instance)
        loop = asyncio.get_running_loop()
        self._vanished[instance] = loop.call_later(self._gone_after_s, self._over, instance)

    def _cancel(self, instance: _Instance) -> None:
        timer = self._vanished.pop(instance, None)
        if timer is not None:
            timer.cancel()

    def _over(self, instance: _Instance) -> None:
        if instance in self._connected:
            self._vanished[instance] = None  # its time begins when the stream ends
            return
        del self._vanished[instance]
        self._handler.node_gone(*instance)


def _is_of(nodes: Collection[NodeId], name: str, entry: Entry) -> bool:
    """The registration is one of these nodes', as far as it can be read."""
    document = _document(entry)
    return document is None or node_id(name, document.start_token) in nodes


def _same_agent(before: NodeDocument, now: NodeDocument | None) -> bool:
    return now is not None and now.start_token == before.start_token


def _document(entry: Entry | None) -> NodeDocument | None:
    if entry is None:
        return None
    try:
        return node_from_json(entry.value)
    except Unreadable as error:
        _LOG.warning("the registration %s cannot be read: %s", entry.key, error)
        return None
