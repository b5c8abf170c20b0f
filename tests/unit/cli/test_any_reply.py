"""Operators' commands show any answer of a coordinator, or refuse it with a message."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time

import pytest
from hypothesis import given

from elastic.cli import operator
from elastic.cli.operator import (
    _NO_STEP,
    documents_of,
    event_from,
    print_explained,
    print_incidents,
    print_status,
    to_document,
)
from elastic.cli.report import print_report
from elastic.errors import ConfigurationError
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2
from tests.fuzzed_documents import documents, may_be_refused, thoroughly
from tests.fuzzed_messages import messages
from tests.unit.cli.test_operator import ACCOUNTS, INCIDENT

EVENT = json.dumps({"time": 1.75e9, "event": "node_lost", "node": "n1"}).encode()
RECOVERY = json.dumps({"generation": 4, "reason": "member_lost", "total_s": 0.05}).encode()


@thoroughly
@given(line=documents(EVENT))
def test_any_line_is_an_event_or_is_refused(line: bytes) -> None:
    with may_be_refused(ConfigurationError, naming="cannot read an event of the coordinator"):
        at, name, _ = event_from(line.decode(errors="replace"))
        time.localtime(at)
        assert name is not None


@pytest.mark.parametrize(
    ("generation", "committed", "line"),
    [(2, 30, "step 30"), (2, 0, _NO_STEP), (0, 0, "step 0, epoch 0")],
)
def test_status_of_a_leader_without_progress_shows_only_the_step_it_knows(
    generation: int, committed: int, line: str
) -> None:
    """A new leader is in this state while its workers wait for others."""
    reply = pb.JobStatus(
        generation=job_pb2.Generation(number=generation),
        progress=job_pb2.Progress(committed=committed),
        accounts_json=json.dumps(ACCOUNTS),
    )
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        print_status(reply)
    lines = shown.getvalue().splitlines()
    assert line in lines
    assert any("samples/s" in line for line in lines) is (generation == 0)


@pytest.mark.parametrize(("days", "told"), [(13, "expires"), (-1, "expired"), (15, ""), (None, "")])
def test_status_tells_before_the_coordinators_certificate_expires(
    days: int | None, told: str
) -> None:
    reply = pb.JobStatus(accounts_json=json.dumps(ACCOUNTS))
    if days is not None:
        reply.certificate_expires_unix_s = time.time() + days * 86_400
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        print_status(reply)
    found = re.search("certificate (expires|expired) at", shown.getvalue())
    assert (found[1] if found else "") == told


@pytest.mark.parametrize(
    ("connected", "told"), [("abc", ""), ("a", "agents of b, c:"), ("", "a, b, c:")]
)
def test_nodes_of_the_group_without_a_connection_are_named(connected: str, told: str) -> None:
    members = [job_pb2.Member(worker=f"{n}-1", node=f"{n}@1f") for n in "abc"]
    reply = pb.JobStatus(
        generation=job_pb2.Generation(number=1, members=members),
        nodes=[pb.NodeStatus(node=n) for n in connected],
        accounts_json=json.dumps(ACCOUNTS),
    )
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        print_status(reply)
    assert told in shown.getvalue()
    assert ("no connection" in shown.getvalue()) == bool(told)


@given(
    reply=messages(pb.JobStatus),
    recovery=documents(RECOVERY),
    accounts=documents(json.dumps(ACCOUNTS).encode()),
)
def test_any_status_is_shown(reply: pb.JobStatus, recovery: bytes, accounts: bytes) -> None:
    reply.recoveries_json.append(recovery.decode(errors="replace"))
    reply.accounts_json = accounts.decode(errors="replace")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        print_status(reply)
    json.dumps(to_document(reply))
    for node in reply.nodes:
        operator._node_row(node)
    assert "recovery to generation" in shown.getvalue()
    with (
        contextlib.redirect_stdout(shown),
        may_be_refused(ConfigurationError, naming="cannot read the coordinator's accounts of time"),
    ):
        print_report(reply)
    assert "\x1b" not in shown.getvalue()


@thoroughly
@given(found=documents(json.dumps(INCIDENT).encode()))
def test_any_incident_is_shown_or_is_refused(found: bytes) -> None:
    shown = io.StringIO()
    for show in (print_incidents, lambda documents: [print_explained(d) for d in documents]):
        with (
            contextlib.redirect_stdout(shown),
            may_be_refused(ConfigurationError, naming="cannot read the coordinator's incidents"),
        ):
            show(documents_of([found.decode(errors="replace")]))
    assert "\x1b" not in shown.getvalue()


@pytest.mark.parametrize("time_of_it", ["NaN", "1e300", "-1", "true", "null"])
def test_an_event_without_a_valid_time_is_refused(time_of_it: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot read an event of the coordinator"):
        event_from(f'{{"time": {time_of_it}, "event": "x"}}' if time_of_it != "true" else "true")


def test_64_bit_counts_are_json_numbers_also_in_lists() -> None:
    progress = job_pb2.Progress(committed=2**40, step_counts=[3, 2**40])
    document = to_document(pb.JobStatus(progress=progress))
    assert document["progress"]["committed"] == 2**40
    assert document["progress"]["step_counts"] == [3, 2**40]
