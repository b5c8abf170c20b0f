"""Calls an etcd cluster: fails over between members, adds the token, turns refusals into errors.
Examines each member for `elastic doctor`: its version, its alarms, and how long commits take.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic.errors import ConfigurationError, ElasticError
from elastic.store.etcd import refusals
from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.connection import (
    LEASE_KEEP_ALIVE,
    READS,
    STATUS,
    TXN,
    WATCH,
    Answer,
    Connection,
    Failover,
    Metadata,
    Method,
    RequestT,
    ResponseT,
    Stream,
    Tokens,
    metadata,
)
from elastic.store.etcd.endpoints import Endpoint, EtcdOptions
from elastic.store.etcd.keys import Keys
from elastic.store.etcd.refusals import NO_ANSWER, Refusal, RefusalReason, Refused

AnswerT = TypeVar("AnswerT")
Attempt = Callable[[Connection, float, Metadata], Awaitable[AnswerT]]
WatchStream = Stream[pb.WatchRequest, pb.WatchResponse]

_LAST_TOKEN = 3
"""This many refused tokens in a row cannot all have expired."""


class EtcdClient:
    """A client of one cluster, for EtcdStore and `members_health`.

    Every call ends within the options' `total_timeout_s`; all raise ElasticError.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._connections = [Connection(e, options.tls) for e in _in_order(options)]
        self._failover = Failover(
            self._connections,
            attempt_timeout_s=options.attempt_timeout_s,
            total_timeout_s=options.total_timeout_s,
        )
        self._let_write = False
        self._tokens = Tokens(self._failover, user=options.user, password=options.password)

    def ends_at(self) -> float:
        """The deadline, in the loop's time, for a group of calls that start now; see `call`."""
        return self._failover.ends_at()

    async def call(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        ends_at: float | None = None,
    ) -> Answer[ResponseT]:
        """Send one request for one answer; the request may be carried out more than once."""

        async def attempt(connection: Connection, timeout_s: float, meta: Metadata) -> ResponseT:
            return await connection.ask(method, request, metadata=meta, timeout_s=timeout_s)

        return await self._ask(method.name, attempt, ends_at)

    async def keep_alive(self, lease: int) -> None:
        """Renew the lease; raises LeaseLost."""

        async def attempt(connection: Connection, timeout_s: float, meta: Metadata) -> None:
            stream = connection.stream(LEASE_KEEP_ALIVE, metadata=meta, timeout_s=timeout_s)
            try:
                await stream.send(pb.LeaseKeepAliveRequest(id=lease), timeout_s=timeout_s)
                answer = await stream.receive(timeout_s=timeout_s)
            finally:
                await stream.close()
            _check_kept_alive(answer)

        await self._ask(LEASE_KEEP_ALIVE.name, attempt, None)

    async def watch_stream(self) -> tuple[Connection, str | None, WatchStream]:
        """A stream from the current member, with the arguments for `watch_failed`."""
        try:
            token = await self._tokens.get(ends_at=self.ends_at())
        except Refused as refused:
            raise self._error(WATCH.name, refused) from refused
        connection = self._failover.current
        return connection, token, connection.stream(WATCH, metadata=self._metadata(token))

    def watch_failed(
        self, connection: Connection, token: str | None, reason: RefusalReason
    ) -> None:
        """Make the next stream use a fresh token, or another member, according to the refusal."""
        # etcd 3.5 ends a watch whose token has expired with "permission denied".
        if reason.kind in (Refusal.TOKEN, Refusal.PERMISSION):
            self._tokens.forget(token)
        else:
            self._failover.move_on(connection)

    async def __aenter__(self) -> EtcdClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _ask(
        self, name: str, attempt: Attempt[AnswerT], ends_at: float | None
    ) -> Answer[AnswerT]:
        """Call `attempt`, again with a fresh token if the token was refused."""
        ends_at = self.ends_at() if ends_at is None else ends_at
        tokens = 0
        while True:
            token: str | None = None
            try:
                token = await self._tokens.get(ends_at=ends_at)
                answer = await self._ask_with(token, name, attempt, ends_at)
            except Refused as refused:
                tokens += 1
                if (
                    refused.reason.kind is not Refusal.TOKEN
                    or token is None
                    or tokens == _LAST_TOKEN
                ):
                    raise self._error(name, refused) from refused
                self._tokens.forget(token)
            else:
                self._failover.answered = True
                self._let_write |= name not in READS
                return Answer(answer.value, repeated=answer.repeated or tokens > 0)

    async def _ask_with(
        self, token: str | None, name: str, attempt: Attempt[AnswerT], ends_at: float
    ) -> Answer[AnswerT]:
        meta = self._metadata(token)
        return await self._failover.ask(
            name,
            lambda connection, timeout_s: attempt(connection, timeout_s, meta),
            ends_at=ends_at,
        )

    def _metadata(self, token: str | None) -> Metadata:
        return metadata(token, len(self._connections))

    def _error(self, name: str, refused: Refused) -> ElasticError:
        error = refusals.refusal(name, refused)
        answered = self._failover.answered
        if refused.reason.kind is Refusal.CERTIFICATE and name not in READS:
            answered = self._let_write  # a user with only read access is answered, too
        return refusals.as_transient(error) if answered else error


def _in_order(options: EtcdOptions) -> Sequence[Endpoint]:
    endpoints = options.endpoints
    return random.sample(endpoints, len(endpoints)) if options.spread else endpoints


def _check_kept_alive(answer: pb.LeaseKeepAliveResponse | None) -> None:
    if answer is None:
        raise Refused(NO_ANSWER)
    if answer.ttl <= 0:
        raise Refused(RefusalReason(Refusal.LEASE_UNKNOWN, "requested lease not found"))


_COMMITS = 5
_NEVER = 2**62
"""A revision at which no key was created."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberHealth:
    """The state of one endpoint. `error`: why it did not answer, or, if `is_refusal`, refused."""

    endpoint: str
    version: str = ""
    errors: tuple[str, ...] = ()
    commit_s: tuple[float, ...] = ()
    size_bytes: int = 0
    """The size of its database, with the pages that a defragmentation would free; 0: unknown."""
    used_bytes: int = 0
    """The part of `size_bytes` that is in use."""
    quota_bytes: int = 0
    """The size at which it refuses writes; 0: it does not tell (before etcd 3.6)."""
    error: str = ""
    is_refusal: bool = False


async def members_health(options: EtcdOptions, key: str) -> Sequence[MemberHealth]:
    """Examine all endpoints at once. The user needs the right to write `key`; nothing is written.

    Each of the calls ends within the options' `total_timeout_s`.
    """
    asked = (_health(options, endpoint, key) for endpoint in options.endpoints)
    return await asyncio.gather(*asked)


async def _health(options: EtcdOptions, endpoint: Endpoint, key: str) -> MemberHealth:
    found = MemberHealth(endpoint=str(endpoint))
    alone = dataclasses.replace(options, endpoints=(endpoint,))
    try:
        async with EtcdClient(alone) as client:
            status = (await client.call(STATUS, pb.StatusRequest())).value
        found = dataclasses.replace(
            found,
            version=status.version,
            errors=tuple(status.errors),
            size_bytes=status.db_size,
            used_bytes=status.db_size_in_use,
            quota_bytes=status.db_size_quota,
        )
        async with EtcdClient(
            alone
        ) as client:  # another client: one that was answered raises no refusal
            commits = [await _commit(client, options, key) for _ in range(_COMMITS)]
        return dataclasses.replace(found, commit_s=tuple(commits))
    except ElasticError as error:
        is_refusal = isinstance(error, ConfigurationError)
        if found.errors and not is_refusal:
            return found  # the alarm explains the error better
        return dataclasses.replace(found, error=str(error), is_refusal=is_refusal)


async def _commit(client: EtcdClient, options: EtcdOptions, key: str) -> float:
    """Time a transaction whose comparison never holds, so that it writes nothing. It passes all
    stages of a write: the user's rights, and the disks of a majority."""
    keys = Keys(options.namespace)
    never = pb.Compare(target=pb.Compare.CREATE, key=keys.encode(key), create_revision=_NEVER)
    request = pb.TxnRequest(compare=[never], success=[keys.put(key, b"", 0)])
    began = time.monotonic()
    await client.call(TXN, request)
    return time.monotonic() - began
