"""What Python itself does before and after a script, for scripts that are run by this package."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import runpy
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from elastic.errors import ExitCode

_MAIN = "__main__"


def run_program(argv: Sequence[str], *, module: bool) -> None:
    """Run `argv[0]` with the arguments that follow: a script, or the module of that name."""
    sys.argv = list(argv)
    if module:
        look_here()
        run_module_as_main(argv[0])
    else:
        look_beside(argv[0])
        run_as_main(argv[0])


def name_of_program() -> str:
    """What is run, for people: the script, or the module's name."""
    spec = getattr(sys.modules.get(_MAIN), "__spec__", None)
    name = getattr(spec, "name", None) or _MAIN
    return str(sys.argv[0] if name == _MAIN else name).removesuffix(f".{_MAIN}")


def look_beside(script: str) -> None:
    """Import first what lies beside the script, unless PYTHONSAFEPATH keeps Python from that."""
    if not getattr(sys.flags, "safe_path", False):  # new in 3.11
        sys.path.insert(0, str(Path(script).resolve().parent))


def look_here() -> None:
    """Import first what lies in the working directory, as `python -m` does."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())


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


def run_module_as_main(name: str) -> None:
    """As `python -m NAME`; and as above it stays `__main__`, for which runpy has no function."""
    sys.argv[0] = "-m"  # what packages see that are imported on the way
    spec = _spec_of(name)
    code = _code_of(spec)
    main = ModuleType(_MAIN)
    main.__file__ = spec.origin
    main.__cached__ = spec.cached  # type: ignore[attr-defined]
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    sys.modules[_MAIN] = main
    sys.argv[0] = str(spec.origin)
    exec(code, main.__dict__)


def _spec_of(name: str) -> ModuleSpec:
    """Of the module, or of a package's `__main__`. Imports the packages in which it is.

    Unlike `importlib.util.find_spec` it does not look among the modules that are imported already:
    those of the zygote, of which plain Python has none, may have the same name.
    """
    package = name.rpartition(".")[0]
    path = importlib.import_module(package).__path__ if package else None
    if name in sys.modules and package:
        warnings.warn(
            f"{name!r} found in sys.modules after import of package {package!r}, but prior to "
            f"execution of {name!r}; this may result in unpredictable behaviour",
            RuntimeWarning,
            stacklevel=2,
        )
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    spec = next((one for one in found if one is not None), None)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if spec.submodule_search_locations is not None:
        return _spec_of(f"{name}.{_MAIN}")
    return spec


def _code_of(spec: ModuleSpec) -> CodeType:
    code: CodeType | None = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ImportError(f"No code object available for {spec.name}", name=spec.name)
    return code


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
