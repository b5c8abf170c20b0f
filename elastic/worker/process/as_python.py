"""Does what Python itself does before and after a script, for scripts that this package runs."""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import io
import os
import pkgutil
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from elastic.errors import ExitCode

_MAIN = "__main__"
_TOO_LARGE = 1 << 63  # for a C long: Python's exit code is then -1


def run_program(argv: Sequence[str], *, module: bool) -> None:
    """Run `argv[0]`, a script or with `module` a module's name; the rest are its arguments."""
    sys.argv = list(argv)
    if module:
        add_cwd_to_path()
        run_module_as_main(argv[0])
    else:
        if not _contains_modules(argv[0]):
            add_script_dir_to_path(argv[0])
        run_as_main(argv[0])


def name_of_program() -> str:
    """Return the name of the script or module that runs, to show to people."""
    spec = getattr(sys.modules.get(_MAIN), "__spec__", None)
    name = getattr(spec, "name", None) or _MAIN
    return str(sys.argv[0] if name == _MAIN else name).removesuffix(f".{_MAIN}")


def add_script_dir_to_path(script: str) -> None:
    """Import from the script's directory first, unless PYTHONSAFEPATH forbids it."""
    if not getattr(sys.flags, "safe_path", False):  # new in 3.11
        sys.path.insert(0, str(Path(script).resolve().parent))


def add_cwd_to_path() -> None:
    """Import from the working directory first, as `python -m` does."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())


def run_as_main(script: str) -> None:
    """Run a script as `__main__`. It stays `__main__` until the process ends, because threads and
    exit handlers that outlive its last line may still pickle what it defines.

    Its file is named by an absolute path, which is right wherever the script goes; `sys.argv[0]`
    stays as it was given.
    """
    path = _absolute(script)
    if _contains_modules(path):  # a directory, a zip file
        sys.path.insert(0, path)
        spec = _spec_of(_MAIN)
        _run(_code_of(spec), _main_of(spec))
        return
    main = ModuleType(_MAIN)
    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    if script.endswith(".pyc"):
        compiled = SourcelessFileLoader(_MAIN, path)
        main.__loader__, code = compiled, compiled.get_code(_MAIN)
        assert code is not None, path  # only modules that are no files have none
    else:
        main.__loader__ = SourceFileLoader(_MAIN, path)
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    _run(code, main)


def run_module_as_main(name: str) -> None:
    """Do what `python -m NAME` does, and keep it as `__main__`, for which runpy has no function."""
    sys.argv[0] = "-m"  # as packages see it that are imported on the way
    spec = _spec_of(name)
    code = _code_of(spec)
    sys.argv[0] = str(spec.origin)
    _run(code, _main_of(spec))


_run_as_main: weakref.WeakSet[ModuleType] = weakref.WeakSet()


def _run(code: CodeType, main: ModuleType) -> None:
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules[_MAIN] = main
    _run_as_main.add(main)
    exec(code, main.__dict__)


def _main_of(spec: ModuleSpec) -> ModuleType:
    main = ModuleType(_MAIN)
    main.__file__ = spec.origin
    main.__cached__ = spec.cached  # type: ignore[attr-defined]
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    return main


def _absolute(script: str) -> str:
    """Return the path as Python makes it: with the working directory before it, else unchanged."""
    try:
        return os.path.join(os.getcwd(), script)
    except OSError:  # the working directory was removed
        return script


def _contains_modules(path: str) -> bool:
    return pkgutil.get_importer(path) is not None


def _spec_of(name: str) -> ModuleSpec:
    """Return the spec of the module, or of a package's `__main__`. Imports the packages around it.

    Unlike `importlib.util.find_spec`, this ignores the modules that are already imported. Those of
    the zygote, which plain Python would not have, may have the same name.
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


def finalize_script() -> None:
    """Flush the files that the script has left open, and finalize its objects, as Python does.
    Objects that existed before the worker was forked are frozen, so this is quick."""
    _flush_files()  # first: in garbage, a file may be closed before its buffer is written
    main = sys.modules.get(_MAIN)
    if main is not None and main in _run_as_main:
        threading.excepthook = lambda _: None  # daemon threads lose their globals, as in Python
        del sys.modules[_MAIN]
        left = weakref.ref(main)
        del main
        gc.collect()
        if (main := left()) is not None:
            for name in vars(main).keys() - {"__builtins__"}:
                vars(main)[name] = None
            gc.collect()
    _flush_files()


def _flush_files() -> None:
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):
            with contextlib.suppress(Exception):
                found.flush()


def flush_output() -> None:
    """Flush stdout and stderr. The script may have closed them, or replaced them with anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def exit_code_of(ending: SystemExit) -> int:
    """Return the process's exit code. Print a text that sys.exit() was given to stderr."""
    tell_ending(ending)
    return code_of(ending)


def code_of(ending: SystemExit) -> int:
    if ending.code is None:
        return ExitCode.OK
    if not isinstance(ending.code, int):
        return ExitCode.SCRIPT_FAILED
    return ending.code & 0xFF if -_TOO_LARGE <= ending.code < _TOO_LARGE else 0xFF


def tell_ending(ending: SystemExit) -> None:
    """Print what sys.exit() was given to stderr, unless it is None or a number."""
    if ending.code is not None and not isinstance(ending.code, int):
        with contextlib.suppress(Exception):  # the script may have closed or replaced it
            print(ending.code, file=sys.stderr)


def format_error(error: BaseException) -> str:
    """Return type, text and notes of an exception, as the last lines of its traceback show them."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # its text names file and line
    told = traceback.TracebackException.from_exception(error, limit=0)
    lines = list(told.format_exception_only())
    told.__notes__ = None  # new in 3.11
    without_notes = list(told.format_exception_only())
    return "".join(lines[len(without_notes) - 1 :]).strip()


def tell_uncaught(error: BaseException) -> None:
    """Pass the exception to `sys.excepthook`, which is the script's own or prints it. Never raises:
    an exception of the hook is printed, too."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as another:  # noqa: BLE001 - a hook may even call sys.exit()
        for each in (another, error):
            with contextlib.suppress(Exception):
                traceback.print_exception(each)
