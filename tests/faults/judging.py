"""Finds what is wrong with what a process or a job has said and left behind."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import open_directory
from elastic.errors import ElasticError, ExitCode
from tests.integration.running import Place, command_line
from tests.job_process import CommandProcess

CLEAN = {ExitCode.SCRIPT_FAILED, ExitCode.TEMPORARY, ExitCode.CONFIGURATION}
_GONE_WITHIN_S = 20.0
# Python's own words for a refused call, in the traceback of a script.
_OTHER_WORDS = {
    errno.ENOMEM: ("MemoryError", "bad_alloc"),
    errno.EAGAIN: ("can't start new thread",),
    errno.EMFILE: ("descriptors",),
    errno.ENFILE: ("descriptors",),
}


def said_by(process: CommandProcess) -> str:
    """All that a person reads of a process: messages, and those of its events."""
    events = (str(e.get("message", "")) for e in list(process.events))
    return "\n".join([*process.messages, *events])


def bare_tracebacks(process: CommandProcess) -> list[str]:
    """An operator can do nothing with a traceback, whatever words stand beside it."""
    found = "Traceback" in "\n".join(process.messages)
    return ["a traceback on the console"] if found else []


def wrong_words(exit_code: int, said: str, errors: Collection[int]) -> list[str]:
    """What is wrong with the words of a process that ended early. errors: of the failed calls that
    may have ended it."""
    wrong = [] if exit_code in CLEAN else [f"exit code {exit_code} means nothing"]
    by_grpc = "no file descriptors left" in said and {errno.EMFILE, errno.ENFILE} & set(errors)
    if not by_grpc and not any(os.strerror(error) in said for error in errors):
        wrong.append("what it says does not name the cause")
    return wrong


def names_cause(text: str, error: int) -> bool:
    """Whether a worker's failure or log names the error; Python and torch may use other words."""
    words = (os.strerror(error), f"rrno {error}", f"rrno: {error}", *_OTHER_WORDS.get(error, ()))
    return any(word in text for word in words)


def left_behind(place: Place, *, directories: bool = True) -> list[str]:
    """The processes and run directories that have not gone after _GONE_WITHIN_S."""

    def kept() -> list[Path]:
        return place.run_directories() if directories else []

    ends_at = time.monotonic() + _GONE_WITHIN_S
    while (place.processes() or kept()) and time.monotonic() < ends_at:
        time.sleep(0.02)
    processes = [f"{pid} {command_line(pid)}" for pid in place.processes()]
    wrong = [f"processes are left: {processes}"] if processes else []
    return wrong + ([f"directories are left: {kept()}"] if kept() else [])


def damaged_checkpoints(folder: Path) -> list[str]:
    """The problems of committed checkpoints, which must be whole."""
    directory = open_directory(str(folder))
    try:
        return [
            f"checkpoint {step}: {problem}"
            for step in catalog.list_checkpoints(directory)
            for problem in catalog.verify(directory, step)
        ]
    except ElasticError as error:
        return [f"checkpoints: {error}"]


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def logs_below(folders: Iterable[Path]) -> str:
    """The last 3000 characters of each log."""
    logs = sorted(log for folder in folders for log in folder.rglob("*.log"))
    return "\n".join(f"--- {log.name}\n{text_of(log)[-3000:]}" for log in logs)
