"""The worker's end of the Unix socket to its agent: messages out, commands in, reconnection."""

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
    """Sends from any thread. Once started, its own thread passes on the agent's commands.

    When an agent ends, another one may follow at the same path. The zygote decides how long to wait
    for that, and then ends the worker. Until then training goes on.
    """

    def __init__(self, worker: str, path: str) -> None:
        self.worker = worker
        self._path = path
        self._socket = self._connect_at_last()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **kind: Any) -> None:
        """Send `WorkerMessage(**kind)`. If the agent is gone, the next one asks for everything
        again. If sending fails, the connection is shut down: an agent that lives would otherwise
        wait for ever for the lost message."""
        frame = encode(pb.WorkerMessage(**kind))
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def notice(self, name: str, fields: Mapping[str, str]) -> None:
        """Send an event for the operator."""
        named = {"worker": self.worker, **fields}
        self.send(notice=pb.Notice(name=name, fields=named))

    def start(
        self,
        on_command: Callable[[pb.WorkerCommand], None],
        on_new_agent: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Read commands on a thread of its own.

        on_command: called with each command. on_new_agent: called after the `hello` to another
        agent. on_error: called with an exception of these two. Then the thread ends and no command
        is read any more, so the worker must not go on as if it were in contact.
        """

        def read() -> None:
            try:
                while True:
                    self._hand_on(on_command)
                    self._reconnect()
                    on_new_agent()
            except Exception as error:  # noqa: BLE001 - any error ends the thread
                on_error(error)

        threading.Thread(target=read, name="elastic-link", daemon=True).start()

    def hello(self) -> None:
        """Say which worker this is: the first message on every connection."""
        self.send(hello=pb.Hello(worker=self.worker, pid=os.getpid()))

    def _hand_on(self, on_command: Callable[[pb.WorkerCommand], None]) -> None:
        """Pass commands on until the agent ends or sends a malformed frame."""
        decoder = FrameDecoder(pb.WorkerCommand)
        while data := received(self._socket):
            try:
                commands = list(decoder.feed(data))
            except BadFrame:
                return
            for command in commands:
                on_command(command)  # type: ignore[arg-type]

    def _reconnect(self) -> None:
        # Close first: if the script has closed the descriptor, the fresh one may get its number.
        with self._sending, contextlib.suppress(OSError):
            self._socket.close()
        fresh = self._connect_at_last()
        with self._sending:
            self._socket = fresh
        self.hello()

    def _connect_at_last(self) -> socket.socket:
        """Connect, after any number of attempts: the agent may have ended while this worker was
        forked, or be restarting."""
        while True:
            try:
                return self._connect()
            except OSError:
                time.sleep(_RETRY_S)

    def _connect(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(None)  # a script may have set a default timeout for its downloads
        try:
            connected.connect(self._path)
        except OSError:
            connected.close()
            raise
        return connected


def received(connection: socket.socket) -> bytes:
    """The next bytes that have arrived. Empty if the connection has ended."""
    try:
        return connection.recv(65536)
    except OSError:
        return b""
