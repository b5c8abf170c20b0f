"""Which member is asked: the one that answered last, and when it fails, the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from elastic.store.etcd import wording
from elastic.store.etcd.connection import Connection
from elastic.store.etcd.endpoints import Endpoint
from elastic.store.etcd.refusals import ANOTHER_MAY_ANSWER, Refusal, Refused, Said

AnswerT = TypeVar("AnswerT")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer(Generic[AnswerT]):
    """An answer; `repeated` if a member asked before may have done the same already."""

    value: AnswerT
    repeated: bool


class Failover:
    """Asks one member after the other until one answers or the time is up."""

    def __init__(
        self, connections: Sequence[Connection], *, attempt_timeout_s: float, total_timeout_s: float
    ) -> None:
        self._connections = connections
        self._current = 0
        self._attempt_timeout_s = attempt_timeout_s
        self._total_timeout_s = total_timeout_s
        self._said_last: dict[Endpoint, Said] = {}
        """By those that did not answer since one did: also to calls that waited for others."""
        self.answered = False
        """Has the cluster ever done what it was asked? The client knows."""

    @property
    def current(self) -> Connection:
        """The member to ask."""
        return self._connections[self._current]

    def ends_at(self) -> float:
        """When a call made now has taken too long, in the event loop's time."""
        return asyncio.get_running_loop().time() + self._total_timeout_s

    def move_on(self, failed: Connection) -> None:
        """Ask the next one from now on, unless somebody has moved on already."""
        failed.failed()
        if self.current is failed:
            self._current = (self._current + 1) % len(self._connections)

    async def ask(
        self,
        method: str,
        attempt: Callable[[Connection, float], Awaitable[AnswerT]],
        *,
        ends_at: float,
    ) -> Answer[AnswerT]:
        """Call `attempt(connection, timeout_s)` until it answers.

        Raises Refused for what no other member would answer either, and what operators read
        when none answers.
        """
        heard: dict[Endpoint, Said] = {}
        attempts = 0
        while (left_s := ends_at - asyncio.get_running_loop().time()) > 0:
            connection = self.current
            answer = await self._attempt(attempt, connection, left_s)
            if not isinstance(answer, Said):
                self._said_last.clear()
                return Answer(answer, repeated=attempts > 0)
            attempts += 1
            if left_s >= self._attempt_timeout_s or connection.endpoint not in heard:
                heard[connection.endpoint] = answer
            self.move_on(connection)
            self._check_handshakes(heard)
            await self._pause(attempts, ends_at)
        self._said_last |= heard
        raise wording.unreachable(method, self._total_timeout_s, self._said_last)

    async def _attempt(
        self,
        attempt: Callable[[Connection, float], Awaitable[AnswerT]],
        connection: Connection,
        left_s: float,
    ) -> AnswerT | Said:
        """The answer, or why another member must be asked."""
        await connection.refresh()
        try:
            return await attempt(connection, min(self._attempt_timeout_s, left_s))
        except Refused as refused:
            refused.by = connection.endpoint
            if refused.said.kind not in ANOTHER_MAY_ANSWER:
                raise
            return refused.said

    def _check_handshakes(self, heard: dict[Endpoint, Said]) -> None:
        failed = [said for said in heard.values() if said.kind is Refusal.HANDSHAKE]
        if len(failed) == len(self._connections) and not self.answered:
            raise wording.handshake_failed(heard)

    async def _pause(self, attempts: int, ends_at: float) -> None:
        """After each round of all members, longer each time."""
        rounds, in_round = divmod(attempts, len(self._connections))
        if in_round == 0:
            left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**rounds, _LONGEST_PAUSE_S, left_s))
