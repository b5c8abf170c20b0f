"""Identifies a stored file by its name, its length and its xxh3 digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

CHUNK_BYTES = 4 << 20  # large enough for full disk speed, small enough to stay in a core's cache


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """The length in bytes and the xxh3-128 digest (32 hexadecimal digits) of the file `name`."""

    name: str
    size_bytes: int
    xxh3_128: str


class Digester:
    """Computes the `FileDigest` of content that arrives piece by piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def update(self, piece: bytes | memoryview) -> None:
        self._hash.update(piece)
        self.size_bytes += len(piece)

    def result(self, name: str) -> FileDigest:
        return FileDigest(
            name=name, size_bytes=self.size_bytes, xxh3_128=str(self._hash.hexdigest())
        )


def digest_of(name: str, content: bytes) -> FileDigest:
    digester = Digester()
    digester.update(content)
    return digester.result(name)


def difference(expected: FileDigest, found: FileDigest) -> str | None:
    """Return a clause that says how the file differs from the recorded one; None if equal."""
    if found.size_bytes != expected.size_bytes:
        return f"it has {found.size_bytes} bytes instead of {expected.size_bytes}"
    if found.xxh3_128 != expected.xxh3_128:
        return f"its xxh3-128 digest is {found.xxh3_128} instead of {expected.xxh3_128}"
    return None


def in_chunks(data: bytes | Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the content as flat byte views of at most `CHUNK_BYTES`."""
    for view in (memoryview(data),) if isinstance(data, bytes) else data:
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]
