"""What a worker does at a signal that was sent to every process of its node.

pkill(1), `scancel`, a service manager that signals a whole control group: all of them ask the job
to end, and mean well. The agent has the workers save and leave; workers that ended at once would
take what is to be saved with them. A signal that was meant for one worker alone ends it as usual, a
little later.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from elastic.runtime.leave_signals import STRAY_SIGNALS

PATIENCE_S = 2.0
"""For the agent to say that it has heard the same signal."""


class StraySignals:
    """Takes the signals' default actions over, unless the script has handlers of its own."""

    def __init__(self) -> None:
        self._node_leaves = threading.Event()
        self._ends_by: int | None = None

    def take_over(self) -> None:
        """From now on, in this process alone. On the main thread; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            return
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: signal.getsignal(n) for n in STRAY_SIGNALS}
        taken = {n: handler for n, handler in before.items() if handler in defaults}
        for number in taken:
            signal.signal(number, self._nothing if number == signal.SIGHUP else self._wait)

        def in_child() -> None:
            """As the script's own processes would find them: loaders are ended by SIGTERM."""
            for number, handler in taken.items():
                if signal.getsignal(number) in (self._nothing, self._wait):
                    signal.signal(number, handler)

        os.register_at_fork(after_in_child=in_child)

    def node_leaves(self) -> None:
        """The agent ends this worker when it has left; on any thread."""
        self._node_leaves.set()

    def _nothing(self, _number: int, _frame: FrameType | None) -> None:
        """SIGHUP has an agent begin anew, and workers train on."""

    def _wait(self, number: int, _frame: FrameType | None) -> None:
        if self._node_leaves.is_set():
            return
        if self._ends_by == number:  # from below
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        threading.Thread(
            target=self._end_unless_left, args=(number,), name="elastic-signal", daemon=True
        ).start()

    def _end_unless_left(self, number: int) -> None:
        if not self._node_leaves.wait(PATIENCE_S):
            self._ends_by = number
            os.kill(os.getpid(), number)  # only the main thread may restore the default action
