"""Readers of files, messages and settings from outside take any content, or say what is wrong.

Each is given strange documents, and one that is large and strange: no reader ends in an error of
another kind, takes long, or needs much more memory than its input. Manifests, structures, shards,
agents' messages, settings and arguments have tests of their own (`any` in the tests' names).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import catalog, documents
from elastic.checkpoint.catalog import Owner
from elastic.checkpoint.directory import open_directory
from elastic.checkpoint.manifest import from_json
from elastic.coordinator.step_recorder import CurveFiles, LedgerFile
from elastic.core.documents import Unreadable
from elastic.core.forks import Fork
from elastic.doctor.meeting import NodeReport, UnexpectedPeer, decode, encode
from elastic.errors import CheckpointDamaged, ConfigurationError, ElasticError
from elastic.rpc.framing import BadFrame, FrameDecoder
from elastic.runtime.run_directory import _job_in
from elastic.store.etcd import v3_pb2 as etcd
from elastic.store.etcd.endpoints import parse_endpoints
from elastic.store.etcd.server import EtcdService, _Refused
from elastic.store.interface import LeaseExists, LeaseLost
from elastic.store.job_documents import leader_from_json, node_from_json
from elastic.store.memory import MemoryStore
from elastic.v1 import job_pb2, local_pb2
from elastic.worker.process.torchrun import _recorded
from elastic.worker.state.shards import structure_from_json
from tests.fuzzed_documents import documents as documents_like
from tests.fuzzed_documents import json_texts, spliced
from tests.fuzzed_messages import messages

pytestmark = pytest.mark.long
OWNER = Owner(job="j", run="r", since_unix_s=1.5, forks=(Fork("r", 1, 2),))
REPORT = NodeReport(
    identity="i", node="n", job="j", elastic="0", torch="2", worker_port=1, store_port=2, stage=0
)
LEDGER = b'{"incarnation": "i"}\n{"step": 1, "run": "i", "generation": 1}\n'
CURVES = {
    ".jsonl": b'{"step": 1, "generation": 1, "unix_s": 2.0, "values": {"loss": 1.0}}\n',
    ".csv": b"step,generation,unix_s,name,value\n1,1,2.0,loss,1.0\n",
}


def owner(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = open_directory(place)
        directory.write(catalog.OWNER, content)
        found = catalog.read(directory)
        if found is not None:
            documents.encode(asdict(found))
        catalog.scan(directory)


def ledger(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "ledger.jsonl"
        path.write_bytes(content)
        file = LedgerFile(path, incarnation="new")
        try:
            file.open()
        except ConfigurationError:
            assert path.read_bytes() == content
            return
        entry = job_pb2.LedgerEntry(step=1, generation=1, run="new")
        file.append([entry])
        file.close()
        assert path.read_bytes().startswith(content)


def curve(content: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"curve{kind}"
        path.write_bytes(content)
        files = CurveFiles(path, None, incarnation="new")
        try:
            files.open()
        except ConfigurationError:
            return
        values = {"loss": 1.0}
        files.append([job_pb2.CurvePoint(step=1, generation=1, run="new", values=values)])
        files.close()


def running_job(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        _job_in(Path(file.name))


def error_file(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        _recorded(Path(file.name))


def refusing(read: Callable[[bytes], object], *kinds: type[Exception]) -> Callable[[bytes], None]:
    """The reader, which may refuse content with one of these errors."""

    def run(content: bytes) -> None:
        with contextlib.suppress(*kinds):
            read(content)

    return run


def frames(content: bytes) -> None:
    list(FrameDecoder(local_pb2.WorkerMessage).feed(content))


READERS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "owner": (owner, documents.encode(asdict(OWNER))),
    "ledger": (ledger, LEDGER.splitlines()[0]),
    "curve": (lambda content: curve(content, ".jsonl"), CURVES[".jsonl"]),
    "curve as CSV": (lambda content: curve(content, ".csv"), b'{"a": 1}'),
    "doctor": (refusing(decode, UnexpectedPeer), encode(REPORT)),
    "running job": (running_job, b'{"job": "j", "pid": 1, "address": "unix:/x"}'),
    "error file": (error_file, b'{"message": {"message": "m", "extraInfo": {"py_callstack": ""}}}'),
    "manifest": (refusing(lambda c: from_json(c, "m"), CheckpointDamaged), b'{"files": []}'),
    "structure": (refusing(lambda c: structure_from_json(c, "s"), CheckpointDamaged), b'{"a": 1}'),
    "node": (refusing(node_from_json, Unreadable), b'{"host": "h"}'),
    "leader": (refusing(leader_from_json, Unreadable), b'{"address": "h:1"}'),
    "frames": (refusing(frames, BadFrame), b'{"a": 1}'),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_any_document_is_read_or_refused(name: str, data: st.DataObject) -> None:
    read, valid = READERS[name]
    read(data.draw(documents_like(valid)))


@pytest.mark.parametrize("kind", CURVES)
@given(data=st.data())
def test_any_curve_and_ledger_of_earlier_runs_are_continued_or_refused(
    kind: str, data: st.DataObject
) -> None:
    lines = spliced(CURVES[kind] * 2) | json_texts().map(lambda text: text.encode() + b"\n")
    curve(data.draw(lines), kind)
    ledger(data.draw(spliced(LEDGER)))


MEBIBYTE = 2**20
LARGE = {
    "lists": b"[" + b"[]," * (MEBIBYTE // 3) + b"[]]",
    "keys": json.dumps({f"k{n}": n for n in range(60_000)}).encode(),
    "depth": b"[" * MEBIBYTE,
    "digits": b"1" * MEBIBYTE,
    "text": b'"' + b"\\u0000" * (MEBIBYTE // 6) + b'"',
    "zeros": bytes(MEBIBYTE),
    "lines": b"\n" * MEBIBYTE,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("large", LARGE)
def test_a_large_strange_document_costs_little(name: str, large: str) -> None:
    read, _ = READERS[name]
    tracemalloc.start()
    began = time.monotonic()
    try:
        read(LARGE[large])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 20.0  # tracing makes it slow
    assert peak < 64 * MEBIBYTE


@given(text=st.text(st.sampled_from("h:/@,?1[]%. \0é"), max_size=12) | st.text(max_size=6))
def test_any_endpoints_are_understood_or_refused(text: str) -> None:
    with contextlib.suppress(ElasticError):
        parse_endpoints(text)


REQUESTS = (etcd.TxnRequest, etcd.RangeRequest, etcd.LeaseGrantRequest, etcd.LeaseRevokeRequest)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.DESCRIPTOR.name)
@given(data=st.data())
async def test_any_request_to_a_store_in_memory_is_answered_or_refused(
    kind: type[etcd.TxnRequest], data: st.DataObject
) -> None:
    store = MemoryStore()
    service = EtcdService(store, version="1")
    calls = (service._transact, service._range, service._grant, service._revoke)
    call = dict(zip(REQUESTS, calls, strict=True))[kind]
    for request in data.draw(st.lists(messages(kind), max_size=4)):
        try:
            args = (request,) if kind is etcd.RangeRequest else (request, None)
            (await call(*args)).SerializeToString()
        except (_Refused, LeaseLost, LeaseExists):
            pass
    await store.list("")
