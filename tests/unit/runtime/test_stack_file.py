"""Processes write their stacks at a signal, each to a file of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from elastic.core.whereabouts import Frame
from elastic.runtime.stack_file import (
    ALL_STACKS_SIGNAL,
    descendants,
    parse_stacks,
    stacks_of_threads,
    state_of,
    written_stacks,
)

PATIENCE_S = 20.0
FAMILY = """
    import os, subprocess, sys, threading, time, ctypes
    from elastic.runtime.stack_file import write_stacks_on_signal
    from elastic.runtime.leave_signals import StraySignals

    def load():
        os.write(write, b".")
        time.sleep(600)

    def keep():
        print("there", flush=True)
        while True:
            pause()

    def stays():
        keep()

    pause = ctypes.PyDLL(None).pause  # keeps the interpreter

    write_stacks_on_signal()
    StraySignals().take_over()  # which leaves these two alone
    read, write = os.pipe()
    if os.fork() == 0:
        load()
    os.read(read, 1)
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    stays()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process whose C code keeps the interpreter, its fork, and a program that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FAMILY)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    output: IO[str] = process.stdout  # type: ignore[assignment]
    assert output.readline() == "there\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    output.close()


def functions(text: str) -> list[str]:
    return [frame.function for frame in parse_stacks(text)[0][1]]


def test_each_process_writes_its_own_stacks_and_goes_on(family: subprocess.Popen[str]) -> None:
    fork, program = sorted(descendants(family.pid, 8))
    pids = [family.pid, fork, program]
    for _ in range(2):
        written = written_stacks([family.pid, fork], PATIENCE_S)
        assert functions(written[family.pid]) == ["keep", "stays", "<module>"]
        assert functions(written[fork])[0] == "load"
    assert written_stacks([program], 0.1) == {}, "it knows nothing of the signal, and lives"
    assert {state_of(pid) for pid in pids} <= {"R", "S", "D"}
    everything = written_stacks([family.pid], PATIENCE_S, ALL_STACKS_SIGNAL)[family.pid]
    assert len(parse_stacks(everything)) == 2
    assert functions(everything) == ["keep", "stays", "<module>"], "the main thread is the first"


def test_a_stopped_process_is_not_signalled(family: subprocess.Popen[str]) -> None:
    os.kill(family.pid, signal.SIGSTOP)
    os.waitpid(family.pid, os.WUNTRACED)
    assert state_of(family.pid) == "T"
    assert written_stacks([family.pid], 0.1) == {}


def test_a_process_that_is_gone_or_has_no_stack_file_is_left_out() -> None:
    assert written_stacks([os.getpid(), 2**22 + 1], 0.1) == {}
    assert descendants(2**22 + 1, 8) == []
    assert state_of(2**22 + 1) == "?"


def test_descendants_are_found_up_to_the_given_number(family: subprocess.Popen[str]) -> None:
    assert len(descendants(family.pid, 1)) == 1
    assert family.pid in descendants(os.getpid(), 1000)


def test_children_are_found_before_their_children(family: subprocess.Popen[str]) -> None:
    found = descendants(os.getpid(), 1000)
    grandchildren = descendants(family.pid, 1000)
    assert len(grandchildren) == 2
    assert all(found.index(family.pid) < found.index(pid) for pid in grandchildren)


TEXT = """\
Thread 0x00007f2c (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/usr/lib/python3.12/threading.py", line 1032 in _bootstrap

Current thread 0x00007f2d (most recent call first):
  File "/job/a, line 3 in b.py", line ??? in keep
  File "/job/train.py", line 12 in <module>
  ...
"""


def test_the_output_of_faulthandler_is_parsed() -> None:
    (current, frames), (other, _) = parse_stacks(TEXT)
    assert current == "Current thread 0x00007f2d"
    assert frames == (
        Frame("/job/a, line 3 in b.py", 0, "keep"),
        Frame("/job/train.py", 12, "<module>"),
    )
    assert other == "Thread 0x00007f2c"
    assert parse_stacks("what a script has written\n") == []
    assert parse_stacks('  File "x.py", line 1 in f\n') == []


def test_the_stacks_of_this_process_have_every_thread_and_the_letters_of_its_files() -> None:
    names = {"done": threading.Event(), "ready": threading.Event()}
    exec(
        compile("def wartet():\n    ready.set()\n    done.wait()\n", "/ö/\u4e2d/x.py", "exec"),
        names,
    )
    thread = threading.Thread(target=names["wartet"], daemon=True)  # type: ignore[arg-type]
    thread.start()
    assert names["ready"].wait(PATIENCE_S)
    try:
        found = stacks_of_threads()
    finally:
        names["done"].set()
        thread.join()
    own = found[threading.get_ident()]
    assert own[0].function == "stacks_of_threads"
    assert own[1].function == sys._getframe().f_code.co_name
    assert thread.ident is not None
    assert [f for f in found[thread.ident] if f.file == "/ö/\u4e2d/x.py"] == [
        Frame("/ö/\u4e2d/x.py", 3, "wartet")
    ]
