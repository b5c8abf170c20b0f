"""The process that tries torch: elastic itself imports it nowhere but in workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from elastic.timeouts import timeout

_COMMAND = (sys.executable, "-m", "elastic.worker.trial")
_MOST_LINE = 2**16


class TrialFailed(Exception):
    """It said nothing; the text says why."""


class TrialProcess:
    """Start it early: it imports torch meanwhile. Close it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """`environment`: added to this process's own."""
        self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MOST_LINE,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    async def say(self, meeting: Mapping[str, Any] | None) -> None:
        """The peers to all-reduce with; None: there are none."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(meeting).encode() + b"\n" if meeting else b"\n")
            await self._process.stdin.drain()

    async def hear(self, timeout_s: float) -> dict[str, Any]:
        """Its next line. Raises TrialFailed."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with timeout(timeout_s):
                line = await self._process.stdout.readline()
                if not line:
                    raise TrialFailed(await self._last_words())
        except asyncio.TimeoutError:
            raise TrialFailed(f"no answer within {timeout_s:g} s") from None
        try:
            said = json.loads(line)
        except ValueError:
            raise TrialFailed(f"it wrote {line[:200]!r}") from None
        if not isinstance(said, dict):
            raise TrialFailed(f"it wrote {line[:200]!r}")
        if said.get("error"):
            raise TrialFailed(str(said["error"]))
        return said

    async def close(self) -> None:
        """End it, if it still runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(5.0):  # one in the kernel's hands does not end
                await self._process.wait()
        # Else the transport is closed when the loop is gone.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _last_words(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        said = (await self._process.stderr.read(2**16)).decode(errors="replace").strip()
        code = await self._process.wait()
        return (said.splitlines() or [f"it ended with {code}"])[-1][:500]
