"""Records of incidents: kept in the store for the leaders after, told as events, for operators."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from elastic.coordinator.attendance import name_of
from elastic.coordinator.incident_words import noticed_by, summary
from elastic.core.accounting import MOST_INCIDENTS
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.incidents import Incidents
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.slot_accounts import SlotAccounts
from elastic.core.diagnosis import Diagnosis
from elastic.core.incidents import Outcome, RankStacks
from elastic.errors import ConfigurationError
from elastic.runtime.journal import Journal
from elastic.store.interface import Guard, GuardFailed, Store
from elastic.store.job_incidents import IncidentKeeper, load_incidents
from elastic.store.retries import until_answered
from elastic.v1 import job_pb2

_BRIEF = (
    *("number", "unix_s", "cause", "summary", "noticed_by", "outcome", "lasted_s", "committed"),
    *("generation", "followed_by", "nodes", "workers", "samples_given_up", "lost_s", "recovery"),
)
_MOST_BYTES = 64 * 2**10  # of a record in the store: far below what etcd takes
_MOST_NAMED = 10
_POLL_S = 0.02


class IncidentRecords:
    """What goes wrong in here is told once, and never holds up the job: no more is recorded then.

    accounts: they number the incidents, and know what each has cost. start: runs what takes time.
    """

    def __init__(
        self,
        accounts: SlotAccounts,
        store: Store,
        journal: Journal,
        *,
        job: str,
        run_id: str,
        guard: Guard,
        start: Callable[[Coroutine[Any, Any, None], str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounts, self._store, self._journal = accounts, store, journal
        self._job, self._run_id, self._guard = job, run_id, guard
        self._start, self._clock = start, clock
        self._incidents = Incidents(accounts.open_incident, name_of=name_of)
        self._keeper = IncidentKeeper(store, job=job, run_id=run_id, guard=guard)
        self._earlier: dict[int, Mapping[str, Any]] = {}
        """Of the leaders before."""
        self._keeping = self._failed = False

    async def load(self) -> None:
        """Take over those of the leaders before; sits out outages."""
        found = await until_answered(
            lambda: load_incidents(self._store, self._job, self._run_id), "load the incidents"
        )
        for number, document in found.items():
            if document.get("outcome") in (Outcome.UNDER_WAY.value, Outcome.WAITING.value):
                document = {**document, "outcome": Outcome.UNKNOWN.value}
            self._earlier[number] = document
        self._keeper.stored.update(found)
        self._accounts.number_after(max(found, default=0))

    # ---- what happens

    def observe(
        self, event: ev.Event, effects: Sequence[fx.Effect], machine: Coordinator, now: float
    ) -> None:
        """The machine has taken the event, and the accounts have seen it."""
        under_way = self._accounts.under_way
        self._guarded(lambda: self._incidents.observe(event, effects, machine, under_way, now))

    def progressed(self, progress: job_pb2.Progress) -> None:
        """Rank 0 reports."""
        self._incidents.progressed(progress.worker, progress.committed, progress.samples)

    def left_late(self, node: str) -> None:
        """A node's workers are ended that were to leave at a step boundary."""
        self._guarded(lambda: self._incidents.left_late(node, self._clock()))

    def explained(self, generation: int, verdict: Diagnosis, stacks: Sequence[RankStacks]) -> None:
        """Where the members of a group are that stands still."""
        self._guarded(lambda: self._incidents.explained(generation, verdict, stacks))

    def recovered(self, recovery: Mapping[str, Any]) -> None:
        """The first step after a loss is committed."""
        self._guarded(lambda: self._incidents.recovered(recovery, self._clock()))

    def reformed(self, report: job_pb2.Reformed) -> None:
        """A member has committed its first step in a group."""
        self._guarded(lambda: self._incidents.reformed(report.generation, report.recomputed))

    def save_failed(self, step: int, generation: int, message: str) -> None:
        """A checkpoint whose parts are whole could not be completed."""
        self._guarded(lambda: self._incidents.save_failed(step, generation, message, self._clock()))

    def saved(self) -> None:
        """A checkpoint is whole."""
        self._guarded(self._incidents.saved)

    def ended(self, message: str) -> None:
        """The job has, and why."""
        self._guarded(lambda: self._incidents.ended(message))

    # ---- what is known

    def brief(self) -> list[dict[str, Any]]:
        """One short document for each incident, oldest first: for lists."""
        return [{name: d.get(name) for name in _BRIEF} for d in self._documents().values()]

    def document(self, number: int) -> dict[str, Any]:
        """All that is known of one; 0: of the newest. Raises ConfigurationError if there is none of
        the number."""
        found = self._documents()
        number = number or max(found, default=0)
        if number in found:
            return found[number]
        known = ", ".join(map(str, sorted(found)[-_MOST_NAMED:]))
        raise ConfigurationError(
            f"there is no incident {number}; those that are remembered: {known}"
            if known
            else f"there is no incident {number}: none has been recorded"
        )

    def _documents(self) -> dict[int, dict[str, Any]]:
        ahead_s = time.time() - self._clock()
        own = self._incidents.documents(ahead_s)
        found = {number: dict(document) for number, document in self._earlier.items()}
        found.update((number, _with_words(document)) for number, document in own.items())
        return {number: found[number] for number in sorted(found)[-MOST_INCIDENTS:]}

    async def kept(self, within_s: float) -> None:
        """Return when the store has all of them, or after so long a time."""
        ends_at = self._clock() + within_s
        while self._keeping and self._clock() < ends_at:
            await asyncio.sleep(_POLL_S)

    # ---- keeping

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
            self._tell()
        except Exception as error:  # noqa: BLE001 - a job can do without
            self._failed = True
            message = f"no incident is recorded any more: {type(error).__name__}: {error}"
            self._journal.record("warning", source="incidents", message=message)

    def _tell(self) -> None:
        if self._incidents.changed and not self._keeping:
            self._keeping = True
            self._start(self._keep(), "incidents")
        news, self._incidents.news = self._incidents.news, []
        for number in news:
            document = self._incidents.document(number, time.time() - self._clock())
            if document is None:
                continue
            told = _with_words(document)
            self._journal.record(
                "incident",
                number=number,
                cause=told["cause"],
                summary=told["summary"],
                noticed_by=told["noticed_by"],
                outcome=told["outcome"],
                lasted_s=told["lasted_s"],
                explain=f"elastic explain {number}",
            )

    async def _keep(self) -> None:
        """Changes that come meanwhile are kept in the same turn, in the order of the numbers."""
        try:
            while self._incidents.changed:
                changed, self._incidents.changed = self._incidents.changed, set()
                for number in sorted(changed):
                    document = self._incidents.document(number, time.time() - self._clock())
                    if document is not None:
                        value = _fitting(_with_words(document))
                        await self._keeper.keep(number, value, most=MOST_INCIDENTS)
                await asyncio.sleep(0)
        except GuardFailed:
            return  # another one leads
        finally:
            self._keeping = False


def _with_words(document: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary(document), "noticed_by": noticed_by(document), **document}


def _fitting(document: dict[str, Any]) -> bytes:
    """The document's bytes, without what is longest if it would be too large: characters may take
    four bytes, and control characters six."""
    value = json.dumps(document, ensure_ascii=False).encode()
    for name in ("log_tail", "traceback", "message"):
        if len(value) <= _MOST_BYTES:
            break
        document = {**document, "processes": [{**p, name: ""} for p in document["processes"]]}
        value = json.dumps(document, ensure_ascii=False).encode()
    return value
