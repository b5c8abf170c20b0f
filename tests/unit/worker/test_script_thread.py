"""The script's thread is stopped for good, wherever it waits, and only where it may be."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import FrameType
from typing import Any

import pytest

from elastic.worker.script_thread import _may_hold_lock

_PROGRAM = """
import ctypes, os, threading, time
from elastic.worker.script_thread import ScriptThread

turns, may = [], [False]

def sleeps():
    while True:
        turns.append(time.sleep(0.01))

def raises():
    while True:
        try:
            turns.append(time.sleep(0.01))
        finally:
            turns.append("clean-up")

def computes():
    while True:
        turns.append(sum(range(100)))

def stuck():  # a lock that its owner takes again: no signal interrupts that
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def wakes():  # from that, after it counts as stopped
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    threading.Timer(2.5, lambda: libc.pthread_mutex_unlock(mutex)).start()
    libc.pthread_mutex_lock(mutex)
    turns.append("went on")

thread = ScriptThread(lambda: may[0])
thread.take_over()

def watch():
    began = time.monotonic()
    time.sleep(0.2)
    assert not thread.stop(0.1), "stopped where it must not be"
    may[0] = True
    while not thread.stop(0.2):
        assert time.monotonic() - began < 30.0
    stopped, may[0] = len(turns), False
    time.sleep(1.5)
    assert len(turns) == stopped, turns[stopped:]
    os._exit(7)

threading.Thread(target=watch).start()
WHAT()
"""


@pytest.mark.parametrize("what", ["sleeps", "raises", "computes", "stuck", "wakes"])
def test_the_main_thread_stops_for_good(what: str) -> None:
    program = textwrap.dedent(_PROGRAM).replace("WHAT", what)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0
    )
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize(
    ("module", "function", "may"),
    [
        ("__main__", "train", False),
        ("elastic.worker.step", "batches", False),
        ("elastic.worker.data_loader", "fetch", False),
        ("elastic.worker.script_calls", "_call_function", False),
        ("elastic.worker.training", "commit", True),
        ("elastic.worker.state.undo", "begin", True),
        ("elastic.worker.reporter", "report", True),
        ("threading", "start", True),
        ("threading", "wait", False),
        ("importlib._bootstrap", "_find_and_load", True),
    ],
)
def test_it_does_not_stop_where_it_may_hold_a_lock(module: str, function: str, may: bool) -> None:
    names: dict[str, Any] = {"__name__": module, "sys": sys, "call": inside}
    exec(f"def {function}(): return call(sys._getframe())", names)
    assert names[function]() is may


def inside(frame: FrameType) -> bool:
    """As seen from further inside: a function of the script, which that one calls."""
    own = sys._getframe()
    assert own.f_back is frame
    return _may_hold_lock(own)
