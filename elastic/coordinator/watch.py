"""Watches a leader's job: takes the facts, keeps the book and the totals, and shows them.

Nothing is decided here, and an error in here holds up nobody.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastic.coordinator.connected_agents import name_of
from elastic.coordinator.history import SAMPLE_EVERY_S, JobHistory
from elastic.coordinator.leadership import Leadership, Loss, Stored
from elastic.coordinator.totals import Totals
from elastic.coordinator.wording import with_words
from elastic.core.book.accounting import TimeSpent
from elastic.core.book.book import Book, FirstStep
from elastic.core.book.incidents import is_open
from elastic.core.book.slot_accounts import Accounts, Period, Report
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.curves import Sample
from elastic.core.diagnosis import Diagnosis
from elastic.core.whereabouts import RankStacks
from elastic.errors import ConfigurationError
from elastic.rpc.codec import Codec
from elastic.runtime.journal import Journal
from elastic.runtime.loop_watch import LoopPauses
from elastic.store.job_incidents import read_incident
from elastic.v1 import job_pb2 as pb

_BRIEF = (
    *("number", "unix_s", "cause", "summary", "noticed_by", "outcome", "lasted_s", "committed"),
    *("generation", "followed_by", "nodes", "workers", "samples_given_up", "lost_s", "recovery"),
)
_TOLD = ("number", "cause", "summary", "noticed_by", "outcome", "lasted_s")
_MOST_BYTES = 64 * 2**10  # of a record in the store: far below etcd's limit
_MOST_NAMED = 10
_MOST_ERRORS = 3  # after each but the last, the book begins again
_MOST_NOT_FINITE = 100  # names of values that are reported as NaN or infinite
_SPENT = Codec(TimeSpent, pb.TimeSpent)
_STEP = Codec(FirstStep, pb.Reformed)

T = TypeVar("T")


class ScriptValues:
    """Records an event when a value that the script reports turns NaN or infinite, and again only
    after it was finite."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._not_finite: set[str] = set()

    @property
    def not_finite(self) -> Sequence[str]:
        """Names of the values that are NaN or infinite now."""
        return sorted(self._not_finite)

    def heard(self, values: Mapping[str, float], step: int) -> None:
        """Take the values that rank 0 reported. step: how many steps are committed."""
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        bad = bad[:_MOST_NOT_FINITE]
        for name in bad:
            if name not in self._not_finite:
                shown = str(values[name])
                self._journal.record("loss_not_finite", name=name, value=shown, step=step)
        self._not_finite = set(bad)


class Watch:
    """What is known of the run beside what its leader decides.

    most: how many slots the job may have. totals: of the run; they listen to the journal. history:
    for the page, if there is one; it listens to the journal. pauses: of this process.
    """

    def __init__(
        self,
        leadership: Leadership,
        machine: Coordinator,
        journal: Journal,
        *,
        most: int,
        totals: Totals | None = None,
        history: JobHistory | None = None,
        pauses: LoopPauses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._journal, self._clock = machine, journal, clock
        self._pauses = pauses if pauses is not None else LoopPauses()
        self._stop_noted_at = 0.0
        self._most, self._errors, self._leads_since = most, 0, clock()
        self._accounts: Mapping[str, Any] = leadership.records.accounts
        """The accounts as they were stored last."""
        self._stored = dict(leadership.records.incidents)
        """The records of incidents as they were stored last, by number."""
        self._decided = self._loss_of(leadership.last)
        """A generation, and the number of the loss that it follows: the newest ones."""
        self._stored_costs: dict[int, float] = {}
        """What each had cost then."""
        self._illegible: set[int] = set()
        """Those that this version cannot read; they are kept."""
        self._book = self._begun_book()
        self.history = history
        self.totals = totals if totals is not None else Totals()
        self.totals.adopt(leadership.records.totals)
        self.progress, self.progressed_at = pb.Progress(), clock()
        """Rank 0's newest report, and when it came (monotonic seconds)."""
        self.script_values = ScriptValues(journal)

    # ---- the facts

    def observe(self, event: ev.Event, effects: Sequence[fx.Effect], now: float) -> None:
        """Call this after the machine has handled the event."""

        def take(book: Book) -> None:
            pauses = self._pauses
            if pauses.runs_since > self._stop_noted_at:
                self._stop_noted_at = pauses.runs_since
                book.stopped(pauses.stopped_s, pauses.runs_since)
            book.observe(event, effects, self._machine, now)
            loss = book.under_way
            if loss is not None and loss.followed_by:
                self._decided = loss.followed_by, loss.number

        self._fold(take)

    def connected(self, *, is_first: bool, has_members: bool) -> None:
        """An agent has connected. is_first: no other one is connected."""
        if is_first and self.totals.last_commit_unix_s > 0.0 and self._machine.current is None:
            self.totals.resumed_unix_s = time.time()  # all nodes had left the run
        if has_members:
            self._fold(lambda book: book.connected(self._clock()))

    def progressed(self, progress: pb.Progress, world_size: int) -> None:
        """Rank 0 of a group of this size reports."""
        self.progress, self.progressed_at = progress, self._clock()

        def take(book: Book) -> None:
            self.totals.progressed(progress, time.time())
            self.script_values.heard(progress.reported, progress.committed)
            book.progressed(progress.worker, progress.committed, progress.samples)

        self._fold(take)
        self._journal.record(
            "progress",
            step=progress.committed,
            epoch=progress.epoch,
            generation=progress.generation,
            world_size=world_size,
            step_s=round(progress.step_s, 6),
            samples_per_s=round(progress.samples_per_s, 1),
            reported={name: round(value, 6) for name, value in progress.reported.items()},
        )

    def spent(self, worker: str, spent: pb.TimeSpent) -> None:
        """A worker reports what it has spent its time on."""
        numbers = [value for _, value in spent.ListFields()]
        if not spent.generation or not all(0.0 <= number < math.inf for number in numbers):
            return  # the worker was in no group, or has another version
        report = Report(
            worker=worker,
            generation=spent.generation,
            committed=spent.committed,
            spent=_SPENT.from_pb(spent),
        )
        self._fold(lambda book: book.slots.spent(report, self._clock()))

    def reformed(self, report: pb.Reformed, age_s: float) -> None:
        """A member has committed its first step in a group, `age_s` seconds ago."""
        if not age_s:  # otherwise newer figures have come
            self.spent(report.worker, report.spent)
        if report.source:
            self._journal.record("state_restored", source=report.source, committed=report.committed)
        if report.bytes_received:
            self._journal.record(
                "state_received",
                worker=report.worker,
                generation=report.generation,
                bytes=report.bytes_received,
                sync_s=round(report.sync_s, 6),
            )
        step, at = _STEP.from_pb(report), self._clock() - age_s
        recovered = self._with_book(lambda book: book.reformed(step, at))
        if recovered is not None:
            self._journal.record("recovered", **recovered)
        self._fold(lambda _: self.totals.reformed(report))

    def left_late(self, node: str) -> None:
        """A node's workers are ended: they did not leave at a step boundary in time."""
        self._fold(lambda book: book.left_late(node, self._machine, self._clock()))

    def explained(self, generation: int, verdict: Diagnosis, stacks: Sequence[RankStacks]) -> None:
        """The members of a group that stands still have said where they are."""
        self._fold(lambda book: book.explained(generation, verdict, stacks))

    def save_failed(self, step: int, generation: int, message: str) -> None:
        """A checkpoint could not be completed, although all its parts were written."""
        self._fold(lambda b: b.save_failed(step, generation, message, self._clock()))

    def saved(self) -> None:
        """A checkpoint is complete."""
        self._fold(Book.saved)

    def ended(self, message: str) -> None:
        """The run has ended."""
        self._fold(lambda book: book.ended(message))

    async def sample(self, wanted: Callable[[], int], is_over: Callable[[], bool]) -> None:
        """Add to the page's curves until the run is over. wanted: returns for how many workers the
        nodes have room."""
        history = self.history

        def take(_: Book) -> None:
            if history is not None:
                history.sample(self._sample(wanted()), self.totals.steps)

        while history is not None and not is_over():
            self._fold(take)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _sample(self, wanted: int) -> Sample:
        progress, current = self.progress, self._machine.current
        return Sample(
            step=self._machine.committed,
            world_size=current.world_size if current is not None else 0,
            wanted=wanted,
            samples_per_s=progress.samples_per_s,
            values=dict(progress.reported),
        )

    # ---- what is known

    @property
    def committed(self) -> int:
        """The job's committed steps as last reported to this leader or an earlier one."""
        return self._with_book(lambda book: book.slots.committed) or 0

    @property
    def recovering_since(self) -> float | None:
        """When the first sign came of the loss from which the job recovers; None: of none."""
        loss = self._with_book(lambda book: book.under_way)
        return loss.at if loss is not None else None

    def accounts(self) -> Accounts:
        """Where the time of the job's slots went."""
        now = self._clock()
        return self._with_book(lambda b: b.slots.accounts(now, self._ahead_s())) or Accounts()

    def periods(self) -> Sequence[Period]:
        return self._with_book(lambda book: book.slots.periods(self._clock())) or []

    def recoveries(self) -> list[dict[str, Any]]:
        """The newest recoveries, phase by phase, newest last."""
        return self._with_book(Book.recoveries) or []

    def incidents(self) -> list[dict[str, Any]]:
        """Return one short document for each incident, oldest first, for lists."""
        return [{name: d.get(name) for name in _BRIEF} for d in self._documents().values()]

    def incident(self, number: int) -> dict[str, Any]:
        """Return an incident's record; 0: the newest one's. Raises ConfigurationError if there is
        none of this number."""
        found = self._documents()
        number = number or max(found, default=0)
        if number in found:
            return found[number]
        known = ", ".join(map(str, sorted(found)[-_MOST_NAMED:]))
        raise ConfigurationError(
            f"there is no incident {number}; known incidents: {known}"
            if known
            else f"there is no incident {number}: none has been recorded"
        )

    def _documents(self) -> dict[int, dict[str, Any]]:
        ahead_s = self._ahead_s()
        found = self._with_book(lambda book: book.documents(ahead_s)) or {}
        return {number: with_words(document) for number, document in found.items()}

    # ---- for later leaders

    @property
    def unstored(self) -> bool:
        """Records of incidents have changed since they were stored."""
        return bool(self._with_book(lambda book: book.changed))

    def loss(self) -> Loss | None:
        """The loss from which the job has not recovered yet."""

        def of(book: Book) -> Loss | None:
            loss = book.under_way
            if loss is None:
                return None
            record = _within_limit(with_words(loss.to_document(self._ahead_s())))
            return Loss(reason=loss.reason, workers=tuple(loss.lost), incident=record)

        return self._with_book(of)

    def accounts_to_store(self) -> Mapping[str, Any]:
        """Return the accounts as JSON values: after an error those before it."""
        now = self._clock()
        found = self._with_book(lambda book: book.slots.to_document(now, self._ahead_s()))
        self._accounts = found or self._accounts
        return self._accounts

    def incidents_to_store(self) -> Mapping[int, bytes]:
        """Return the records of incidents by number. They are made only if they have changed."""

        def take(book: Book) -> dict[int, bytes]:
            changed, book.changed = book.changed, set()
            found = {n: self._stored[n] for n in self._illegible}
            for number, incident in book.slots.books.incidents.items():
                cost = incident.lost_s
                if number in changed or self._stored_costs.get(number) != cost:
                    document = with_words(incident.to_document(self._ahead_s()))
                    self._stored[number] = _within_limit(document)
                    self._stored_costs[number] = cost
                found[number] = self._stored[number]
            self._stored_costs = {n: self._stored_costs[n] for n in book.slots.books.incidents}
            return found

        self._stored = self._with_book(take) or self._stored
        return self._stored

    def _loss_of(self, last: Stored | None) -> tuple[int, int]:
        loss = last.loss if last is not None else None
        document = read_incident(loss.incident) if loss is not None else None
        if last is None or loss is None or document is None:
            return 0, 0
        number = document["number"]
        stored = self._stored.get(number, b"")
        known = read_incident(stored)
        if known is None or is_open(known):  # otherwise this copy is the newer one
            if known is not None and len(stored) > len(loss.incident):  # it knows more
                document = known
            with_reason = {**document, "reason": document.get("reason") or loss.reason}
            self._stored[number] = json.dumps(with_reason, ensure_ascii=False).encode()
        return last.generation.number, number

    # ---- inside

    def _fold(self, take: Callable[[Book], None]) -> None:
        """Hand a fact to the book, and tell users what follows from it."""
        self._with_book(take)
        self._tell_news()

    def _with_book(self, action: Callable[[Book], T]) -> T | None:
        """The one way to the book. After an error it begins again with what was stored last."""
        if self._errors < _MOST_ERRORS:
            try:
                return action(self._book)
            except Exception as error:  # noqa: BLE001 - the job can do without its book
                self._errors += 1
                goes_on = self._errors < _MOST_ERRORS
                then = "begins again with what was stored" if goes_on else "is closed"
                message = f"the book of losses and time {then}: {type(error).__name__}: {error}"
                self._journal.record("warning", source="book", message=message)
            try:
                self._book = self._begun_book()
            except Exception:  # noqa: BLE001 - as above
                self._errors = _MOST_ERRORS
        return None

    def _begun_book(self) -> Book:
        book = Book(self._most, name_of=name_of, leads_since=self._leads_since)
        ahead_s = self._ahead_s()
        documents = {n: read_incident(value) or {} for n, value in self._stored.items()}
        self._illegible = book.resume(documents, self._decided, ahead_s)
        if self._accounts:
            book.adopt(self._accounts, self._clock(), ahead_s)
        known = book.slots.books.incidents
        self._stored_costs = {n: known[n].lost_s for n in known.keys() & self._stored.keys()}
        return book

    def _tell_news(self) -> None:
        def told(book: Book) -> list[dict[str, Any]]:
            news, book.news = book.news, []
            return [with_words(incident.to_document(self._ahead_s())) for incident in news]

        for document in self._with_book(told) or []:
            explain = f"elastic explain {document['number']}"
            self._journal.record("incident", **{n: document[n] for n in _TOLD}, explain=explain)

    def _ahead_s(self) -> float:
        return time.time() - self._clock()


def _within_limit(document: dict[str, Any]) -> bytes:
    """Return the document's bytes, without the longest texts if it would be too large: characters
    may take four bytes, and control characters six."""
    value = json.dumps(document, ensure_ascii=False).encode()
    processes = document.get("processes", ())
    for name in ("log_tail", "traceback", "message"):
        if len(value) <= _MOST_BYTES:
            break
        processes = [{**p, name: ""} for p in processes]
        document = {**document, "processes": processes}
        value = json.dumps(document, ensure_ascii=False).encode()
    return value
