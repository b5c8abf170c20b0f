"""Asks each member of a cluster how it is: its version, its alarms, how long commits take."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from elastic.errors import ConfigurationError, ElasticError
from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.client import EtcdClient
from elastic.store.etcd.connection import STATUS, TXN
from elastic.store.etcd.endpoints import Endpoint, EtcdOptions
from elastic.store.etcd.keys import Keys

_COMMITS = 5
_NEVER = 2**62
"""A revision that no key was created at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberHealth:
    """Of one endpoint; `error` says why it did not answer, or, if `is_refusal`, why it refused."""

    endpoint: str
    version: str = ""
    errors: tuple[str, ...] = ()
    commit_s: tuple[float, ...] = ()
    error: str = ""
    is_refusal: bool = False


async def members_health(options: EtcdOptions, key: str) -> Sequence[MemberHealth]:
    """Of all endpoints, at once. The user must have the right to write `key`; nothing is written.

    Ends within the options' `total_timeout_s` for each of the calls.
    """
    asked = (_health(options, endpoint, key) for endpoint in options.endpoints)
    return await asyncio.gather(*asked)


async def _health(options: EtcdOptions, endpoint: Endpoint, key: str) -> MemberHealth:
    found = MemberHealth(endpoint=str(endpoint))
    alone = dataclasses.replace(options, endpoints=(endpoint,))
    try:
        async with _client(alone) as client:
            status = (await client.call(STATUS, pb.StatusRequest())).value
        found = dataclasses.replace(found, version=status.version, errors=tuple(status.errors))
        async with _client(alone) as client:  # another one: one that was answered refuses nothing
            commits = [await _commit(client, options, key) for _ in range(_COMMITS)]
        return dataclasses.replace(found, commit_s=tuple(commits))
    except ElasticError as error:
        is_refusal = isinstance(error, ConfigurationError)
        if found.errors and not is_refusal:
            return found  # an alarm explains it better
        return dataclasses.replace(found, error=str(error), is_refusal=is_refusal)


@contextlib.asynccontextmanager
async def _client(options: EtcdOptions) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(options)
    try:
        yield client
    finally:
        await client.close()


async def _commit(client: EtcdClient, options: EtcdOptions, key: str) -> float:
    """A write that never happens, because of what it asks for first. It takes the way of every
    write: the user's rights, a majority's disks."""
    keys = Keys(options.namespace)
    never = pb.Compare(target=pb.Compare.CREATE, key=keys.encode(key), create_revision=_NEVER)
    request = pb.TxnRequest(compare=[never], success=[keys.put(key, b"", 0)])
    began = time.monotonic()
    await client.call(TXN, request)
    return time.monotonic() - began
