"""Length-prefixed protobuf messages on a stream socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from elastic.errors import ElasticError

MAX_FRAME_BYTES = 32 * 2**20
"""Less than the limit of a message to the coordinator, so that agents can pass messages on."""
_LENGTH = struct.Struct("!I")

M = TypeVar("M", bound=Message)


class BadFrame(ElasticError):
    """The peer does not speak this protocol; close the connection."""


def encode(message: Message) -> bytes:
    """The message with its length in front; raises BadFrame if it is too long."""
    payload = message.SerializeToString()
    if len(payload) > MAX_FRAME_BYTES:
        raise BadFrame(f"message of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Collects bytes as they arrive and hands out whole messages."""

    def __init__(self, kind: type[Message]) -> None:
        self._kind = kind
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add bytes; yield the messages that are complete. Raises BadFrame."""
        self._buffer += data
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        _check_length(length, MAX_FRAME_BYTES)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return _parse(self._kind, payload)


async def read_message(
    reader: asyncio.StreamReader, kind: type[M], *, most_bytes: int | None = None
) -> M | None:
    """The next message, or None at the end of the stream. Raises BadFrame.

    most_bytes: the message's limit; None: MAX_FRAME_BYTES.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        _check_length(length, MAX_FRAME_BYTES if most_bytes is None else most_bytes)
        return _parse(kind, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _check_length(length: int, most_bytes: int) -> None:
    if length > most_bytes:
        raise BadFrame(f"frame of {length} bytes announced, at most {most_bytes} allowed")


def _parse(kind: type[M], payload: bytes) -> M:
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise BadFrame(f"not a {kind.DESCRIPTOR.name}: {error}") from error
