"""Stores the files of checkpoints on a local or mounted file system, or behind an fsspec URL.

On a local or mounted file system a file is durable before it becomes visible. An fsspec URL may
name an object store or any file system that fsspec knows.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from elastic.checkpoint.digest import CHUNK_BYTES, Digester, FileDigest, in_chunks
from elastic.checkpoint.layout import MANIFEST, is_of_step, partial_name
from elastic.errors import (
    CheckpointDamaged,
    CheckpointWriteError,
    ConfigurationError,
    ElasticError,
    TransientError,
    refusal_of,
)
from elastic.settings.masking import masked_url

MOST_BYTES_OF_DOCUMENT = 64 << 20
"""More than any manifest or list of tensors needs: 100,000 tensors take some 20 MB."""


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

    def read(self, relative: str, most_bytes: int = MOST_BYTES_OF_DOCUMENT) -> bytes:
        """Return a file's content.

        Raises FileNotFoundError if there is no such file, CheckpointDamaged if the file is longer
        than `most_bytes`, is a link or a special file, or if the medium cannot read it, and
        TransientError if the storage cannot be reached, or stands still.
        """
        ...

    def chunks(self, relative: str) -> Iterator[memoryview]:
        """Yield a file's content, whatever its length, piece by piece; raises as `read` does.

        The memory of a piece may be that of the next one.
        """
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

    def remove_step(self, name: str) -> None:
        """Remove a step's files if they exist, its manifest first, and its directory if empty.

        So an interrupted removal never leaves a damaged checkpoint that counts as committed. Files
        of other programs stay. Raises CheckpointWriteError.
        """
        ...


_REQUEST_BYTES = 32 << 20  # of remote storage, which takes a while to answer each request
_PATIENCE_S, _SLOWEST_BYTES_PER_S = 120.0, 4 << 20
_T = TypeVar("_T")


def _in_time(what: str, operation: Callable[[], _T], most_bytes: int = 0) -> _T:
    """Return what the operation returns, which may read so many bytes.

    A network file system that stands still may never answer, and nothing can interrupt the call: it
    runs on a thread of its own, which is left behind then. Raises TransientError.
    """
    limit_s = min(_PATIENCE_S + most_bytes / _SLOWEST_BYTES_PER_S, threading.TIMEOUT_MAX)
    done, results, errors = threading.Event(), list[_T](), list[BaseException]()

    def run() -> None:
        try:
            results.append(operation())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="elastic-storage", daemon=True).start()
    if not done.wait(limit_s):
        raise TransientError(
            f"{what} has not ended within {limit_s:.0f} s: the storage stands still, or is slower "
            f"than {_SLOWEST_BYTES_PER_S >> 20} MiB/s"
        )
    if errors:
        raise errors[0]
    return results[0]


def _each_in_time(what: str, pieces: Iterator[memoryview], most_bytes: int) -> Iterator[memoryview]:
    """Yield the pieces, each of at most so many bytes. Raises TransientError, as `_in_time`."""
    while (piece := _in_time(what, lambda: next(pieces, None), most_bytes)) is not None:
        yield piece


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
_OPENS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _NeverUsed(OSError):
    """A link or a special file below the root, which nobody reads, enters or writes through."""

    def __init__(self, mode: int, name: str) -> None:
        what = (
            "it is a symbolic link, and links in a checkpoint directory are never followed; move "
            "what it points to here"
            if stat.S_ISLNK(mode)
            else "it is not a regular file"
        )
        super().__init__(errno.ELOOP, what, name)


class LocalDirectory:
    """A `CheckpointDirectory` on a path: temporary name, fsync, rename, fsync of the directory.

    The root may be reached through links. Below it, every directory and file is opened without
    following one, so nothing outside is read, written or removed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def probe(self) -> None:
        try:
            with self._inside(f".probe-{uuid.uuid4().hex}", create=True) as (parent, probe):
                try:
                    _write_synced(parent, probe, [memoryview(b"probe")], Digester())
                finally:
                    _unlink(parent, probe)
        except OSError as error:
            raise refusal_of(
                f"the checkpoint directory {self._root} cannot be written to: "
                f"{_reason(error)}; {_advice(error)}",
                error,
            ) from error

    def write(
        self, relative: str, data: bytes | Iterable[memoryview], *, replace: bool = True
    ) -> FileDigest:
        digester = Digester()
        try:
            with self._inside(relative, create=True) as (parent, name):
                # The name is unique: a writer that was wrongly taken for dead may write the same
                # share.
                partial = partial_name(name, uuid.uuid4().hex)
                try:
                    _write_synced(parent, partial, in_chunks(data), digester)
                    if replace:
                        os.replace(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
                    else:
                        _move_without_replacing(parent, partial, name)
                    os.fsync(parent)
                except BaseException:
                    _unlink(parent, partial)
                    raise
        except FileExistsError:
            raise
        except OSError as error:
            raise CheckpointWriteError(_write_failure(self._root / relative, error)) from error
        return digester.result(name)

    def read(self, relative: str, most_bytes: int = MOST_BYTES_OF_DOCUMENT) -> bytes:
        path = f"{self._root}/{relative}"

        def content() -> bytes:
            with self._reading(relative) as handle:
                require_size(path, os.fstat(handle).st_size, most_bytes)
                with open(handle, "rb", buffering=0, closefd=False) as file:
                    return file.readall()

        return _in_time(f"reading {path}", content, most_bytes)

    def chunks(self, relative: str) -> Iterator[memoryview]:
        def pieces() -> Iterator[memoryview]:
            room = memoryview(bytearray(CHUNK_BYTES))
            with self._reading(relative) as handle:
                while length := os.readv(handle, [room]):
                    yield room[:length]

        return _each_in_time(f"reading {self._root}/{relative}", pieces(), CHUNK_BYTES)

    def size_bytes(self, relative: str) -> int | None:
        def size() -> int:
            with self._reading(relative) as handle:
                return os.fstat(handle).st_size

        try:
            return _in_time(f"looking at {self._root}/{relative}", size)
        except FileNotFoundError:
            return None

    def list(self, relative: str = "") -> list[str]:
        path = self._root / relative

        def names() -> builtins.list[str]:
            with self._inside(f"{relative}/." if relative else ".") as (parent, _):
                return sorted(os.listdir(parent))

        try:
            return _in_time(f"listing {path}", names)
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
        try:
            with self._inside(relative) as (parent, name):
                _unlink_if_there(parent, name)
        except _ABSENT:
            return
        except OSError as error:
            path = self._root / relative
            raise CheckpointWriteError(f"removing {path} failed: {_reason(error)}") from error

    def remove_step(self, name: str) -> None:
        try:
            with self._inside(name) as (parent, name):
                _remove_step(parent, name)
                os.fsync(parent)
        except _ABSENT:
            return
        except OSError as error:
            path = self._root / name
            raise CheckpointWriteError(f"removing {path} failed: {_reason(error)}") from error

    @contextlib.contextmanager
    def _inside(self, relative: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory that `relative` is in, and its name there.

        create: make missing directories. Raises OSError.
        """
        *above, name = relative.split("/")
        if create:
            _make_directory(self._root)
        handle = os.open(self._root, _OPENS_DIRECTORY)
        try:
            for part in above:
                inner = _enter(handle, part, create=create)
                os.close(handle)
                handle = inner
            yield handle, name
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _reading(self, relative: str) -> Iterator[int]:
        """Yield a descriptor of a regular file. Raises as `read` does."""
        path = f"{self._root}/{relative}"
        try:
            with self._inside(relative) as (parent, name):
                # Opening some devices does harm, and opening a pipe may wait for ever.
                mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
                if not stat.S_ISREG(mode):
                    raise _NeverUsed(mode, name)
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                handle = os.open(name, flags, dir_fd=parent)
            try:
                mode = os.fstat(handle).st_mode
                if not stat.S_ISREG(mode):  # it was replaced meanwhile
                    raise _NeverUsed(mode, name)
                yield handle
            finally:
                os.close(handle)
        except _ABSENT as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        except OSError as error:
            if error.errno in (errno.EIO, errno.EISDIR) or isinstance(error, _NeverUsed):
                raise CheckpointDamaged(f"{path} cannot be read: {_reason(error)}") from error
            raise TransientError(f"reading {path} failed: {_reason(error)}") from error


def _enter(parent: int, name: str, *, create: bool = False) -> int:
    """Open a directory. Raises _NeverUsed for a link, and OSError."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
            os.fsync(parent)  # a crash must not undo the save
    try:
        return os.open(name, _OPENS_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise _NeverUsed(mode, name) from error
        raise


def _make_directory(path: Path) -> None:
    """Create missing directories and sync each new entry: a crash must not undo the save."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    handle = os.open(path.parent, _OPENS_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_synced(parent: int, name: str, pieces: Iterable[memoryview], digester: Digester) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(name, flags, 0o666, dir_fd=parent)
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


def _move_without_replacing(parent: int, partial: str, name: str) -> None:
    """Move `partial` to `name`. Raises FileExistsError if that exists."""
    try:
        os.link(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # The best that a file system without hard links can do.
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        os.replace(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
    else:
        os.unlink(partial, dir_fd=parent)


def _remove_step(parent: int, name: str) -> None:
    """Remove a step's own files, the manifest first, and its directory if nothing else is in it.

    A link is unlinked. Raises OSError.
    """
    try:
        step = _enter(parent, name)
    except _NeverUsed:
        _unlink_if_there(parent, name)
        return
    try:
        if _unlink_if_there(step, MANIFEST):
            os.fsync(step)
        for entry in sorted(os.listdir(step)):
            if is_of_step(entry):
                with contextlib.suppress(IsADirectoryError):  # not ours
                    _unlink_if_there(step, entry)  # another process may be pruning too
    finally:
        os.close(step)
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _unlink_if_there(parent: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    return True


def _unlink(parent: int, name: str) -> None:
    """Remove a file and ignore errors: the caller reports the error that led to the clean-up."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=parent)


def require_size(where: str, size_bytes: int, most_bytes: int) -> None:
    """Raise CheckpointDamaged for a file that is longer than anybody has written it."""
    if size_bytes > most_bytes:
        raise CheckpointDamaged(
            f"{where} has {size_bytes} bytes where at most {most_bytes} are expected"
        )


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
                f"installed: {error} (`pip install 'elastic-ddp[s3]'` for s3://)"
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
        partial = f"{parent}/{partial_name(name, uuid.uuid4().hex)}"
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

    def read(self, relative: str, most_bytes: int = MOST_BYTES_OF_DOCUMENT) -> bytes:
        def content() -> bytes:
            with self._reading(relative) as path:
                size_bytes = int(self._fs.info(path)["size"])
            require_size(f"{self._url}/{relative}", size_bytes, most_bytes)
            with self._reading(relative) as path:
                return bytes(self._fs.cat_file(path))

        return _in_time(f"reading {self._url}/{relative}", content, most_bytes)

    def chunks(self, relative: str) -> Iterator[memoryview]:
        def pieces() -> Iterator[memoryview]:
            with self._reading(relative) as path, self._fs.open(path, "rb") as file:
                while piece := file.read(_REQUEST_BYTES):
                    yield memoryview(piece)

        return _each_in_time(f"reading {self._url}/{relative}", pieces(), _REQUEST_BYTES)

    def size_bytes(self, relative: str) -> int | None:
        def size() -> int:
            with self._reading(relative) as path:
                return int(self._fs.info(path)["size"])

        try:
            return _in_time(f"looking at {self._url}/{relative}", size)
        except FileNotFoundError:
            return None

    def list(self, relative: str = "") -> list[str]:
        def entries() -> builtins.list[Any]:
            with self._reading(relative) as path:
                found: builtins.list[Any] = self._fs.ls(path, detail=False)
                return found

        try:
            found = _in_time(f"listing {self._url}/{relative}", entries)
        except FileNotFoundError:
            return []
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in found)

    def remove(self, relative: str) -> None:
        with self._storing(relative, "removing"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(relative))
        self._fs.invalidate_cache()

    def remove_step(self, name: str) -> None:
        self.remove(f"{name}/{MANIFEST}")
        for entry in self.list(name):
            if is_of_step(entry):
                self.remove(f"{name}/{entry}")
        with contextlib.suppress(Exception):  # it is not empty, or storage has no directories
            self._fs.rmdir(self._path(name))
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
