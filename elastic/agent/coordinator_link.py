"""The agent's stream to whoever coordinates."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.control import ControlClient, CoordinatorLost
from elastic.v1 import control_pb2 as pb

_RETRY_S = 0.25
_RETRY_REFUSED_S = 2.0
_KEPT = ("failure", "notice", "stop", "leave")
"""What a coordinator must hear even if it was away; all else is sent anew on a new stream."""
_MOST_KEPT = 1000

LeaderT = TypeVar("LeaderT", bound="Leader")


class Leader(Protocol):
    """Who coordinates; two are equal only if they are the same in the same office."""

    @property
    def address(self) -> str:
        """host:port, or unix:/path."""
        ...


class LeaderSource(Protocol):
    """Knows who coordinates."""

    async def newer(self, than: Any = None) -> Leader:
        """The first leader known that is not `than`; waits for it."""
        ...


class FixedLeader:
    """One coordinator, for ever."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def newer(self, than: Any = None) -> Leader:
        """Itself, once."""
        if than is not None:
            await asyncio.Event().wait()
        return self


class CoordinatorLink:
    """Keeps a stream open to the newest leader.

    on_connected: called at each new stream, to send everything again that is no matter of once.
    on_refused: the coordinator, or what is between, will never let this agent in as it is.
    """

    def __init__(
        self,
        leaders: LeaderSource,
        connect: Callable[[str], ControlClient],
        hello: pb.AgentHello,
        *,
        on_connected: Callable[[], None],
        on_message: Callable[[pb.CoordinatorMessage], None],
        on_lost: Callable[[str], None],
        on_refused: Callable[[ConfigurationError], None],
    ) -> None:
        self._leaders = leaders
        self._connect = connect
        self._hello = hello
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._outgoing: asyncio.Queue[pb.AgentMessage | None] | None = None
        self._kept: deque[pb.AgentMessage] = deque(maxlen=_MOST_KEPT)
        self._closed = False
        self._let_in = False
        self._told_lost = ""
        self.connected = False
        """A coordinator has answered on the present stream."""

    def send(self, **kind: Any) -> None:
        """Send `AgentMessage(**kind)`; never blocks."""
        message = pb.AgentMessage(**kind)
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)
        elif message.WhichOneof("kind") in _KEPT:
            self._kept.append(message)

    async def run(self) -> None:
        """Attend the leader, and the next one when there is a newer."""
        leader: Leader | None = None
        while not self._closed:
            leader = await self._leaders.newer() if leader is None else leader
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
        """Attend nobody any more; what was sent has had its time."""
        self._closed = True

    async def _attend_again_and_again(self, address: str) -> None:
        client = self._connect(address)
        try:
            while not self._closed:
                try:
                    await self._attend(client)
                except ConfigurationError as error:
                    if not self._let_in:
                        self._on_refused(error)
                        return
                    # Once it was good enough: the group trains on, whoever leads it now. Somebody
                    # may mend that, or another coordinator lead.
                    self._tell_lost(str(error))
                    await asyncio.sleep(_RETRY_REFUSED_S)
                except (CoordinatorLost, TransientError) as error:
                    self._tell_lost(str(error))
                await asyncio.sleep(_RETRY_S)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await client.close()

    def _tell_lost(self, reason: str) -> None:
        """Once for each outage, and when there is another reason."""
        if not self._closed and reason != self._told_lost:
            self._told_lost = reason
            self._on_lost(reason)

    async def _attend(self, client: ControlClient) -> None:
        outgoing: asyncio.Queue[pb.AgentMessage | None] = asyncio.Queue()
        outgoing.put_nowait(pb.AgentMessage(hello=self._hello))
        self._outgoing = outgoing
        kept, self._kept = self._kept, deque(maxlen=_MOST_KEPT)
        try:
            self._on_connected()
            for message in kept:
                outgoing.put_nowait(message)
            async for answer in client.attend(_Drained(outgoing)):
                if answer.HasField("refused"):
                    raise ConfigurationError(answer.refused.message)
                self.connected = self._let_in = True
                self._told_lost = ""
                self._on_message(answer)
        finally:
            self.connected = False
            self._outgoing = None
            self._keep_unsent(outgoing)
            outgoing.put_nowait(None)  # gRPC waits for more even after the call is over

    def _keep_unsent(self, outgoing: asyncio.Queue[pb.AgentMessage | None]) -> None:
        while not outgoing.empty():
            message = outgoing.get_nowait()
            if message is not None and message.WhichOneof("kind") in _KEPT:
                self._kept.append(message)


class _Drained(AsyncIterator[pb.AgentMessage]):
    """What is put into a queue, until None is. No generator: gRPC may wait in it when let go."""

    def __init__(self, queue: asyncio.Queue[pb.AgentMessage | None]) -> None:
        self._queue = queue

    async def __anext__(self) -> pb.AgentMessage:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        return message
