"""Notices when torch.compile is at work in this process: a step that compiles may take minutes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

_CALLBACKS = "torch._dynamo.callback"


class Compilations:
    """Counts the compilations of the process, from the moment that torch._dynamo is imported.

    torch imports it with the first use of torch.compile. Looking for it takes a fraction of a
    microsecond, and this module never imports it. With a torch that lacks the callbacks, no
    compilation is noticed.
    """

    def __init__(self) -> None:
        self._registering = threading.Lock()
        self.under_way = False
        self.count = 0
        """Grows whenever a compilation begins or ends."""

    def watch(self) -> None:
        """Register for compilations from now on. Call this again and again: torch._dynamo.reset()
        drops the callbacks."""
        handler = getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
        if handler is None or self._began in handler.start_callbacks:
            return
        with self._registering:
            if self._began not in handler.start_callbacks:
                _skip_untraced()
                handler.register_end_callback(self._ended)
                handler.register_start_callback(self._began)

    def _began(self, *_: object) -> None:  # torch before 2.7 passes no arguments
        self.under_way = True
        self.count += 1

    def _ended(self, *_: object) -> None:
        self.under_way = False
        self.count += 1


COMPILATIONS = Compilations()
"""The compilations of this process: torch._dynamo has only one callback handler, too."""

_untraced: list[CodeType] = []


def untraced(function: FunctionT) -> FunctionT:
    """What torch.compile leaves alone, as with torch.compiler.disable(recursive=False): what
    `function` calls may be compiled again. That decorator imports torch._dynamo, which takes half
    a second in jobs that compile nothing. In effect from the next `Compilations.watch` on.
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "elastic's own bookkeeping"
    vars(function)["_torchdynamo_disable_recursive"] = False
    _untraced.append(function.__code__)
    return function


def _skip_untraced() -> None:
    """A caller's trace ends at the attributes above; here Dynamo learns not to trace the frame."""
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for code in _untraced:
            skip(code)
