"""Metrics and health checks are answered whatever the daemon's event loop does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic.runtime import http_pages
from elastic.runtime.http_pages import WatcherPages
from elastic.runtime.http_server import Request, Response
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.metrics import Catalog, Collect
from elastic.runtime.process_metrics import CATALOG, Directories, ProcessParts, Watched
from elastic.store.measured import StoreCalls

COUNT = Catalog("A daemon").gauge("elastic_count", "How many snapshots.")
SCRAPE = Request()


class Daemon:
    """A daemon whose event loop runs on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.snapshots = 0
        self.reason = ""
        parts = ProcessParts(
            pauses=LoopPauses(),
            directories=Directories({"logs": "/tmp", "checkpoints": "/nowhere"}),
            store=StoreCalls(),
        )
        watched = Watched(
            job="digits", snapshot=self._snapshot, why_not_ready=self._why_not_ready, parts=parts
        )
        refuse: Callable[[Request], str] = lambda r: "who are you?" if r.peer == () else ""  # noqa: E731
        self.pages = WatcherPages(watched, self.loop, refuse)

    def _snapshot(self) -> Collect:
        assert threading.current_thread() is self._thread
        self.snapshots += 1
        count = self.snapshots
        return lambda found: found.set(COUNT, count)

    async def _why_not_ready(self) -> str:
        assert threading.current_thread() is self._thread
        return self.reason

    def hold_up(self, until: threading.Event) -> None:
        self.loop.call_soon_threadsafe(until.wait)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        self.loop.close()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(http_pages, "_FRESH_S", 0.2)
    daemon = Daemon()
    yield daemon
    daemon.close()


def text(response: Response) -> str:
    return response.body.decode()


async def test_a_scrape_has_the_daemons_figures_and_those_of_its_process(daemon: Daemon) -> None:
    response = await daemon.pages.metrics(SCRAPE)
    assert response.status == 200
    for found in (
        'elastic_count{job="digits"} 1.0',
        "process_resident_memory_bytes",
        'elastic_directory_free_bytes{job="digits",kind="logs"}',
        'elastic_store_errors_total{job="digits",kind="put"} 0.0',
        "elastic_snapshot_timestamp_seconds",
        "elastic_build_info",
    ):
        assert found in text(response)
    assert 'kind="checkpoints"' not in text(response), "there is no such directory"
    opens = await daemon.pages.metrics(Request(accept="application/openmetrics-text;q=0.5"))
    assert text(opens).endswith("# EOF\n")


async def test_concurrent_scrapes_share_one_snapshot(daemon: Daemon) -> None:
    await asyncio.gather(*(daemon.pages.metrics(SCRAPE) for _ in range(50)))
    assert daemon.snapshots == 1
    await asyncio.sleep(0.25)
    assert "} 2.0" in text(await daemon.pages.metrics(SCRAPE))


async def test_a_blocked_daemon_is_healthy_but_not_ready(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pages, "ASK_WITHIN_S", 0.3)
    goes_on = threading.Event()

    try:
        first = text(await daemon.pages.metrics(SCRAPE))
        daemon.hold_up(goes_on)
        await asyncio.sleep(0.25)
        began_at = time.monotonic()
        assert (await daemon.pages.healthz(SCRAPE)).status == 200
        assert time.monotonic() - began_at < 0.2
        ready = await daemon.pages.readyz(SCRAPE)
        assert (ready.status, "has not answered" in text(ready)) == (503, True)
        taken = [line for line in first.splitlines() if "snapshot_timestamp" in line][-1]
        assert taken in text(await daemon.pages.metrics(SCRAPE)), "the last one, and its time"
        goes_on.set()
        while (await daemon.pages.readyz(SCRAPE)).status != 200:
            await asyncio.sleep(0.05)
        while taken in text(await daemon.pages.metrics(SCRAPE)):
            await asyncio.sleep(0.05)
    finally:
        goes_on.set()


async def test_metrics_are_unavailable_until_the_first_snapshot(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pages, "ASK_WITHIN_S", 0.1)
    goes_on = threading.Event()
    daemon.hold_up(goes_on)
    assert (await daemon.pages.metrics(SCRAPE)).status == 503
    goes_on.set()
    await asyncio.sleep(0.1)


async def test_readyz_says_why_a_daemon_is_not_ready(daemon: Daemon) -> None:
    daemon.reason = "no coordinator answers"
    response = await daemon.pages.readyz(SCRAPE)
    assert (response.status, text(response)) == (503, "no coordinator answers\n")
    assert (await daemon.pages.healthz(SCRAPE)).status == 200


async def test_metrics_are_refused_to_strangers_but_health_checks_are_not(daemon: Daemon) -> None:
    stranger = Request(peer=())
    assert (await daemon.pages.metrics(stranger)).status == 403
    assert (await daemon.pages.healthz(stranger)).status == 200
    assert (await daemon.pages.readyz(stranger)).status == 200
    assert daemon.snapshots == 0


async def test_a_scrape_has_every_metric_except_those_of_tls_and_etcd(daemon: Daemon) -> None:
    written = text(await daemon.pages.metrics(SCRAPE))
    assert {m.name for m in CATALOG.metrics if f"# TYPE {m.name} " not in written} == {
        "elastic_certificate_expiry_timestamp_seconds",
        "elastic_store_last_answer_timestamp_seconds",
    }
