"""A node's name in a job: taken by one agent at a time, kept under a lease, left with a word."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import aclosing

from elastic.errors import ConfigurationError
from elastic.store.claim import Claim
from elastic.store.deadlines import within
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Store
from elastic.store.job_documents import NodeDocument, Unreadable, node_from_json, to_json
from elastic.store.job_keys import JobKeys
from elastic.store.lease_keeper import LeaseState, boot_time_s
from elastic.store.retries import until_answered

NODE_TTL_S = 10.0
_PATIENCE_S = 1.0
"""Longer than its time a lease may live, since stores look at whole seconds."""


class Registration:
    """`register`, then `keep` until closed; `close` when nothing of this node runs any more.

    `on_change`: HELD after each registration and when a lease in doubt was not lost, SUSPECT when
    it was not renewed in time, GONE when it is lost; `keep` then registers anew.
    `on_waiting`: another agent has the name; who it is, and how many seconds its lease may last.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        node: str,
        document: NodeDocument,
        on_change: Callable[[LeaseState], None],
        on_waiting: Callable[[str, float], None] = lambda _who, _at_most_s: None,
        ttl_s: float = NODE_TTL_S,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        """An agent that was started again takes its key over by its `document.start_token`."""
        self._store = store
        self._job = job
        self._node = node
        self._document = document
        self._on_change = on_change
        self._on_waiting = on_waiting
        self._ttl_s = ttl_s
        self._key = JobKeys(job).node(node)
        self._claim = Claim(store, key=self._key, ttl_s=ttl_s, on_change=on_change, clock=clock)
        self._closed = False

    @property
    def renewed_at_s(self) -> float:
        """When the last renewal that was answered was sent, by `clock`.

        Followers of the nodes see the key go no earlier than `ttl_s` after it.
        """
        return self._claim.renewed_at_s

    def held(self) -> bool:
        """Is this node certainly registered at this moment?"""
        return self._claim.held()

    async def register(self) -> None:
        """Take the name; sits out outages.

        Raises ConfigurationError if another agent keeps it for longer than a lost lease could.
        """
        await self._register(take_over=True)

    async def keep(self) -> None:
        """Stay registered; returns after `close`. Raises ConfigurationError as `register` does."""
        while not self._closed:
            await self._claim.hold()
            if not self._closed:
                # Our key went with its lease: one with our token is of a second agent that was
                # started on the same files.
                await self._register(take_over=False)

    async def close(self) -> None:
        """Say that nothing of this node runs any more, and leave; at most some seconds.

        If the store does not answer, the lease ends by itself.
        """
        self._closed = True
        farewell = dataclasses.replace(self._document, left=True)
        await self._claim.release(last_words=to_json(farewell))

    async def _register(self, *, take_over: bool) -> None:
        while not self._closed:
            over = await self._until_free(take_over)
            if await self._claim.take(to_json(self._document), over=over) is not None:
                self._on_change(LeaseState.HELD)
                if not self._claim.held():
                    self._on_change(LeaseState.SUSPECT)
                return

    async def _until_free(self, take_over: bool) -> Entry | None:
        """The entry to take over, or None when there is none at all."""
        other: Entry | None
        loop = asyncio.get_running_loop()
        async with aclosing(follow_key(self._store, self._key)) as entries:
            other = await anext(entries)
            ends_at = loop.time() + self._ttl_s + _PATIENCE_S
            if other is not None and not (take_over and self._is_ours(other)):
                self._on_waiting(_owner(other), self._ttl_s + _PATIENCE_S)
            while other is not None and not (take_over and self._is_ours(other)):
                try:
                    other = await within(anext(entries), ends_at - loop.time())
                except asyncio.TimeoutError:
                    break
            else:
                return other
        # An outage may have hidden its end.
        other = await until_answered(lambda: self._store.get(self._key), f"get {self._key!r}")
        if other is not None:
            raise self._taken_by(other)
        return None

    def _is_ours(self, entry: Entry) -> bool:
        document = _document(entry)
        return document is not None and document.start_token == self._document.start_token

    def _taken_by(self, entry: Entry) -> ConfigurationError:
        return ConfigurationError(
            f"the node name {self._node!r} of the job {self._job!r} is taken by {_owner(entry)}; "
            "stop that one, or give this one another name with --node-name"
        )


def _document(entry: Entry) -> NodeDocument | None:
    try:
        return node_from_json(entry.value)
    except Unreadable:
        return None


def _owner(entry: Entry) -> str:
    other = _document(entry)
    if other is None:
        return "something that this version cannot read"
    return f"an agent on host {other.host!r}, started {_instant(other.started_unix_s)}"


def _instant(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
