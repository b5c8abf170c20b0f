"""Starts the zygote, asks it to fork and kill, and hears of what it reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.errors import TransientError
from elastic.rpc.framing import encode, read_message
from elastic.v1 import local_pb2 as pb

_MODULE = "elastic.worker.zygote"
_EXIT_GRACE_S = 5.0


class ZygoteProcess:
    """One zygote. Its events go to `on_event`; its unexpected end to `on_lost`."""

    def __init__(
        self,
        *,
        run_directory: Path,
        log: Path,
        environment: Mapping[str, str],
        on_event: Callable[[pb.ZygoteEvent], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._run_directory = run_directory
        self._log = log
        self._environment = dict(environment)
        self._on_event = on_event
        self._on_lost = on_lost
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closing = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        """Start it and read its events until it ends."""
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(self._run_directory)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C on the terminal is the agent's to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        while (event := await read_message(reader, pb.ZygoteEvent)) is not None:
            self._on_event(event)
        if not self._closing:
            self._on_lost()

    def spawn(self, request: pb.SpawnRequest) -> None:
        """Fork a worker."""
        self._send(spawn=request)

    def kill(self, worker: str, number: signal.Signals) -> None:
        """Send a signal to a worker and everything in its process group."""
        self._send(kill=pb.KillRequest(worker=worker, signal=number))

    async def close(self) -> None:
        """Let go of it: it ends its workers, then itself."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        process = self._process
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, _EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)

    def exit_reason(self) -> TransientError:
        """What its unexpected end means."""
        code = self._process.poll() if self._process is not None else None
        return TransientError(f"the zygote ended unexpectedly ({code}); its log: {self._log}")

    def _send(self, **kind: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(pb.ZygoteRequest(**kind)))
