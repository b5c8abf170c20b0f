"""The token that a user's name and password are exchanged for."""

from __future__ import annotations

import asyncio

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.connection import Connection, Metadata
from elastic.store.etcd.failover import Failover
from elastic.store.etcd.methods import AUTHENTICATE

NEEDS_LEADER: Metadata = (("hasleader", "true"),)
"""Makes a member that is cut off from the others refuse, instead of answering what it knows."""
ENDPOINTS = "elastic-endpoints"
"""The name under which a store is told how many others are asked: of those in memory there is one.
etcd takes no notice."""


class Tokens:
    """Fetches a token when there is none; without a user there never is."""

    def __init__(self, failover: Failover, *, user: str | None, password: str | None) -> None:
        self._failover = failover
        self._user = user
        self._request = pb.AuthenticateRequest(name=user or "", password=password or "")
        self._token: str | None = None
        self._fetching = asyncio.Lock()

    async def get(self, *, ends_at: float) -> str | None:
        """The token to send; raises Refused and what `Failover.ask` raises."""
        if self._user is None:
            return None
        async with self._fetching:
            if self._token is None:
                answer = await self._failover.ask(
                    AUTHENTICATE.name, self._authenticate, ends_at=ends_at
                )
                self._token = answer.value.token
            return self._token

    def forget(self, token: str | None) -> None:
        """It was refused."""
        if self._token == token:
            self._token = None

    async def _authenticate(
        self, connection: Connection, timeout_s: float
    ) -> pb.AuthenticateResponse:
        return await connection.ask(
            AUTHENTICATE, self._request, metadata=NEEDS_LEADER, timeout_s=timeout_s
        )


def metadata(token: str | None, endpoints: int) -> Metadata:
    """What goes along with every call; `endpoints` is the number of those that are asked."""
    always = (*NEEDS_LEADER, (ENDPOINTS, str(endpoints)))
    return always if token is None else (*always, ("token", token))
