"""What an agent is recognised by when it is started again in the same directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from elastic.errors import ConfigurationError

_FILE = "start-token"
_STARTS_FILE = "starts"
_BYTES = 16


def start_token(directory: Path) -> str:
    """The one kept in `directory`, made at the first start; nobody else may read it.

    Raises ConfigurationError if it can be neither read nor written.
    """
    path = directory / _FILE
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):
            token = path.read_text(encoding="ascii").strip()
            if len(bytes.fromhex(token)) == _BYTES:
                return token
        return _make(path)
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep the agent's token in {path}: {error.strerror}; "
            "give the agent a directory of its own that it may write"
        ) from error


def next_start(directory: Path) -> int:
    """How many agents have been started in `directory`, this one included; a much larger number
    where that cannot be read: workers of an earlier one may live, and names must not come again.

    Raises ConfigurationError if it cannot be kept.
    """
    path = directory / _STARTS_FILE
    try:
        before = int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        before = 0
    except (OSError, ValueError):
        before = int(time.time())
    try:
        written = path.with_name(f"{_STARTS_FILE}.{os.getpid()}")
        written.write_text(str(before + 1), encoding="ascii")
        written.replace(path)  # killed in the middle it must not begin anew: names would come again
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep the count of starts in {path}: {error.strerror}; "
            "give the agent a directory of its own that it may write"
        ) from error
    return before + 1


def _make(path: Path) -> str:
    token = secrets.token_hex(_BYTES)
    written = path.with_name(f"{_FILE}.{os.getpid()}")
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    written.replace(path)
    return token
