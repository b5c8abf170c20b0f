"""Keeps the agent's stream to the leading coordinator open."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from elastic.errors import ConfigurationError, NodeRefused, TransientError
from elastic.rpc.control_client import ControlClient, CoordinatorLost
from elastic.rpc.security import Report
from elastic.v1 import control_pb2 as pb

_RETRY_S = 0.25
_RETRY_REFUSED_S = 2.0
_RETRY_NOT_YET_S = 0.75
_AWAITED_S = 5.0
_ONCE = ("failure", "reformed", "notice")
"""Kinds that are told once: a coordinator must hear each, and count it once."""
_KEPT_OFFLINE = ("stop", "leave")
"""Kinds that are kept while no stream is open; a new stream sends all others again anyway."""
_MOST_KEPT = 1000
_SOURCE_LENGTH = 12
_REPLACED = ("view", "progress", "pulse")
"""Kinds of which a newer message replaces one that waits."""
_MOST_UNSENT = 10_000

LeaderT = TypeVar("LeaderT", bound="Leader")


class Leader(Protocol):
    """A coordinator that leads; two are equal only if they are the same one in the same term."""

    @property
    def address(self) -> str:
        """host:port, or unix:/path."""
        ...


class LeaderSource(Protocol):
    """Finds the leader for a CoordinatorLink."""

    async def newer(self, than: Any = None) -> Leader:
        """Wait for the first known leader that is not `than`, and return it."""
        ...


class FixedLeader:
    """A LeaderSource for a coordinator that never changes, as in `elastic run`."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def newer(self, than: Any = None) -> Leader:
        """Return this one; wait for ever if `than` is given, since there is no other."""
        if than is not None:
            await asyncio.Event().wait()
        return self


class _NotYet(TransientError):
    """The coordinator may let this agent in later, as it is."""


class CoordinatorLink:
    """Keeps a stream open to the newest leader.

    on_connected: called at each new stream; sends everything again that is not told once.
    on_refused: called when the coordinator, or what is between, will never let this agent in as it
    is. report: takes what the journal should know, as `Journal.record` does.
    """

    def __init__(
        self,
        leaders: LeaderSource,
        connect: Callable[[str], ControlClient],
        hello: pb.AgentHello,
        *,
        on_connected: Callable[[], None],
        on_message: Callable[[pb.CoordinatorMessage], None],
        on_refused: Callable[[ConfigurationError], None],
        report: Report,
    ) -> None:
        self._leaders = leaders
        self._connect = connect
        self._hello = hello
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_refused = on_refused
        self._report = report
        self._outgoing: Outgoing | None = None
        self._kept: deque[pb.AgentMessage] = deque(maxlen=_MOST_KEPT)
        self._once: deque[tuple[float, pb.AgentMessage]] = deque(maxlen=_MOST_KEPT)
        """Messages told once, each with its time, until a coordinator has stored them: one that is
        sent to a dead coordinator is lost, and only this agent knows why a worker ended."""
        self._source, self._said = uuid.uuid4().hex[:_SOURCE_LENGTH], 0
        self._closed = False
        self._let_in = False
        self._told_lost = self._told_not_yet = ""
        self._told_awaited = False
        self.connected = False
        """A coordinator has answered on the open stream."""
        self.answered_at = 0.0
        """When the last pulse was sent that a coordinator has answered, as that pulse says."""

    def send(self, **kind: Any) -> None:
        """Send `AgentMessage(**kind)`; never blocks."""
        message = pb.AgentMessage(**kind)
        if message.WhichOneof("kind") in _ONCE:
            self._said += 1
            message.once.source, message.once.number = self._source, self._said
            self._once.append((time.monotonic(), message))
        if self._outgoing is not None and self._outgoing.takes:
            self._outgoing.put(message)
        elif message.WhichOneof("kind") in _KEPT_OFFLINE:
            self._kept.append(message)

    async def run(self) -> None:
        """Attend the leader, and move to the next one when there is a newer one."""
        leader: Leader | None = None
        while not self._closed:
            leader = await self._first_leader() if leader is None else leader
            attending = asyncio.ensure_future(self._attend_again_and_again(leader.address))
            changing = asyncio.ensure_future(self._leaders.newer(leader))
            try:
                await asyncio.wait({attending, changing}, return_when=asyncio.FIRST_COMPLETED)
                if attending.done():
                    attending.result()
                    return
                leader = changing.result()
            finally:
                for task in (attending, changing):
                    task.cancel()
                await asyncio.gather(attending, changing, return_exceptions=True)

    def close(self) -> None:
        """Attend no coordinator any more; do not wait for unsent messages."""
        self._closed = True

    async def _first_leader(self) -> Leader:
        looking = asyncio.ensure_future(self._leaders.newer())
        try:
            found, _ = await asyncio.wait({looking}, timeout=_AWAITED_S)
            if not found:
                self._told_awaited = True
                self._report("coordinator_awaited")
            return await looking
        finally:
            looking.cancel()

    async def _attend_again_and_again(self, address: str) -> None:
        client = self._connect(address)
        try:
            while not self._closed:
                try:
                    await self._attend(client, address)
                except ConfigurationError as error:
                    if not self._let_in:
                        self._on_refused(error)
                        return
                    # The agent was let in before, and its group trains on under any leader.
                    # Somebody may repair the cause, or another coordinator may lead.
                    self._tell_lost(str(error))
                    await asyncio.sleep(_RETRY_REFUSED_S)
                except _NotYet as error:
                    self._tell_not_yet(str(error))
                    await asyncio.sleep(_RETRY_NOT_YET_S)
                except (CoordinatorLost, TransientError) as error:
                    self._tell_lost(str(error))
                await asyncio.sleep(_RETRY_S)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await client.close()

    def _tell_lost(self, reason: str) -> None:
        """Report each outage once, and again when its reason changes."""
        if not self._closed and reason != self._told_lost:
            self._told_lost = reason
            self._report("coordinator_lost", reason=reason)

    def _tell_not_yet(self, reason: str) -> None:
        if self._let_in:
            self._tell_lost(reason)
        elif reason != self._told_not_yet:
            self._told_not_yet = reason
            self._report("admission_awaited", reason=reason)

    async def _attend(self, client: ControlClient, address: str) -> None:
        outgoing = Outgoing()
        outgoing.put(pb.AgentMessage(hello=self._hello))
        self._outgoing = outgoing
        kept, self._kept = self._kept, deque(maxlen=_MOST_KEPT)
        try:
            self._on_connected()
            for message in (*self._resend_once(), *kept):
                outgoing.put(message)
            async for answer in client.attend(outgoing):
                if answer.HasField("refused") and answer.refused.for_now:
                    raise _NotYet(answer.refused.message)
                if answer.HasField("refused"):
                    raise NodeRefused(answer.refused.message)
                while self._once and self._once[0][1].once.number <= answer.once_stored:
                    self._once.popleft()
                self.connected = self._let_in = True
                if self._told_lost or self._told_awaited or self._told_not_yet:
                    self._told_lost, self._told_awaited, self._told_not_yet = "", False, ""
                    self._report("coordinator_found", address=address)
                if answer.HasField("pulse"):
                    self.answered_at = max(self.answered_at, answer.pulse)
                self._on_message(answer)
        finally:
            self.connected = False
            self._outgoing = None
            earlier, self._kept = self._kept, deque(maxlen=_MOST_KEPT)
            unsent = outgoing.end()  # gRPC waits for messages even after the call is over
            not_said = (m for m in (*unsent, *earlier) if m.WhichOneof("kind") in _KEPT_OFFLINE)
            self._kept += _without_repeats(not_said)

    def _resend_once(self) -> Iterator[pb.AgentMessage]:
        now = time.monotonic()
        for said_at, message in self._once:
            message.once.age_s = now - said_at
            yield message


def _without_repeats(messages: Iterable[pb.AgentMessage]) -> Iterator[pb.AgentMessage]:
    """A message that every new stream sends would otherwise pile up during an outage."""
    said: list[pb.AgentMessage] = []
    for message in messages:
        if message not in said:
            said.append(message)
            yield message


class Outgoing(AsyncIterator[pb.AgentMessage]):
    """The messages of one stream. Not a generator: gRPC may still wait in it when the call is
    dropped.

    A coordinator that does not read costs no memory: of kinds in `_REPLACED` only the newest
    message waits, and when more than `most` messages wait the stream ends. The link opens another
    one when the coordinator reads again.
    """

    def __init__(self, most: int = _MOST_UNSENT) -> None:
        self._most = most
        self._waiting: dict[int, pb.AgentMessage] = {}  # by number, oldest first
        self._newest: dict[str, int] = {}  # numbers of the newest of the kinds in _REPLACED
        self._count = 0
        self._changed = asyncio.Event()
        self.takes = True
        """False once it has ended."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: pb.AgentMessage) -> None:
        kind = message.WhichOneof("kind")
        self._count += 1
        if kind in _REPLACED and not message.progress.probed:
            self._waiting.pop(self._newest.get(kind, 0), None)
            self._newest[kind] = self._count
        self._waiting[self._count] = message
        if len(self._waiting) > self._most:
            self.takes = False
            self._waiting = {
                n: m for n, m in self._waiting.items() if m.WhichOneof("kind") in _KEPT_OFFLINE
            }
        self._changed.set()

    def end(self) -> list[pb.AgentMessage]:
        """Send nothing more; return the unsent messages."""
        unsent, self._waiting = list(self._waiting.values()), {}
        self.takes = False
        self._changed.set()
        return unsent

    async def __anext__(self) -> pb.AgentMessage:
        while not self._waiting and self.takes:
            self._changed.clear()
            await self._changed.wait()
        if not self.takes:
            raise StopAsyncIteration
        return self._waiting.pop(next(iter(self._waiting)))
