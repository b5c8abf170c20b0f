"""What the system refuses is said in words; what is a fault of ours comes with its traceback."""

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
def test_what_the_system_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, named: str
) -> None:
    result = _failing_with(monkeypatch, error)
    assert result.exit_code == ExitCode.TEMPORARY
    assert named in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("y"), OSError("no number")])
def test_a_fault_of_ours_comes_with_its_traceback(
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


def test_a_reader_who_has_seen_enough_ends_the_command_without_a_word() -> None:
    """`elastic events | head`"""
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


def test_of_what_was_half_made_then_nothing_is_said() -> None:
    """asyncio's loop complains as it is collected, and so does the coroutine that never ran."""
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
    monkeypatch.setattr(main, "_say_no_more", lambda: None)  # this process goes on
    return CliRunner().invoke(main.app, ["checkpoint", "ls", "x"])
