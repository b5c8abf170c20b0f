"""Checkpoint files behind an fsspec URL, in an object store or on any file system it knows."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec

from elastic.checkpoint.digest import CHUNK_BYTES, Digester, FileDigest, in_chunks
from elastic.checkpoint.layout import MANIFEST
from elastic.errors import (
    CheckpointWriteError,
    ConfigurationError,
    ElasticError,
    TransientError,
    refusal_of,
)
from elastic.settings.masking import masked_url


class RemoteDirectory:
    """A `CheckpointDirectory` behind fsspec: temporary name, then move.

    Where the storage cannot rename, a move is one copy inside it. That is the price for never
    harming a complete file: stores finish an upload that is broken off by publishing the part.
    """

    def __init__(self, url: str, file_system: Any, root: str) -> None:
        self._url = masked_url(url)  # for messages alone
        self._fs = file_system
        self._root = root.rstrip("/")

    @classmethod
    def open(cls, url: str) -> RemoteDirectory:
        """Return the directory behind an fsspec URL; raises ConfigurationError."""
        try:
            file_system, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigurationError(
                f"the checkpoint directory {masked_url(url)} needs a package that is not "
                f"installed: {error}"
            ) from error
        except Exception as error:
            raise ConfigurationError(
                f"the checkpoint directory {masked_url(url)} cannot be opened: {error}; "
                "give a local path or a URL that fsspec knows, such as s3://bucket/path"
            ) from error
        return cls(url.rstrip("/"), file_system, root)

    @property
    def url(self) -> str:
        """The URL that was opened."""
        return self._url

    def probe(self) -> None:
        """Create the root, then write and remove a small file in it."""
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
        """Write under a temporary name beside the final one, then move. What comes to be between
        the last look and the move is replaced."""
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
        """Return the whole object."""
        with self._reading(relative) as path:
            return bytes(self._fs.cat_file(path))

    def chunks(self, relative: str) -> Iterator[bytes]:
        """Yield the object in pieces of `CHUNK_BYTES`."""
        with self._reading(relative) as path, self._fs.open(path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def size_bytes(self, relative: str) -> int | None:
        """Return the object's length, None if it is absent."""
        try:
            with self._reading(relative) as path:
                return int(self._fs.info(path)["size"])
        except FileNotFoundError:
            return None

    def list(self, relative: str = "") -> list[str]:
        """Return the names directly under the root or a directory in it, sorted."""
        try:
            with self._reading(relative) as path:
                found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in found)

    def remove(self, relative: str) -> None:
        """Remove the object."""
        with self._storing(relative, "removing"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(relative))
        self._fs.invalidate_cache()

    def remove_tree(self, name: str) -> None:
        """Remove the manifest, then the rest."""
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
        # Other processes write here too: a remembered listing would hide what they did.
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
            # Each kind of storage has its own exceptions, few of them OSError.
            raise CheckpointWriteError(
                f"{verb} {self._url}/{relative} failed: {_reason(error)}"
            ) from error


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
