"""The Unix socket at which this node's workers report and are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.rpc.framing import BadFrame, encode, read_message
from elastic.rpc.security import Report, log_report
from elastic.timeouts import timeout
from elastic.v1 import local_pb2 as pb

_HELLO_TIMEOUT_S = 5.0
_MOST_HELLO_BYTES = 4096
_MOST_UNREAD_BYTES = 16 << 20  # by a worker: one that is so far behind does not follow any more


class WorkerServer:
    """One connection per worker, named by its first message.

    expected: is this a worker that was spawned here? Others are turned away.
    report: takes what the journal should know, as `Journal.record` does.
    on_error: takes what `on_message` raises, except for ValueError: that is said of the message.
    known: set once it is known which workers an earlier agent has left: who says its name before
    waits for that, if it is not expected.
    listener: a descriptor that listens at `path` already, from before the agent began anew.
    """

    def __init__(
        self,
        path: Path,
        *,
        expected: Callable[[str], bool],
        on_message: Callable[[str, pb.WorkerMessage], None],
        report: Report = log_report,
        on_error: Callable[[Exception], None] | None = None,
        known: asyncio.Event | None = None,
        listener: int | None = None,
    ) -> None:
        self._path = path
        self._expected = expected
        self._on_message = on_message
        self._report = report
        self._on_error = on_error
        self._known = known
        self._kept = listener
        self._listener: socket.socket | None = None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; only this user can connect."""
        self._listener = self._keep() or self._bind()
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener)

    async def listen_at(self, path: Path) -> None:
        """The socket was removed: make another one. Those who are connected stay so."""
        if self._server is not None:
            self._server.close()
        self._path = path
        self._listener = self._bind()
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener)

    def _keep(self) -> socket.socket | None:
        if self._kept is not None:
            with contextlib.suppress(OSError):
                kept = socket.socket(fileno=self._kept)
                if kept.getsockname() == str(self._path) and self._path.is_socket():
                    return kept
                kept.close()
        return None

    def _bind(self) -> socket.socket:
        self._path.unlink(missing_ok=True)  # of an earlier agent, which is gone
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # of the whole process: not across an await
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        return listener

    def keep_listening(self) -> int | None:
        """A descriptor that listens on when this server is closed: who connects then waits."""
        return os.dup(self._listener.fileno()) if self._listener is not None else None

    def send(self, worker: str, **kind: Any) -> None:
        """Send `WorkerCommand(**kind)`; a worker that is gone does not miss it."""
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(encode(pb.WorkerCommand(**kind)))
            unread = writer.transport.get_write_buffer_size()
            if unread > _MOST_UNREAD_BYTES:
                reason = f"worker {worker}: it does not read; {unread} bytes wait for it"
                self._report("connection_refused", path=str(self._path), reason=reason)
                writer.transport.abort()  # it connects again, and is told everything anew

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
            worker = await self._hello(reader)
            self._writers[worker] = writer
            while (message := await read_message(reader, pb.WorkerMessage)) is not None:
                self._hand_on(worker, message)
        except BadFrame as error:
            who = f"worker {worker}" if worker else "somebody"
            self._report("connection_refused", path=str(self._path), reason=f"{who}: {error}")
        except ConnectionError:
            return
        finally:
            if self._writers.get(worker) is writer:
                del self._writers[worker]
            writer.close()

    async def _hello(self, reader: asyncio.StreamReader) -> str:
        """The name of a worker that is expected; raises BadFrame."""
        try:
            async with timeout(_HELLO_TIMEOUT_S):
                first = await read_message(reader, pb.WorkerMessage, most_bytes=_MOST_HELLO_BYTES)
        except asyncio.TimeoutError:
            raise BadFrame(f"did not say its name within {_HELLO_TIMEOUT_S:g} s") from None
        if first is None:
            raise BadFrame("left without having said its name")
        worker = first.hello.worker
        if not self._expected(worker) and self._known is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(_HELLO_TIMEOUT_S):
                    await self._known.wait()
        if not self._expected(worker):
            raise BadFrame(f"says that it is {worker!r}, which was not started here")
        return worker

    def _hand_on(self, worker: str, message: pb.WorkerMessage) -> None:
        try:
            self._on_message(worker, message)
        except ValueError as error:
            raise BadFrame(f"a message that makes no sense: {error}") from error
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
