"""What doctors of two nodes say to each other: JSON lines over TCP, or over the job's TLS."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.core.legible import is_text
from elastic.rpc.identity import job_identity
from elastic.settings.tls_files import TlsFiles
from elastic.timeouts import timeout

_FORMAT = 1
_MOST_LINE = 2**14
_MOST_AT_ONCE = 1024
"""Connections: a few from each of the nodes of a large job."""
_PATIENCE_S = 60.0
"""With one that is connected and says nothing."""
_MOST_NAME = 300
_HANDSHAKE_S = 5.0


class NotADoctor(Exception):
    """Something else answers, or a doctor of another job; the text says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """What one doctor tells another of its node. Stages only grow."""

    identity: str
    """Drawn by lot: tells a node from itself and others."""
    node: str
    job: str
    elastic: str
    torch: str
    worker_port: int
    store_port: int
    stage: int
    marker: str = ""
    """The name of a file in its checkpoint directory; empty: it has none."""
    met: tuple[str, ...] = ()
    """The identities of the nodes that it reaches, its own too, sorted; once `stage` is above 0."""
    unix_s: float = 0.0
    """Its wall clock as it said so."""


def encode(word: Word) -> bytes:
    """A line."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(word)}).encode() + b"\n"


def decode(line: bytes) -> Word:
    """Raises NotADoctor for what cannot be one's word."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise NotADoctor("something else than `elastic doctor` answers") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
        raise NotADoctor("`elastic doctor` of another version answers")
    known = {one.name: one for one in dataclasses.fields(Word)}
    given = {name: value for name, value in fields.items() if name in known}
    try:
        given["met"] = tuple(given["met"])
        word = Word(**given)
    except (KeyError, TypeError):
        raise NotADoctor("`elastic doctor` of another version answers") from None
    if not _is_sound(word):
        raise NotADoctor("what answers says nothing that makes sense")
    return word


def _is_sound(word: Word) -> bool:
    texts = (word.identity, word.node, word.job, word.elastic, word.torch, word.marker, *word.met)
    ports, whole = (word.worker_port, word.store_port), (word.stage,)
    return (
        all(isinstance(one, str) and is_text(one) and len(one) <= _MOST_NAME for one in texts)
        and all(type(one) is int and 0 <= one <= 65535 for one in (*ports, *whole))
        and isinstance(word.unix_s, (int, float))
        and "/" not in word.marker
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """The two contexts of the job's TLS, and the name that both ends ask for."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    name: str

    @classmethod
    def of(cls, files: TlsFiles, job: str) -> Protection:
        """From files that have been found good."""
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.check_hostname = False  # names of jobs, and not of hosts, are in it
            assert files.certificate is not None
            context.load_cert_chain(files.certificate, files.key)
            context.load_verify_locations(cafile=files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            contexts.append(context)
        return cls(server=contexts[0], client=contexts[1], name=job_identity(job))

    def admits(self, writer: asyncio.StreamWriter) -> bool:
        """Whether the other end has shown a certificate of the job."""
        shown: Any = writer.get_extra_info("peercert") or {}
        return ("DNS", self.name) in shown.get("subjectAltName", ())


async def serve(
    listener: socket.socket, word: Callable[[], Word], protection: Protection | None
) -> Callable[[], None]:
    """Answers each line with the word of that moment, until what it returns is called."""
    callers: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.add(writer)
        try:
            if len(callers) > _MOST_AT_ONCE or (protection and not protection.admits(writer)):
                return
            while True:
                async with timeout(_PATIENCE_S):
                    if not await reader.readline():
                        return
                    writer.write(encode(word()))
                    await writer.drain()
        except (OSError, ValueError, asyncio.TimeoutError):  # a line that is too long: ValueError
            return
        except asyncio.CancelledError:
            return  # the loop ends, and nobody asks for this task
        finally:
            callers.discard(writer)
            writer.close()

    server = await asyncio.start_server(
        answer,
        sock=listener,
        limit=_MOST_LINE,
        ssl=protection.server if protection else None,
        ssl_handshake_timeout=_HANDSHAKE_S if protection else None,
    )

    def close() -> None:
        server.close()
        for caller in [*callers]:
            caller.close()

    return close


class Line:
    """A connection to another doctor."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int, protection: Protection | None) -> Line:
        """Raises OSError, of which ssl.SSLError is one, and NotADoctor."""
        reader, writer = await asyncio.open_connection(
            host,
            port,
            limit=_MOST_LINE,
            ssl=protection.client if protection else None,
            ssl_handshake_timeout=_HANDSHAKE_S if protection else None,
        )
        if protection and not protection.admits(writer):
            writer.close()
            raise NotADoctor(f"its certificate does not name {protection.name}")
        return cls(reader, writer)

    @property
    def own_address(self) -> str:
        """This node's, on the way to the other one."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def ask(self) -> Word:
        """Raises OSError and NotADoctor."""
        self._writer.write(b"\n")
        await self._writer.drain()
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise NotADoctor("something else than `elastic doctor` answers") from error
        if not line:
            raise NotADoctor(
                "it closes the connection at once: another program, or with TLS where the other "
                "has none, or with a certificate of another job or authority"
            )
        return decode(line)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
