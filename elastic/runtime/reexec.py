"""Executes this process's command again in its place, with the same pid, children and descriptors.

So a daemon takes up a new version of its package or a changed configuration, and loses nothing:
execve(2) keeps the process, with every lock and listening socket that is passed on by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

from elastic.errors import TransientError
from elastic.runtime.leave_signals import STRAY_SIGNALS

_KEPT = "_ELASTIC_KEPT_DESCRIPTORS"
_TRIAL = "_ELASTIC_TRIAL_START"
_TRIAL_S = 60.0
_MOST_SHOWN = 500
_TURNS = 5  # an event loop needs some to read a signal and call its handler


def inherited() -> dict[str, int]:
    """Return the descriptors, by name, that this process kept when it executed its command again.

    Call this once: it removes the variable, so that children do not take them for their own.
    """
    text = os.environ.pop(_KEPT, "")
    if not text:
        return {}
    document = json.loads(text)
    if document["pid"] != os.getpid():
        return {}
    kept: dict[str, int] = document["descriptors"]
    for descriptor in kept.values():
        os.set_inheritable(descriptor, False)
    return kept


def is_trial() -> bool:
    """Return whether this process only tests that the command starts, for `try_start`."""
    return _TRIAL in os.environ


def try_start() -> None:
    """Run this process's command up to the point where its work would begin. Blocks.

    Raises TransientError with the reason if the command does not get there in `_TRIAL_S` seconds.
    """
    environment = {**os.environ, _TRIAL: "1"}
    try:
        trial = subprocess.run(
            _command(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise TransientError(f"the new command did not start within {_TRIAL_S:g} s") from None
    except OSError as error:
        raise TransientError(f"{sys.executable}: {error.strerror}") from error
    if trial.returncode != 0:
        errors = trial.stderr.decode(errors="backslashreplace").strip()[-_MOST_SHOWN:]
        raise TransientError(errors or f"the new command ended with exit code {trial.returncode}")


class Reexecution:
    """A decided restart of the command in this process, with these descriptors kept open.

    It keeps SIGHUP and signals to leave for the new program. Create it on the main thread.
    """

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._descriptors = dict(descriptors)
        self._late: list[int] = []
        for number in STRAY_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda late, _frame: self.keep(late))

    def keep(self, number: int) -> None:
        """Keep a signal that came before this was created, and is noticed only now."""
        self._late.append(number)

    async def take_over_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call this last on an event loop that has handled the signals, and calls `keep` now."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for number in STRAY_SIGNALS:
            handler = signal.getsignal(number)
            loop.remove_signal_handler(number)  # restores the default action, as its end would do
            signal.signal(number, handler)

    def execute(self) -> NoReturn:
        """Execute the new program, which gets the descriptors from `inherited`. Signals are blocked
        until it calls `unblock_signals`: they would end it before it has handlers. Raises OSError.
        """
        kept = self._descriptors
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:  # libraries may have opened some without O_CLOEXEC
                with contextlib.suppress(OSError):  # the listing's own descriptor
                    os.set_inheritable(int(name), int(name) in kept.values())
        os.environ[_KEPT] = json.dumps({"pid": os.getpid(), "descriptors": kept})
        command = _command()
        signal.pthread_sigmask(signal.SIG_BLOCK, STRAY_SIGNALS)
        for number in self._late:
            signal.pthread_kill(threading.get_ident(), number)
        os.execv(command[0], command)


def unblock_signals() -> None:
    """Unblock what `Reexecution.execute` has blocked, as soon as the handlers are in place."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STRAY_SIGNALS)


def has_controlling_terminal() -> bool:
    """Return whether a terminal controls this process: closing it sends SIGHUP, as operators do."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]
