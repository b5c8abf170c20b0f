"""Serves a daemon's pages for monitoring: /metrics, /healthz, /readyz.

They run on the HTTP server's thread. The daemon's own event loop only provides a snapshot, at most
twice a second, and only the request that needs the snapshot waits for that loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Generic, TypeVar

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from elastic.runtime.http_server import Page, Request, Response
from elastic.runtime.metrics import Collect, Found, Kind, Metric, Sample
from elastic.runtime.process_metrics import Watched, collect
from elastic.timeouts import timeout

T = TypeVar("T")

ASK_WITHIN_S = 2.0
"""Seconds in which the daemon's event loop must answer."""
_FRESH_S = 0.5
SILENT = f"the event loop of this process has not answered within {ASK_WITHIN_S:g} s"


class Question(Generic[T]):
    """A question to the daemon's loop, asked once at a time; its answer is shared for a moment."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, question: Callable[[], Awaitable[T]]
    ) -> None:
        self._loop, self._question = loop, question
        self._under_way: asyncio.Future[T] | None = None
        self._answered_at = 0.0
        self.answer: T | None = None
        """The newest answer; None before the first."""

    async def ask(self, *, fresh: bool = False) -> T:
        """Return an answer; with `fresh` never the last one. Raises asyncio.TimeoutError if
        the loop does not answer within `ASK_WITHIN_S`."""
        if (
            not fresh
            and self.answer is not None
            and time.monotonic() - self._answered_at < _FRESH_S
        ):
            return self.answer
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._on_the_loop())
        async with timeout(ASK_WITHIN_S):
            return await asyncio.shield(self._under_way)

    async def _on_the_loop(self) -> T:
        async def ask() -> T:
            return await self._question()

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        self.answer = await asyncio.wrap_future(asked)
        self._answered_at = time.monotonic()
        return self.answer


class WatcherPages:
    """The pages of one daemon. `may_scrape` returns why a client may not see metrics, or ""."""

    def __init__(
        self,
        watched: Watched,
        loop: asyncio.AbstractEventLoop,
        may_scrape: Callable[[Request], str] = lambda _: "",
    ) -> None:
        self._watched, self._may_scrape = watched, may_scrape
        self._snapshot = Question(loop, self._take)
        self._ready = Question(loop, watched.why_not_ready)
        self._process = ProcessCollector(registry=None)
        self._written: dict[bool, tuple[float, Response]] = {}  # by: is OpenMetrics

    def by_path(self) -> dict[str, Page]:
        return {"/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz}

    async def healthz(self, request: Request) -> Response:
        """Answer that this process lives, without a question to the daemon's loop."""
        del request
        return Response.of(200, "ok")

    async def readyz(self, request: Request) -> Response:
        """Answer whether the daemon can do its part, and if not, why."""
        del request
        try:
            reason = await self._ready.ask()
        except asyncio.TimeoutError:
            reason = SILENT
        return Response.of(503, reason) if reason else Response.of(200, "ready")

    async def metrics(self, request: Request) -> Response:
        """Answer with the newest snapshot and its time: an old one while the loop is silent."""
        if refused := self._may_scrape(request):
            return Response.of(403, refused)
        try:
            taken = await self._snapshot.ask()
        except asyncio.TimeoutError:
            if self._snapshot.answer is None:
                return Response.of(503, SILENT)
            taken = self._snapshot.answer
        opens = OPENMETRICS in request.accept
        since, written = self._written.get(opens, (0.0, None))
        if written is None or time.monotonic() - since >= _FRESH_S:
            await self._watched.parts.look()
            written = self._write(taken, opens=opens)
            self._written[opens] = (time.monotonic(), written)
        return written

    def _write(self, taken: tuple[float, Collect], *, opens: bool) -> Response:
        at_unix_s, collect_snapshot = taken
        found = Found(job=self._watched.job)
        collect_snapshot(found)
        collect(found, self._watched.parts, at_unix_s)
        return write(found, opens=opens, others=self._process.collect())

    async def _take(self) -> tuple[float, Collect]:
        return time.time(), self._watched.snapshot()


OPENMETRICS = "application/openmetrics-text"


def write(found: Found, *, opens: bool = False, others: Iterable[Family] = ()) -> Response:
    """Return the answer to a scrape. opens: as OpenMetrics. others: more families to include."""
    wanted = f"{OPENMETRICS}; version=1.0.0" if opens else ""
    encode, content_type = choose_encoder(wanted)
    families = [*(_family(*one) for one in found.samples.items()), *others]
    return Response(status=200, content_type=content_type, body=encode(_Collector(families)))


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind.value)
    total = "_total" if metric.kind is Kind.COUNTER else ""
    for sample in samples:
        name = f"{family.name}{sample.suffix}{total}"
        family.add_sample(name, dict(sample.labels), sample.value)
    return family


class _Collector(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return iter(self._families)
