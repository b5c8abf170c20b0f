"""Looks for the notice that this machine is about to be taken away."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elastic.runtime.off_loop import off_loop
from elastic.timeouts import timeout

_COMMAND_TIMEOUT_S = 30.0


async def until_preempted(
    *, file: Path | None, command: Sequence[str] | None, interval_s: float
) -> str:
    """Return the reason once `file` exists or `command` ends with exit code 0; else never."""
    while True:
        if file is not None and await off_loop(file.exists):
            return f"preemption: {file} exists"
        if command is not None and await _succeeds(command):
            return f"preemption: {' '.join(command)} says so"
        await asyncio.sleep(interval_s)


async def _succeeds(command: Sequence[str]) -> bool:
    """A command that can not be run, or takes too long, says nothing."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return False
    try:
        async with timeout(_COMMAND_TIMEOUT_S):
            return await process.wait() == 0
    except asyncio.TimeoutError:
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
