"""Bad and slow clients cost the HTTP server little and are cut; proper requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import http.client
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigurationError
from elastic.rpc.certificates import Role
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import Tls
from elastic.runtime import http_server
from elastic.runtime.http_server import HttpServer, HttpTls, Request, Response
from elastic.runtime.listening import address_of, listen_for_http
from tests.certificates import make_certificates, sign_for_job
from tests.fuzzed_documents import spliced
from tests.waiting import eventually

DEADLINE_S = 20.0
BODY = b"x" * 2_000_000


class Site:
    """A server on loopback, with its requests in `asked` and its reports in `told`."""

    def __init__(
        self, tls: HttpTls | None = None, kind: type[socket.socket] = socket.socket
    ) -> None:
        self.told: list[dict[str, Any]] = []
        self.asked: list[Request] = []
        listener = kind(fileno=asyncio.run(listen_for_http("127.0.0.1:0")).detach())
        listener.setblocking(False)
        self.port = int(address_of(listener).rpartition(":")[2])
        pages = {
            "/small": self._small,
            "/large": self._large,
            "/fails": self._fails,
            "/stream": self._stream,
        }
        self.chunk, self.pause_s, self.breaks = b"tick\n", 0.02, False
        self.stays_s = 0.0
        """Seconds that a stream takes to end."""
        self.streaming = 0
        self.server = HttpServer(listener, pages, report=self._report, tls=tls)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def _report(self, name: str, /, **fields: Any) -> None:
        self.told.append({"name": name, **fields})

    async def _small(self, request: Request) -> Response:
        self.asked.append(request)
        return Response.of(200, "small")

    async def _large(self, request: Request) -> Response:
        del request
        return Response(status=200, body=BODY)

    async def _fails(self, request: Request) -> Response:
        raise LookupError(f"no {request}")

    async def _stream(self, request: Request) -> Response:
        del request
        return Response(status=200, body=b"begin\n", chunks=self._ticks())

    async def _ticks(self) -> AsyncGenerator[bytes, None]:
        self.streaming += 1
        try:
            while not self.breaks:
                yield self.chunk
                await asyncio.sleep(self.pause_s)
            raise LookupError("no more")
        finally:
            await asyncio.sleep(self.stays_s)
            self.streaming -= 1

    def stream(self) -> socket.socket:
        """A connection on which the first part of a stream, or its refusal, has come."""
        connection = self.connect()
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while b"begin" not in received and b"others" not in received:
            data = connection.recv(65536)
            assert data, received
            received += data
        return connection

    def ask(self, path: str = "/small", method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def close(self) -> None:
        self.server.close()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def rest_of(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def test_only_known_pages_and_methods_are_answered(site: Site) -> None:
    assert site.ask() == (200, b"small\n")
    assert site.ask(method="HEAD") == (200, b"")
    assert site.ask("/small?name[]=x") == (200, b"small\n")
    assert site.ask("/large") == (200, BODY)
    for path in ("/", "/smaller", "/small/", "/small/../small", "/..%2f..%2fetc/passwd", "//small"):
        assert site.ask(path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE"):
        assert site.ask(method=method)[0] == 405, method


def test_a_failing_page_answers_500_and_is_reported_once(site: Site) -> None:
    status, body = site.ask("/fails")
    assert status == 500
    assert b"Lookup" not in body
    for _ in range(5):
        site.ask("/fails")
    assert len(site.told) == 1
    assert site.told[0]["name"] == "warning"
    assert "/fails: LookupError" in site.told[0]["message"]
    assert site.ask()[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", id="path"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", id="header"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", id="headers"),
        pytest.param(b"GET /small\x00 HTTP/1.1\r\nHost: x\r\n\r\n", id="zero"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 100, id="tls"),
        pytest.param(b"\xff" * 50_000, id="bytes"),
        pytest.param(b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", id="length"),
    ],
)
def test_garbage_is_refused_and_the_connection_ends(site: Site, sent: bytes) -> None:
    with site.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        received = rest_of(connection)
    assert not received or b" 400 " in received.splitlines()[0], received[:200]
    assert site.asked == []
    assert site.ask()[0] == 200
    assert site.told == []


def test_clients_that_take_too_long_are_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ANSWER_WITHIN_S", 0.3)
    with site.connect() as silent, site.connect() as slow, site.connect() as deaf:
        slow.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n")
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        stops_at = time.monotonic() + DEADLINE_S
        trickle = threading.Thread(target=drip, args=(slow, stops_at))
        trickle.start()
        assert rest_of(silent) == b""
        trickle.join(DEADLINE_S)
        assert not trickle.is_alive()
        assert time.monotonic() < stops_at, "cut while it was still sending"
        while True:  # a reset loses the rest that it has not read
            try:
                if not deaf.recv(65536):
                    break
            except ConnectionResetError:
                break
    assert site.ask()[0] == 200


def drip(connection: socket.socket, stops_at: float) -> None:
    """Send header lines that never end."""
    with contextlib.suppress(OSError):
        while time.monotonic() < stops_at:
            connection.sendall(b"X-A: b\r\n")
            time.sleep(0.02)


def test_thousands_of_connections_do_not_keep_others_out(site: Site) -> None:
    with contextlib.ExitStack() as kept:
        for n in range(10 * http_server.MOST_CONNECTIONS):
            kept.enter_context(contextlib.closing(site.connect()))
            if n % 250 == 249:
                assert site.ask()[0] == 200
                assert len(site.server._connections) <= http_server.MOST_CONNECTIONS
        assert site.ask()[0] == 200


def test_a_server_without_descriptors_accepts_again_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = [errno.EMFILE, errno.ENFILE]

    class Exhausted(socket.socket):
        def accept(self) -> Any:
            if refusals:
                raise OSError(refusals.pop(), "no descriptor is left")
            return super().accept()

    monkeypatch.setattr(http_server, "_PAUSE_S", 0.05)
    site = Site(kind=Exhausted)
    try:
        assert site.ask() == (200, b"small\n")
        assert not refusals
    finally:
        site.close()


@pytest.mark.long
def test_a_server_that_closes_while_it_accepts_leaves_no_connection_open() -> None:
    """pytest makes an error of the ResourceWarning that tells of one."""

    def connect(site: Site) -> None:
        with contextlib.suppress(OSError):
            while True:
                site.connect().close()

    for _ in range(10):
        site = Site()
        clients = [threading.Thread(target=connect, args=(site,)) for _ in range(2)]
        for client in clients:
            client.start()
        site.close()
        for client in clients:
            client.join()
        gc.collect()


def test_closing_does_not_wait_for_clients() -> None:
    site = Site()
    with site.connect() as silent, site.connect() as deaf:
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        site.ask()
        began_at = time.monotonic()
        site.close()
        assert time.monotonic() - began_at < DEADLINE_S / 2
        assert rest_of(silent) == b""


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.1:0", r"192\.0\.2\.1 is not an address of this machine"),
        ("nowhere.invalid:1", "the host does not resolve"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"HTTP at {address}.*{said}.*--http-address"):
        asyncio.run(listen_for_http(address))


def test_a_port_in_use_is_named(site: Site) -> None:
    with pytest.raises(ConfigurationError, match=f"port {site.port} is in use"):
        asyncio.run(listen_for_http(f"127.0.0.1:{site.port}"))


# ---- answers that do not end


def test_a_stream_lasts_as_long_as_its_client_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "ANSWER_WITHIN_S", 0.3)
    with contextlib.closing(site.stream()) as connection:
        received, ends_at = b"", time.monotonic() + 1.0
        while time.monotonic() < ends_at:
            data = connection.recv(65536)
            assert data, "parts come, so it is not cut"
            received += data
        assert received.count(b"tick") > 5
    eventually(lambda: not site.streaming, "nothing is made for who has gone")
    assert site.ask("/stream", method="HEAD") == (200, b"")
    assert site.told == []


def test_a_client_that_does_not_read_its_stream_is_cut(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "ANSWER_WITHIN_S", 0.3)
    site.chunk = b"x" * 1_000_000
    with contextlib.closing(site.stream()):
        eventually(lambda: not site.streaming, "its next part waits in vain")
    assert site.ask()[0] == 200


def test_streams_are_limited_and_not_cut_for_newer_connections(site: Site) -> None:
    with contextlib.ExitStack() as kept:
        for _ in range(http_server.MOST_STREAMS):
            kept.enter_context(contextlib.closing(site.stream()))
        status, body = site.ask("/stream")
        told = f"too many streams ({http_server.MOST_STREAMS}); poll instead\n".encode()
        assert (status, body) == (503, told)
        for _ in range(3 * http_server.MOST_CONNECTIONS):
            kept.enter_context(contextlib.closing(site.connect()))
        assert site.ask()[0] == 200
        eventually(lambda: site.streaming == http_server.MOST_STREAMS, "none was cut")
        assert len(site.server._connections) <= http_server.MOST_CONNECTIONS
    eventually(lambda: not site.streaming, "all have gone")
    with contextlib.closing(site.stream()):
        eventually(lambda: site.streaming == 1, "there is room again")


def test_a_stream_that_fails_ends_and_is_reported(site: Site) -> None:
    with contextlib.closing(site.stream()) as connection:
        site.breaks = True
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    assert "/stream: LookupError: no more" in site.told[0]["message"]
    assert site.ask()[0] == 200


@pytest.mark.parametrize("stays_s", [0.0, 0.2])
def test_closing_ends_streams(stays_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    site = Site()
    site.stays_s = stays_s
    with contextlib.closing(site.stream()) as connection:
        began_at = time.monotonic()
        site.close()
        assert time.monotonic() - began_at < DEADLINE_S / 2
        rest_of(connection)
    assert site.streaming == 0
    assert capfd.readouterr().err == ""


# ---- TLS


class Secured(Site):
    """A site with TLS and certificates of the job `digits`."""

    def __init__(self, files: Any) -> None:
        tls = Tls(job="digits", files=files)
        newest = NewestCertificate(tls, Role.SERVER, lambda _name, **_: None, coordinates=False)
        super().__init__(HttpTls(files=files, newest=newest))

    def peer(self, ca: Path, client: Any = None) -> tuple[tuple[str, ...] | None, bytes]:
        """The client's names as the page saw them, and the certificate that the server showed."""
        context = ssl.create_default_context(cafile=str(ca))
        context.check_hostname = False
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        with self.connect() as plain, context.wrap_socket(plain) as secured:
            secured.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            rest_of(secured)
            return self.asked[-1].peer, secured.getpeercert(binary_form=True) or b""


def test_a_client_certificate_is_optional_and_the_servers_newest_is_shown(tmp_path: Path) -> None:
    made, other = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    files, foreign = sign_for_job(made, "digits"), sign_for_job(other, "digits")
    ca, site = made.ca, Secured(files)
    try:
        nobody, first = site.peer(ca)
        assert nobody == ()
        assert site.peer(ca, files)[0] == ("digits.job.elastic",)
        sign_for_job(made, "digits")
        assert site.peer(ca)[1] != first
        count = len(site.asked)
        with contextlib.suppress(OSError, ValueError):
            site.peer(ca, foreign)
        assert len(site.asked) == count, "signed by another authority"
        with site.connect() as plain:
            plain.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in rest_of(plain)
        assert site.peer(ca)[0] == ()
        assert site.told == []
    finally:
        site.close()


def test_unfinished_handshakes_do_not_keep_others_out(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    with (
        contextlib.closing(Secured(sign_for_job(made, "digits"))) as site,
        contextlib.ExitStack() as kept,
    ):
        for _ in range(3 * http_server.MOST_CONNECTIONS):
            kept.enter_context(contextlib.closing(site.connect()))
        assert site.peer(made.ca)[0] == ()
        assert len(site.server._connections) <= http_server.MOST_CONNECTIONS


def test_a_server_whose_loop_gets_no_socket_pair_raises_without_other_complaints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    listener = asyncio.run(listen_for_http("127.0.0.1:0"))
    monkeypatch.setattr(socket, "socketpair", refuse)
    with listener, pytest.raises(OSError, match="Too many open files"):
        HttpServer(listener, {}, report=lambda *_, **__: None)
    gc.collect()
    assert complaints == []


REQUEST = b"POST /small?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nA: b\r\n\r\nbody"


@pytest.mark.long
def test_any_request_is_answered_or_its_connection_is_closed(site: Site) -> None:
    @given(sent=spliced(REQUEST) | st.binary(max_size=200))
    def check(sent: bytes) -> None:
        with site.connect() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = rest_of(connection)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")

    check()
    assert site.ask() == (200, b"small\n")
    assert site.told == []
