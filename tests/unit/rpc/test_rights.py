"""Every cell of the tables of rights in docs/SECURITY.md holds: who calls what and writes where."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from elastic.cli.coordinator import store_rights
from elastic.errors import ElasticError
from elastic.rpc.health import Health
from elastic.rpc.security import PLAINTEXT, Security, Tls
from elastic.settings.tls_files import TlsFiles
from elastic.store.etcd.endpoints import EtcdOptions, parse_endpoints
from elastic.store.etcd.server import EtcdService
from elastic.store.etcd.store import EtcdStore
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from tests.certificates import Certificates, make_certificates, sign
from tests.unit.rpc.conversation import Place, place_at

DOCUMENT = Path(__file__).parents[3] / "docs" / "SECURITY.md"
KEYS = JobKeys("digits")
NOBODY, ANOTHER_JOB = "no certificate", "another job's"
NAMES = {
    ANOTHER_JOB: "DNS:letters.job.elastic",
    "viewer": "DNS:digits.job.elastic,DNS:viewer.digits.job.elastic",
    "agent": "DNS:digits.job.elastic,DNS:agent.digits.job.elastic,DNS:n1",
    "another node's agent": "DNS:digits.job.elastic,DNS:agent.digits.job.elastic,DNS:n2",
    "operator": "DNS:digits.job.elastic,DNS:operator.digits.job.elastic",
    "coordinator": "DNS:digits.job.elastic,DNS:coordinator.digits.job.elastic",
    "no role": "DNS:digits.job.elastic",
}
"""The certificates that the columns of the tables stand for."""

Table = dict[str, dict[str, str]]


def table(first: str) -> Table:
    """Return the cells of the document's table whose first column has this title, by the name in
    backquotes at the start of the row and by column."""
    (found,) = re.findall(rf"^\| {first} \|.*(?:\n\|.*)+", DOCUMENT.read_text(), re.MULTILINE)
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in found.splitlines()]
    head, rows = lines[0], lines[2:]
    assert all(len(row) == len(head) for row in rows)
    return {row[0].split("`")[1]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


CALLS, WRITES = table("call"), table("key")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = make_certificates(tmp_path_factory.mktemp("rights") / "made")
    sign(made, "server", names="DNS:digits.job.elastic,IP:127.0.0.1")
    for who, names in NAMES.items():
        sign(made, _file(who), names=names)
    return made


def _file(who: str) -> str:
    return re.sub(r"\W", "-", who)


def papers(made: Certificates, who: str) -> TlsFiles:
    if who == NOBODY:
        return TlsFiles(ca=made.ca)
    return TlsFiles(ca=made.ca, certificate=made.certificate(_file(who)), key=made.key(_file(who)))


@asynccontextmanager
async def served(made: Certificates, protected: bool, memory: MemoryStore) -> AsyncIterator[Place]:
    """A coordinator that serves `memory`, with the services that it has beside its own methods."""
    security: Security = PLAINTEXT
    if protected:
        security = Tls(job="digits", files=papers(made, "server"))
    beside = [*_store(memory, security).handlers(), Health(_ready).handler()]
    async with place_at("127.0.0.1:0", security, beside=beside) as place:
        yield place


def _store(memory: MemoryStore, security: Security) -> EtcdService:
    return EtcdService(memory, version="1", rights_of=store_rights(security))


async def _ready() -> str:
    return ""


each_security = pytest.mark.parametrize("protected", [True, False], ids=["tls", "plain text"])


def test_the_tables_have_every_method_and_every_key() -> None:
    control = pb.DESCRIPTOR.services_by_name["Control"]
    methods = {f"{control.name}/{m.name}" for m in control.methods}
    for handler in (*_store(MemoryStore(), PLAINTEXT).handlers(), Health(_ready).handler()):
        methods |= {"/".join(p.split(".")[-1].split("/")) for p in handler._method_handlers}  # type: ignore[attr-defined]
    assert set(CALLS) == methods
    keys = {key.removeprefix(KEYS.folder) for key in vars(KEYS).values()} - {""}
    assert {re.sub("[A-Z]+$", "", name) for name in WRITES} == keys | {"../JOB/"}
    assert {who for row in CALLS.values() for who in row} == {NOBODY, *NAMES} - {
        "another node's agent"
    }
    assert {who for row in WRITES.values() for who in row} == {NOBODY, *NAMES}


# ---- calls


@each_security
async def test_each_may_call_what_the_table_says(made: Certificates, protected: bool) -> None:
    """In plain text all may call everything."""
    found: Table = {call: {} for call in CALLS}
    async with served(made, protected, MemoryStore(revision=1000)) as place:
        for who in (NOBODY, ANOTHER_JOB, "viewer", "agent", "operator", "coordinator", "no role"):
            async with _channel(place, papers(made, who), protected) as channel:
                for call in CALLS:
                    found[call][who] = "yes" if await _is_admitted(channel, call) else "–"
    assert found == (CALLS if protected else {c: dict.fromkeys(CALLS[c], "yes") for c in CALLS})


def _channel(place: Place, files: TlsFiles, protected: bool) -> grpc.aio.Channel:
    if not protected:
        return grpc.aio.insecure_channel(place.address)
    assert files.ca is not None
    key, certificate = (f.read_bytes() if f else None for f in (files.key, files.certificate))
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(place.address, credentials, options)


PACKAGES = {"Control": "elastic.v1.Control", "Health": "grpc.health.v1.Health"}


async def _is_admitted(channel: grpc.aio.Channel, call: str) -> bool:
    """Call the method with an empty message. Any answer of the method itself will do."""
    service, method = call.split("/")
    path = f"/{PACKAGES.get(service, f'etcdserverpb.{service}')}/{method}"
    while True:
        stream = channel.stream_stream(path)(iter([b""]))
        try:
            await stream.read()
        except grpc.aio.AioRpcError as error:
            if "Internal error from Core" in str(error.details()):
                continue  # the refusal came before the message: gRPC reports nothing else
            code = error.code()
            return code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)
        stream.cancel()
        return True


# ---- keys


@pytest.mark.parametrize(
    "protected", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tls", "plain text"]
)
async def test_each_may_write_the_keys_that_the_table_says(
    made: Certificates, protected: bool
) -> None:
    """In plain text all may write everything."""
    found: Table = {key: {} for key in WRITES}
    memory = MemoryStore(revision=1000)
    async with served(made, protected, memory) as place, AsyncExitStack() as stack:
        stores = {}
        async with _channel(place, papers(made, NOBODY), protected) as channel:
            admitted = await _is_admitted(channel, "KV/Range") or await _is_admitted(
                channel, "KV/Txn"
            )
        for name in WRITES:
            found[name][NOBODY] = "write" if admitted else "–"
        for who in NAMES:
            options = EtcdOptions(endpoints=parse_endpoints(f"http://{place.address}"))
            if protected:
                endpoints = parse_endpoints(f"https://{place.address}")
                options = EtcdOptions(endpoints=endpoints, tls=papers(made, who))
            stores[who] = await stack.enter_async_context(EtcdStore(options))
        for name in WRITES:
            for who, store in stores.items():
                await memory.put(_key(name), b"coordinator's")
                if name == "nodes/NODE":
                    await memory.delete(_key(name))
                    lease = await stores["agent"].grant(60.0)
                    await stores["agent"].put(_key(name), b"n1", lease=lease)
                found[name][who] = await _rights(store, _key(name), memory)
    assert found == (
        WRITES if protected else {k: dict.fromkeys(WRITES[k], "write") for k in WRITES}
    )


def _key(name: str) -> str:
    if name.startswith(".."):
        return JobKeys("letters").stop
    return KEYS.folder + name.replace("NODE", "n1").replace("RUN", "r")


async def _rights(store: EtcdStore, key: str, memory: MemoryStore) -> str:
    """Return what a client may do with the key, in the words of the table."""
    if not await _may(store.get(key)):
        assert not await _may(store.put(key, b"x"))
        return "–"
    leased = False
    if await _may(store.grant(60.0)):
        leased = await _may(store.put(key, b"x", lease=await store.grant(60.0)))
    for lease in (entry.lease for entry in await memory.list(key) if not leased and entry.lease):
        assert not await _may(store.revoke(lease))  # nor by the end of its lease
    written, deleted = await _may(store.put(key, b"x")), await _may(store.delete(key))
    assert written == deleted
    return "write" if written else "register" if leased else "read"


async def _may(asked: Awaitable[object]) -> bool:
    try:
        await asked
    except ElasticError:
        return False
    return True
