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
from elastic.runtime.orphans import end_children
from elastic.v1 import local_pb2 as pb

_KEEPER = "elastic.runtime.keeper"
_ZYGOTE = "elastic.worker.zygote"
_EXIT_GRACE_S = 5.0


class ZygoteProcess:
    """One zygote. Its events go to `on_event`; its unexpected end to `on_lost`.

    This process's only child is its keeper. Whatever else becomes one was orphaned by its end.
    """

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
        self._waiting: list[bytes] = []  # requests from before it was started
        self._closing = False
        self.was_ready = False
        """It has imported torch and served."""

    async def run(self) -> None:
        """Start it and read its events until it ends."""
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as log:
            python = [sys.executable, "-m"]
            directory = str(self._run_directory)
            zygote = [*python, _ZYGOTE, str(theirs.fileno()), directory]
            self._process = subprocess.Popen(
                [*python, _KEEPER, directory, *zygote],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C on the terminal is the agent's to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.writelines(self._waiting)
        while (event := await read_message(reader, pb.ZygoteEvent)) is not None:
            self.was_ready = True
            self._on_event(event)
        if not self._closing:
            await self._reap(self._process)
            await asyncio.to_thread(end_children)
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
        if self._process is None:
            return
        if not self.was_ready:  # it has no worker yet, and does not listen
            self._kill_group(self._process)
        await self._reap(self._process)

    def exit_reason(self) -> TransientError:
        """What its unexpected end means."""
        code = self._process.poll() if self._process is not None else None
        return TransientError(f"the zygote ended unexpectedly ({code}); its log: {self._log}")

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        try:
            await asyncio.to_thread(process.wait, _EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill_group(process)
            await asyncio.to_thread(process.wait)

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        """The keeper and the zygote."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _send(self, **kind: Any) -> None:
        request = encode(pb.ZygoteRequest(**kind))
        if self._writer is None:
            self._waiting.append(request)
        elif not self._writer.is_closing():
            self._writer.write(request)
