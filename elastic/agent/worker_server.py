"""The Unix socket at which this node's workers report and are told."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.rpc.framing import BadFrame, encode, read_message
from elastic.v1 import local_pb2 as pb

_HELLO_TIMEOUT_S = 5.0


class WorkerServer:
    """One connection per worker, named by its first message.

    expected: is this a worker that was spawned here? Others are turned away.
    """

    def __init__(
        self,
        path: Path,
        *,
        expected: Callable[[str], bool],
        on_message: Callable[[str, pb.WorkerMessage], None],
    ) -> None:
        self._path = path
        self._expected = expected
        self._on_message = on_message
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; only this user can connect."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # of the whole process: not across an await
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    def send(self, worker: str, **kind: Any) -> None:
        """Send `WorkerCommand(**kind)`; a worker that is gone does not miss it."""
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(encode(pb.WorkerCommand(**kind)))

    def broadcast(self, **kind: Any) -> None:
        """Send to every worker."""
        for worker in list(self._writers):
            self.send(worker, **kind)

    async def close(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = ""
        try:
            first = await asyncio.wait_for(read_message(reader, pb.WorkerMessage), _HELLO_TIMEOUT_S)
            if first is None or not self._expected(first.hello.worker):
                return
            worker = first.hello.worker
            self._writers[worker] = writer
            while (message := await read_message(reader, pb.WorkerMessage)) is not None:
                self._on_message(worker, message)
        except (BadFrame, asyncio.TimeoutError, ConnectionError):
            return
        finally:
            if self._writers.get(worker) is writer:
                del self._writers[worker]
            writer.close()
