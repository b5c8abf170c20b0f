"""What Python itself does before and after a script, for scripts that are run by this package."""

from __future__ import annotations

import contextlib
import pkgutil
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType

from elastic.errors import ExitCode


def look_beside(script: str) -> None:
    """Import first what lies beside the script, unless PYTHONSAFEPATH keeps Python from that."""
    if not getattr(sys.flags, "safe_path", False):  # new in 3.11
        sys.path.insert(0, str(Path(script).resolve().parent))


def run_as_main(script: str) -> None:
    """Run it as `__main__`, which it stays to the process's end: threads and exit handlers that
    outlive its last line may still pickle what is defined in it."""
    if script.endswith(".pyc") or pkgutil.get_importer(script) is not None:
        runpy.run_path(script, run_name="__main__")  # compiled, a directory, a zip file
        return
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def flush_output() -> None:
    """What is left of it; the script may have closed it, or put anything in its place."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def exit_code_of(ending: SystemExit) -> int:
    """The process's exit code; a text is printed to stderr, where there is one."""
    tell_ending(ending)
    return code_of(ending)


def code_of(ending: SystemExit) -> int:
    """The process's exit code."""
    if ending.code is None:
        return ExitCode.OK
    return ending.code & 0xFF if isinstance(ending.code, int) else ExitCode.SCRIPT_FAILED


def tell_ending(ending: SystemExit) -> None:
    """Print what sys.exit() was given, if it is no number; to stderr, where there is one."""
    if ending.code is not None and not isinstance(ending.code, int):
        with contextlib.suppress(Exception):  # the script may have closed it, or put another there
            print(ending.code, file=sys.stderr)


def in_words(error: BaseException) -> str:
    """Type and text of an exception, and what it was noted with, as its traceback ends."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # with its place, which stands before it there
    told = traceback.TracebackException.from_exception(error, limit=0)
    lines = list(told.format_exception_only())
    told.__notes__ = None  # new in 3.11
    without_notes = list(told.format_exception_only())
    return "".join(lines[len(without_notes) - 1 :]).strip()


def tell_uncaught(error: BaseException) -> None:
    """Hand the exception to `sys.excepthook`, which is the script's own or prints it. Never raises:
    what a hook raises is told as well."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as another:  # noqa: BLE001 - a hook may even call sys.exit()
        for each in (another, error):
            with contextlib.suppress(Exception):
                traceback.print_exception(each)
