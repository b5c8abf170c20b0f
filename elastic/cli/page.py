"""Connects the job's page to the coordinator, for `elastic coordinator` and `elastic run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from elastic.coordinator.history import JobHistory
from elastic.coordinator.page import JobView, PageBuilder
from elastic.rpc.control import ControlHandler
from elastic.runtime.process_metrics import Document, PageSource

_WILDCARDS = ("0.0.0.0", "::")


def page_of(
    history: JobHistory,
    job: ControlHandler,
    view: Callable[[], JobView | None],
    otherwise: Callable[[], Document] = dict,
) -> PageSource:
    """`view` returns None if another coordinator leads; then the page shows `otherwise`."""
    builder = PageBuilder()

    def take() -> Callable[[], Document]:
        seen = view()
        if seen is None:
            document = otherwise()
            return lambda: document
        return lambda: builder.document(seen)

    def curve(name: str) -> Mapping[str, Any]:
        found = history.curves.curve(name, time.time() - time.monotonic())
        return {"width_s": found.width_s, "names": found.names, "rows": found.rows}

    async def log(of: str) -> str:
        return await job.operators().log(of)

    return PageSource(
        html=_html,
        take=take,
        ranges=history.curves.ranges,
        curve=curve,
        incident=lambda number: job.incidents(number)[0],
        log=log,
    )


def reached_at(served: str, advertised: str) -> str:
    """The page's address for people on other machines. If it is served on every address, it has the
    host under which agents find the coordinator."""
    parts = urlsplit(served)
    if parts.hostname not in _WILDCARDS:
        return served
    host = advertised.rpartition(":")[0]
    return f"{parts.scheme}://{host}:{parts.port}"


def _html() -> str:
    return resources.files("elastic.coordinator").joinpath("page.html").read_text("utf-8")
