"""Measures the page in a real browser: first paint, how soon a kill shows, frames of 1,000 nodes.

    python -m benchmarks.page                # about a minute

The job is `elastic run` with three workers; one worker after the other is killed. The 1,000 nodes
are data, and 100 of them change twice a second. Needs Debian's chromium-headless-shell.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import elastic_job
from benchmarks.report import command_line, save, show
from elastic.core.membership import WorkerPhase
from tests import page_jobs
from tests.browser import Tab, browser
from tests.etcd_cluster import free_ports
from tests.page_jobs import page_site

_WORKERS = 3
_WARM_UP_STEPS = 30
_START_S = 60.0
_BETWEEN_S = 1.0
_FRAMES_S = 10.0
_CHANGE_EVERY_S = 0.5
_CHANGED = 100  # nodes at a time
_KILLS_SHOWN = "(document.body.innerText.match(/SIGKILL/g) || []).length"
_WATCH_FRAMES = """
window.frames_ms = []; window.last = performance.now();
(function next() {
  requestAnimationFrame(now => { frames_ms.push(now - last); last = now; next(); });
})()
"""


def main() -> None:
    options = _parse()
    with browser() as tab:
        found = {**_job(tab, options.times), **_thousand_nodes(tab)}
        if tab.errors:
            raise RuntimeError(f"in the browser's console: {tab.errors}")
    rows = [
        [name, f"{statistics.median(times):.3f}", f"{max(times):.3f}", str(len(times))]
        for name, times in found.items()
    ]
    show("The page", ["what", "median s", "most s", "times"], rows)
    save("page", {"options": vars(options), "measured": found})


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        "--times", type=int, default=10, help="measurements of first paint, and kills (10)"
    )
    return parser.parse_args()


def _job(tab: Tab, times: int) -> dict[str, list[float]]:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    paints, kills = [], []
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--http-address", address]
        with elastic_job(Path(scratch), "--size", "tiny", workers=_WORKERS, options=options) as job:
            job.wait_until(
                lambda marks: len(marks) > _WORKERS * _WARM_UP_STEPS,
                what="steps",
                limit_s=_START_S,
            )
            for _ in range(times):
                tab.open("about:blank")
                tab.open(f"http://{address}/")
                paints.append(tab.first_paint_ms() / 1000)
            tab.wait_for("document.getElementById('state')?.textContent === 'Training'")
            for _ in range(times):
                time.sleep(_BETWEEN_S)  # the loss before must be over
                before = int(tab.evaluate(_KILLS_SHOWN))
                os.kill(job.members()[0], signal.SIGKILL)
                at = time.monotonic()
                tab.wait_for(f"{_KILLS_SHOWN} > {before}")
                kills.append(time.monotonic() - at)
            tab.open("about:blank")  # otherwise the page reports that its server has gone
    return {"first paint": paints, "kill shows": kills}


def _thousand_nodes(tab: Tab) -> dict[str, list[float]]:
    with page_site(page_jobs.large()) as site:
        tab.open(site.url)
        tab.wait_for("document.body?.innerText.includes('1,000 nodes')")
        tab.evaluate(_WATCH_FRAMES)
        ends_at, round_ = time.monotonic() + _FRAMES_S, 0
        while time.monotonic() < ends_at:
            round_ += 1
            site.seen = replace(page_jobs.large(), figures=_changed(page_jobs.large(), round_))
            time.sleep(_CHANGE_EVERY_S)
        frames_ms = tab.evaluate("frames_ms")
        tab.open("about:blank")
    return {"frame with 1,000 nodes": [ms / 1000 for ms in frames_ms]}


def _changed(seen: Any, round_: int) -> Any:
    """Return the figures of `seen` after the workers of some nodes have changed their phase."""
    phase = (WorkerPhase.JOINING, WorkerPhase.TRAINING)[round_ % 2]
    nodes = list(seen.figures.nodes)
    for number in range(_CHANGED):
        index = (round_ * _CHANGED + number) % len(nodes)
        old = nodes[index]
        nodes[index] = page_jobs.node(old.node, len(old.workers) or 1, phase)
    return replace(seen.figures, nodes=tuple(nodes))


if __name__ == "__main__":
    main()
