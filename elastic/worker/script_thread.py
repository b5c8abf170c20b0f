"""Stops the script's thread for good, so that another thread of the process can use the state.

No thread can be stopped from outside. But a signal interrupts the main one in Python code, also
while it sleeps or waits for a queue or a lock. The handler, which runs on that thread, decides
whether this is a place to stop at, and then never returns: nothing that the script has begun goes
on, neither its code nor its clean-up.

Inside of other code, such as a library's blocking read, the handler waits until that returns. A
thread that has slept there since the signal counts as stopped: the handler is the first that it
will run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from elastic.worker.group.stuck import main_frame, main_thread_times

_SIGNAL = signal.SIGURG
"""Ignored by default, so that it does no harm where nobody handles it. Scripts have no use for it:
it announces urgent data of sockets, which nobody sends."""

_ASLEEP_S = 1.0
"""Python code would have noticed the signal by then, also where it waits for the interpreter."""

_PACKAGE = "elastic.worker."
_AROUND_SCRIPT = tuple(
    _PACKAGE + name
    for name in ("step", "session", "data_loader", "group.distributed_model", "process.")
)
"""Modules that call code of the script, or wait for its samples, and hold no lock meanwhile."""
_AROUND_CALLS = {
    *((_PACKAGE + "training", name) for name in ("call", "_drive", "_perform_call", "<lambda>")),
    *((_PACKAGE + "script_calls", name) for name in ("perform", "_call_function")),
}


class ScriptThread:
    """The main thread. may_stop: whether it may be stopped where it is; asked on that thread, too,
    so that it cannot go on meanwhile."""

    def __init__(self, may_stop: Callable[[], bool]) -> None:
        self._may_stop = may_stop
        self._stopped = threading.Event()
        self._signalled = False
        """The handler has not run since the signal."""
        self._seen = 0.0, ("R", 0)
        """Since when the thread has been in this state, with so much processor time."""

    def take_over(self) -> None:
        """Install the handler in this process, not its children; only works on the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
            return

        def in_child() -> None:
            if signal.getsignal(_SIGNAL) == self._stop_here:
                signal.signal(_SIGNAL, signal.SIG_DFL)

        signal.signal(_SIGNAL, self._stop_here)
        os.register_at_fork(after_in_child=in_child)

    def stop(self, within_s: float) -> bool:
        """Stop the main thread for good; return whether it has. Another thread calls this, and
        again if the thread was at a place where it must not stop."""
        if self._stopped.is_set():
            return True
        if signal.getsignal(_SIGNAL) != self._stop_here or not self._may_stop():
            return False
        if not self._signalled:
            self._signalled = True
            main = threading.main_thread().ident or 0
            signal.pthread_kill(main, _SIGNAL)
        return self._stopped.wait(within_s) or self._sleeps_in_other_code()

    def _sleeps_in_other_code(self) -> bool:
        now, (since, before) = time.monotonic(), self._seen
        state, ticks = main_thread_times()
        if not self._signalled or state == "R" or (state, ticks) != before:
            self._seen = now, (state, ticks)
            return False
        if now - since < _ASLEEP_S or _may_hold_lock(main_frame()):
            return False
        self._stopped.set()  # first: from now on the handler stops the thread wherever it is
        if not self._signalled:  # it has run meanwhile
            self._stopped.clear()
        return self._signalled

    def _stop_here(self, _number: int, frame: FrameType | None) -> None:
        self._signalled = False
        if not self._stopped.is_set() and (not self._may_stop() or _may_hold_lock(frame)):
            return
        self._stopped.set()
        for_ever = threading.Lock()
        for_ever.acquire()
        while True:  # an exception of a handler of the script, or of a thread, must not free it
            with contextlib.suppress(BaseException):
                for_ever.acquire()


def _may_hold_lock(frame: FrameType | None) -> bool:
    """Whether the thread may hold a lock that saving the state needs, or change what is saved:
    inside of other parts of elastic, while it starts a thread, or imports a module."""
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        around = module.startswith(_AROUND_SCRIPT) or (module, function) in _AROUND_CALLS
        if module.startswith(_PACKAGE) and not around:
            return True
        if module == "importlib._bootstrap" or (module, function) == ("threading", "start"):
            return True
        frame = frame.f_back
    return False
