"""HTTP addresses of a daemon: what each serves, how it is protected, and when it is refused."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.cli.http import (
    METRICS_OPTION,
    Guard,
    HttpSite,
    _admission,
    _Serving,
    http_sites,
    require_http_protection,
    watched_over_http,
)
from elastic.cli.page import reached_at
from elastic.errors import ConfigurationError
from elastic.rpc.security import PLAINTEXT, Plaintext, Security, Tls
from elastic.runtime.http_server import HttpServer, Request
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.process_metrics import Directories, PageSource, ProcessParts, Watched
from elastic.settings.node import NodeSettings
from elastic.settings.run import RunSettings
from elastic.settings.store import StoreSettings
from elastic.settings.tls_files import TlsFiles
from tests.unit.coordinator.agents import Diary

FILES = Tls(job="digits", files=TlsFiles(ca=Path("a"), certificate=Path("b"), key=Path("c")))


async def ready() -> str:
    return ""


WATCHED = Watched(
    job="digits",
    snapshot=lambda: lambda _: None,
    why_not_ready=ready,
    parts=ProcessParts(pauses=LoopPauses(), directories=Directories({})),
)


def sites_of(
    address: str | None,
    metrics: str | None = None,
    *,
    default: str | None = None,
    security: Security = PLAINTEXT,
) -> list[HttpSite]:
    settings = RunSettings(http_address=address, metrics_address=metrics)
    return http_sites(settings, security, default)


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def serve(
    address: str | None, default: str | None = None, security: Security = PLAINTEXT
) -> tuple[Diary, list[bytes]]:
    """The recorded events, and the answers at the addresses that they announce."""
    diary, answers = Diary(), list[bytes]()

    def ask(url: str) -> bytes:
        with urllib.request.urlopen(f"{url}/healthz", timeout=20.0) as answer:
            found: bytes = answer.read()
            return found

    async def main() -> None:
        sites = sites_of(address, default=default, security=security)
        async with watched_over_http(WATCHED, sites, diary.journal, security):
            for event in diary.of("http_started"):
                answers.append(await asyncio.to_thread(ask, event["address"]))

    asyncio.run(main())
    return diary, answers


@pytest.mark.parametrize(("address", "default"), [(None, None), ("off", None), ("off", "x:1")])
def test_nothing_is_served_without_an_address_or_with_off(address: str, default: str) -> None:
    diary, _ = serve(address, default)
    assert diary.names() == []


@pytest.mark.parametrize(
    ("address", "default"), [("127.0.0.1:0", None), ("[::1]:0", None), (None, "127.0.0.1:0")]
)
def test_a_served_address_is_recorded_and_answers(address: str | None, default: str | None) -> None:
    diary, answers = serve(address, default)
    assert diary.names() == ["http_started"]
    assert answers == [b"ok\n"]


def test_an_occupied_default_address_is_not_served_and_gives_a_warning(taken: str) -> None:
    diary, _ = serve(None, taken)
    (warning,) = diary.of("warning")
    assert f"{taken}: port {taken.rpartition(':')[2]} is in use" in warning["message"]
    assert diary.names() == ["warning"]


def statuses(url: str, *paths: str) -> list[int]:
    found = []
    for path in paths:
        try:
            with urllib.request.urlopen(url + path, timeout=20.0) as answer:
                found.append(answer.status)
        except urllib.error.HTTPError as error:
            found.append(error.code)
            error.close()
    return found


STORE = StoreSettings(etcd=("127.0.0.1:1",))
PATHS = ("/", "/metrics", "/healthz", "/readyz")
PAGED = replace(
    WATCHED, page=PageSource(html=lambda: '<html lang="en">', take=lambda: lambda: {"head": {}})
)


@pytest.mark.parametrize(
    ("watched", "address", "metrics", "served"),
    [
        *(
            (PAGED, "127.0.0.1:0", None, {"page, metrics and health checks": [200] * 4}),
            (PAGED, "127.0.0.1:0", "127.0.0.1:0", {"page, metrics and health checks": [200] * 4}),
            (PAGED, "127.0.0.1:0", "off", {"page and health checks": [200, 404, 200, 200]}),
            (PAGED, "off", "127.0.0.1:0", {"metrics and health checks": [404, 200, 200, 200]}),
        ),
        (
            PAGED,
            "127.0.0.1:0",
            "localhost:0",
            {
                "metrics and health checks": [404, 200, 200, 200],
                "page and health checks": [200, 404, 200, 200],
            },
        ),
        (
            WATCHED,
            "127.0.0.1:0",
            "localhost:0",
            {
                "metrics and health checks": [404, 200, 200, 200],
                "health checks": [404, 404, 200, 200],
            },
        ),
    ],
)
async def test_metrics_may_have_an_address_of_their_own(
    watched: Watched, address: str, metrics: str | None, served: dict[str, list[int]]
) -> None:
    diary = Diary()
    settings = RunSettings(http_address=address, metrics_address=metrics)
    if watched is WATCHED:
        settings = NodeSettings(http_address=address, metrics_address=metrics, store=STORE)
    sites = http_sites(settings, PLAINTEXT)
    async with watched_over_http(watched, sites, diary.journal, PLAINTEXT) as page:
        found = {
            event["serves"]: await asyncio.to_thread(statuses, event["address"], *PATHS)
            for event in diary.of("http_started")
        }
        at = {event["serves"]: event["address"] for event in diary.of("http_started")}
    assert found == served
    assert page == next((at[s] for s in at if not s.startswith("metrics")), "")
    for url in at.values():
        with pytest.raises(urllib.error.URLError):
            statuses(url, "/healthz")


async def test_a_page_without_metrics_does_not_link_to_them() -> None:
    diary, bodies = Diary(), list[bytes]()
    sites = sites_of("127.0.0.1:0", "off")

    def read(url: str) -> None:
        with urllib.request.urlopen(url, timeout=20.0) as answer:
            bodies.append(answer.read())

    async with watched_over_http(PAGED, sites, diary.journal, PLAINTEXT) as page:
        await asyncio.to_thread(read, page)
    assert bodies == [b'<html lang="en" data-metrics="elsewhere">']


def test_an_occupied_or_unprotected_metrics_address_is_an_error_with_its_option(taken: str) -> None:
    async def main() -> None:
        diary = Diary()
        sites = sites_of("127.0.0.1:0", taken)
        async with watched_over_http(WATCHED, sites, diary.journal, PLAINTEXT):
            raise AssertionError("it is taken")

    with pytest.raises(ConfigurationError, match=f"HTTP at {taken}: .*in use.*{METRICS_OPTION}"):
        asyncio.run(main())
    with pytest.raises(ConfigurationError, match=f"{METRICS_OPTION} 0.0.0.0:1 can be reached"):
        require_http_protection("0.0.0.0:1", PLAINTEXT, METRICS_OPTION)


def test_metrics_are_served_without_the_page_if_its_default_address_is_occupied(taken: str) -> None:
    """The metrics come first: their address may be the one that occupies the page's default."""

    async def main() -> None:
        diary = Diary()
        sites = sites_of(None, "127.0.0.1:0", default=taken)
        async with watched_over_http(PAGED, sites, diary.journal, PLAINTEXT) as page:
            assert page == ""
        assert [e["serves"] for e in diary.of("http_started")] == ["metrics and health checks"]
        (warning,) = diary.of("warning")
        assert "page and health checks are not served" in warning["message"]

    asyncio.run(main())


def test_a_requested_address_that_cannot_be_bound_is_an_error(taken: str) -> None:
    for address in (taken, "192.0.2.1:9400"):
        with pytest.raises(ConfigurationError, match=f"HTTP at {address}") as raised:
            serve(address, "127.0.0.1:0", Plaintext(insecure=True))
        assert raised.value.exit_code == 78


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "10.0.0.1:9400", "somewhere:9400", "[::]:1"])
def test_an_address_for_other_machines_needs_certificates_or_insecure(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-ca.*--insecure"):
        require_http_protection(address, PLAINTEXT)
    require_http_protection(address, Plaintext(insecure=True))
    require_http_protection(address, FILES)


@pytest.mark.parametrize(
    ("peer", "may"),
    [
        (None, True),
        (("digits.job.elastic",), True),
        (("digits.job.elastic", "operator.digits.job.elastic"), True),
        (("digits.job.elastic", "viewer.digits.job.elastic"), True),
        (("operator.digits.job.elastic",), False),
        (("letters.job.elastic",), False),
        ((), False),
    ],
)
def test_a_certificate_of_the_job_permits_to_see_the_page(
    peer: tuple[str, ...] | None, may: bool
) -> None:
    """`peer` is None on a loopback address, where nobody shows a certificate."""
    refused = _admission(FILES)(Request(peer=peer))
    assert (refused == "") == may
    assert may or "digits.job.elastic" in refused


@pytest.mark.parametrize("address", [None, "off", "127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_plain_text_is_allowed_on_loopback_or_without_an_address(address: str | None) -> None:
    require_http_protection(address, PLAINTEXT)


@pytest.mark.parametrize(
    ("host", "may"),
    [
        *(("127.0.0.1", True), ("localhost", True), ("LocalHost", True), ("::1", True), ("", True)),
        *(("rebound.example", False), ("127.0.0.1.example", False), ("localhost.example", False)),
    ],
)
def test_a_loopback_page_refuses_requests_for_another_host_name(host: str, may: bool) -> None:
    local = Guard(is_known=lambda _: "", is_local=True)
    assert (local.may_see(Request(host=host)) == "") == may
    elsewhere = Guard(is_known=lambda _: "", is_local=False)
    assert elsewhere.may_see(Request(host=host)) == ""
    refusing = Guard(is_known=lambda _: "no certificate", is_local=False)
    assert refusing.may_see(Request(host=host)) == "no certificate"


def test_metrics_at_a_loopback_address_refuse_another_host_name() -> None:
    def status(url: str, host: str) -> int:
        request = urllib.request.Request(f"{url}/metrics", headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=20.0) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    async def main() -> list[int]:
        diary = Diary()
        sites = sites_of("127.0.0.1:0", "127.0.0.1:0")
        async with watched_over_http(WATCHED, sites, diary.journal, PLAINTEXT):
            (event,) = diary.of("http_started")
            hosts = ("rebound.example", event["address"].removeprefix("http://"))
            return [await asyncio.to_thread(status, event["address"], host) for host in hosts]

    assert asyncio.run(main()) == [403, 200]


@pytest.mark.parametrize(
    ("served", "reached"),
    [
        ("http://127.0.0.1:9400", "http://127.0.0.1:9400"),
        ("https://10.0.0.1:9400", "https://10.0.0.1:9400"),
        ("https://0.0.0.0:9400", "https://host-1:9400"),
        ("http://[::]:9400", "http://host-1:9400"),
        ("", ""),
    ],
)
def test_the_url_of_a_page_on_all_addresses_names_the_coordinators_host(
    served: str, reached: str
) -> None:
    assert reached_at(served, "host-1:9300") == reached
    assert reached_at("http://[::]:9400", "[fd00::1]:9300") == "http://[fd00::1]:9400"


def test_insecure_plain_text_for_other_machines_gives_a_security_warning() -> None:
    diary, answers = serve("0.0.0.0:0", security=Plaintext(insecure=True))
    assert diary.names() == ["security_warning", "http_started"]
    assert answers == [b"ok\n"]


def test_unusable_certificates_are_an_error_only_beyond_loopback() -> None:
    with pytest.raises(ConfigurationError, match="TLS authority a cannot be used"):
        serve("0.0.0.0:0", security=FILES)
    diary, _ = serve("127.0.0.1:0", security=FILES)
    assert diary.names() == ["http_started"], "in plain text, for this machine"


async def test_a_daemon_goes_on_without_an_http_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("elastic.cli.http._Serving.start", refuse)
    diary = Diary()
    sites = sites_of("127.0.0.1:0")
    async with watched_over_http(WATCHED, sites, diary.journal, PLAINTEXT):
        assert diary.names() == ["http_started", "warning"]
        (address,) = [e["address"].removeprefix("http://") for e in diary.of("http_started")]
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=20.0)


async def test_a_server_that_is_closed_before_it_is_made_closes_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = list[HttpServer](), _Serving._make

    def make_late(serving: _Serving) -> HttpServer:
        while not serving._closed:
            time.sleep(0.001)
        made.append(make(serving))
        return made[0]

    monkeypatch.setattr(_Serving, "_make", make_late)
    async with watched_over_http(WATCHED, sites_of("127.0.0.1:0"), Diary().journal, PLAINTEXT):
        pass
    assert made[0]._loop.is_closed()
