"""Decides how to start a script: for elastic or for torchrun, its environment, its log directory.

The file that `python -m NAME` runs is found without importing anything, because packages may import
torch, and no code of a script may run in the agent.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path, PurePath
from typing import NamedTuple

from elastic.core.legible import is_utf8_encodable
from elastic.errors import ConfigurationError, refusal_of
from elastic.runtime.devices import usable_cpus
from elastic.runtime.log_retention import make_directory
from elastic.runtime.network import interface_of
from elastic.runtime.service_notice import NOTICE_VARIABLES
from elastic.settings.fields import options_of
from elastic.settings.node import NodeSettings
from elastic.settings.shared import Launch

_PACKAGE = "elastic"


def is_classic(script: str | Path, launch: Launch, *, module: bool = False) -> bool:
    """Whether the script was written for torchrun. With Launch.AUTO, it was if neither it nor any
    module beside it that it imports, directly or indirectly, imports elastic. A script that cannot
    be parsed is started as elastic's: it reports its own error, once.

    module: `script` is a module's name; the modules beside it are those of its package and of the
    working directory. Raises ConfigurationError if there is no module of this name.
    """
    if launch is not Launch.AUTO:
        return launch is Launch.TORCHRUN
    return _imports_none(_Examined.module(str(script)) if module else _Examined.script(script))


class _Examined(NamedTuple):
    """The file to run, and where Python finds the modules that it imports."""

    path: Path
    directory: Path | None
    """The directory that Python searches first; None: the usual path only."""
    package: str = ""
    """The outermost package of a module, which lies in `root`; empty for a script."""
    root: Path = Path()

    @classmethod
    def script(cls, path: str | Path) -> _Examined:
        return cls(Path(path), Path(path).resolve().parent)

    @classmethod
    def module(cls, name: str) -> _Examined:
        found = module_file(name)
        directory = Path.cwd() if looks_here() else None
        return cls(found.path, directory, found.package, found.root)

    def first(self) -> Iterator[Path]:
        """The files that Python runs in any case: `path`, and the packages that contain it."""
        yield self.path
        if self.package:
            within = self.path.relative_to(self.root).with_suffix("")
            yield from _beside(self.root, ".".join(within.parts))

    def imported(self, name: str) -> Iterator[Path]:
        """The files that an absolute import may run. An installed package lies beside all others
        that are installed, so in `root` only its own modules count."""
        if self.directory is not None:
            yield from _beside(self.directory, name)
        if self.package and name.partition(".")[0] == self.package:
            yield from _beside(self.root, name)


def _imports_none(examined: _Examined) -> bool:
    script = examined.path
    waiting, seen = [*examined.first()], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            if path == script:
                return False
            continue
        for level, name in _imported(tree):
            if level == 0 and name.partition(".")[0] == _PACKAGE:
                return False
            if level == 0:
                waiting += examined.imported(name)
            for directory in path.parents[level - 1 : level] if level else ():
                waiting += _beside(directory, name)
    return True


def require_command(argv: Sequence[str], *, module: bool = False) -> None:
    """Raises ConfigurationError unless `argv` is a script that exists, and arguments in UTF-8.

    module: the first argument is a module's name instead.
    """
    try:
        os.getcwd()
    except OSError as error:  # torch cannot be imported there
        raise ConfigurationError(
            f"the current directory is gone ({error.strerror}); change to another one"
        ) from error
    if module:
        module_file(argv[0])
    else:
        _require_file(Path(argv[0]))
    for argument in argv:
        if not is_utf8_encodable(argument):
            raise ConfigurationError(
                f"the argument {argument!r} is not UTF-8, and workers receive arguments as UTF-8; "
                "rename the file, or pass the value to the script in a file"
            )


def _require_file(script: Path) -> None:
    try:
        found = script.is_file()
        what = "is a directory" if script.is_dir() else "does not exist"
    except OSError as error:
        found, what = False, f"cannot be accessed ({error.strerror})"
    if not found:
        raise ConfigurationError(
            f"the script {str(script)!r} {what}; give the path of a Python file"
        )


def log_directory(job: str, parent: Path | None) -> Path:
    """Make a log directory for this run. Raises ConfigurationError, and TransientError if the disk
    is full."""
    root = parent or log_root()
    try:
        return make_directory(root, job)
    except OSError as error:
        raise refusal_of(
            f"cannot make the log directory {error.filename or root}: {error.strerror}; "
            "choose another with --log-dir",
            error,
        ) from error


def log_root() -> Path:
    """Where logs go by default. Raises ConfigurationError if there is no home directory."""
    try:
        return _state_home() / "elastic" / "logs"
    except RuntimeError as error:  # no HOME, and a user id without a name
        raise ConfigurationError(
            f"there is no home directory to keep logs in ({error}); choose one with --log-dir, or "
            "set HOME"
        ) from error


def worker_environment(workers: int, host: str, *, classic: bool) -> dict[str, str]:
    """This process's environment without its secrets, and with what several workers on a machine
    need. Other nodes reach the workers at `host`."""
    secrets = {option.variable for option in options_of(NodeSettings) if option.secret}
    withheld = {*secrets, *NOTICE_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in withheld}
    for name, wish in {"GRPC_VERBOSITY": "NONE", "GRPC_DNS_RESOLVER": "native"}.items():
        if environment.get(name) == wish:  # set by main.py
            del environment[name]
    # Several workers must not each use every core. With several, torchrun gives each one thread.
    threads = 1 if classic else max(1, usable_cpus() // workers)
    if not classic or workers > 1:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if not classic:
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # broken sockets are usual here
    # torch resolves its peers' names when it first connects. If a part of the network is lost with
    # the name server in it, that must not hold up the group that forms without that part.
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    if (interface := interface_of(host)) is not None:  # else gloo resolves the host's own name
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


# ---- inside


def _state_home() -> Path:
    """$XDG_STATE_HOME of the XDG base directory specification: data that persists between runs."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each import in the file: how many dots lead, and the dotted name that follows them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            yield from ((node.level, module + alias.name) for alias in node.names)


def _beside(directory: Path, name: str) -> Iterator[Path]:
    """The files in `directory` that Python would run to import the module and its parents."""
    path = directory
    for part in name.split("."):
        path = path / part
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file


_MAIN = "__main__"


class ModuleFile(NamedTuple):
    """A module that `python -m` can run; for a package, its `__main__`."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """The outermost package, or the module's own name if it is in none."""
        return self.name.partition(".")[0]

    @property
    def root(self) -> Path:
        """The directory that holds the outermost package."""
        return self.path.parents[self.name.count(".")]


def module_file(name: str) -> ModuleFile:
    """Find the module to run. Raises ConfigurationError unless there is one that can be read."""
    parts = name.split(".")
    if not all(parts) or os.sep in name or not name.isprintable() or parts[0] == _MAIN:
        raise ConfigurationError(f"{name!r} is not a module name; {_advice(name, '')}")
    importlib.invalidate_caches()  # the module may be a moment old
    specs = list(_specs(name, parts))
    if specs[-1].submodule_search_locations is not None:
        within = _locations(specs[-1])
        main = PathFinder.find_spec(_MAIN, within)
        if main is None or main.submodule_search_locations is not None:
            raise ConfigurationError(
                f"the package {name!r} ({_place(specs[-1])}) has no {_MAIN}.py, and cannot be run; "
                f"give one of its modules: -m {name}.MODULE"
            )
        specs.append(main)
        name = f"{name}.{_MAIN}"
    last, path = specs[-1], specs[-1].origin
    if not last.has_location or path is None or isinstance(last.loader, ExtensionFileLoader):
        raise ConfigurationError(
            f"the module {name!r} is not Python source and cannot be run; give a script's"
        )
    for spec in specs:
        _require_readable(name, spec)
    return ModuleFile(name, Path(path))


def looks_here() -> bool:
    """Whether workers look for modules in the working directory first, as `python -m` does."""
    return sys.version_info < (3, 11) or not os.environ.get("PYTHONSAFEPATH")


# ---- inside


def _specs(name: str, parts: Sequence[str]) -> Iterator[ModuleSpec]:
    """The specs of the packages, outermost first, and of the module."""
    spec = _outermost(parts[0])
    if spec is None:
        where = f"in {_here()} or among the installed packages"
        raise _missing(name, f"there is no {parts[0]!r} {where}", parts[0])
    yield spec
    for depth, part in enumerate(parts[1:], 1):
        outer = ".".join(parts[:depth])
        if spec.submodule_search_locations is None:
            raise _missing(name, f"{outer!r} ({_place(spec)}) is not a package")
        # The last part alone: given the full name, Python looks for its parent in sys.modules.
        within = PathFinder.find_spec(part, _locations(spec))
        if within is None:
            _require_open(name, _locations(spec))
            raise _missing(name, f"the package {outer!r} ({_place(spec)}) has no {part!r}")
        spec = within
        yield spec


def _outermost(name: str) -> ModuleSpec | None:
    """Find it as a worker will: a worker's path lacks the directory of the `elastic` command."""
    own = os.path.dirname(os.path.realpath(sys.argv[0]))
    path = sys.path[1:] if sys.path[:1] == [own] else sys.path
    path = [os.getcwd(), *path] if looks_here() else path
    for finder in sys.meta_path:  # packages installed with --editable have finders of their own
        spec = finder.find_spec(name, path if finder is PathFinder else None)
        if spec is not None:
            return spec
    return None


def _locations(spec: ModuleSpec) -> list[str]:
    return list(dict.fromkeys(spec.submodule_search_locations or []))


def _place(spec: ModuleSpec) -> str:
    return ", ".join(_locations(spec)) or spec.origin or "?"


def _require_readable(name: str, spec: ModuleSpec) -> None:
    read = getattr(spec.loader, "get_data", None)  # importers of zip files have it too
    if read is None or not spec.has_location:  # a package without __init__.py
        return
    try:
        read(spec.origin)
    except OSError as error:
        raise ConfigurationError(
            f"the module {name!r} cannot be read: {spec.origin}: {error.strerror}; let this user "
            "read it"
        ) from error


def _require_open(name: str, directories: Sequence[str]) -> None:
    """Raises ConfigurationError if a directory cannot be read: to Python it seems to have no
    modules."""
    for directory in directories:
        try:
            with os.scandir(directory):
                os.stat(os.path.join(directory, "."))
        except NotADirectoryError:  # an archive
            continue
        except OSError as error:
            raise ConfigurationError(
                f"cannot look for the module {name!r} in {directory}: {error.strerror}; let this "
                "user read the directory"
            ) from error


def _missing(name: str, why: str, package: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"the module {name!r} does not exist: {why}; {_advice(name, package)}"
    )


def _advice(name: str, package: str) -> str:
    if name.endswith(".py") or os.sep in name or os.path.isfile(name):
        parts = PurePath(name.removesuffix(".py")).parts
        within = parts and not {os.sep, ".."} & set(parts)
        as_module = f", or give the module's name, {'.'.join(parts)!r}" if within else ""
        return f"to run a file leave out -m (or give --no-module){as_module}"
    if package and not looks_here():
        return f"PYTHONSAFEPATH is set: add the directory that holds {package!r} to PYTHONPATH"
    if package:
        return f"start elastic in the directory that holds {package!r}, or add it to PYTHONPATH"
    return "give a name as python -m takes it: elastic run [options] -m PACKAGE.MODULE [arguments]"


def _here() -> str:
    return os.getcwd() if looks_here() else "PYTHONPATH"
