"""The worker's end of the Unix socket to its agent."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic.rpc.framing import BadFrame, FrameDecoder, encode
from elastic.v1 import local_pb2 as pb

_RETRY_S = 0.1


class Link:
    """Sends from any thread; once started, a thread of its own hands out what the agent says.

    An agent that ends may be followed by another at the same path; how long to hope for that is
    the zygote's decision, which ends the worker. Until then training goes on.
    """

    def __init__(self, worker: str, path: str) -> None:
        self.worker = worker
        self._path = path
        self._socket = self._connect_at_last()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, **kind: Any) -> None:
        """Send `WorkerMessage(**kind)`; what an agent that is gone misses is asked for again. One
        that lives but cannot be told is hung up on: it would wait for ever for what it missed."""
        frame = encode(pb.WorkerMessage(**kind))
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def notice(self, name: str, fields: Mapping[str, str]) -> None:
        """Something that an operator should know of, as an event."""
        named = {"worker": self.worker, **fields}
        self.send(notice=pb.Notice(name=name, fields=named))

    def start(
        self,
        on_command: Callable[[pb.WorkerCommand], None],
        on_new_agent: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Read commands on a thread of its own; `on_new_agent` is called when another agent has
        been told who this is, `on_error` with what one of these raises: nothing is read any more
        then, and a worker that hears nothing must not go on as if it did."""

        def read() -> None:
            try:
                while True:
                    self._hand_on(on_command)
                    self._reconnect()
                    on_new_agent()
            except Exception as error:  # noqa: BLE001 - whatever it is
                on_error(error)

        threading.Thread(target=read, name="elastic-link", daemon=True).start()

    def hello(self) -> None:
        """Say who this is: the first message on every connection."""
        self.send(hello=pb.Hello(worker=self.worker, pid=os.getpid()))

    def _hand_on(self, on_command: Callable[[pb.WorkerCommand], None]) -> None:
        """Until the agent ends, or says what cannot be read."""
        decoder = FrameDecoder(pb.WorkerCommand)
        while data := received(self._socket):
            try:
                commands = list(decoder.feed(data))
            except BadFrame:
                return
            for command in commands:
                on_command(command)  # type: ignore[arg-type]

    def _reconnect(self) -> None:
        # First: if the script has closed the descriptor, the fresh one may be of that number.
        with self._sending, contextlib.suppress(OSError):
            self._socket.close()
        fresh = self._connect_at_last()
        with self._sending:
            self._socket = fresh
        self.hello()

    def _connect_at_last(self) -> socket.socket:
        """The agent may have ended as this worker was forked, or be starting anew."""
        while True:
            try:
                return self._connect()
            except OSError:
                time.sleep(_RETRY_S)

    def _connect(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(None)  # a script may have set a default, for what it downloads
        try:
            connected.connect(self._path)
        except OSError:
            connected.close()
            raise
        return connected


def received(connection: socket.socket) -> bytes:
    """What has come; nothing at the end."""
    try:
        return connection.recv(65536)
    except OSError:
        return b""
