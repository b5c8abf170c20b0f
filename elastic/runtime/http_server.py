"""Serves HTTP on a thread with its own event loop, apart from the daemon's loop.

Everything that a stranger can make grow is bounded: connections, the time of each, the size of a
request. TLS uses the job's newest certificates, which each new connection looks up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import Report
from elastic.settings.tls_files import TlsFiles
from elastic.timeouts import timeout

MOST_CONNECTIONS = 100
MOST_STREAMS = 32
"""How many connections may be streams. A newer connection never replaces a stream."""
MOST_HEAD_BYTES = 16 * 1024
"""The largest request line and headers together."""
ANSWER_WITHIN_S = 10.0
"""Seconds without a completed answer or part of a stream, after which a connection is cut."""
_KEEP_ALIVE_S = 5
_END_WITHIN_S = 1.0
_FAREWELL_S = 0.3
_PAUSE_S = 0.5  # before the next try when no descriptor is left
_TOLD_EVERY_S = 10.0
_METHODS = ("GET", "HEAD")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a page gets to know about a request."""

    accept: str = ""
    name: str = ""
    """The last part of the path, for a page that serves a whole folder (`/folder/*`)."""
    host: str = ""
    """The name or address by which the client knows this server, without the port."""
    peer: tuple[str, ...] | None = None
    """The DNS names in the client's certificate, which the job's authority has signed. Empty: the
    client has shown none. None: plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A page's answer to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: AsyncGenerator[bytes, None] | None = None
    """A stream that follows `body` while the client stays. It must yield in `ANSWER_WITHIN_S`."""

    @classmethod
    def of(cls, status: int, text: str, **headers: str) -> Response:
        """Return an answer that is one line of text."""
        return cls(status=status, body=f"{text}\n".encode(), headers=headers)


Page = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpTls:
    """The certificate that the server shows, and the files it comes from."""

    files: TlsFiles
    newest: NewestCertificate


class HttpServer:
    """Serves `pages` at a listening socket. `run` occupies a thread; `close` ends it."""

    def __init__(
        self,
        listener: socket.socket,
        pages: Mapping[str, Page],
        *,
        report: Report,
        tls: HttpTls | None = None,
        farewell: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """pages: by path. report: called with a
        warning about a page that fails, on the server's thread. farewell: called before streams
        end, to send their last part. Raises ConfigurationError if the certificate is unusable."""
        self._farewell = farewell
        self._listener, self._pages, self._report = listener, pages, report
        self._context = _context(tls) if tls is not None else None
        self._connections: dict[socket.socket, tuple[asyncio.Task[None], _Connection]] = {}
        """The oldest connection comes first."""
        self._streams = 0
        self._state = ServerState()
        self._told_at = -_TOLD_EVERY_S
        self._config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            proxy_headers=False,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        )
        self._config.load()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # no warnings about bad requests
        self._loop = _new_loop()
        self._loop.set_exception_handler(_on_loop_error)
        self._ends = asyncio.Event()
        self._pause: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """Serve until `close` is called from another thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._listener.close()

    def close(self) -> None:
        """Make `run` return soon, whatever is under way."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ends.set)

    async def _serve(self) -> None:
        self._listen()
        await self._ends.wait()
        if self._streams and self._farewell is not None:
            with contextlib.suppress(Exception):  # its failure may be why the daemon ends
                async with timeout(_FAREWELL_S):
                    await self._farewell()
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        await _cancelled([task for task, _ in self._connections.values()])
        await asyncio.sleep(0.01)  # the loop releases aborted transports
        await _cancelled(list(self._state.tasks))
        if left := asyncio.all_tasks() - {asyncio.current_task()}:  # tasks they have cancelled
            await asyncio.wait(left, timeout=_END_WITHIN_S)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Attend the next connection. The loop calls this when there is one.

        A task that awaits `sock_accept` would lose an accepted connection if it is cancelled before
        it resumes.
        """
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the client has already gone
            return
        except OSError:  # no descriptor is left
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_PAUSE_S, self._listen)
            return
        connection.setblocking(False)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._cut_oldest()
        protocol = _Connection(
            config=self._config, server_state=self._state, app_state={}, _loop=self._loop
        )
        task = self._loop.create_task(self._attend(connection, protocol))
        self._connections[connection] = task, protocol
        task.add_done_callback(functools.partial(self._forget, connection))

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        del task
        self._connections.pop(connection, None)
        connection.close()  # a task that was cancelled before it began has no transport

    def _cut_oldest(self) -> None:
        """Make room: a probe must not wait for clients that only keep a connection open."""
        oldest = next(c for c, (_, protocol) in self._connections.items() if not protocol.streams)
        self._connections.pop(oldest)[0].cancel()

    async def _attend(self, connection: socket.socket, protocol: _Connection) -> None:
        """Serve a connection until it ends or makes no progress."""
        transport: asyncio.Transport | None = None
        try:
            unheard_ms = int(ANSWER_WITHIN_S * 1000)  # if the client has vanished
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=ANSWER_WITHIN_S if self._context else None,
            )
            await protocol.ends()
        except (OSError, asyncio.TimeoutError):
            pass  # a failed handshake is the client's problem
        finally:
            if transport is not None:
                transport.abort()

    async def _answer(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one request, as the ASGI application."""
        try:
            response = await self._respond(scope)
        except Exception as error:  # noqa: BLE001 - a page that fails is only reported
            self._tell(f"{scope['path']}: {type(error).__name__}: {error}")
            response = Response.of(500, "this page failed; the daemon's events say why")
        chunks = response.chunks
        if chunks is not None and self._streams >= MOST_STREAMS:
            message = f"too many streams ({MOST_STREAMS}); poll instead"
            response, chunks = Response.of(503, message, **{"retry-after": "30"}), None
        if chunks is None:
            await _send(response, send)
            return
        self._streams += 1
        try:
            await _send(response, send, more=True)
            if scope["method"] == "GET":
                await self._stream(scope, chunks, receive, send)
        finally:
            self._streams -= 1
        await send({"type": "http.response.body", "body": b""})

    async def _stream(
        self,
        scope: MutableMapping[str, Any],
        chunks: AsyncGenerator[bytes, None],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Send chunks until the client leaves; make one only after the last was taken."""
        connection: _Connection = scope["state"]["connection"]

        async def pump() -> None:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    connection.progressed()

        pumping = asyncio.ensure_future(pump())
        going = asyncio.ensure_future(_until_gone(receive))
        connection.streams = True
        try:
            await asyncio.wait({pumping, going}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.streams = False
            await _cancelled([pumping, going])
        if not pumping.cancelled() and (error := pumping.exception()) is not None:
            self._tell(f"{scope['path']}: {type(error).__name__}: {error}")

    def _tell(self, message: str) -> None:
        """Report a warning, at most one in `_TOLD_EVERY_S` seconds."""
        now = time.monotonic()
        if now - self._told_at >= _TOLD_EVERY_S:
            self._told_at = now
            self._report("warning", source="http", message=message)

    async def _respond(self, scope: MutableMapping[str, Any]) -> Response:
        if scope["method"] not in _METHODS:
            return Response.of(405, f"use {' or '.join(_METHODS)}", allow=", ".join(_METHODS))
        folder, _, name = scope["path"].rpartition("/")
        page = self._pages.get(scope["path"]) or self._pages.get(f"{folder}/*")
        if page is None:
            return Response.of(404, f"not found; pages: {', '.join(self._pages)}")
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        request = Request(
            name=name,
            accept=headers.get("accept", ""),
            host=_without_port(headers.get("host", "")),
            peer=scope["state"].get("peer"),
        )
        return await page(request)


async def _send(
    response: Response, send: Callable[[Any], Awaitable[None]], *, more: bool = False
) -> None:
    """Send a response. more: its body is only the beginning, so its length is unknown."""
    headers = {
        "content-type": response.content_type,
        **({} if more else {"content-length": str(len(response.body))}),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **response.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": response.status, "headers": encoded})
    await send({"type": "http.response.body", "body": response.body, "more_body": more})


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel tasks and wait for them, at most `_END_WITHIN_S` seconds."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_WITHIN_S)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop. Raises OSError.

    If the system refuses the loop its socket pair, the destructor of the half-made loop fails, and
    Python prints that to the console. So the destructor runs in here, while the hook is silenced.
    """
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        return asyncio.new_event_loop()
    except OSError as error:
        refused = error.errno, error.strerror
    finally:
        sys.unraisablehook = before
    raise OSError(*refused)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore OSError, which a client can cause on its connection."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


class _Connection(H11Protocol):
    """A connection that ends if no answer is completed for too long, for whatever reason."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._ended = asyncio.Event()
        self._answered = 0
        self.streams = False
        """A stream is under way."""
        self.app_state["connection"] = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secured is not None:
            self.app_state["peer"] = _names(secured)

    def data_received(self, data: bytes) -> None:
        # In pieces: h11 bounds only what it has not parsed yet, and `data` may be 256 KiB long.
        for begin in range(0, len(data), MOST_HEAD_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[begin : begin + MOST_HEAD_BYTES])

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ended.set()

    def progressed(self) -> None:
        """Note that the client has taken an answer or a part of a stream."""
        self._answered += 1

    def on_response_complete(self) -> None:
        self.progressed()
        super().on_response_complete()

    async def ends(self) -> None:
        """Return when the connection has ended, or should."""
        seen = -1
        while seen != self._answered:
            seen = self._answered
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(ANSWER_WITHIN_S):
                    await self._ended.wait()
                return


def _names(secured: ssl.SSLObject) -> tuple[str, ...]:
    shown: Mapping[str, Any] = secured.getpeercert() or {}
    return tuple(name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS")


def _context(tls: HttpTls) -> ssl.SSLContext:
    """Return a server's context that looks for newer certificates at each handshake."""
    used, context = tls.newest.get(), _plain_context(tls.files)
    current = context

    def newer(secured: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal used, current
        if (found := tls.newest.get()) is not used:
            with contextlib.suppress(OSError, ValueError):  # replaced again: next handshake
                current, used = _plain_context(tls.files), found
        secured.context = current

    context.sni_callback = newer
    return context


def _plain_context(files: TlsFiles) -> ssl.SSLContext:
    assert files.certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(cafile=files.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
