"""Serves the page of a job to browsers: one HTML file, snapshots, and a stream of changes.

It runs on the HTTP server's thread. The daemon's event loop provides a snapshot, at most twice a
second and only while somebody watches; this module makes one document of it for all watchers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic.errors import ElasticError, TransientError
from elastic.runtime.http_pages import ASK_WITHIN_S, SILENT, Question
from elastic.runtime.http_server import Page, Request, Response
from elastic.runtime.process_metrics import Document, PageSource
from elastic.timeouts import timeout

EVERY_S = 0.5
BEAT_S = 2.0
"""Seconds without a change after which a stream sends a beat."""
_REST_FACTOR = 10  # rest this many times as long as a document took: at most a tenth of a core
_SENT_S = 0.05  # for streams to send the last document
_JSON = "application/json"
_BEGIN = '<html lang="en"'  # attributes added here tell the file how it is served
_PROTECTION = {
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class JobPage:
    """The page of one job. `may_see` returns why a client may not see the job, or ""."""

    def __init__(
        self,
        source: PageSource,
        loop: asyncio.AbstractEventLoop,
        may_see: Callable[[Request], str] = lambda _: "",
        *,
        has_metrics: bool = True,
    ) -> None:
        """has_metrics: metrics are at the same address."""
        self._source, self._loop, self._may_see = source, loop, may_see
        self._feed = Feed(Question(loop, self._take))
        self._curves = {name: self._curve(loop, name) for name in source.ranges}
        self._html = source.html()
        traits = "" if has_metrics else ' data-metrics="elsewhere"'
        self._html = self._html.replace(_BEGIN, _BEGIN + traits)
        self._headers = {**_PROTECTION, "content-security-policy": policy_of(self._html)}

    def by_path(self) -> dict[str, Page]:
        pages: dict[str, Page] = {
            "/": self._page,
            "/page/state": self._state,
            "/page/stream": self._stream,
            "/page/incident/*": self._incident,
            "/page/log/*": self._log,
            **{f"/page/curve/{name}": page for name, page in self._curves.items()},
        }
        return {path: self._guarded(page) for path, page in pages.items()}

    async def farewell(self) -> None:
        """Send the last state, which says how the job has ended, to all watchers."""
        await self._feed.renew(fresh=True)
        await asyncio.sleep(_SENT_S)

    def _guarded(self, page: Page) -> Page:
        async def seen(request: Request) -> Response:
            if refused := self._may_see(request):
                return Response.of(403, refused)
            return await page(request)

        return seen

    async def _page(self, request: Request) -> Response:
        """Answer with the HTML file; a standby coordinator redirects browsers to the leader."""
        del request
        leader = await self._feed.leads_elsewhere()
        if leader:
            return Response.of(307, f"the leader's page is {leader}", location=leader)
        html = self._html.encode()
        return Response(
            status=200, body=html, content_type="text/html; charset=utf-8", headers=self._headers
        )

    async def _state(self, request: Request) -> Response:
        del request
        try:
            await self._feed.renew()
        except asyncio.TimeoutError:
            if not self._feed.version:
                return Response.of(503, SILENT)
        return _json(self._feed.whole())

    async def _stream(self, request: Request) -> Response:
        del request
        return Response(
            status=200,
            body=b"retry: 1000\n\n",
            content_type="text/event-stream",
            headers=_PROTECTION,
            chunks=self._feed.chunks(),
        )

    async def _incident(self, request: Request) -> Response:
        if self._source.incident is None or not _NUMBER.fullmatch(request.name):
            return Response.of(404, "the path must end with the number of an incident")
        number, find = int(request.name), self._source.incident

        async def look() -> str:
            return find(number)

        return replace(await self._answer(look, 404), content_type=_JSON)

    async def _log(self, request: Request) -> Response:
        find = self._source.log
        if find is None:
            return Response.of(404, "this page does not show logs")
        return await self._answer(lambda: find(request.name), 404)

    async def _answer(self, ask: Callable[[], Awaitable[str]], refused: int) -> Response:
        """Return the daemon's answer. refused: the status if the daemon refuses."""
        try:
            return Response.of(200, await Question(self._loop, ask).ask(), **_PROTECTION)
        except asyncio.TimeoutError:
            return Response.of(503, f"the coordinator did not answer within {ASK_WITHIN_S:g} s")
        except ElasticError as error:
            return Response.of(503 if isinstance(error, TransientError) else refused, str(error))

    def _curve(self, loop: asyncio.AbstractEventLoop, name: str) -> Page:
        async def take() -> Mapping[str, Any]:
            return self._source.curve(name)

        question = Question(loop, take)

        async def page(request: Request) -> Response:
            del request
            try:
                return _json(_encoded(await question.ask()))
            except asyncio.TimeoutError:
                return Response.of(503, SILENT)

        return page

    async def _take(self) -> tuple[float, Callable[[], Document]]:
        return time.time(), self._source.take()


class Feed:
    """The newest document and its changes since the previous one, for any number of watchers.

    Nothing queues up: a watcher that has missed a document gets the whole newest one.
    """

    def __init__(self, question: Question[tuple[float, Callable[[], Document]]]) -> None:
        self._question = question
        self.version = 0
        """The number of documents so far that differ from the previous one."""
        self._at_unix_s = 0.0
        self._taken_unix_s = 0.0
        self._document: Document = {}
        self._whole: bytes | None = None
        self._change = b""
        self._silent = False
        self._error: Exception | None = None
        self._watchers = 0
        self._renewing: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """Set and replaced at every new document or error."""

    async def renew(self, *, fresh: bool = False) -> None:
        """Take a newer snapshot. Raises asyncio.TimeoutError if the daemon's loop is silent."""
        taken_unix_s, make = await self._question.ask(fresh=fresh)
        self._silent = False
        if taken_unix_s != self._taken_unix_s:
            self._taken_unix_s = taken_unix_s
            self._take(make(), taken_unix_s)

    def whole(self) -> bytes:
        if self._whole is None:
            self._whole = self._message(self._document, whole=True)
        return self._whole

    async def leads_elsewhere(self) -> str:
        """Return the leader's page if another coordinator leads and others can reach the page."""
        try:
            await self.renew()
        except asyncio.TimeoutError:
            return ""
        page = str(self._document.get("head", {}).get("leader_page", ""))
        return page if page and not _STAYS_HERE.match(page) else ""

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: the whole document first, then changes and beats."""
        self._watchers += 1
        if self._renewing is None:
            self._error = None
            self._renewing = asyncio.ensure_future(self._keep_renewing())
        seen = 0
        try:
            while True:
                if self._error is not None:
                    raise self._error
                version, news = self.version, self._news
                if version == seen:
                    if version or self._silent:
                        yield b"event: beat\ndata: " + self._beat() + b"\n\n"
                elif version == seen + 1 and seen:
                    yield b"data: " + self._change + b"\n\n"
                else:
                    yield b"data: " + self.whole() + b"\n\n"
                seen = version
                await _within(news, BEAT_S)
        finally:
            self._watchers -= 1
            if not self._watchers and self._renewing is not None:
                self._renewing.cancel()
                self._renewing = None

    async def _keep_renewing(self) -> None:
        while True:
            began_at = time.monotonic()
            try:
                await self.renew()
                self._error = None
            except asyncio.TimeoutError:
                self._silent = True
            except Exception as error:  # noqa: BLE001 - `chunks` raises it
                self._error = error
                self._tell()
            took_s = time.monotonic() - began_at
            await asyncio.sleep(max(EVERY_S, 0.0 if self._silent else _REST_FACTOR * took_s))

    def _take(self, document: Document, at_unix_s: float) -> None:
        change = changed(self._document, document)
        self._at_unix_s = at_unix_s
        if change or not self.version:
            self.version += 1
            self._document, self._whole = document, None
            self._change = self._message(change, whole=False)
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _message(self, sections: Mapping[str, Any], *, whole: bool) -> bytes:
        at = {"at": round(self._at_unix_s, 3), "whole": whole, "version": self.version}
        return _encoded({**at, "sections": sections})

    def _beat(self) -> bytes:
        return _encoded({"at": round(self._at_unix_s, 3), "silent": self._silent})


_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_STAYS_HERE = re.compile(r"https?://(127\.|localhost[:/]|\[::1\])")


def changed(before: Document, after: Document) -> Document:
    """Return the parts that differ, by section; None for a part that is gone."""
    found: Document = {}
    for name in {**before, **after}:
        old, new = before.get(name, {}), after.get(name, {})
        if old is new:
            continue
        parts = {key: part for key, part in new.items() if old.get(key) != part}
        parts |= {key: None for key in old if key not in new}
        if parts:
            found[name] = parts
    return found


def policy_of(html: str) -> str:
    """Return a Content-Security-Policy that allows only the file's own script and style."""
    return (
        f"default-src 'none'; script-src {_digests('script', html)}; "
        f"style-src {_digests('style', html)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )


def _digests(tag: str, html: str) -> str:
    """Return the CSP sources of all texts between `<tag>` and `</tag>`."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with timeout(seconds):
            await event.wait()
    except asyncio.TimeoutError:
        return


def _json(body: bytes) -> Response:
    return Response(status=200, body=body, content_type=_JSON, headers=_PROTECTION)


def _encoded(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
