"""Gives up a process whose script's thread does not come out of a group that was aborted.

gloo never wakes whoever waits for an operation of which a part was done when its connection went
(`signalException` in its tcp/pair.cc), and offers no other way to. So transfers of state do not
wait for such ones, a group that was aborted is destroyed on a thread of its own, and for an
all-reduce there is this. Before the process ends, another of its threads gives its state to the
next group (`Training._bequeath`), since nobody else may hold it; a spare takes its place.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import elastic.worker
from elastic.worker.compilation import COMPILATIONS

STUCK_S = 3.0
_LOOK_S = 0.25
_CALLERS = tuple(str(Path(m.__file__).parent) for m in (torch, elastic.worker) if m.__file__)


def watch_script(left: Callable[[], bool], give_up: Callable[[], None], stuck_s: float) -> None:
    """Call `give_up` once the script's thread (the main one) has stood still for `stuck_s` in a
    call of torch, using no processor; return when `left` says that it has left the group.

    A script may take as long as it likes over anything else, such as an evaluation; or over
    torch.compile, which waits inside of torch for compilers and for the locks of its caches.
    """
    stood_since, before = time.monotonic(), _where()
    while not left():
        time.sleep(min(_LOOK_S, stuck_s / 4))
        now, where = time.monotonic(), _where()
        if where is None or where != before:
            stood_since, before = now, where
        elif now - stood_since >= stuck_s:
            give_up()
            return


def _where() -> tuple[int, int, int] | None:
    """What changes as the main thread gets on; None while it is outside of torch, or compiles."""
    if COMPILATIONS.under_way:
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith(_CALLERS):
        return None
    return id(frame), frame.f_lasti, _ticks()


def _ticks() -> int:
    """Of processor time of the main thread; a clock tick is 10 ms."""
    thread = os.getpid()  # Thread.native_id is that of the parent after a fork
    stat = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(stat[11]) + int(stat[12])
