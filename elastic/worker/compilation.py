"""Whether torch.compile is at work in this process: a step that compiles may take minutes."""

from __future__ import annotations

import sys
import threading

_CALLBACKS = "torch._dynamo.callback"


class Compilations:
    """Counts the compilations of the process, from the moment that torch._dynamo is imported.

    torch imports it with the first use of torch.compile. To look for it costs a fraction of a
    microsecond, and it is never imported from here. A torch without these callbacks is as one
    that does not compile.
    """

    def __init__(self) -> None:
        self._registering = threading.Lock()
        self.under_way = False
        """A compilation has begun and not ended."""
        self.count = 0
        """Grows with every one that begins or ends."""

    def watch(self) -> None:
        """Make sure that what compiles from now on is counted: torch._dynamo.reset() forgets it."""
        handler = getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
        if handler is None or self._began in handler.start_callbacks:
            return
        with self._registering:
            if self._began not in handler.start_callbacks:
                handler.register_end_callback(self._ended)
                handler.register_start_callback(self._began)

    def _began(self, *_: object) -> None:  # before torch 2.7 with nothing
        self.under_way = True
        self.count += 1

    def _ended(self, *_: object) -> None:
        self.under_way = False
        self.count += 1


COMPILATIONS = Compilations()
"""Those of this process, which torch._dynamo keeps as one, too."""
