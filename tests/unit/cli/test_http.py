"""Where metrics and health are served, and where not."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.cli.http import METRICS_OPTION, Guard, require_http_protection, watched_over_http
from elastic.cli.page import reached_at
from elastic.errors import ConfigurationError
from elastic.rpc.security import PLAINTEXT, Plaintext, Security, Tls
from elastic.runtime.http_server import Request
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.process_metrics import Directories, PageSource, ProcessParts, Watched
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


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else has."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def serve(
    address: str | None, default: str | None = None, security: Security = PLAINTEXT
) -> tuple[Diary, list[bytes]]:
    """What was recorded, and what is answered where it says that it serves."""
    diary, answers = Diary(), list[bytes]()

    def ask(url: str) -> bytes:
        with urllib.request.urlopen(f"{url}/healthz", timeout=20.0) as answer:
            found: bytes = answer.read()
            return found

    async def main() -> None:
        serving = watched_over_http(WATCHED, address, diary.journal, security, default=default)
        async with serving:
            for event in diary.of("http_started"):
                answers.append(await asyncio.to_thread(ask, event["address"]))

    asyncio.run(main())
    return diary, answers


@pytest.mark.parametrize(("address", "default"), [(None, None), ("off", None), ("off", "x:1")])
def test_nothing_is_served_where_nothing_is_wanted(address: str, default: str) -> None:
    diary, _ = serve(address, default)
    assert diary.names() == []


@pytest.mark.parametrize(
    ("address", "default"), [("127.0.0.1:0", None), ("[::1]:0", None), (None, "127.0.0.1:0")]
)
def test_what_is_served_is_told(address: str | None, default: str | None) -> None:
    diary, answers = serve(address, default)
    assert diary.names() == ["http_started"]
    assert answers == [b"ok\n"]


def test_a_default_that_another_has_is_gone_without(taken: str) -> None:
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
    serving = watched_over_http(watched, address, diary.journal, PLAINTEXT, metrics_address=metrics)
    async with serving as page:
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
    serving = watched_over_http(
        PAGED, "127.0.0.1:0", diary.journal, PLAINTEXT, metrics_address="off"
    )

    def read(url: str) -> None:
        with urllib.request.urlopen(url, timeout=20.0) as answer:
            bodies.append(answer.read())

    async with serving as page:
        await asyncio.to_thread(read, page)
    assert bodies == [b'<html lang="en" data-metrics="elsewhere">']


def test_an_address_for_metrics_that_cannot_be_had_is_named(taken: str) -> None:
    async def main() -> None:
        diary = Diary()
        async with watched_over_http(
            WATCHED, "127.0.0.1:0", diary.journal, PLAINTEXT, metrics_address=taken
        ):
            raise AssertionError("it is taken")

    with pytest.raises(ConfigurationError, match=f"HTTP at {taken}: .*in use.*{METRICS_OPTION}"):
        asyncio.run(main())
    with pytest.raises(ConfigurationError, match=f"{METRICS_OPTION} 0.0.0.0:1 is reached"):
        require_http_protection("0.0.0.0:1", PLAINTEXT, METRICS_OPTION)


def test_a_page_goes_without_its_default_where_the_metrics_have_it(taken: str) -> None:
    """Their address is taken first."""

    async def main() -> None:
        diary = Diary()
        async with watched_over_http(
            PAGED, None, diary.journal, PLAINTEXT, default=taken, metrics_address="127.0.0.1:0"
        ) as page:
            assert page == ""
        assert [e["serves"] for e in diary.of("http_started")] == ["metrics and health checks"]
        (warning,) = diary.of("warning")
        assert "page and health checks are not served" in warning["message"]

    asyncio.run(main())


def test_an_address_that_is_wanted_and_cannot_be_had_is_an_error(taken: str) -> None:
    for address in (taken, "192.0.2.1:9400"):
        with pytest.raises(ConfigurationError, match=f"HTTP at {address}") as raised:
            serve(address, "127.0.0.1:0", Plaintext(insecure=True))
        assert raised.value.exit_code == 78


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "10.0.0.1:9400", "somewhere:9400", "[::]:1"])
def test_other_machines_are_served_with_certificates_or_if_that_is_wanted(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-ca.*--insecure"):
        require_http_protection(address, PLAINTEXT)
    require_http_protection(address, Plaintext(insecure=True))
    require_http_protection(address, FILES)


@pytest.mark.parametrize("address", [None, "off", "127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_this_machine_is_served_in_plain_text(address: str | None) -> None:
    require_http_protection(address, PLAINTEXT)


@pytest.mark.parametrize(
    ("host", "may"),
    [
        *(("127.0.0.1", True), ("localhost", True), ("LocalHost", True), ("::1", True), ("", True)),
        *(("rebound.example", False), ("127.0.0.1.example", False), ("localhost.example", False)),
    ],
)
def test_a_page_for_this_machine_is_not_asked_for_under_a_name(host: str, may: bool) -> None:
    local = Guard(may_scrape=lambda _: "", is_local=True)
    assert (local.may_see(Request(host=host)) == "") == may
    elsewhere = Guard(may_scrape=lambda _: "", is_local=False)
    assert elsewhere.may_see(Request(host=host)) == ""
    refusing = Guard(may_scrape=lambda _: "no certificate", is_local=False)
    assert refusing.may_see(Request(host=host)) == "no certificate"


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
def test_a_page_on_every_address_is_told_with_the_host_of_its_coordinator(
    served: str, reached: str
) -> None:
    assert reached_at(served, "host-1:9300") == reached
    assert reached_at("http://[::]:9400", "[fd00::1]:9300") == "http://[fd00::1]:9400"


def test_plain_text_for_others_is_warned_of() -> None:
    diary, answers = serve("0.0.0.0:0", security=Plaintext(insecure=True))
    assert diary.names() == ["security_warning", "http_started"]
    assert answers == [b"ok\n"]


def test_certificates_that_cannot_be_used_are_an_error_where_they_are_needed() -> None:
    with pytest.raises(ConfigurationError, match="TLS authority a cannot be used"):
        serve("0.0.0.0:0", security=FILES)
    diary, _ = serve("127.0.0.1:0", security=FILES)
    assert diary.names() == ["http_started"], "in plain text, for this machine"


async def test_without_a_thread_the_daemon_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("elastic.cli.http._Serving.start", refuse)
    diary = Diary()
    async with watched_over_http(WATCHED, "127.0.0.1:0", diary.journal, PLAINTEXT):
        assert diary.names() == ["http_started", "warning"]
        (address,) = [e["address"].removeprefix("http://") for e in diary.of("http_started")]
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=20.0)
