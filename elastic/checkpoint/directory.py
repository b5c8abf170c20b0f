"""Stores the files of checkpoints on a local or mounted file system, or behind an fsspec URL.

On a local or mounted file system a file is durable before it becomes visible. An fsspec URL may
name an object store or any file system that fsspec knows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

from elastic.checkpoint.digest import CHUNK_BYTES, Digester, FileDigest, in_chunks
from elastic.checkpoint.layout import MANIFEST
from elastic.errors import (
    CheckpointDamaged,
    CheckpointWriteError,
    ConfigurationError,
    ElasticError,
    TransientError,
    refusal_of,
)
from elastic.settings.masking import masked_url


class CheckpointDirectory(Protocol):
    """A root under which files are written whole or not at all.

    Paths are relative to the root, with "/" between their parts.
    """

    @property
    def url(self) -> str:
        """The root for messages, as a path or a URL without its secrets."""
        ...

    def probe(self) -> None:
        """Create the root and check that it is writable.

        Raises ConfigurationError, which names the path, the reason and what to do, and
        TransientError if the storage is full or does not answer.
        """
        ...

    def write(
        self, relative: str, data: bytes | Iterable[memoryview], *, replace: bool = True
    ) -> FileDigest:
        """Write a file that becomes visible only when it is complete, and replaces an older one.

        With replace=False this raises FileExistsError if the file exists, also if another process
        has written it meanwhile, as far as the storage can tell.
        Raises CheckpointWriteError, which names path and reason; no partial file is left behind.
        """
        ...

    def read(self, relative: str) -> bytes:
        """Return a file's content.

        Raises FileNotFoundError if there is no such file, CheckpointDamaged if the medium cannot
        read it, and TransientError if the storage cannot be reached.
        """
        ...

    def chunks(self, relative: str) -> Iterator[bytes]:
        """Yield a file's content piece by piece; raises as `read` does."""
        ...

    def size_bytes(self, relative: str) -> int | None:
        """Return a file's length, None if there is no such file.

        Raises CheckpointDamaged and TransientError, as `read` does.
        """
        ...

    def list(self, relative: str = "") -> list[str]:
        """Return the sorted names in the root or a directory below; empty if it is absent.

        Raises TransientError, and ConfigurationError if the path is wrong.
        """
        ...

    def remove(self, relative: str) -> None:
        """Remove a file if it exists. Raises CheckpointWriteError."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove a directory under the root if it exists, its manifest first.

        So an interrupted removal never leaves a damaged checkpoint that counts as committed.
        Raises CheckpointWriteError.
        """
        ...


def open_directory(url: str) -> CheckpointDirectory:
    """Return the directory at a local path or an fsspec URL without accessing the storage.

    Raises ConfigurationError for an unknown URL scheme or one whose package is not installed.
    """
    if not url:
        raise ConfigurationError("the checkpoint directory is empty: give a path or a URL")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalDirectory(Path(url).expanduser().absolute())
    if scheme in ("file", "local"):
        return LocalDirectory(Path(rest).expanduser().absolute())
    return RemoteDirectory.open(url)


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# The errors of opening a path that does not exist, or that lies below a file.
_ABSENT = (FileNotFoundError, NotADirectoryError)
# Those of a path that a user must correct.
_WRONG_PATHS = (errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


class LocalDirectory:
    """A `CheckpointDirectory` on a path: temporary name, fsync, rename, fsync of the directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def probe(self) -> None:
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
        path = self._root / relative
        # The name is unique: a writer that was wrongly taken for dead may write the same share.
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        digester = Digester()
        try:
            _make_directory(path.parent)
            _write_synced(partial, in_chunks(data), digester)
            if replace:
                os.replace(partial, path)
            else:
                _move_without_replacing(partial, path)
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
        with _reading(self._root / relative) as path:
            return path.read_bytes()

    def chunks(self, relative: str) -> Iterator[bytes]:
        with _reading(self._root / relative) as path, path.open("rb", buffering=0) as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def size_bytes(self, relative: str) -> int | None:
        """Return None also for what is not a regular file: reading a pipe may never end."""
        try:
            with _reading(self._root / relative) as path:
                found = path.stat()
                return found.st_size if stat.S_ISREG(found.st_mode) else None
        except _ABSENT:
            return None

    def list(self, relative: str = "") -> list[str]:
        path = self._root / relative
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in _WRONG_PATHS:
                raise ConfigurationError(
                    f"the checkpoint directory {path} cannot be listed: "
                    f"{_reason(error)}; {_advice(error)}"
                ) from error
            raise TransientError(f"listing {path} failed: {_reason(error)}") from error

    def remove(self, relative: str) -> None:
        """Unlink the file. The removal is not synced: a crash may bring the file back."""
        path = self._root / relative
        try:
            _unlink_if_there(path)
        except NotADirectoryError:
            return
        except OSError as error:
            raise CheckpointWriteError(f"removing {path} failed: {_reason(error)}") from error

    def remove_tree(self, name: str) -> None:
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
    """Create missing directories and sync each new entry: a crash must not undo the save."""
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


def _move_without_replacing(partial: Path, path: Path) -> None:
    """Move `partial` to `path`. Raises FileExistsError if `path` exists."""
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
    """Remove a file and ignore errors: the caller reports the error that led to the clean-up."""
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
        existing = next(parent for parent in path.parents if parent.exists())
        free = f"{shutil.disk_usage(existing).free} bytes free"
    except OSError as unknown:
        free = f"free space unknown: {_reason(unknown)}"
    return f"writing {path} failed: {_reason(error)} ({free})"


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
            return "fix that or choose another one"


class RemoteDirectory:
    """A `CheckpointDirectory` behind fsspec: writes under a temporary name, then moves.

    If the storage cannot rename, a move costs one copy inside it. Writing in place could harm a
    complete file: object stores publish the part of an upload that breaks off.
    """

    def __init__(self, url: str, file_system: Any, root: str) -> None:
        self._url = masked_url(url)  # only for messages
        self._fs = file_system
        self._root = root.rstrip("/")

    @classmethod
    def open(cls, url: str) -> RemoteDirectory:
        try:
            file_system, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigurationError(
                f"the checkpoint directory {masked_url(url)} needs a package that is not "
                f"installed: {error} (`pip install 'elastic[s3]'` for s3://)"
            ) from error
        except Exception as error:
            raise ConfigurationError(
                f"the checkpoint directory {masked_url(url)} cannot be opened: {error}; "
                "give a local path or a URL that fsspec knows, such as s3://bucket/path"
            ) from error
        return cls(url.rstrip("/"), file_system, root)

    @property
    def url(self) -> str:
        return self._url

    def probe(self) -> None:
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.write(name, b"probe")
            self._fs.rm_file(self._path(name))
        except Exception as error:
            reason = error.__cause__ or error
            raise refusal_of(
                f"the checkpoint directory {self._url} cannot be written to: {_reason(reason)}; "
                "check that it exists and that the credentials may write, or choose another one",
                reason,
            ) from error

    def write(
        self, relative: str, data: bytes | Iterable[memoryview], *, replace: bool = True
    ) -> FileDigest:
        """With replace=False, a file that appears between the check and the move is replaced."""
        parent, _, name = self._path(relative).rpartition("/")
        partial = f"{parent}/.{name}.{uuid.uuid4().hex}.partial"
        digester = Digester()
        try:
            with self._storing(relative):
                self._fs.makedirs(parent, exist_ok=True)
                self._upload(partial, in_chunks(data), digester)
                if not replace and self.size_bytes(relative) is not None:
                    raise FileExistsError(f"{self._url}/{relative}")
                self._fs.mv(partial, f"{parent}/{name}")
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(partial)
            raise
        finally:
            self._fs.invalidate_cache()
        return digester.result(name)

    def _upload(self, path: str, pieces: Iterable[memoryview], digester: Digester) -> None:
        with self._fs.open(path, "wb") as file:
            for piece in pieces:
                digester.update(piece)
                file.write(piece)

    def read(self, relative: str) -> bytes:
        with self._reading(relative) as path:
            return bytes(self._fs.cat_file(path))

    def chunks(self, relative: str) -> Iterator[bytes]:
        with self._reading(relative) as path, self._fs.open(path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def size_bytes(self, relative: str) -> int | None:
        try:
            with self._reading(relative) as path:
                return int(self._fs.info(path)["size"])
        except FileNotFoundError:
            return None

    def list(self, relative: str = "") -> list[str]:
        try:
            with self._reading(relative) as path:
                found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in found)

    def remove(self, relative: str) -> None:
        with self._storing(relative, "removing"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(relative))
        self._fs.invalidate_cache()

    def remove_tree(self, name: str) -> None:
        path = self._path(name)
        with self._storing(name, "removing"):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{path}/{MANIFEST}")
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)
        self._fs.invalidate_cache()

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}".rstrip("/")

    @contextlib.contextmanager
    def _reading(self, relative: str) -> Iterator[str]:
        # Other processes write here too: a cached listing would hide their changes.
        self._fs.invalidate_cache()
        try:
            yield self._path(relative)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise TransientError(
                f"reading {self._url}/{relative} failed: {_reason(error)}"
            ) from error

    @contextlib.contextmanager
    def _storing(self, relative: str, verb: str = "writing") -> Iterator[None]:
        try:
            yield
        except (ElasticError, FileExistsError):
            raise
        except Exception as error:
            # Each kind of storage raises its own exceptions; few of them are OSError.
            raise CheckpointWriteError(
                f"{verb} {self._url}/{relative} failed: {_reason(error)}"
            ) from error


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
