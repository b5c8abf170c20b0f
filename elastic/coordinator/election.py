"""Wins the leader lease when nobody holds it, and notices when it is lost."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import aclosing

from elastic.coordinator.leadership import Leadership, take_office
from elastic.runtime.peer_life import until_gone
from elastic.store.claim import Claim
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, GuardFailed, Store
from elastic.store.job_documents import LeaderDocument, Unreadable, leader_from_json, to_json
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import DEFAULT_RUN
from elastic.store.leader_watch import leader_from
from elastic.store.lease_keeper import LeaseState, boot_time_s
from elastic.store.retries import until_answered

_LOG = logging.getLogger(__name__)
LEADER_TTL_S = 3.0


class Election:
    """One candidate: `campaign` until elected, `hold` until deposed, campaign again.

    `on_change` is told of the leadership that `campaign` returned. SUSPECT: others may lead soon;
    lead on, since every write is fenced. HELD: still the leader after all. GONE: step down; told
    once, and `hold` returns.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        address: str,
        on_change: Callable[[LeaseState], None],
        on_waiting: Callable[[LeaderDocument], None] = lambda _: None,
        run_id: str = DEFAULT_RUN,
        page: Callable[[], str] = str,
        ttl_s: float = LEADER_TTL_S,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        """`address`: host:port where agents and operators find this candidate. `on_waiting`: told
        who leads while it waits, once for each leader. `page`: where people find its page."""
        self._store = store
        self._job, self._run_id = job, run_id
        self._key = JobKeys(job).leader
        self._candidate = uuid.uuid4().hex
        self._address, self._page = address, page
        self._on_waiting = on_waiting
        self._on_change = on_change
        self._in_office = False
        self._told = LeaseState.HELD
        self._claim = Claim(
            store, key=self._key, ttl_s=ttl_s, on_change=self._claim_changed, clock=clock
        )

    def held(self) -> bool:
        """Is it certain that nobody else leads at this moment?"""
        return self._in_office and self._claim.held()

    async def campaign(self) -> Leadership:
        """Wait until nobody leads, and lead. Sits out outages.

        Raises AlreadyEnded and ConfigurationError.
        """
        while True:
            await self._until_vacant()
            elected = await self._claim.take(self._value())
            if elected is None:
                continue
            try:
                leadership = await self._take_office(elected)
            except BaseException:
                await self._claim.release()
                raise
            if leadership is not None:
                return leadership

    async def hold(self) -> None:
        """Return when deposed, or after `resign`. Raises ConfigurationError if the store does."""
        await self._claim.hold()
        self._in_office = False

    async def resign(self) -> None:
        """Make way for the next leader at once, if the store answers. Tells no change.

        Cancel `campaign` before, or it goes on.
        """
        self._in_office = False
        await self._claim.release()

    async def _take_office(self, elected: Entry) -> Leadership | None:
        """None if deposed meanwhile."""
        deposed = asyncio.ensure_future(self._claim.hold())
        reading = asyncio.ensure_future(
            take_office(
                self._store,
                job=self._job,
                candidate=self._candidate,
                elected=elected,
                run_id=self._run_id,
            )
        )
        try:
            await asyncio.wait({deposed, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (deposed, reading):
                task.cancel()
            await asyncio.gather(deposed, reading, return_exceptions=True)
        if reading.cancelled():
            deposed.result()
            return None
        try:
            return self._in_office_with(reading.result())
        except GuardFailed:
            return None

    def _in_office_with(self, leadership: Leadership) -> Leadership | None:
        if self._claim.entry is None:
            return None
        self._in_office, self._told = True, LeaseState.HELD
        if not self._claim.held():
            self._tell(LeaseState.SUSPECT)
        return leadership

    async def _until_vacant(self) -> None:
        ending: asyncio.Task[None] | None = None
        told = ""
        try:
            async with aclosing(follow_key(self._store, self._key)) as entries:
                async for entry in entries:
                    if ending is not None:
                        ending.cancel()
                    if entry is None:
                        return
                    told = self._tell_who_leads(entry, told)
                    ending = asyncio.create_task(self._end_with_its_process(entry))
        finally:
            if ending is not None:
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

    def _value(self) -> bytes:
        document = LeaderDocument(
            candidate=self._candidate,
            address=self._address,
            run_id=self._run_id,
            page=self._page(),
        )
        return to_json(document)

    def _tell_who_leads(self, entry: Entry, told: str) -> str:
        """The candidate of which it has been told now; `told`: until now."""
        try:
            leader = leader_from_json(entry.value)
        except Unreadable:
            return told
        if leader.address and leader.candidate not in (told, self._candidate):
            self._on_waiting(leader)
        return leader.candidate

    async def _end_with_its_process(self, entry: Entry) -> None:
        """A leader whose process is gone is not waited for until its lease ends. If that is an
        error, it is deposed as if its lease had been lost."""
        leader = leader_from(entry)
        if leader is None or not entry.lease:
            return
        await until_gone(leader.address)
        _LOG.info("nobody listens at %s any more, where the leader was", leader.address)
        await until_answered(lambda: self._store.revoke(entry.lease), "revoke the leader's lease")

    def _claim_changed(self, state: LeaseState) -> None:
        if self._in_office:
            self._tell(state)

    def _tell(self, state: LeaseState) -> None:
        """Once: what was in doubt from the first moment is found out by two."""
        if state is not self._told:
            self._told = state
            self._on_change(state)
