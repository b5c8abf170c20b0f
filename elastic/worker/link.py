"""The worker's end of the Unix socket to its agent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from elastic.rpc.framing import FrameDecoder, encode
from elastic.v1 import local_pb2 as pb


class Link:
    """Sends from any thread; once started, a thread of its own hands out what the agent says."""

    def __init__(self, worker: str, path: str) -> None:
        self.worker = worker
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, **kind: Any) -> None:
        """Send `WorkerMessage(**kind)`; an agent that is gone is not this thread's problem."""
        frame = encode(pb.WorkerMessage(**kind))
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:
                return

    def start(self, on_command: Callable[[pb.WorkerCommand], None]) -> None:
        """Read commands until the agent closes, on a thread of its own.

        What follows from an agent's end is the zygote's decision, not the worker's.
        """

        def read() -> None:
            decoder = FrameDecoder(pb.WorkerCommand)
            while data := self._receive():
                for command in decoder.feed(data):
                    on_command(command)  # type: ignore[arg-type]

        threading.Thread(target=read, name="elastic-link", daemon=True).start()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(65536)
        except OSError:
            return b""
