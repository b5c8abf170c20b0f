"""The script's thread is stopped for good, wherever it waits, and only where it may be."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

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
