"""A process starts its command again in its own place and keeps descriptors and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.errors import TransientError
from elastic.runtime import reexec

_TURNS = """
import os, signal, sys
from elastic.runtime.reexec import Reexecution, inherited, unblock_signals

turn, kept = int(os.environ.get("TURN", "0")), inherited()
blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
again = inherited()
fds = sorted(int(f) for f in os.listdir("/proc/self/fd"))
print(turn, os.getpid(), sorted(kept), blocked, again, sys.argv[1:], len(fds), flush=True)
if turn == 2:
    assert os.read(kept["pipe"], 4) == b"word"
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
    unblock_signals()
    sys.exit(0)
os.environ["TURN"] = str(turn + 1)
if turn == 0:
    read, write = os.pipe()
    os.write(write, b"word")
    os.close(write)
    stray = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(stray, True)
    kept = {"pipe": read}
reexecution = Reexecution(kept)
if turn == 1:
    os.kill(os.getpid(), signal.SIGTERM)  # comes while this program ends
reexecution.execute()
"""


def test_a_reexecution_keeps_the_process_its_descriptors_and_pending_signals(
    tmp_path: Path,
) -> None:
    script = tmp_path / "turns.py"
    script.write_text(_TURNS)
    run = subprocess.run(
        [sys.executable, script, "--lr", "a b"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    first, second, third, last = run.stdout.splitlines()
    pid = first.split()[1]
    assert first.startswith(f"0 {pid} [] False {{}} ['--lr', 'a b'] ")
    for turn, line in (("1", second), ("2", third)):
        assert line.startswith(f"{turn} {pid} ['pipe'] True {{}} ['--lr', 'a b'] ")
        assert int(line.split()[-1]) == int(first.split()[-1]) + 1  # the stray one is gone
    assert last == "asked to end"


_FROM_LOOP = """
import asyncio, os, signal, sys
from elastic.runtime.reexec import Reexecution, inherited, unblock_signals

if inherited():
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
    unblock_signals()
    sys.exit(0)

async def main():
    loop, reexecution = asyncio.get_running_loop(), None
    loop.add_signal_handler(signal.SIGTERM, lambda: reexecution.keep(signal.SIGTERM))
    early = sys.argv[1] == "early"
    if early:
        os.kill(os.getpid(), signal.SIGTERM)  # the loop has not called its handler yet
    reexecution = Reexecution({"input": 0})
    await reexecution.take_over_from(loop)
    if not early:
        os.kill(os.getpid(), signal.SIGTERM)
    return reexecution

asyncio.run(main()).execute()
"""


@pytest.mark.parametrize("early", [False, True])
def test_a_signal_that_an_event_loop_was_to_handle_is_kept(tmp_path: Path, *, early: bool) -> None:
    script = tmp_path / "from_loop.py"
    script.write_text(_FROM_LOOP)
    run = subprocess.run(
        [sys.executable, script, "early" if early else "late"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30.0,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout == "asked to end\n"


def test_kept_descriptors_of_another_process_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ELASTIC_KEPT_DESCRIPTORS", '{"pid": 1, "descriptors": {"lock": 0}}')
    assert reexec.inherited() == {}
    assert "_ELASTIC_KEPT_DESCRIPTORS" not in os.environ


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('no such option: --lx')", "no such option: --lx"),
        ("import sys; sys.exit(7)", "the new command ended with exit code 7"),
        ("import time; time.sleep(60)", "the new command did not start within 0.5 s"),
    ],
)
def test_a_command_that_does_not_start_raises_with_the_reason(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", program])
    monkeypatch.setattr(reexec, "_TRIAL_S", 0.5)
    with pytest.raises(TransientError, match=why):
        reexec.try_start()


def test_a_trial_start_knows_that_it_is_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; from elastic.runtime.reexec import is_trial; sys.exit(not is_trial())"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", program])
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    reexec.try_start()
    assert not reexec.is_trial()
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
