"""The job's page: a stream of its state and changes, actions, and a strict content policy."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from elastic.coordinator.page import standby
from elastic.errors import ConfigurationError, TransientError
from elastic.runtime import http_pages, job_page
from elastic.runtime.job_page import changed, policy_of
from elastic.store.job_documents import LeaderDocument
from tests.page_jobs import PageSite, page_site, recovering, view
from tests.waiting import eventually

DEADLINE_S = 20.0


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageSite]:
    for module, name in ((job_page, "EVERY_S"), (job_page, "BEAT_S"), (http_pages, "_FRESH_S")):
        monkeypatch.setattr(module, name, 0.05)
    with page_site(view()) as site:
        yield site


class Watcher:
    """A client that reads the page's stream."""

    def __init__(self, site: PageSite) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=DEADLINE_S)
        self._connection.request("GET", "/page/stream")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.getheader("content-type") == "text/event-stream"

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event that has data: its kind and its content."""
        lines: list[str] = []
        while (line := self._answer.readline().decode()) != "\n":
            assert line, "the stream has ended"
            lines.append(line.rstrip("\n"))
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" not in fields:
            return self.next()
        return fields.get("event", "message"), json.loads(fields["data"])

    def until(self, condition: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        ends_at = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends_at:
            kind, message = self.next()
            if condition(kind, message):
                return message
        raise AssertionError("it never came")

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def watcher(site: PageSite) -> Iterator[Watcher]:
    with contextlib.closing(Watcher(site)) as watcher:
        yield watcher


def ask(site: PageSite, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_a_stream_begins_with_the_whole_job_and_goes_on_with_changes(
    site: PageSite, watcher: Watcher
) -> None:
    kind, whole = watcher.next()
    assert (kind, whole["whole"]) == ("message", True)
    assert set(whole["sections"]) == {"head", "values", "kinds", "nodes", "incidents", "events"}
    assert len(whole["sections"]["nodes"]) == 3
    assert site.seen is not None
    site.seen = replace(site.seen, figures=replace(site.seen.figures, step=4801))
    change = watcher.until(lambda kind, _: kind == "message")
    assert (change["whole"], change["sections"]) == (False, {"head": {"step": 4801}})
    assert change["version"] == whole["version"] + 1


def test_a_stream_without_news_sends_beats(watcher: Watcher) -> None:
    beat = watcher.until(lambda kind, _: kind == "beat")
    assert beat["silent"] is False
    assert abs(beat["at"] - time.time()) < 10.0


def test_many_watchers_cost_the_daemon_one_look(site: PageSite) -> None:
    with contextlib.ExitStack() as ends:
        watchers = [ends.enter_context(contextlib.closing(Watcher(site))) for _ in range(20)]
        wholes = [watcher.next()[1] for watcher in watchers]
        before, since = site.takes, time.monotonic()
        for watcher in watchers:
            watcher.until(lambda kind, _: kind == "beat")
        looks = (time.monotonic() - since) / 0.05 + 2
        assert site.takes - before <= looks
        assert all(whole == wholes[0] for whole in wholes)


def test_the_daemon_is_not_asked_while_nobody_watches(site: PageSite, watcher: Watcher) -> None:
    watcher.next()
    watcher.close()
    eventually(lambda: site.page._feed._renewing is None)
    before = site.takes
    time.sleep(0.3)
    assert site.takes <= before + 1


def test_a_watcher_that_has_missed_a_document_gets_the_newest_as_a_whole(site: PageSite) -> None:
    feed = site.page._feed

    async def watch() -> list[dict[str, Any]]:
        async with contextlib.aclosing(feed.chunks()) as chunks:
            got: list[dict[str, Any]] = []
            for step in (1, 2, 4):
                while feed.version < step:
                    feed._take({"head": {"step": feed.version}}, time.time())
                got.append(json.loads((await anext(chunks)).partition(b"data: ")[2]))
            return got

    feed._question.ask = never  # type: ignore[method-assign]
    first, second, third = asyncio.run(watch())
    assert (first["whole"], second["whole"], third["whole"]) == (True, False, True)
    assert third["sections"] == {"head": {"step": 3}}


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_blocked_daemon_is_reported_as_silent_in_the_beats(
    site: PageSite, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pages, "ASK_WITHIN_S", 0.2)
    watcher.next()
    goes_on = threading.Event()
    try:
        site.loop.call_soon_threadsafe(goes_on.wait)
        watcher.until(lambda kind, message: kind == "beat" and message["silent"])
        assert ask(site, "/page/state")[0] == 200, "the last one"
        assert ask(site, "/page/curve/15m")[0] == 503
    finally:
        goes_on.set()
    watcher.until(lambda kind, message: kind == "beat" and not message["silent"])


def test_a_view_that_cannot_be_made_ends_the_stream_and_is_reported(
    site: PageSite, watcher: Watcher
) -> None:
    watcher.next()
    site.seen = replace(view(), incidents=(1,))  # type: ignore[arg-type]
    eventually(lambda: site.told)
    assert "/page/stream: TypeError" in site.told[0]["message"]
    site.seen = recovering()
    with contextlib.closing(Watcher(site)) as again:
        again.until(lambda kind, m: kind == "message" and "nodes" in m["sections"])


def test_the_end_of_the_job_is_sent_before_the_server_ends(
    site: PageSite, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_page, "EVERY_S", 60.0)
    watcher.until(lambda kind, _: kind == "beat")
    time.sleep(0.1)  # the next look would come in a minute
    assert site.seen is not None
    site.seen = replace(site.seen, figures=replace(site.seen.figures, exit_code=1))
    site.stop_serving()
    try:
        last = watcher.until(lambda kind, _: kind == "message")
        assert last["sections"]["head"]["state"] == "ended"
    finally:
        site.serve()


def test_state_and_curves_are_served_without_a_stream(site: PageSite) -> None:
    status, headers, body = ask(site, "/page/state")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["sections"]["head"]["state"] == "training"
    for name in ("15m", "6h", "run"):
        assert set(json.loads(ask(site, f"/page/curve/{name}")[2])) == {"width_s", "names", "rows"}
    assert json.loads(ask(site, "/page/incident/3")[2])["processes"][0]["rank"] == 3
    for number in ("4", "0", "-3", "3.0", "x", "9" * 30, "..%2f3", ""):
        assert ask(site, f"/page/incident/{number}")[0] == 404, number
    for path in (
        "/page/curve/1h",
        "/page/curve/../state",
        "/page/",
        "/page/state/..",
        "/index.html",
    ):
        assert ask(site, path)[0] == 404, path


def test_a_standby_redirects_browsers_only_to_a_leader_page_that_they_can_reach(
    site: PageSite,
) -> None:
    site.seen = None
    for page, expected in (
        ("http://10.0.0.1:9400", 307),
        ("https://[fd00::1]:9400", 307),
        ("", 200),
        ("http://127.0.0.1:9400", 200),
        ("http://localhost:9400", 200),
        ("http://[::1]:9400", 200),
    ):
        leader = LeaderDocument(candidate="c", address="one:1", page=page)
        site.otherwise = lambda leader=leader: standby("digits", "default", "two:1", leader)
        time.sleep(0.06)
        status, headers, body = ask(site, "/")
        assert status == expected, page
        assert status == 200 or headers["location"] == page, body
        assert json.loads(ask(site, "/page/state")[2])["sections"]["head"]["leader"] == "one:1"


def test_the_log_of_a_worker_is_fetched_on_request(site: PageSite) -> None:
    status, headers, body = ask(site, "/page/log/node-1-2")
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert body.decode() == "step 1\nthe log of node-1-2\n<b>not markup</b>\n"
    site.asked.error = ConfigurationError("there is no rank or worker 'x'")
    assert ask(site, "/page/log/x")[::2] == (404, b"there is no rank or worker 'x'\n")
    site.asked.error = TransientError("the agent of node b did not send the log")
    assert ask(site, "/page/log/x")[0] == 503


def test_a_page_is_read_only(site: PageSite) -> None:
    for path in ("drain", "clear", "stop", "log/node-1-2"):
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("POST", f"/page/{path}", body='{"node": "node-1"}')
            assert connection.getresponse().status == 405


# ---- the page is one self-contained file


HTML = resources.files("elastic.coordinator").joinpath("page.html").read_text("utf-8")


def test_the_policy_allows_only_the_pages_own_script_and_style(site: PageSite) -> None:
    status, headers, body = ask(site, "/")
    policy = headers["content-security-policy"]
    assert (status, body.decode()) == (200, HTML)
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert policy == policy_of(HTML)
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_fetches_nothing_from_elsewhere_and_inserts_no_markup() -> None:
    addresses = set(re.findall(r"https?://[\w./]+", HTML)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    for markup in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        " style=",
    ):
        assert markup not in HTML, markup
    assert len(HTML) < 100_000


def test_changed_returns_only_the_parts_that_differ() -> None:
    same: dict[str, Any] = {"x": 1}
    before = {"head": {"a": 1, "b": [1]}, "gone": {"c": 1}, "same": same}
    after = {"head": {"a": 2, "b": [1], "d": 3}, "new": {"e": 1}, "same": same}
    assert changed(before, after) == {
        "head": {"a": 2, "d": 3},
        "gone": {"c": None},
        "new": {"e": 1},
    }
    assert changed(after, after) == {}
