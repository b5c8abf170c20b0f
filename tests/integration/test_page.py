"""The page of a job in a real Chromium: by keyboard, on a phone, and without contact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic.core.membership import WorkerPhase
from elastic.errors import TransientError
from tests import page_jobs
from tests.browser import Tab, browser
from tests.page_jobs import PageSite, page_site

SHOWN = "document.getElementById('state').textContent"
MOST_FIRST_PAINT_MS = 5000.0  # beside other tests; alone it takes a tenth of a second
CONTACT_DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


@pytest.fixture
def site(tab: Tab) -> Iterator[PageSite]:
    with page_site(page_jobs.view(), page_jobs.history()) as site:
        site.goes_on = True
        tab.errors.clear()
        yield site
        tab.open("about:blank")


def shows(tab: Tab, text: str) -> None:
    tab.wait_for(f"document.body?.innerText.includes({text!r})")


def test_the_page_shows_the_progress_nodes_and_charts_of_a_job(tab: Tab, site: PageSite) -> None:
    tab.look()
    tab.open(site.url)
    shows(tab, "Training")
    assert tab.first_paint_ms() < MOST_FIRST_PAINT_MS
    for text in (
        "6 of 6",
        "4,800",
        "80 ms",
        "90.0%",
        "node-2",
        "Step time",
        "loss",
        "rank 3 (node node-1",
    ):
        shows(tab, text)
    tab.wait_for("document.querySelectorAll('svg path.line').length >= 2")
    assert tab.evaluate("document.title") == "Training 6/6 – digits"
    for landmark in ("header", "main", "footer", "h1", "[role=alert]", "[role=status]"):
        assert tab.evaluate(f"document.querySelectorAll('{landmark}').length") == 1, landmark
    assert tab.evaluate("document.querySelectorAll('section:not([aria-labelledby])').length") == 0
    assert tab.evaluate("document.querySelectorAll('pre b, pre script').length") == 0, (
        "text is text"
    )
    tab.evaluate("document.querySelector('#incidents details').open = true")
    shows(tab, "<b>not markup</b>")
    assert tab.errors == []


def test_the_page_shows_a_change_within_five_seconds(tab: Tab, site: PageSite) -> None:
    tab.open(site.url)
    shows(tab, "Training")
    site.goes_on, site.seen = False, page_jobs.recovering()
    tab.wait_for(f"{SHOWN} === 'Recovering'", deadline_s=5.0)
    tab.wait_for(
        "document.querySelector('.node.gone')?.getAttribute('aria-label').includes('lost')"
    )
    assert "Recovering, 6 of 6" in tab.evaluate("document.getElementById('said').textContent")
    site.seen = replace(
        page_jobs.view(), figures=replace(page_jobs.view().figures, phase="waiting")
    )
    tab.wait_for(f"{SHOWN} === 'Below the minimum'", deadline_s=5.0)
    assert tab.evaluate("document.querySelectorAll('.node.gone').length") == 0
    assert tab.errors == []


def test_the_page_shows_lost_contact_and_its_return(tab: Tab, site: PageSite) -> None:
    tab.open(site.url)
    shows(tab, "Training")
    site.stop_serving()
    tab.wait_for("document.body.innerText.includes('Lost contact')", CONTACT_DEADLINE_S)
    assert tab.evaluate("document.title").startswith("⚠ lost contact")
    assert tab.evaluate("document.body.classList.contains('stale')")
    site.serve()
    tab.wait_for("document.getElementById('lost').hidden", CONTACT_DEADLINE_S)
    tab.wait_for("document.getElementById('contact').textContent === 'live'", CONTACT_DEADLINE_S)
    assert all("ERR_" in error for error in tab.errors), "only of the network"


def test_the_page_works_by_keyboard_and_on_a_phone_in_dark_mode(tab: Tab, site: PageSite) -> None:
    tab.look(width=390, height=844, dark=True)
    try:
        tab.open(site.url)
        shows(tab, "node-2")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        dark = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert dark == "rgb(13, 17, 23)"
        tab.press("Tab")
        assert tab.evaluate("document.activeElement.className") == "skip"
        tab.press("Tab")
        for key in ("ArrowRight", "Enter"):
            tab.press(key)
        shows(tab, "Node node-1")
        tab.press("Escape")
        assert tab.evaluate("document.getElementById('node').hidden")
        assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
            "node node-1"
        )
        assert tab.errors == []
    finally:
        tab.look()


def test_a_click_on_the_page_shows_the_log_of_a_worker(tab: Tab, site: PageSite) -> None:
    tab.open(site.url)
    shows(tab, "Training")
    tab.evaluate("document.querySelector('.node').click()")
    shows(tab, "Node node-0")
    tab.evaluate("document.querySelector('[aria-label=\"Log of node-0-1\"]').click()")
    shows(tab, "the log of node-0-1")
    shows(tab, "<b>not markup</b>")
    joins = page_jobs.node("node-0", 2, WorkerPhase.JOINING)
    others = page_jobs.view().figures.nodes[1:]
    site.seen = replace(
        page_jobs.view(), figures=replace(page_jobs.view().figures, nodes=(joins, *others))
    )
    tab.wait_for("document.querySelector('#node td + td').textContent === 'joining'")
    assert "the log of node-0-1" in tab.evaluate("document.getElementById('node').innerText")
    site.asked.error = TransientError("the agent of node node-0 did not send the log")
    click(tab, "Refresh")
    shows(tab, "The agent of node node-0 did not send the log")
    tab.press("Escape")
    tab.evaluate("document.querySelectorAll('.node')[1].click()")
    shows(tab, "Node node-1")
    assert "Log of" not in tab.evaluate("document.getElementById('node').innerText")
    assert all("status of 503" in error for error in tab.errors)


def click(tab: Tab, words: str) -> None:
    """Click the visible button with these words."""
    tab.wait_for(
        "(() => { const found = [...document.querySelectorAll('button')].findLast((one) => "
        f"one.textContent === {words!r} && one.checkVisibility() && !one.disabled); "
        "found?.click(); return Boolean(found); })()"
    )


def test_a_thousand_nodes_are_shown_and_those_in_trouble_are_named(
    tab: Tab, site: PageSite
) -> None:
    site.goes_on, site.seen = False, page_jobs.large()
    tab.open(site.url)
    shows(tab, "1,000 nodes")
    for text in ("node-17: quarantined", "node-700: 3 empty", "node-900: lost"):
        shows(tab, text)
    nodes = [
        n if n.node != "node-5" else page_jobs.node("node-5", 8, WorkerPhase.JOINING)
        for n in site.seen.figures.nodes
    ]
    site.seen = replace(site.seen, figures=replace(site.seen.figures, nodes=tuple(nodes)))
    shows(tab, "8 joining")
    assert tab.errors == []
