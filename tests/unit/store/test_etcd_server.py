"""Tests a memory store that is served as etcd, beyond the contract of stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc.aio
import pytest

from elastic.cli.coordinator import store_rights
from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.security import PLAINTEXT, Security, Tls
from elastic.settings.tls_files import TlsFiles
from elastic.store.etcd import server
from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.client import members_health
from elastic.store.etcd.endpoints import EtcdOptions, parse_endpoints
from elastic.store.etcd.server import EtcdService
from elastic.store.etcd.store import EtcdStore
from elastic.store.interface import LeaseExists, StoreWentBack, WatchCompacted
from elastic.store.memory import MemoryStore
from tests.certificates import make_certificates, sign, sign_for_job
from tests.etcd_cluster import free_ports
from tests.unit.rpc.conversation import Place, place_at

LOOPBACK = "127.0.0.1:0"


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(revision=1000)


@pytest.fixture
async def place(memory: MemoryStore) -> AsyncIterator[Place]:
    async with served(memory) as place:
        yield place


def served(
    memory: MemoryStore, security: Security = PLAINTEXT
) -> AbstractAsyncContextManager[Place]:
    """Serve `memory` as a coordinator does, beside its own methods."""
    rights = store_rights(security)
    handlers = EtcdService(memory, version="1.2.3", rights_of=rights).handlers()
    return place_at(LOOPBACK, security, beside=handlers)


def options(place: Place, *others: str, **more: object) -> EtcdOptions:
    endpoints = parse_endpoints(",".join((place.address, *others)))
    return EtcdOptions(endpoints=endpoints, spread=False, **more)  # type: ignore[arg-type]


async def test_revisions_of_an_earlier_store_are_compacted_in_a_new_one(place: Place) -> None:
    async with EtcdStore(options(place)) as store:
        assert (await store.list("")).revision == 1000
        for earlier in (0, 999):
            with pytest.raises(WatchCompacted, match="1001"):
                await anext(store.watch("", after=earlier))
        with pytest.raises(StoreWentBack):
            await anext(store.watch("", after=1001))
        written = await store.put("a", b"1")
        assert written.modified == 1001
        assert (await anext(store.watch("", after=1000))).entry == written


async def test_a_remote_watch_sees_the_same_changes_as_a_local_one(
    place: Place, memory: MemoryStore
) -> None:
    async with EtcdStore(options(place)) as store:
        lease = await memory.grant(60.0)
        away, here = store.watch("job/", after=1000), memory.watch("job/", after=1000)
        await store.put("job/a", b"1", lease=lease)
        await memory.put("other", b"2")
        await memory.put("job/\N{SNOWMAN}", b"2")
        await store.revoke(lease)
        for _ in range(3):
            assert await anext(away) == await anext(here)


async def test_an_idle_watch_is_answered_and_stays_up(place: Place, memory: MemoryStore) -> None:
    async with EtcdStore(options(place, watch_idle_s=0.02)) as store:
        changes = store.watch("a", after=1000)
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await memory.put("a", b"1")
        assert (await waiting).key == "a"


async def test_a_watcher_that_does_not_read_is_told_that_changes_are_lost(
    place: Place, memory: MemoryStore
) -> None:
    async with grpc.aio.insecure_channel(place.address) as channel:
        call = channel.stream_stream("/etcdserverpb.Watch/Watch")()
        create = pb.WatchCreateRequest(key=b"a", range_end=b"b", start_revision=1001)
        await call.write(pb.WatchRequest(create_request=create).SerializeToString())
        assert pb.WatchResponse.FromString(await call.read()).created
        for _ in range(400):  # some of them fit in the connection's buffers
            await memory.put("a", bytes(2**16))
            await asyncio.sleep(0)
        told = [pb.WatchResponse.FromString(await call.read())]
        while not told[-1].canceled:
            told.append(pb.WatchResponse.FromString(await call.read()))
        seen = [event.kv.mod_revision for one in told for event in one.events]
        assert seen == list(range(1001, 1001 + len(seen)))
        assert 1001 + len(seen) < told[-1].compact_revision


async def test_a_lease_name_is_granted_once_at_a_time() -> None:
    store = MemoryStore()
    assert await store.grant(1.0, name=1) == 1
    with pytest.raises(LeaseExists):
        await store.grant(1.0, name=1)
    assert await store.grant(1.0) == 2
    await store.revoke(1)
    assert await store.grant(1.0, name=1) == 1
    assert store.has_lease(1)
    assert not store.has_lease(3)


async def test_a_client_of_several_endpoints_is_refused(place: Place, memory: MemoryStore) -> None:
    """Two coordinators with a store each would form two groups of the same job."""
    (unused,) = free_ports(1)
    for others in ((f"127.0.0.1:{unused}",), ("127.0.0.2:1", "127.0.0.3:1")):
        async with EtcdStore(options(place, *others)) as store:
            with pytest.raises(ConfigurationError, match=r"--store memory.*only endpoint"):
                await store.put("a", b"1")
            with pytest.raises(ConfigurationError, match="only endpoint"):
                await anext(store.watch("a", after=1000))
    assert memory.revision == 1000


async def test_a_client_with_a_user_is_refused(place: Place) -> None:
    async with EtcdStore(options(place, user="u", password="p")) as store:
        with pytest.raises(ConfigurationError, match="has no users"):
            await store.get("a")


async def test_server_health_has_a_version_and_no_error(place: Place, memory: MemoryStore) -> None:
    (found,) = await members_health(options(place), "a")
    assert (found.version, found.error, found.errors) == ("elastic 1.2.3", "", ())
    assert found.commit_s
    assert memory.revision == 1000


async def test_a_coordinator_without_a_store_of_its_own_says_what_is_missing() -> None:
    async with (
        place_at(LOOPBACK, PLAINTEXT) as place,
        EtcdStore(options(place)) as store,
    ):
        with pytest.raises(ConfigurationError, match="only with --store memory"):
            await store.get("a")


@pytest.mark.parametrize(
    ("path", "requests", "told"),
    [
        ("KV/Range", [pb.RangeRequest(key=b"\xff")], "a key must be UTF-8"),
        (
            "KV/Txn",
            [pb.TxnRequest(compare=[pb.Compare(key=b"a")])],
            "this comparison is not supported",
        ),
        (
            "KV/Txn",
            [pb.TxnRequest(success=[pb.RequestOp()])],
            "this operation is not supported in a transaction",
        ),
        (
            "Lease/LeaseGrant",
            [pb.LeaseGrantRequest(ttl=0)],
            "the TTL of a lease must be at least 1 s",
        ),
        ("Watch/Watch", [pb.WatchRequest()], "first request of a stream must create a watch"),
        (
            "Watch/Watch",
            [pb.WatchRequest(create_request=pb.WatchCreateRequest(key=b"a"))] * 2,
            "a stream can have only one watch",
        ),
        ("Watch/Watch", [b"\xff\xff"], "cannot be read"),
        ("Lease/LeaseKeepAlive", [b"\xff\xff"], "cannot be read"),
        ("KV/Range", [b"\xff\xff"], "cannot be read"),
    ],
)
async def test_a_request_that_is_not_supported_is_refused_with_the_reason(
    place: Place, memory: MemoryStore, path: str, requests: Sequence[object], told: str
) -> None:
    sent = [r if isinstance(r, bytes) else r.SerializeToString() for r in requests]  # type: ignore[attr-defined]
    async with grpc.aio.insecure_channel(place.address) as channel:
        call = channel.stream_stream(f"/etcdserverpb.{path}")(iter(sent))
        with pytest.raises(grpc.aio.AioRpcError, match=told):
            [_ async for _ in call]
    refused = place.reports.named("message_refused")
    assert len(refused) == (requests[0] == b"\xff\xff")
    assert memory.revision == 1000


# ---- certificates


async def test_a_certificate_of_another_job_is_refused_with_the_reason(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "made")
    for job in ("digits", "letters"):
        sign(made, job, names=f"DNS:{job}.job.elastic,IP:127.0.0.1")
    ours, theirs = (
        TlsFiles(ca=made.ca, certificate=made.certificate(job), key=made.key(job))
        for job in ("digits", "letters")
    )
    async with (
        served(MemoryStore(revision=1000), Tls(job="digits", files=ours)) as place,
        EtcdStore(options_with(place, theirs)) as store,
    ):
        with pytest.raises(ConfigurationError, match=r"job 'digits'.*a certificate of the job"):
            await store.get("a")
        with pytest.raises(ConfigurationError, match="a certificate of the job"):
            await anext(store.watch("a", after=1000))


async def test_a_coordinator_whose_certificate_lacks_its_host_is_refused(tmp_path: Path) -> None:
    """The host is easily forgotten: no other connection of a job asks for it."""
    made = make_certificates(tmp_path / "made")
    files = sign_for_job(made, "digits")
    async with (
        served(MemoryStore(revision=1000), Tls(job="digits", files=files)) as place,
        EtcdStore(options_with(place, files)) as store,
    ):
        with pytest.raises(ConfigurationError, match=r"Hostname.*elastic certs issue --host"):
            await store.get("a")


def options_with(place: Place, files: TlsFiles) -> EtcdOptions:
    return EtcdOptions(endpoints=parse_endpoints(f"https://{place.address}"), tls=files)


# ---- rights


NODES = "elastic/digits/nodes/"
ROLES = {
    "all": "",
    "agent": "DNS:agent.digits.job.elastic,DNS:n1",
    "other agent": "DNS:agent.digits.job.elastic,DNS:n2",
    "operator": "DNS:operator.digits.job.elastic",
    "coordinator": "DNS:coordinator.digits.job.elastic",
    "viewer": "DNS:viewer.digits.job.elastic",
}


@pytest.fixture(scope="module")
def of_role(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    """A certificate of the job for each role, and the coordinator's own as "server"."""
    made = make_certificates(tmp_path_factory.mktemp("roles") / "made")
    found = {}
    for role, more in {**ROLES, "server": "IP:127.0.0.1,DNS:localhost"}.items():
        name = role.replace(" ", "-")
        sign(made, name, names=",".join(filter(None, ["DNS:digits.job.elastic", more])))
        found[role] = TlsFiles(ca=made.ca, certificate=made.certificate(name), key=made.key(name))
    return found


@contextlib.asynccontextmanager
async def store_of(place: Place, files: TlsFiles) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(options_with(place, files)) as store:
        yield store


async def _may(asked: Awaitable[object]) -> bool:
    try:
        await asked
    except (ConfigurationError, TransientError):
        return False
    return True


@pytest.mark.parametrize("role", ROLES)
async def test_leases_of_others_are_renewed_and_revoked_only_by_those_who_may_write_all(
    memory: MemoryStore, of_role: dict[str, TlsFiles], role: str
) -> None:
    """What each role may write: tests/unit/rpc/test_rights.py. One lease is the coordinator's own,
    which holds the election."""
    own_lease = await memory.grant(60.0)
    everything = role in ("all", "operator", "coordinator")
    async with (
        served(memory, Tls(job="digits", files=of_role["server"])) as place,
        store_of(place, of_role[role]) as store,
        store_of(place, of_role["other agent"]) as other,
    ):
        (found,) = await members_health(options_with(place, of_role[role]), NODES + "doctor")
        assert (found.version, found.is_refusal) == ("elastic 1.2.3", role == "viewer")
        others = await other.grant(60.0)
        if role != "viewer":
            assert await _may(store.renew(await store.grant(60.0)))
        same = everything or role == "other agent"
        assert await _may(store.renew(others)) == same
        assert await _may(store.revoke(others)) == same
        assert await _may(store.revoke(own_lease)) == everything


async def test_an_agent_takes_over_the_registration_of_a_certificate_without_hosts(
    memory: MemoryStore, of_role: dict[str, TlsFiles]
) -> None:
    """So a running job's certificates can be replaced by those of single nodes."""
    async with (
        served(memory, Tls(job="digits", files=of_role["server"])) as place,
        store_of(place, of_role["all"]) as before,
        store_of(place, of_role["agent"]) as now,
    ):
        lease = await before.grant(60.0)
        await before.put(NODES + "n1", b"1", lease=lease)
        await now.renew(lease)
        assert await _may(now.put(NODES + "n1", b"2", lease=await now.grant(60.0)))


async def test_a_node_cannot_fill_the_memory_of_the_store(
    memory: MemoryStore, of_role: dict[str, TlsFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_REGISTERED", 2)
    async with (
        served(memory, Tls(job="digits", files=of_role["server"])) as place,
        store_of(place, of_role["agent"]) as store,
    ):
        lease = await store.grant(60.0)
        assert not await _may(store.put(NODES + "n1", bytes(2**14 + 1), lease=lease))
        assert await _may(store.put(NODES + "n1", bytes(2**13), lease=lease))
        assert await _may(store.put(NODES + "n2", b"", lease=lease))
        assert not await _may(store.put(NODES + "n3", b"", lease=lease))
        assert await _may(store.put(NODES + "n2", b"again", lease=lease))
        assert await _may(store.grant(60.0))
        assert not await _may(store.grant(60.0))


async def test_a_transaction_has_at_most_128_operations(place: Place) -> None:
    """Each could return the largest value of the store."""
    look = pb.RequestOp(request_range=pb.RangeRequest(key=b"a"))
    async with grpc.aio.insecure_channel(place.address) as channel:
        ask = channel.unary_unary("/etcdserverpb.KV/Txn")
        await ask(pb.TxnRequest(success=[look] * 128).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError, match="too many operations"):
            await ask(pb.TxnRequest(success=[look] * 129).SerializeToString())
