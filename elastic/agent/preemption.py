"""Looks for the notice that this machine is about to be taken away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
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
        if file is not None and await _is_there(file):
            return f"preemption: {file} exists"
        if command is not None and await _succeeds(command):
            return f"preemption: {' '.join(command)} says so"
        await asyncio.sleep(interval_s)


async def _is_there(file: Path) -> bool:
    """What cannot be looked at says nothing."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no thread is left for it
        return await off_loop(file.exists)
    return False


async def _succeeds(command: Sequence[str]) -> bool:
    """A command that cannot be run, or takes too long, says nothing."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, RuntimeError):
        return False
    try:
        async with timeout(_COMMAND_TIMEOUT_S):
            return await process.wait() == 0
    except asyncio.TimeoutError:
        return False
    finally:
        if process.returncode is None:  # it, and what it waits for
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
