"""Messages and documents as this version and others have written them are read as they were meant.

corpus.json has them: those of this version are also written again, equal to what is there. Whoever
adds a field moves what lacks it to `read`, and adds what this version writes now to `written`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from elastic.checkpoint import catalog
from elastic.checkpoint import manifest as manifests
from elastic.checkpoint.catalog import Owner
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import open_directory
from elastic.checkpoint.manifest import Manifest
from elastic.coordinator.leadership import (
    Command,
    Leadership,
    Loss,
    StopOrder,
    Stored,
    lead,
    load_generation,
    load_stop,
    save_generation,
    save_stop,
)
from elastic.coordinator.node_registry import DRAINED, Exclusion, Exclusions
from elastic.coordinator.records import Records, RecordWriter, load_records
from elastic.core.documents import Unreadable, to_json
from elastic.core.forks import Fork
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    Purpose,
    WorkerPhase,
    WorkerStatus,
)
from elastic.core.whereabouts import Answer, ChildStack, Frame, Place, Whereabouts
from elastic.doctor import meeting
from elastic.doctor.meeting import NodeReport, UnexpectedPeer
from elastic.errors import CheckpointDamaged, ConfigurationError, ExitCode
from elastic.rpc import codec
from elastic.rpc.stacks import whereabouts_from_pb
from elastic.store.interface import Store
from elastic.store.job_documents import (
    LeaderDocument,
    NodeDocument,
    leader_from_json,
    node_from_json,
)
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import RunEnd, announce_end, newest_end
from elastic.store.memory import MemoryStore
from elastic.v1 import job_pb2 as pb
from elastic.v1 import stacks_pb2

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())
KEYS = JobKeys("job")


# ---- what the corpus holds

MEMBERS = (
    Member(worker="n1-1", node="n1@t1", slot=0, endpoint="10.0.0.1:5000"),
    Member(worker="n2-7", node="n2@t2", slot=2**32 - 1, endpoint="[fe80::1]:65535"),
)
STARTED = Generation(number=1, incarnation="i", members=MEMBERS, reason=ChangeReason.STARTED)
PLANNED = Generation(
    number=2**64 - 1,
    incarnation="0123456789abcdef",
    members=MEMBERS[::-1],
    reason=ChangeReason.MEMBER_LEAVING,
    leave_after=0,
    provisional=True,
    purpose=Purpose.SAVE_AND_LEAVE,
    save_first=True,
    begun=True,
    restart_count=3,
    max_restarts=10,
)
EMPTY = Generation(number=4, incarnation="", members=(), reason=ChangeReason.BELOW_MINIMUM)
STATUS = WorkerStatus(
    worker="n1-1",
    phase=WorkerPhase.TRAINING,
    slot=0,
    generation=7,
    acknowledged=8,
    broken=True,
    detail="connection reset by peer: Zürich",
    committed=2**64 - 1,
    endpoint="10.0.0.1:5000",
    pid=2**63 - 1,
    in_run=True,
    has_state=True,
    trained_in=6,
    compiling=0,
)
FAILURE = Failure(
    worker="n1-1",
    kind=FailureKind.EXCEPTION,
    code=-(2**31),
    signature="ValueError train.py:47",
    message="ValueError: ünder",
    traceback="Traceback (most recent call last):\n  ...",
    log_tail="the last\nlines",
    retryable=False,
    state_lost=True,
    log="/run/elastic/n1-1.log",
    place="train.py:47",
)
WHEREABOUTS = Whereabouts(
    rank=1,
    worker="n1-1",
    node="n1",
    answer=Answer.SIGNALLED,
    place=Place.BACKWARD,
    place_s=2.5,
    committed=9,
    collectives=4,
    frames=(Frame("train.py", 47, "step"), Frame("train.py", 3, "<module>")),
    children=(
        ChildStack(pid=12, frames=(Frame("loader.py", 1, "load"),)),
        ChildStack(pid=13, frames=()),
    ),
)
STORED = Stored(
    generation=PLANNED,
    may_train=(STARTED, EMPTY),
    revision=0,
    command=Command(text="python train.py", digest="d"),
    loss=Loss(reason="signal", workers=("n1-1", "n1-2"), incident=b'{"number": 1}\xff'),
)
LEADER = LeaderDocument(candidate="c", address="host:1", run_id="night", page="http://host:2")
NODE = NodeDocument(
    start_token="t",
    host="höst",
    slots=2**32 - 1,
    version="1",
    command_digest="d",
    started_unix_s=1.5,
    machine="m",
    left=True,
)
END = RunEnd(
    run_id="default",
    exit_code=255,
    message="stopped: ünder",
    committed=2**40,
    ended_unix_s=253402300799.5,
    left=True,
)
UNREADABLE_END = RunEnd(run_id="default", exit_code=int(ExitCode.SCRIPT_FAILED))
EXCLUSION = Exclusion(
    state=DRAINED, reason="a new disk", since_unix_s=1.75e9, machine="m1", node="n1"
)
UNREADABLE_EXCLUSION = replace(
    EXCLUSION,
    reason=f"marked as drained by the store's key {KEYS.drain('m1')}, which cannot be read",
    since_unix_s=0.0,
)
RECORDS = Records(
    started_unix_s=10.0,
    restarts=(20.0, 21.5),
    failures={"n1": (20.0,)},
    told_once={"0123": 7},
    totals={"weight": 3},
    accounts={"books": {"wall_s": 8.0}},
    begun=True,
)
DIGEST = "0123456789abcdef" * 2
MANIFEST = Manifest(
    job="digits",
    step=1200,
    generation=7,
    world_size=4,
    epoch=2,
    cursor=0,
    learning_rate={"factor": 2.5, "ramp": [1, 2.0, None]},
    created_unix_s=1.75e9,
    files=(
        FileDigest(
            name="shard-00000-of-00001-g7-5fa5c435.safetensors", size_bytes=0, xxh3_128=DIGEST
        ),
        FileDigest(name="structure-g7-5fa5c435.json", size_bytes=2**40, xxh3_128=DIGEST),
    ),
)
OWNER = Owner(job="digits", run="i", since_unix_s=1.5, forks=(Fork("tag", 7, 0),))
REPORT = NodeReport(
    identity="i",
    node="n",
    job="j",
    elastic="0.1.0",
    torch="2.13",
    worker_port=0,
    store_port=65535,
    stage=2,
    marker="m",
    met=("i", "j"),
    unix_s=1.5,
)

OBJECTS: dict[str, Any] = {
    "started": STARTED,
    "planned": PLANNED,
    "empty": EMPTY,
    "status": STATUS,
    "least status": WorkerStatus(worker="w"),
    "failure": FAILURE,
    "least failure": Failure(worker="w", kind=FailureKind.SIGNAL, retryable=False),
    "whereabouts": WHEREABOUTS,
    "whereabouts of a newer version": Whereabouts(
        rank=1, worker="n1-1", node="n1", answer=Answer.NONE, place=Place.UNKNOWN
    ),
    "stored": STORED,
    "stored without loss": replace(STORED, may_train=(), command=Command(), loss=None),
    "stored with an empty loss": replace(STORED, loss=Loss(reason="", workers=())),
    "leader": LEADER,
    "older leader": replace(LEADER, run_id="", page=""),
    "node": NODE,
    "older node": replace(NODE, machine="", left=False, slots=0, started_unix_s=2.0),
    "end": END,
    "plain end": replace(END, exit_code=0, message="", committed=0, ended_unix_s=2.0, left=False),
    "unreadable end": UNREADABLE_END,
    "stop": StopOrder(reason="enough: ünder", exit_code=255),
    "unreadable stop": StopOrder(
        reason=f"the store's key {KEYS.stop} holds a stop order that cannot be read",
        exit_code=ExitCode.STOPPED,
    ),
    "exclusion": EXCLUSION,
    "exclusion of a name": replace(EXCLUSION, machine="", node=""),
    "unreadable exclusion": replace(UNREADABLE_EXCLUSION, machine="", node=""),
    "unreadable exclusion of a machine": UNREADABLE_EXCLUSION,
    "records": RECORDS,
    "older records": replace(RECORDS, told_once={}, totals={}, accounts={}, begun=False),
    "no records": Records(started_unix_s=0.0, are_kept=False),
    "manifest": MANIFEST,
    "manifest of version 1": replace(MANIFEST, format_version=1),
    "owner": OWNER,
    "owner without forks": replace(OWNER, forks=()),
    "no owner": None,
    "report": REPORT,
    "least report": replace(REPORT, marker="", met=(), unix_s=0.0),
}


# ---- how each kind is read and written


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How this version reads and writes one kind. The corpus has its messages in hex."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes] | None = None
    is_message: bool = False


def message(kind: type[Any], read: Callable[[Any], Any], write: Callable[[Any], Message]) -> Kind:
    return Kind(
        read=lambda content: read(kind.FromString(content)),
        write=lambda found: write(found).SerializeToString(deterministic=True),
        is_message=True,
    )


def stored(
    key: str,
    load: Callable[[Store], Awaitable[Any]],
    save: Callable[[Store, Leadership, Any], Awaitable[None]],
    *,
    is_message: bool = False,
) -> Kind:
    """A kind that is the value of a key in the store."""

    async def read(content: bytes) -> Any:
        store = MemoryStore()
        await store.put(key, content)
        return await load(store)

    async def write(found: Any) -> bytes:
        store = MemoryStore()
        await save(store, await lead(store, job="job", candidate="c"), found)
        entry = await store.get(key)
        assert entry is not None
        return entry.value

    return Kind(
        read=lambda content: asyncio.run(read(content)),
        write=lambda found: asyncio.run(write(found)),
        is_message=is_message,
    )


async def _load_generation(store: Store) -> Stored:
    found = await load_generation(store, "job")
    assert found is not None
    return replace(found, revision=0)


async def _save_generation(store: Store, leadership: Leadership, found: Stored) -> None:
    await save_generation(
        store, leadership, found.generation, found.may_train, found.command, found.loss
    )


async def _save_end(store: Store, leadership: Leadership, end: RunEnd) -> None:
    await announce_end(store, job="job", guard=leadership.guard, end=end)


async def _load_exclusion(store: Store) -> Exclusion:
    leadership = await lead(store, job="job", candidate="c")
    exclusions = Exclusions(store, job="job", guard=leadership.guard)
    await exclusions.load()
    found = exclusions.get("m1")
    assert found is not None
    is_readable = "cannot be read" not in found.reason
    return found if is_readable else replace(found, since_unix_s=0.0)


async def _save_exclusion(store: Store, leadership: Leadership, found: Exclusion) -> None:
    exclusions = Exclusions(store, job="job", guard=leadership.guard)
    exclusions._excluded["m1"] = found  # the clock gives the instant of a new one
    await exclusions.keep("m1")


async def _load_records(store: Store) -> Records:
    found = await load_records(store, "job")
    at = found.started_unix_s if found.are_kept else 0.0
    return replace(found, started_unix_s=at, entries={})


async def _save_records(store: Store, leadership: Leadership, found: Records) -> None:
    await RecordWriter(store, job="job", guard=leadership.guard, stored={}).save(found)


def _read_owner(content: bytes) -> Owner | None:
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / catalog.OWNER).write_bytes(content)
        return catalog.read(open_directory(made))


def _write_owner(owner: Owner) -> bytes:
    with tempfile.TemporaryDirectory() as made:
        catalog.claim(open_directory(made), owner)
        return (Path(made) / catalog.OWNER).read_bytes()


KINDS = {
    "Generation": message(pb.Generation, codec.generation_from_pb, codec.generation_to_pb),
    "WorkerStatus": message(pb.WorkerStatus, codec.status_from_pb, codec.status_to_pb),
    "Failure": message(pb.Failure, codec.failure_from_pb, codec.failure_to_pb),
    "WorkerStacks": Kind(
        read=lambda content: whereabouts_from_pb(
            stacks_pb2.WorkerStacks.FromString(content), rank=1, node="n1"
        ),
        is_message=True,
    ),
    "StoredGeneration": stored(
        KEYS.generation, _load_generation, _save_generation, is_message=True
    ),
    "leader": Kind(read=leader_from_json, write=to_json),
    "node": Kind(read=node_from_json, write=to_json),
    "end": stored(KEYS.end("default"), lambda store: newest_end(store, "job"), _save_end),
    "stop": stored(KEYS.stop, lambda store: load_stop(store, "job"), save_stop),
    "exclusion": stored(KEYS.drain("m1"), _load_exclusion, _save_exclusion),
    "records": stored(KEYS.records, _load_records, _save_records),
    "manifest": Kind(
        read=lambda content: manifests.from_json(content, "manifest.json"), write=manifests.to_json
    ),
    "owner": Kind(read=_read_owner, write=_write_owner),
    "doctor": Kind(read=meeting.decode, write=meeting.encode),
}


def content_of(kind: str, text: str) -> bytes:
    return bytes.fromhex(text) if KINDS[kind].is_message else text.encode()


# ---- the tests


def short(value: object) -> str:
    return str(value)[:40]


@pytest.mark.parametrize(("kind", "name", "text"), CORPUS["written"], ids=short)
def test_what_this_version_writes_is_read_and_written_again(
    kind: str, name: str, text: str
) -> None:
    content, expected = content_of(kind, text), OBJECTS[name]
    assert KINDS[kind].read(content) == expected
    write = KINDS[kind].write
    if write is not None:
        again = write(expected)
        assert again == content if KINDS[kind].is_message else json.loads(again) == json.loads(text)


@pytest.mark.parametrize(("kind", "name", "text", "why"), CORPUS["read"], ids=short)
def test_what_other_versions_write_is_read(kind: str, name: str, text: str, why: str) -> None:
    del why
    assert KINDS[kind].read(content_of(kind, text)) == OBJECTS[name]


REFUSALS: dict[str, type[Exception]] = {
    "Generation": ValueError,
    "WorkerStatus": ValueError,
    "Failure": ValueError,
    "StoredGeneration": ConfigurationError,
    "leader": Unreadable,
    "node": Unreadable,
    "manifest": CheckpointDamaged,
    "doctor": UnexpectedPeer,
}


@pytest.mark.parametrize(("kind", "text", "words"), CORPUS["refused"], ids=short)
def test_what_is_malformed_is_refused_with_the_field_that_is_wrong(
    kind: str, text: str, words: list[str]
) -> None:
    with pytest.raises(REFUSALS[kind]) as caught:
        KINDS[kind].read(content_of(kind, text))
    assert type(caught.value) is REFUSALS[kind]
    assert [word for word in words if word not in str(caught.value)] == []
