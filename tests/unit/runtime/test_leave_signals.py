"""A leave signal ends a worker only if the agent does not say in time that the node leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

_DEADLINE_S = 30.0
_BEGIN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
from elastic.runtime import leave_signals
leave_signals.PATIENCE_S = 0.2
stray = leave_signals.StraySignals()
"""


def ran(script: str) -> subprocess.CompletedProcess[str]:
    """Run this script as a worker."""
    command = [sys.executable, "-c", _BEGIN + textwrap.dedent(script)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, env=os.environ
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2], ids=str)
def test_a_signal_for_one_worker_ends_it_after_the_patience(number: signal.Signals) -> None:
    done = ran(f"""
        stray.take_over()
        began = time.monotonic()
        os.kill(os.getpid(), {int(number)})
        print(time.monotonic() - began < 0.2, flush=True)
        time.sleep({_DEADLINE_S})
    """)
    assert (done.returncode, done.stdout) == (-number, "True\n"), done.stderr


def test_a_signal_that_the_agent_got_as_well_ends_no_worker() -> None:
    done = ran("""
        import threading
        stray.take_over()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.05, stray.node_leaves).start()
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.6)
        print("saved")
    """)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr


def test_a_worker_ignores_signals_at_which_agents_leave_their_workers_alone() -> None:
    done = ran("""
        stray.take_over()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
        time.sleep(0.6)
        print("trains")
    """)
    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr


def test_handlers_of_the_script_stay() -> None:
    done = ran("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        stray.take_over()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    """)
    assert done.returncode == 7, done.stderr


def test_a_signal_ends_a_child_process_of_the_script_at_once() -> None:
    """torch's DataLoader ends its workers this way."""
    done = ran("""
        leave_signals.PATIENCE_S = 60.0
        stray.take_over()
        begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begins, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(begun, 1)
        os.kill(child, signal.SIGTERM)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
    """)
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM)}\n"), done.stderr


def test_take_over_off_the_main_thread_changes_nothing() -> None:
    done = ran("""
        import threading
        thread = threading.Thread(target=stray.take_over)
        thread.start()
        thread.join()
        print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
