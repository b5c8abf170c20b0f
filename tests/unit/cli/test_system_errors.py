"""Commands name what the system refuses; only an internal error comes with its traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic.cli import files, main
from elastic.errors import ExitCode


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "No space left on device (/x)"),
        (BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), "Broken pipe"),
        (MemoryError(), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "Resource temporarily unavailable (a thread)"),
    ],
    ids=["descriptors", "storage", "another pipe", "memory", "threads"],
)
def test_a_refusal_of_the_system_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception, named: str
) -> None:
    result = _failing_with(monkeypatch, error)
    assert result.exit_code == ExitCode.TEMPORARY
    assert named in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("y"), OSError("no number")])
def test_an_internal_error_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    result = _failing_with(monkeypatch, error)
    assert result.exit_code == ExitCode.SCRIPT_FAILED
    assert "Traceback" in result.output


SAYS_MUCH = """
from elastic.cli import files, main

def say(*_, **__):
    for _ in range(100_000):
        print("a line", flush=True)

files.list_checkpoints = say
main.app(["checkpoint", "ls", "x"])
"""


def test_a_closed_standard_output_ends_the_command_silently() -> None:
    """For example `elastic events | head`."""
    with subprocess.Popen(
        [sys.executable, "-c", SAYS_MUCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


HALF_A_LOOP = """
import asyncio, errno, os, socket
from elastic.cli import files, main

def refuse(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

async def never():
    pass

def begin(*_, **__):
    socket.socketpair = refuse
    asyncio.run(never())

files.list_checkpoints = begin
main.app(["checkpoint", "ls", "x"])
"""


def test_an_event_loop_that_cannot_be_made_leaves_one_line_on_stderr() -> None:
    """A half-made asyncio loop and a coroutine that never ran usually complain when collected."""
    ended = subprocess.run(
        [sys.executable, "-c", HALF_A_LOOP], capture_output=True, text=True, check=False
    )
    assert ended.returncode == ExitCode.TEMPORARY
    (line,) = ended.stderr.splitlines()
    assert "Too many open files" in line


def _failing_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(files, "list_checkpoints", fail)
    monkeypatch.setattr(main, "_silence_python", lambda: None)  # this process goes on
    return CliRunner().invoke(main.app, ["checkpoint", "ls", "x"])
