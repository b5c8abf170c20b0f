"""Gives up a process whose script's thread does not come out of an aborted group.

gloo never wakes a thread that waits for an operation if the connection broke when the operation was
partly done, or when gloo's event loop was about to begin it (`signalException` in its tcp/pair.cc
knows neither). There is no other way to wake it. So transfers of state do not wait for such
operations, an aborted group is destroyed on its own thread, and this module handles all-reduces.
Nor does an abort reach a group that the script has made with `new_group`: nobody knows its sockets.
Before the process ends, another of its threads gives its state to the next group
(`Training._hand_over_state`), since perhaps no other member holds it. A spare replaces the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import elastic.worker
from elastic.worker.compilation import COMPILATIONS
from elastic.worker.group.process_group import GROUPS

STUCK_S = 3.0
_LOOK_S = 0.1
_SURE_S = 0.5
_SURE_LOOPS = 20  # gloo's event loop runs every 10 ms
_CALLERS = tuple(str(Path(m.__file__).parent) for m in (torch, elastic.worker) if m.__file__)
_WAITERS = (f"{_CALLERS[0]}/autograd/", f"{_CALLERS[0]}/distributed/", *_CALLERS[1:])
"""Files in which the main thread waits for a collective, and rarely for anything else."""


def watch_script(
    left: Callable[[], bool],
    give_up: Callable[[float], None],
    stuck_s: float,
    leaves_block: Callable[[], bool] = lambda: False,
    is_cut: Callable[[], bool] = lambda: True,
) -> None:
    """Call `give_up` once the script's thread (the main one) has stood still for `stuck_s` seconds
    in a call of torch, asleep. Return when `left` says that it has left the group.

    give_up: called with the seconds for which the thread has stood still.

    Gives up earlier if the thread is certainly stuck: it waits for a collective, and gloo's event
    loop has run many times since the connections were cut and has not woken any thread that waits.

    A script may take any time for other things, such as an evaluation, or torch.compile, which
    waits inside of torch for compilers and for the locks of its caches.

    leaves_block: asked after `_SURE_S` and again, wherever the thread is. True: another thread
    leaves the job in its place, so there is nothing left to watch.

    is_cut: whether the connections are cut. On a busy machine it may take a second to find them.
    """
    began = time.monotonic()
    stood_since, before = began, _where()
    sure_since, looped, asleep = stood_since, *_gloo()
    while not left():
        time.sleep(min(_LOOK_S, stuck_s / 4))
        if time.monotonic() - began >= _SURE_S and leaves_block():
            return
        now, where = time.monotonic(), _where()
        loops, sleepers = _gloo()
        if where is None or where != before:
            stood_since, before = now, where
            sure_since, looped, asleep = now, loops, sleepers
        elif sleepers != asleep or not _waits_for_collective() or not is_cut():
            sure_since, looped, asleep = now, loops, sleepers
        sure = now - sure_since >= _SURE_S and loops - looped >= _SURE_LOOPS
        if sure or now - stood_since >= stuck_s:
            give_up(now - stood_since)
            return


def words(stood_s: float) -> str:
    """Say why a process ends whose script's thread has stood still for `stood_s` seconds."""
    message = f"hung for {stood_s:.1f} s in a lost group"
    if len(GROUPS) > 1:
        message += "; the script has groups of its own (new_group), whose collectives nothing frees"
    return message


def _where() -> tuple[int, int, int] | None:
    """Return what changes as the main thread gets on; None if it does not wait in torch: while it
    compiles, while it has a processor, or waits for one on a busy machine."""
    if COMPILATIONS.under_way:
        return None
    frame, (state, ticks) = main_frame(), main_thread_times()
    if frame is None or not frame.f_code.co_filename.startswith(_CALLERS) or state == "R":
        return None
    return id(frame), frame.f_lasti, ticks


def _waits_for_collective() -> bool:
    frame = main_frame()
    return frame is not None and frame.f_code.co_filename.startswith(_WAITERS)


def main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def main_thread_times() -> tuple[str, int]:
    """Return the main thread's state, R if it could run, and processor time in ticks of 10 ms."""
    thread = os.getpid()  # Thread.native_id is that of the parent after a fork
    stat = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return stat[0], int(stat[11]) + int(stat[12])


def _gloo() -> tuple[int, frozenset[tuple[str, str]]]:
    """Return how often gloo's event loops have run, and when the threads that wait for them did
    (the main thread and gloo's own), as their times on and before a processor."""
    loops, sleepers = 0, set()
    main = str(os.getpid())
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            times = Path(f"/proc/self/task/{task}/schedstat").read_text()
        except OSError:
            continue  # the thread has ended, or the kernel keeps no such figures
        if name == "gloo_tcp_loop":
            loops += int(times.split()[2])
        elif task == main or name == "pt_gloo_runloop":
            sleepers.add((task, times))
    return loops, frozenset(sleepers)
