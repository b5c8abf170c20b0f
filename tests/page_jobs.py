"""Jobs in every state for the page, as data, and a server that shows them to a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from elastic.cli.page import page_of
from elastic.coordinator.history import Departed, JobHistory
from elastic.coordinator.metrics import JobFigures
from elastic.coordinator.node_registry import NodeFigures
from elastic.coordinator.page import JobView
from elastic.coordinator.totals import Totals
from elastic.core.book.accounting import Kind
from elastic.core.book.slot_accounts import Accounts
from elastic.core.curves import Sample
from elastic.core.histogram import STEP_BOUNDS_S, Histogram
from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase, WorkerStatus
from elastic.errors import ConfigurationError
from elastic.runtime.http_server import HttpServer
from elastic.runtime.job_page import JobPage
from elastic.runtime.journal import Entry
from elastic.runtime.listening import address_of, listen_for_http

AT = time.time()
INCIDENT: dict[str, Any] = {
    "number": 3,
    "unix_s": AT - 100.0,
    "reason": "signal",
    "nodes": ["node-1"],
    "workers": ["node-1-2"],
    "generation": 7,
    "detection_s": 0.02,
    "is_hang": False,
    "lost_s": 4.25,
    "seconds": {"join": 1.25, "start_up": 3.0},
}
RECORD: dict[str, Any] = {
    "number": 3,
    "unix_s": AT - 100.0,
    "cause": "worker_failed",
    "summary": "rank 3 (node node-1, worker node-1-2) was ended by SIGKILL (signal 9)",
    "noticed_by": "the agent of node node-1: the process ended",
    "outcome": "recovered",
    "lasted_s": 0.131,
    "committed": 4711,
    "generation": 6,
    "followed_by": 7,
    "nodes": ["node-1"],
    "workers": ["node-1-2"],
    "samples_given_up": 64,
    "lost_s": 4.25,
    "recovery": {
        "generation": 7,
        "reason": "member_lost",
        "committed": 4711,
        "total_s": 0.131,
        **dict.fromkeys(("detect_s", "persist_s", "notify_s", "abort_s", "join_s", "sync_s"), 0.02),
        "first_step_s": 0.031,
    },
}
PROCESS: dict[str, Any] = {
    "node": "node-1",
    "rank": 3,
    "worker": "node-1-2",
    "message": "was ended by SIGKILL (signal 9)",
    "log": "/var/log/elastic/node-1-2.log",
    "traceback": "",
    "log_tail": "step 4711\nallocating 12 GB\n<b>not markup</b>",
}


def committed_at(totals: Totals, unix_s: float) -> Totals:
    other = totals.copy()
    other.last_commit_unix_s = unix_s
    return other


def members(nodes: int, slots: int) -> tuple[Member, ...]:
    return tuple(
        Member(worker=f"node-{n}-{s}", node=f"node-{n}@abcd", slot=s, endpoint="h:1")
        for n in range(nodes)
        for s in range(slots)
    )


def node(
    name: str, slots: int, phase: WorkerPhase = WorkerPhase.TRAINING, **more: Any
) -> NodeFigures:
    workers = tuple(
        WorkerStatus(worker=f"{name}-{s}", phase=phase, slot=s, generation=7, pid=4000 + s)
        for s in range(slots)
    )
    base = {"state": "ready", "host": "10.0.0.1", "slots": slots, "workers": workers}
    return NodeFigures(node=name, **(base | more))


def view(count: int = 3, slots: int = 2, **figures: Any) -> JobView:
    totals = Totals()
    totals.last_commit_unix_s = AT
    kinds = {**dict.fromkeys(Kind, 0.0), Kind.PRODUCTIVE: 90.0, Kind.JOIN: 10.0}
    base = {
        "phase": "running",
        "totals": totals,
        "accounts": Accounts(kinds=kinds, wall_s=100.0, incidents=(INCIDENT,)),
        "started_unix_s": AT - 3600.0,
        "step": 4800,
        "step_usual_s": 0.08,
        "samples_per_s": 1234.5,
        "world_size": count * slots,
        "wanted": count * slots,
        "generation": 7,
        "restarts_left": 9,
        "restarts_allowed": 10,
        "nodes": tuple(node(f"node-{n}", slots) for n in range(count)),
        "values": {"loss": 0.25},
    }
    return JobView(
        at_unix_s=AT,
        job="digits",
        run_id="default",
        coordinator="10.0.0.9:9300",
        figures=JobFigures(**(base | figures)),
        generation=Generation(
            number=7,
            incarnation="i",
            members=members(count, slots),
            reason=ChangeReason.MEMBER_LOST,
        ),
        incidents=(RECORD,),
    )


def gathering() -> JobView:
    """A job of which only the first node has come."""
    nothing = Accounts()
    one = (node("node-0", 2, WorkerPhase.STARTING),)
    figures = {"phase": "gathering", "step": 0, "step_usual_s": 0.0, "world_size": 0, "values": {}}
    seen = view(1, accounts=nothing, nodes=one, minimum=4, generation=0, **figures)
    totals = committed_at(seen.figures.totals, 0.0)
    return replace(seen, figures=replace(seen.figures, totals=totals), generation=None)


def recovering() -> JobView:
    """A job that forms a group after the loss of a node."""
    seen = view(4)
    left = tuple(node(f"node-{n}", 2, WorkerPhase.JOINING) for n in (0, 1, 3))
    figures = replace(seen.figures, phase="forming", nodes=left, wanted=6, world_size=6)
    gone = {"node-2": Departed(unix_s=AT - 0.4, as_wanted=False)}
    return replace(seen, figures=figures, departed=gone, recovering_since_unix_s=AT - 0.4)


def large(nodes: int = 1000, slots: int = 8) -> JobView:
    """A job of a thousand nodes, a few of which are in trouble."""
    seen = view(nodes, slots)
    found = list(seen.figures.nodes)
    found[17] = replace(found[17], state="quarantined", reason="3 failures within 600 s")
    found[431] = node("node-431", slots, WorkerPhase.STARTING)
    found[700] = replace(found[700], workers=found[700].workers[:5])
    gone = {"node-900": Departed(unix_s=AT - 60.0, as_wanted=False)}
    del found[900]
    return replace(seen, figures=replace(seen.figures, nodes=tuple(found)), departed=gone)


def history(minutes: float = 20.0) -> JobHistory:
    """The history of a job that lost a worker, up to now."""
    clock = [time.monotonic() - 60.0 * minutes]
    made, steps = JobHistory(lambda: clock[0]), Histogram(STEP_BOUNDS_S)
    begin_unix_s, ahead_s = time.time() - 60.0 * minutes, time.time() - time.monotonic()

    def tell(name: str, **fields: Any) -> None:
        made(Entry(unix_s=clock[0] + ahead_s, name=name, fields=fields))

    tell("elected", address="10.0.0.9:9300", generation=0, members=[])
    tell("generation_formed", generation=6, reason="started", world_size=6, after_step=None)
    count = int(60 * minutes / 2)
    for n in range(count):
        clock[0] += 2.0
        for _ in range(20):
            steps.observe(0.08 + 0.02 * ((n * 7919) % 11) / 11)
        loss = 2.3 / (1 + n / 60) + 0.02 * ((n * 31) % 7)
        world = 5 if abs(clock[0] + ahead_s - (begin_unix_s + 60.0 * minutes - 100.0)) < 6.0 else 6
        sample = Sample(
            step=20 * n, world_size=world, wanted=6, samples_per_s=1200.0, values={"loss": loss}
        )
        made.sample(sample, steps)
        if n == count - 50:
            tell(
                "worker_failed",
                worker="node-1-2",
                node="node-1",
                kind="signal",
                message="was ended by SIGKILL (signal 9), sent by the kernel: out of memory",
                log_tail="step 4711\nallocating 12 GB\n<b>not markup</b>",
            )
            lost = {"reason": "member_lost", "after_step": None}
            tell("generation_formed", generation=7, world_size=5, **lost)
            tell(
                "recovered",
                reason="member_lost",
                **{k: RECORD["recovery"][k] for k in ("total_s", "committed")},
            )
    tell("checkpoint_committed", step=4700, bytes=38_000_000, stall_s=0.01, save_s=0.4)
    return made


class Asked:
    """Answers the page's questions in place of a coordinator."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def incidents(self, number: int | None) -> list[str]:
        if number != RECORD["number"]:
            raise ConfigurationError(f"there is no incident {number}")
        more = {"steps_again": 1, "steps_lost": 0, "further_processes": 0, "verdict": ""}
        return [json.dumps({**RECORD, **more, "hang": None, "processes": [PROCESS]})]

    def operators(self) -> Asked:
        return self

    async def log(self, of: str) -> str:
        if self.error is not None:
            raise self.error
        return f"step 1\nthe log of {of}\n<b>not markup</b>"


class PageSite:
    """The page of a job that a test changes; its daemon's event loop has a thread of its own."""

    def __init__(self, seen: JobView | None, past: JobHistory | None = None) -> None:
        self.seen = seen
        self.goes_on = False
        """If set, a step has always just been committed when somebody looks."""
        self.takes = 0
        self.loop = asyncio.new_event_loop()
        self._daemon = threading.Thread(target=self.loop.run_forever)
        self._daemon.start()
        self.past = past if past is not None else JobHistory()
        self.otherwise: Callable[[], Any] = dict
        self.told: list[dict[str, Any]] = []
        self.asked = Asked()
        job: Any = self.asked
        source = page_of(self.past, job, self._view, lambda: self.otherwise())
        self.page = JobPage(source, self.loop)
        self.port = 0
        self.serve()

    def _view(self) -> JobView | None:
        self.takes += 1
        seen = self.seen
        if seen is None:
            return None
        if self.goes_on:
            now_unix_s = time.time()
            totals = committed_at(seen.figures.totals, now_unix_s - 0.05)
            figures = replace(seen.figures, totals=totals)
            seen = replace(seen, at_unix_s=now_unix_s, figures=figures)
        return replace(seen, entries=tuple(self.past.entries))

    def serve(self) -> None:
        """Serve, at the same port as before if there was one."""
        listener = asyncio.run(listen_for_http(f"127.0.0.1:{self.port}"))
        self.port = int(address_of(listener).rpartition(":")[2])
        self.server = HttpServer(
            listener, self.page.by_path(), report=self._report, farewell=self.page.farewell
        )
        self._serving = threading.Thread(target=self.server.run)
        self._serving.start()

    def _report(self, name: str, /, **fields: Any) -> None:
        self.told.append({"name": name, **fields})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def stop_serving(self) -> None:
        """Stop as if the coordinator had ended."""
        self.server.close()
        self._serving.join(20.0)
        assert not self._serving.is_alive()

    def close(self) -> None:
        self.stop_serving()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._daemon.join(20.0)
        self.loop.close()


@contextmanager
def page_site(seen: JobView | None, past: JobHistory | None = None) -> Iterator[PageSite]:
    with contextlib.closing(PageSite(seen, past)) as site:
        yield site
