"""Finds where the script's code is, in words that its author knows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

from elastic.runtime.stack_file import stacks_of_threads

_WAITS = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/",
    "/elastic/worker/group/distributed_model.py",  # agrees on buckets, too
)


def place_of_main_thread() -> tuple[str, bool]:
    """The file name and line of the script's innermost frame, and whether the thread is inside of
    torch's code for collectives or for backward passes."""
    frames = stacks_of_threads().get(threading.main_thread().ident or 0, ())
    inside = bool(frames) and any(p in frames[0].file for p in _WAITS)
    return _place((frame.file, frame.line) for frame in frames), inside


def place_of_script(frame: FrameType | None) -> str:
    """The file name and line of the innermost frame of the script, from `frame` on outwards.
    frame: one of the calling thread."""
    return _place((f.f_code.co_filename, f.f_lineno) for f in _outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(calls: Iterable[tuple[str, int]]) -> str:
    packages = ("/elastic/worker/", "/elastic/runtime/", "/site-packages/", "/lib/python3")
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for file, line in calls:
        if file == script or not any(p in file for p in packages):
            return f"{file.rpartition('/')[2]}:{line}"
    return "an unknown place"
