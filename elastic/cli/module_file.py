"""Which file `python -m NAME` runs, found without importing anything: packages may import torch,
and nothing of a script is to run in the agent."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path, PurePath
from typing import NamedTuple

from elastic.errors import ConfigurationError

_MAIN = "__main__"


class ModuleFile(NamedTuple):
    """A module that can be run; that of a package is its `__main__`."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """The outermost, or the module's own name where it is in none."""
        return self.name.partition(".")[0]

    @property
    def root(self) -> Path:
        """The directory that holds the outermost package."""
        return self.path.parents[self.name.count(".")]


def module_file(name: str) -> ModuleFile:
    """Raises ConfigurationError unless it is a module that can be read."""
    parts = name.split(".")
    if not all(parts) or os.sep in name or not name.isprintable() or parts[0] == _MAIN:
        raise ConfigurationError(f"{name!r} is no module's name; {_advice(name, '')}")
    importlib.invalidate_caches()  # it may have been written just now
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
    path = specs[-1].origin
    if not specs[-1].has_location or path is None or _is_compiled(specs[-1]):
        raise ConfigurationError(
            f"the module {name!r} is no Python source, and cannot be run; give a script's"
        )
    for spec in specs:
        _require_readable(name, spec)
    return ModuleFile(name, Path(path))


def looks_here() -> bool:
    """Whether workers look for modules in the working directory first, as `python -m` does."""
    return sys.version_info < (3, 11) or not os.environ.get("PYTHONSAFEPATH")


# ---- inside


def _specs(name: str, parts: Sequence[str]) -> Iterator[ModuleSpec]:
    """Those of the packages, outermost first, and of the module."""
    spec = _outermost(parts[0])
    if spec is None:
        where = f"no {parts[0]!r} in {_here()}, nor among what is installed"
        raise _missing(name, f"there is {where}", parts[0])
    yield spec
    for depth, part in enumerate(parts[1:], 1):
        outer = ".".join(parts[:depth])
        if spec.submodule_search_locations is None:
            raise _missing(name, f"{outer!r} ({_place(spec)}) is no package")
        # By its last name alone: the full one makes Python look for packages among those imported.
        within = PathFinder.find_spec(part, _locations(spec))
        if within is None:
            _require_open(name, _locations(spec))
            raise _missing(name, f"the package {outer!r} ({_place(spec)}) has no {part!r}")
        spec = within
        yield spec


def _outermost(name: str) -> ModuleSpec | None:
    """As a worker will find it, whose path has no directory of the command `elastic`."""
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


def _is_compiled(spec: ModuleSpec) -> bool:
    return isinstance(spec.loader, ExtensionFileLoader)


def _place(spec: ModuleSpec) -> str:
    """For people."""
    return ", ".join(_locations(spec)) or spec.origin or "?"


def _require_readable(name: str, spec: ModuleSpec) -> None:
    read = getattr(spec.loader, "get_data", None)  # also of an archive
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
    """What lies in a directory that cannot be looked into is no package to Python, and has no
    modules."""
    for directory in directories:
        try:
            with os.scandir(directory):
                os.stat(os.path.join(directory, "."))
        except NotADirectoryError:  # an archive
            continue
        except OSError as error:
            raise ConfigurationError(
                f"the module {name!r} cannot be looked for: {directory}: {error.strerror}; let "
                "this user read the directory"
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
        return f"PYTHONSAFEPATH is set: give the directory that holds {package!r} in PYTHONPATH"
    if package:
        return (
            f"start elastic in the directory that holds {package!r}, or give that one in PYTHONPATH"
        )
    return "give a name as python -m takes it: elastic run [options] -m PACKAGE.MODULE [arguments]"


def _here() -> str:
    return os.getcwd() if looks_here() else "PYTHONPATH"
