"""Checkpoint files on a local or mounted file system, durable before they become visible."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from elastic.checkpoint.digest import CHUNK_BYTES, Digester, FileDigest, in_chunks
from elastic.checkpoint.layout import MANIFEST
from elastic.errors import (
    CheckpointDamaged,
    CheckpointWriteError,
    ConfigurationError,
    TransientError,
    refusal_of,
)

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# What opening a path below something that is not a directory, or not there, is answered with.
_ABSENT = (FileNotFoundError, NotADirectoryError)


class LocalDirectory:
    """A `CheckpointDirectory` on a path: temporary name, fsync, rename, fsync of the directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The absolute path."""
        return str(self._root)

    def probe(self) -> None:
        """Create the root, then write, sync and remove a small file in it."""
        try:
            _make_directory(self._root)
            probe = self._root / f".probe-{uuid.uuid4().hex}"
            try:
                _write_synced(probe, [memoryview(b"probe")], Digester())
            finally:
                _unlink(probe)
        except OSError as error:
            raise refusal_of(
                f"the checkpoint directory {self._root} cannot be written to: "
                f"{_reason(error)}; {_advice(error)}",
                error,
            ) from error

    def write(
        self, relative: str, data: bytes | Iterable[memoryview], *, replace: bool = True
    ) -> FileDigest:
        """Write under a temporary name in the same directory, then rename."""
        path = self._root / relative
        # Two writers of one share may meet when one was wrongly thought dead: the name is unique.
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        digester = Digester()
        try:
            _make_directory(path.parent)
            _write_synced(partial, in_chunks(data), digester)
            if replace:
                os.replace(partial, path)
            else:
                _move_to_nothing(partial, path)
            _sync_directory(path.parent)
        except FileExistsError:
            _unlink(partial)
            raise
        except OSError as error:
            _unlink(partial)
            raise CheckpointWriteError(_write_failure(path, error)) from error
        except BaseException:
            _unlink(partial)
            raise
        return digester.result(path.name)

    def read(self, relative: str) -> bytes:
        """Return the whole file."""
        with _reading(self._root / relative) as path:
            return path.read_bytes()

    def chunks(self, relative: str) -> Iterator[bytes]:
        """Yield the file in pieces of `CHUNK_BYTES`."""
        with _reading(self._root / relative) as path, path.open("rb", buffering=0) as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def size_bytes(self, relative: str) -> int | None:
        """Return the file's length, None if it is absent or no file, as a pipe without an end."""
        try:
            with _reading(self._root / relative) as path:
                found = path.stat()
                return found.st_size if stat.S_ISREG(found.st_mode) else None
        except _ABSENT:
            return None

    def list(self, relative: str = "") -> list[str]:
        """Return the directory's entries, sorted."""
        path = self._root / relative
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except (NotADirectoryError, PermissionError) as error:
            raise ConfigurationError(
                f"the checkpoint directory {path} cannot be listed: "
                f"{_reason(error)}; {_advice(error)}"
            ) from error
        except OSError as error:
            raise TransientError(f"listing {path} failed: {_reason(error)}") from error

    def remove(self, relative: str) -> None:
        """Unlink the file. Not made durable: a crash may bring it back."""
        path = self._root / relative
        try:
            _unlink_if_there(path)
        except NotADirectoryError:
            return
        except OSError as error:
            raise CheckpointWriteError(f"removing {path} failed: {_reason(error)}") from error

    def remove_tree(self, name: str) -> None:
        """Remove the manifest durably, then the rest."""
        tree = self._root / name
        try:
            if _unlink_if_there(tree / MANIFEST):
                _sync_directory(tree)
            _remove(tree)
            _sync_directory(self._root)
        except _ABSENT:
            return
        except OSError as error:
            raise CheckpointWriteError(f"removing {tree} failed: {_reason(error)}") from error


def _make_directory(path: Path) -> None:
    """Create missing directories; each new entry is synced, or a crash could undo the save."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    _sync_directory(path.parent)


def _write_synced(path: Path, pieces: Iterable[memoryview], digester: Digester) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            digester.update(piece)
            _write_all(handle, piece)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, piece: memoryview) -> None:
    written = 0
    while written < len(piece):
        written += os.write(handle, piece[written:])


def _move_to_nothing(partial: Path, path: Path) -> None:
    """Raises FileExistsError if there is something at `path`."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():  # the best that a file system without hard links can do
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.replace(partial, path)
    else:
        os.unlink(partial)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(tree: Path) -> None:
    for entry in sorted(tree.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            _remove(entry)
        else:
            _unlink_if_there(entry)  # another process may be pruning too
    os.rmdir(tree)


def _unlink_if_there(path: Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _unlink(path: Path) -> None:
    """Clean up; the error that made it necessary is the one worth reporting."""
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except _ABSENT as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise CheckpointDamaged(f"{path} cannot be read: {_reason(error)}") from error
        raise TransientError(f"reading {path} failed: {_reason(error)}") from error


def _write_failure(path: Path, error: OSError) -> str:
    try:
        free = f"{shutil.disk_usage(_existing(path.parent)).free} bytes free"
    except OSError as unknown:
        free = f"free space unknown: {_reason(unknown)}"
    return f"writing {path} failed: {_reason(error)} ({free})"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EACCES | errno.EPERM:
            return f"give user id {os.getuid()} permission to write there or choose another one"
        case errno.ENOTDIR | errno.EEXIST:
            return "a part of this path is a file: move it away or choose another one"
        case errno.EROFS:
            return "mount the file system writable or choose another one"
        case errno.ENOSPC | errno.EDQUOT:
            return "free some space or choose another one"
        case _:
            return "mend that or choose another one"
