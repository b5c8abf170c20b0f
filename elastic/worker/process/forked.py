"""What a process forked from the zygote does to become a worker: it runs the user's script and
reports how it ended. What a log does not take any more of its output is lost, and the script goes
on.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.core.membership import Failure, FailureKind
from elastic.errors import ConfigurationError, ElasticError, ExitCode, StateLost, Stranded
from elastic.rpc.codec import failure_to_pb
from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.process_title import set_worker_title
from elastic.runtime.stack_file import write_stacks_on_signal
from elastic.v1 import local_pb2 as pb
from elastic.worker import session
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
from elastic.worker.process.children import die_with_parent
from elastic.worker.process.torchrun import run_classic

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def become_worker(request: pb.SpawnRequest, parent: int) -> int:
    """Cut the ties to the zygote, then run the script; return the exit code."""
    _redirect_output(request.log_path)  # first: that is where is looked for what goes wrong
    # A group of its own, but the zygote's session: where the kernel schedules by session
    # (sched_autogroup_enabled) members that have one each, as under torchrun, wake each other more
    # slowly: steps take 5% longer with 2 or 3 workers on 2 cores.
    os.setpgid(0, 0)
    die_with_parent(parent)
    adopt_orphans()  # so that it is known whose daemons they are that outlive it
    os.environ.update(request.environment)
    set_worker_title(request.worker, request.argv[0])
    _reseed()
    faulthandler.enable()  # a segmentation fault leaves its stacks in the log
    write_stacks_on_signal()
    lost: list[Callable[[str], None]] = []
    outlive_full_disk(lambda reason: lost.pop()(reason) if lost else None)
    if request.classic:
        return run_classic(request)
    link = Link(request.worker, request.socket_path)
    lost.append(lambda reason: link.notice("output_lost", {"reason": reason}))
    session.use_link(link)
    return run_script(link, list(request.argv), module=request.module)


def _redirect_output(path: str) -> None:
    """A worker that cannot open its log trains all the same, and writes to the zygote's."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # somebody may have tidied up
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        print(f"the log {path} cannot be opened: {error.strerror}", file=sys.stderr, flush=True)
    else:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reseed() -> None:
    """Forks share the zygote's generators; a fresh interpreter would have seeded its own."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


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


_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS}


class LogStream(io.FileIO):
    """Writes to a descriptor. A full disk is no error of the script that prints: what is refused is
    lost, and a line says so as soon as there is space again."""

    def __init__(self, fd: int, on_lost: Callable[[str], None]) -> None:
        """on_lost: called with the reason when something is lost for the first time."""
        super().__init__(fd, "w", closefd=False)
        self._on_lost: Callable[[str], None] | None = on_lost
        self._lost_bytes = 0

    def write(self, data: ReadableBuffer, /) -> int:
        """Take all of it, or as much as the file takes now."""
        try:
            if self._lost_bytes:
                note = f"\n[elastic: {self._lost_bytes} bytes of output are lost here]\n"
                super().write(note.encode())
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            size = memoryview(data).nbytes
            self._lost_bytes += size
            tell, self._on_lost = self._on_lost, None
            if tell is not None:
                tell(os.strerror(error.errno))
            return size


def outlive_full_disk(on_lost: Callable[[str], None]) -> None:
    """From here on `sys.stdout` and `sys.stderr` raise no error for want of space; `on_lost` is
    called with the reason, once for each."""
    sys.stdout = _text(LogStream(1, on_lost), sys.stdout)
    sys.stderr = _text(LogStream(2, on_lost), sys.stderr)


def _text(log: LogStream, before: object) -> io.TextIOWrapper:
    """As Python has it for a terminal: by lines, so that a log shows what has happened."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    errors = getattr(before, "errors", None) or "backslashreplace"
    return io.TextIOWrapper(
        io.BufferedWriter(log), encoding=encoding, errors=errors, line_buffering=True
    )
