"""Stores the records that later leaders need, and tells agents what need not be repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from elastic.coordinator.leadership import Leadership
from elastic.coordinator.records import Records, RecordWriter, to_unix
from elastic.coordinator.watch import Watch
from elastic.core.coordinator.machine import Coordinator
from elastic.core.quarantine import NodeFailures
from elastic.rpc.control import AgentStream
from elastic.store.interface import GuardFailed, Store
from elastic.v1 import control_pb2 as pb

_KEEP_TOTALS_S = 10.0  # at least, between writes while only steps are counted
_STEPS_BYTES_PER_S = 200.0
"""At most, on average, while only steps are counted: 17 MB a day. A large job writes less often:
workers report all that they have ever spent, so the next leader books what was not written."""
_MOST_SOURCES = 5_000
_POLL_S = 0.02


class ToldOnce:
    """Counts each numbered message of the agents once, across leaders.

    An agent repeats such a message until it learns that the message is stored, since a leader may
    die before it has stored it.
    """

    def __init__(self, stored: Mapping[str, int] = MappingProxyType({})) -> None:
        """stored: the newest number of each source that earlier leaders have counted."""
        self._heard, self._stored = dict(stored), dict(stored)
        self._unanswered: dict[str, AgentStream] = {}
        self.count = 0
        """Grows with each new message."""

    def hear(self, once: pb.Once, stream: AgentStream) -> bool:
        """Return True if no leader has counted this message before."""
        source, number = once.source, once.number
        if number <= self._stored.get(source, 0):
            stream.send(once_stored=self._stored[source])
            return False
        self._unanswered[source] = stream
        if number <= self._heard.get(source, 0):
            return False
        self._heard.pop(source, None)  # reinsert at the end: the source heard first is dropped
        self._heard[source] = number
        self.count += 1
        if len(self._heard) > _MOST_SOURCES:
            oldest = next(iter(self._heard))
            del self._heard[oldest]
            self._stored.pop(oldest, None)
        return True

    def heard(self) -> dict[str, int]:
        """Return the newest number of each source; the source heard last is at the end."""
        return dict(self._heard)

    def stored(self, heard: Mapping[str, int]) -> None:
        """The store has these numbers now: tell the agents that wait for that."""
        for source, number in heard.items():
            if source in self._heard:
                self._stored[source] = number
        for source, stream in list(self._unanswered.items()):
            if number := heard.get(source, 0):
                stream.send(once_stored=number)
            if number == self._heard.get(source, number):
                del self._unanswered[source]


class RecordKeeper:
    """Stores the leader's records. Call `keep` whenever something may have been counted.

    start: runs a coroutine in the background.
    """

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        machine: Coordinator,
        failures: NodeFailures,
        told_once: ToldOnce,
        watch: Watch,
        *,
        job: str,
        run_id: str,
        start: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._leadership, self._start = leadership, start
        self._writer = RecordWriter(
            store,
            job=job,
            run_id=run_id,
            guard=leadership.guard,
            stored=leadership.records.entries,
        )
        self._machine, self._failures, self._told_once = machine, failures, told_once
        self._watch, self._totals = watch, watch.totals
        self._kept: tuple[object, ...] = self._counted() if leadership.records.are_kept else ()
        self._kept_steps, self._kept_at = self._totals.steps_committed, time.monotonic()
        self._keeping = False

    def keep(self) -> None:
        """Start a write if there is something new to store and no write is under way."""
        if self._keeping:
            return
        steps, since_s = self._totals.steps_committed, time.monotonic() - self._kept_at
        every_s = max(_KEEP_TOTALS_S, self._writer.written_bytes / _STEPS_BYTES_PER_S)
        if steps != self._kept_steps and since_s >= every_s:
            self._kept = ()
        if self._has_news:
            self._keeping = True
            self._start(self._save(), "records")

    def _counted(self) -> tuple[object, ...]:
        """Return a value that changes when there is something new to store other than steps."""
        counted = (self._machine.restarts()[-1:], self._failures.instants())
        return (*counted, self._totals.weight, self._told_once.count, self._machine.begun)

    @property
    def _has_news(self) -> bool:
        return self._counted() != self._kept or self._watch.unstored

    async def wait_until_stored(self, within_s: float) -> None:
        """Return when the store has all records, or after this time."""
        ends_at = time.monotonic() + within_s
        while self._keeping and time.monotonic() < ends_at:
            await asyncio.sleep(_POLL_S)

    async def _save(self) -> None:
        try:
            while self._has_news:
                counted, told = self._counted(), self._told_once.heard()
                records = Records(
                    started_unix_s=self._leadership.records.started_unix_s,
                    restarts=to_unix(self._machine.restarts()),
                    failures={n: to_unix(found) for n, found in self._failures.instants().items()},
                    told_once=told,
                    totals=self._totals.to_document(),
                    accounts=self._watch.accounts_to_store(),
                    incidents=self._watch.incidents_to_store(),
                    begun=self._machine.begun,
                )
                self._kept_steps, self._kept_at = self._totals.steps_committed, time.monotonic()
                await self._writer.save(records)
                self._kept = counted
                self._told_once.stored(told)
        except GuardFailed:
            return  # another coordinator leads
        finally:
            self._keeping = False
