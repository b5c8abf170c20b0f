"""Documents in the store are read as they were written, and others are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from elastic.core.documents import Unreadable, to_json
from elastic.store.job_documents import (
    LeaderDocument,
    NodeDocument,
    leader_from_json,
    node_from_json,
)
from elastic.store.job_keys import JobKeys, node_of
from elastic.v1 import control_pb2 as pb
from tests.fuzzed_documents import documents, thoroughly

LEADER = LeaderDocument(candidate="c", address="host:1", run_id="night", page="http://host:2")
NODE = NodeDocument(
    start_token="t",
    host="h",
    slots=8,
    version="1",
    command_digest="d",
    started_unix_s=1.5,
    machine="m",
)


def test_documents_survive_a_round_trip() -> None:
    assert leader_from_json(to_json(LEADER)) == LEADER
    assert node_from_json(to_json(NODE)) == NODE


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    newer = json.loads(to_json(NODE)) | {"colour": "blue"}
    assert node_from_json(json.dumps(newer).encode()) == NODE


@pytest.mark.parametrize(
    "changed",
    [
        {"slots": "8"},
        {"slots": True},
        {"left": 1},
        {"host": None},
        {"machine": 3},
        {"started_unix_s": float("nan")},
        {"started_unix_s": 10**400},
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_fields_of_another_type_are_refused(changed: dict[str, object]) -> None:
    value = json.dumps(json.loads(to_json(NODE)) | changed).encode()
    with pytest.raises(Unreadable, match=next(iter(changed))):
        node_from_json(value)


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b"12", b"[" * 100_000])
def test_content_that_is_no_document_is_refused(value: bytes) -> None:
    with pytest.raises(Unreadable):
        node_from_json(value)
    with pytest.raises(Unreadable):
        leader_from_json(value)


def test_the_keys_of_a_job_are_fixed_and_name_their_node() -> None:
    keys = JobKeys("job")
    assert keys.leader == "elastic/job/leader"
    assert keys.generation == "elastic/job/generation"
    assert keys.incarnation == "elastic/job/incarnation"
    assert keys.node("n1") == "elastic/job/nodes/n1"
    assert keys.quarantine("n1") == "elastic/job/quarantine/n1"
    assert keys.drain("n1") == "elastic/job/drain/n1"
    for key in (keys.node("n1"), keys.quarantine("n1"), keys.drain("n1")):
        assert node_of(key) == "n1"


@thoroughly
@given(value=documents(to_json(LEADER)))
def test_any_bytes_are_a_leader_or_are_refused(value: bytes) -> None:
    try:
        leader = leader_from_json(value)
    except Unreadable:
        return
    pb.JobStatus(coordinator=leader.address).SerializeToString()
    assert leader_from_json(to_json(leader)) == leader


@thoroughly
@given(value=documents(to_json(NODE)))
def test_any_bytes_are_a_node_or_are_refused(value: bytes) -> None:
    """A document that is read fits in a message to operators."""
    try:
        node = node_from_json(value)
    except Unreadable:
        return
    told = pb.NodeStatus(host=node.host, version=node.version, slots=node.slots)
    told.SerializeToString()
    assert node_from_json(to_json(node)) == node


def test_a_leader_of_an_older_version_has_no_run_id() -> None:
    older = json.loads(to_json(LEADER))
    del older["run_id"]
    assert leader_from_json(json.dumps(older).encode()).run_id == ""


def test_a_node_of_an_older_version_has_no_machine() -> None:
    older = json.loads(to_json(NODE))
    del older["machine"]
    assert node_from_json(json.dumps(older).encode()).machine == ""
