"""Where checkpoints are kept: the operations that a local path and an fsspec URL both offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.local_directory import LocalDirectory
from elastic.checkpoint.remote_directory import RemoteDirectory
from elastic.errors import ConfigurationError


class CheckpointDirectory(Protocol):
    """A root under which files are written whole or not at all.

    Paths are relative to the root, with "/" between their parts.
    """

    @property
    def url(self) -> str:
        """The root as the user may write it, for messages."""
        ...

    def probe(self) -> None:
        """Create the root and prove that it can be written to.

        Raises ConfigurationError naming the path, the reason and what to do, and TransientError
        where the storage is full or does not answer.
        """
        ...

    def write(
        self, relative: str, data: bytes | Iterable[memoryview], *, replace: bool = True
    ) -> FileDigest:
        """Write a file that becomes visible only when it is complete, replacing an older one.

        replace=False: raises FileExistsError if there is one, also one that somebody else has
        written meanwhile, as far as the storage can tell.
        Raises CheckpointWriteError naming path and reason; nothing partial is left behind.
        """
        ...

    def read(self, relative: str) -> bytes:
        """Return a file's content.

        Raises FileNotFoundError if there is none, CheckpointDamaged if the medium cannot read
        it, TransientError if the storage cannot be reached.
        """
        ...

    def chunks(self, relative: str) -> Iterator[bytes]:
        """Yield a file's content piece by piece; raises as `read` does."""
        ...

    def size_bytes(self, relative: str) -> int | None:
        """Return a file's length, None if there is no such file; TransientError as `read`."""
        ...

    def list(self, relative: str = "") -> list[str]:
        """Return the names under the root or a directory in it, sorted; none if it is absent."""
        ...

    def remove(self, relative: str) -> None:
        """Remove a file; absent is fine. Raises CheckpointWriteError."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove a directory under the root, its manifest first; absent is fine.

        An interrupted removal therefore never leaves a damaged checkpoint that counts as one.
        Raises CheckpointWriteError.
        """
        ...


def open_directory(url: str) -> CheckpointDirectory:
    """Return the directory behind a local path or an fsspec URL, touching nothing yet.

    Raises ConfigurationError for an unknown kind of URL or one whose package is not installed.
    """
    if not url:
        raise ConfigurationError("the checkpoint directory is empty: give a path or a URL")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalDirectory(Path(url).expanduser().absolute())
    if scheme in ("file", "local"):
        return LocalDirectory(Path(rest).expanduser().absolute())
    return RemoteDirectory.open(url)
