"""How a script is to be started: of which kind it is, with which environment, logged where."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.core.legible import is_text
from elastic.errors import ConfigurationError, refusal_of
from elastic.runtime.log_retention import make_directory
from elastic.runtime.network import interface_of
from elastic.runtime.service_notice import NOTICE_VARIABLES
from elastic.settings.fields import options_of
from elastic.settings.node import NodeSettings
from elastic.settings.shared import Launch

_PACKAGE = "elastic"


def is_classic(script: Path, launch: Launch) -> bool:
    """Was it written for torchrun? Unless told, it was if neither it nor any module beside it that
    it imports, in turn, imports elastic. One that is no Python is left to say so itself, once."""
    if launch is not Launch.AUTO:
        return launch is Launch.TORCHRUN
    directory = script.resolve().parent
    waiting, seen = [script], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            if path is script:
                return False
            continue
        for level, name in _imported(tree):
            if level == 0 and name.partition(".")[0] == _PACKAGE:
                return False
            waiting += _beside(path.parents[level - 1] if level else directory, name)
    return True


def require_command(argv: Sequence[str]) -> None:
    """Raises ConfigurationError unless it is a file and arguments that workers can be told of."""
    try:
        os.getcwd()
    except OSError as error:  # in which torch cannot be imported
        raise ConfigurationError(
            f"the current directory is gone ({error.strerror}); change to another one"
        ) from error
    script = Path(argv[0])
    try:
        found = script.is_file()
        what = "is a directory" if script.is_dir() else "does not exist"
    except OSError as error:
        found, what = False, f"cannot be looked at ({error.strerror})"
    if not found:
        raise ConfigurationError(
            f"the script {str(script)!r} {what}; give the path of a Python file: "
            "elastic run [options] SCRIPT [arguments]"
        )
    for argument in argv:
        if not is_text(argument):
            raise ConfigurationError(
                f"the argument {argument!r} is not UTF-8, and the workers are told of it in UTF-8; "
                "rename the file, or give the script what it needs in a file"
            )


def log_directory(job: str, parent: Path | None) -> Path:
    """A new one for this run. Raises ConfigurationError, and TransientError where the disk is
    full."""
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
    """Where logs go unless told. Raises ConfigurationError."""
    try:
        return _state_home() / "elastic" / "logs"
    except RuntimeError as error:  # no HOME, and a user id without a name
        raise ConfigurationError(
            f"there is no home directory to keep logs in ({error}); choose one with --log-dir, or "
            "set HOME"
        ) from error


def worker_environment(workers: int, host: str, *, classic: bool) -> dict[str, str]:
    """This process's but its secrets, and what several workers on a machine need besides, who are
    reached at `host`."""
    secrets = {option.variable for option in options_of(NodeSettings) if option.secret}
    withheld = {*secrets, *NOTICE_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in withheld}
    for name, wish in {"GRPC_VERBOSITY": "NONE", "GRPC_DNS_RESOLVER": "native"}.items():
        if environment.get(name) == wish:  # our own, see main.py
            del environment[name]
    # Several workers must not each take every core. torchrun gives each one, if there are several.
    threads = 1 if classic else max(1, (os.cpu_count() or 1) // workers)
    if not classic or workers > 1:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if not classic:
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # broken sockets are no news here
    # torch asks for the names of its peers when it first connects; a name server that has gone
    # with the rest of the network must not hold up the group that is formed without them.
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    if (interface := interface_of(host)) is not None:  # gloo would look for the host's own name
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


# ---- inside


def _state_home() -> Path:
    """XDG base directory specification: data that should persist but is no configuration."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Leading dots and the dotted names that follow them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            yield from ((node.level, module + alias.name) for alias in node.names)


def _beside(directory: Path, name: str) -> Iterator[Path]:
    """Where Python, which looks beside the script first, would find the module and its parents."""
    path = directory
    for part in name.split("."):
        path = path / part
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file
