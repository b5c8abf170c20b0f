"""The stores that tests/contract checks against elastic/store/interface.py."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from elastic.store.etcd.endpoints import EtcdOptions, parse_endpoints
from elastic.store.etcd.server import EtcdService
from elastic.store.etcd.store import EtcdStore
from elastic.store.interface import Change, Store
from elastic.store.memory import MemoryStore
from tests.etcd_cluster import EtcdCluster, etcd_cluster

DEADLINE_S = 10.0

_open_stores: list[EtcdStore] = []
_open_servers: list[grpc.aio.Server] = []


@dataclass
class Adapter:
    """A kind of store under test. Each test makes its own store inside its event loop."""

    make: Callable[[], Store]
    pass_s: Callable[[float], Awaitable[None]]
    """Let this many seconds of the store's own clock pass."""
    ttl_s: float
    """The shortest lease that the store honors, in seconds."""
    compact: Callable[[Store, int], Awaitable[None]]
    """Forget the changes before a revision."""


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[EtcdCluster]:
    """A cluster for tests that break nothing and use only keys of their own."""
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """A cluster for one test, which may break it."""
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd", "served"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """To add an adapter, add a parameter here and a branch that returns it."""
    if request.param == "etcd":
        return _etcd(request.getfixturevalue("shared_cluster"))
    return {"memory": _memory, "served": _served}[request.param]()


def _memory() -> Adapter:
    now = 0.0

    async def pass_s(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    async def compact(store: Store, revision: int) -> None:
        assert isinstance(store, MemoryStore)
        store.compact(revision)

    def make() -> Store:
        return MemoryStore(clock=lambda: now)

    return Adapter(make=make, pass_s=pass_s, ttl_s=5.0, compact=compact)


def _served() -> Adapter:
    """A store in memory behind a gRPC server, as a coordinator serves it."""
    memory = _memory()
    behind: dict[int, Store] = {}

    def make() -> Store:
        kept = memory.make()
        assert isinstance(kept, MemoryStore)
        store = EtcdStore(_options_of(serve(kept)))
        behind[id(store)] = kept
        _open_stores.append(store)
        return store

    async def compact(store: Store, revision: int) -> None:
        await memory.compact(behind[id(store)], revision)

    return Adapter(make=make, pass_s=memory.pass_s, ttl_s=memory.ttl_s, compact=compact)


def serve(store: MemoryStore) -> int:
    """Serve the store by etcd's API until the test ends, and return the port."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(tuple(EtcdService(store, version="1.2.3").handlers()))
    port = server.add_insecure_port("127.0.0.1:0")
    starting = asyncio.ensure_future(server.start())
    starting.add_done_callback(lambda done: done.result())
    _open_servers.append(server)
    return int(port)


def _options_of(port: int) -> EtcdOptions:
    return EtcdOptions(endpoints=parse_endpoints(f"127.0.0.1:{port}"), watch_idle_s=0.2)


def _etcd(cluster: EtcdCluster) -> Adapter:
    namespace = f"{uuid.uuid4()}/"

    def make() -> Store:
        _open_stores.append(EtcdStore(cluster.options(namespace)))
        return _open_stores[-1]

    async def compact(store: Store, revision: int) -> None:
        del store
        await asyncio.to_thread(cluster.ctl, "compact", str(revision))

    return Adapter(make=make, pass_s=asyncio.sleep, ttl_s=1.0, compact=compact)


def within_deadline(work: Coroutine[Any, Any, None], deadline_s: float = DEADLINE_S) -> None:
    """Run a coroutine for a test that is not async itself; fail if it hangs."""
    asyncio.run(asyncio.wait_for(work, deadline_s))


@pytest.fixture(autouse=True)
async def _close_stores() -> AsyncIterator[None]:
    yield
    while _open_stores:
        await _open_stores.pop().close()
    while _open_servers:
        await _open_servers.pop().stop(None)


async def take(changes: AsyncIterator[Change], count: int) -> list[Change]:
    return [await anext(changes) for _ in range(count)]
