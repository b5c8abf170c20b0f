"""The process in which a script that was written for torchrun runs, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.core.membership import Failure, FailureKind, signal_name
from elastic.errors import ElasticError, ExitCode
from elastic.worker import session as sessions
from elastic.worker.process.as_python import (
    exit_code_of,
    in_words,
    run_program,
    tell_uncaught,
)

_NO_SESSION = (
    "elastic.init() was called in a script that was started as torchrun starts scripts, since "
    "neither it nor the modules beside it import elastic; give --launch elastic"
)


class ClassicScript:
    """A child that waits at the other end of a pipe for its environment, then runs the script."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe
        self._status: int | None = None

    def begin(self, environment: Mapping[str, str]) -> None:
        """Have it run the script, with these variables."""
        data = json.dumps(dict(environment)).encode()
        with open(self._pipe, "wb") as told:
            told.write(data)

    def terminate(self) -> None:
        """SIGTERM to it and whatever else is in its process group; this process ignores it."""
        if self._status is None:
            os.killpg(os.getpgid(0), signal.SIGTERM)

    def wait(self) -> int:
        """Return when it has ended: its exit code, or minus the signal that ended it.

        Reaps also what the script has left behind, which are children of this process by now.
        """
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)
                return self._status


def run_when_told(pipe: int, argv: Sequence[str], *, module: bool = False) -> int:
    """In the child: wait for the environment, run the script, return its exit code."""
    with open(pipe, "rb") as told:
        data = told.read()
    if not data:
        return ExitCode.OK  # the parent has ended, and the kernel ends this process
    os.environ.update(json.loads(data))
    sessions.refuse(_NO_SESSION)
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    process = os.getpid()
    try:
        run_program(argv, module=module)
    except SystemExit as ending:
        return exit_code_of(ending)
    except BaseException as error:  # noqa: BLE001 - whatever the script raised ends the process
        code = error.exit_code if isinstance(error, ElasticError) else ExitCode.SCRIPT_FAILED
        if os.getpid() == process:  # a process that the script has forked does not speak for it
            _record(error, int(code), error_file)
        tell_uncaught(error)
        return int(code)
    return ExitCode.OK


def _record(error: BaseException, code: int, path: Path) -> None:
    """As torch's `record` reports, if the script does not use it."""
    message = {
        "message": in_words(error),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
        "errorCode": code,
    }
    with contextlib.suppress(OSError):  # no space: the log has it
        if not path.exists() or code != ExitCode.SCRIPT_FAILED:
            path.write_text(json.dumps({"message": message}))


def failure_of(worker: str, status: int, error_file: Path) -> Failure:
    """What the end of the script with a status other than 0 means, with what it left in the file.

    Read as torch's ProcessFailure reads it.
    """
    if status < 0:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=-status,
            signature=f"signal {-status}",
            message=f"was ended by {signal_name(-status)}",
        )
    recorded = _recorded(error_file)
    if recorded is None:
        message = f"the script ended with exit code {status}"
        return Failure(
            worker=worker,
            kind=FailureKind.EXIT_CODE,
            code=status,
            signature=f"exit code {status}",
            message=message,
        )
    message, stack, code = recorded
    return Failure(
        worker=worker,
        kind=FailureKind.EXCEPTION,
        code=status,
        signature=message,
        message=message,
        traceback=stack,
        retryable=code != ExitCode.CONFIGURATION,
    )


def _recorded(path: Path) -> tuple[str, str, int] | None:
    """Message, traceback and error code from an error file; None without a legible one."""
    try:
        content: Any = json.loads(path.read_text(errors="replace"))
        message = content["message"]
        if isinstance(message, str):
            return message.splitlines()[0], message, 0
        first = str(message["message"]).strip().splitlines()
        stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        return first[0] if first else "?", stack, int(message.get("errorCode", 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except (OverflowError, RecursionError):  # a number or a depth that no such file has
        return None
