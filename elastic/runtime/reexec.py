"""Starts this process's command anew in its place: the same pid, children and kept descriptors.

That is how a daemon takes a new version of its package, or a changed configuration, without the
loss of what it holds: execve(2) keeps the process, and with it every lock and listening socket
that is passed on by name.
"""

from __future__ import annotations

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


def inherited() -> dict[str, int]:
    """The descriptors that this process kept when its command was started anew, by name.

    To be asked once: children must not take these for their own.
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
    """This process only shows that the command can be started (`try_start`)."""
    return _TRIAL in os.environ


def try_start() -> None:
    """Start this process's command up to the point at which it would begin its work. Blocks.

    Raises TransientError with the reason if it does not get there.
    """
    environment = {**os.environ, _TRIAL: "1"}
    try:
        tried = subprocess.run(
            _command(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise TransientError(f"it has not begun within {_TRIAL_S:g} s") from None
    except OSError as error:
        raise TransientError(f"{sys.executable}: {error.strerror}") from error
    if tried.returncode != 0:
        said = tried.stderr.decode(errors="backslashreplace").strip()[-_MOST_SHOWN:]
        raise TransientError(said or f"it ends with {tried.returncode}")


class NewStart:
    """It is decided that the command begins anew, with these descriptors kept open.

    SIGHUP and what asks to leave are for the new program from here on. Made on the main thread.
    """

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._descriptors = dict(descriptors)
        self._late: list[int] = []
        for number in STRAY_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda late, _frame: self._late.append(late))

    def execute(self) -> NoReturn:
        """The new program finds the descriptors with `inherited`. Signals wait, blocked, until it
        calls `unblock_signals`: they would end it before it has its handlers. Raises OSError.
        """
        kept = self._descriptors
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:  # libraries may have opened some without O_CLOEXEC
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.set_inheritable(int(name), int(name) in kept.values())
        os.environ[_KEPT] = json.dumps({"pid": os.getpid(), "descriptors": kept})
        command = _command()
        signal.pthread_sigmask(signal.SIG_BLOCK, STRAY_SIGNALS)
        for number in self._late:
            signal.pthread_kill(threading.get_ident(), number)
        os.execv(command[0], command)


def unblock_signals() -> None:
    """The handlers are in place."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STRAY_SIGNALS)


def has_terminal() -> bool:
    """A terminal controls this process. One that is closed sends SIGHUP as an operator does."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]
