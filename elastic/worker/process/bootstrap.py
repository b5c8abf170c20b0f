"""Runs the user's script in a worker process and reports how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from elastic.core.membership import Failure, FailureKind
from elastic.errors import ConfigurationError, ElasticError, ExitCode, StateLost, Stranded
from elastic.rpc.codec import failure_to_pb
from elastic.worker import session as sessions
from elastic.worker.link import Link
from elastic.worker.process.as_python import (
    code_of,
    exit_code_of,
    in_words,
    run_program,
    tell_ending,
    tell_uncaught,
)

_NO_GROUP = (
    "the group forms when session.steps() begins; call torch.distributed inside of its loop, use "
    "session.distribute(model) in place of DistributedDataParallel, and no init_process_group()"
)
_NO_INPUT = (
    "a worker has no terminal, and its standard input is empty; give what it would read as an "
    "argument, and debug the script alone: python SCRIPT is a job of one worker"
)
# What torch says where a script uses it as if torchrun had started it, and Python where a script
# asks somebody; and what to do instead.
_ADVICE = {
    "Default process group has not been initialized": _NO_GROUP,
    "env:// rendezvous": _NO_GROUP,
    "trying to initialize the default process group twice": _NO_GROUP,
    "EOFError: EOF when reading a line": _NO_INPUT,
    "bdb.BdbQuit": _NO_INPUT,
}


def run_script(link: Link, argv: list[str], *, module: bool = False) -> int:
    """Run `argv[0]`, a script or the name of a module, as `__main__`, as `python` would; return the
    exit code.

    Returns in every process that the script has forked and that comes to the script's end: that is
    no worker, and ends as plain Python would.
    """
    worker = os.getpid()
    link.hello()
    program = f"-m {argv[0]}" if module else argv[0]
    try:
        run_program(argv, module=module)
        if os.getpid() == worker:
            _finish(program)
    except SystemExit as ending:
        if os.getpid() != worker:
            return exit_code_of(ending)
        return _exited(link, ending, program)
    except BaseException as error:  # noqa: BLE001 - whatever the script raised ends the process
        if os.getpid() != worker:
            tell_uncaught(error)
            return ExitCode.SCRIPT_FAILED
        return _raised(link, error)
    return ExitCode.OK


def _finish(script: str, where: str = "") -> None:
    training = sessions.current_training()
    if training is None and {"-h", "--help"} & set(sys.argv[1:]):
        raise ConfigurationError(
            f"{script} has shown its help and ended, without calling elastic.init(): there is "
            f"nothing to train. What it takes is shown by: python {script} --help"
        )
    if training is None:
        raise ConfigurationError(
            f"{script} ended without calling elastic.init(); call it once, before the model is "
            "built, and train in `for step in session.steps(...)`; or give --launch torchrun, if "
            "the script was written for torchrun"
        )
    training.finish(where)


def _exited(link: Link, ending: SystemExit, script: str) -> int:
    """sys.exit(): what ends a process with 0 is a good end, everything else a failure."""
    code = code_of(ending)
    if code == ExitCode.OK:
        try:
            _finish(script, _place(ending))
        except BaseException as error:  # noqa: BLE001 - as above
            return _raised(link, error)
        return ExitCode.OK
    failure = Failure(
        worker=link.worker,
        kind=FailureKind.EXIT_CODE,
        code=code,
        signature=_signature(ending),
        message=f"the script called sys.exit({_shown(ending.code)})",
    )
    _report(link, failure)
    tell_ending(ending)
    return code


def _shown(value: object) -> str:
    """`sys.exit(main())` gives whatever main() returns, which may be of any type and length."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is the script's own object
        return f"a {type(value).__name__}"


def _raised(link: Link, error: BaseException) -> int:
    code = error.exit_code if isinstance(error, ElasticError) else ExitCode.SCRIPT_FAILED
    words = in_words(error)
    advice = next((a for said, a in _ADVICE.items() if said in words), "")
    stranded = isinstance(error, Stranded)  # which is no fault of the script
    failure = Failure(
        worker=link.worker,
        kind=FailureKind.LEFT_OUT if stranded else FailureKind.EXCEPTION,
        code=int(code),
        signature=_signature(error),
        message=f"{words} ({advice})" if advice else words,
        traceback="".join(traceback.format_exception(error)),
        retryable=code != ExitCode.CONFIGURATION and not isinstance(error, StateLost),
        state_lost=isinstance(error, StateLost),
    )
    _report(link, failure)
    tell_uncaught(error)  # last: it may print to what is closed, and a hook do anything
    return int(code)


def _report(link: Link, failure: Failure) -> None:
    """First free the peers, then say why: they must not wait for this process to wind up."""
    training = sessions.current_training()
    if training is not None:
        training.abandon()
    link.send(failure=failure_to_pb(failure))


def _signature(error: BaseException) -> str:
    """The same for the same fault, whatever its text names: the type, and the place."""
    return f"{type(error).__name__} at {_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of the script's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    own = [f for f in frames if not f.filename.startswith((package, "<frozen"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "?"
