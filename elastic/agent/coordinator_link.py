"""The agent's stream to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from elastic.errors import TransientError
from elastic.rpc.control import ControlClient, CoordinatorLost
from elastic.v1 import control_pb2 as pb

_RETRY_S = 0.5


class CoordinatorLink:
    """Keeps the stream open; what is sent while it is down waits.

    on_connected: called at each new stream, to send the whole view again.
    """

    def __init__(
        self,
        client: ControlClient,
        hello: pb.AgentHello,
        *,
        on_connected: Callable[[], None],
        on_message: Callable[[pb.CoordinatorMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._client = client
        self._hello = hello
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_lost = on_lost
        self._outgoing: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        self._closed = asyncio.Event()

    def send(self, **kind: Any) -> None:
        """Send `AgentMessage(**kind)`; never blocks."""
        self._outgoing.put_nowait(pb.AgentMessage(**kind))

    async def run(self) -> None:
        """Attend until closed."""
        while not self._closed.is_set():
            try:
                self._on_connected()
                async for message in self._client.attend(self._messages()):
                    self._on_message(message)
            except (CoordinatorLost, TransientError) as error:
                if self._closed.is_set():
                    return
                self._on_lost(str(error))
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """No more streams; what was sent is given a moment to leave."""
        self._closed.set()
        await self._client.close()

    async def _messages(self) -> AsyncIterator[pb.AgentMessage]:
        yield pb.AgentMessage(hello=self._hello)
        while True:
            yield await self._outgoing.get()
