"""`elastic trace` lays out the timeline of a job as a trace with tracks and arrows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from elastic.cli.trace import build_trace
from elastic.v1 import timeline_pb2 as pb
from tests.chrome_trace import check_trace
from tests.fuzzed_messages import messages

AT = 1.75e9
_WHAT = pb.Stretch.What


def stretch(what: str, began: float, lasted_s: float, generation: int, **more: Any) -> pb.Stretch:
    return pb.Stretch(
        what=pb.Stretch.What.Value(f"WHAT_{what}"),
        began_unix_s=AT + began,
        lasted_s=lasted_s,
        generation=generation,
        **more,
    )


def period(node: str, worker: str, kind: str, began: float, ended: float) -> pb.SlotPeriod:
    return pb.SlotPeriod(
        node=node, worker=worker, kind=kind, began_unix_s=AT + began, ended_unix_s=AT + ended
    )


TIMELINE = pb.JobTimeline(
    ranks=[
        pb.RankStretches(
            node="a",
            worker="wa",
            stretches=[
                stretch("STEP", 1.0, 0.5, 1, step=1, data_s=0.1, saves_s=0.2),
                stretch("GIVEN_UP", 1.5, 0.1, 1, step=1),
                stretch("REGROUP", 1.6, 0.3, 2, step=1, join_s=0.1, sync_s=0.05),
                stretch("STEP", 1.9, 0.5, 2, step=2),
            ],
        )
    ],
    periods=[
        period("a", "wa", "start_up", 0.0, 1.0),
        period("a", "wa", "training", 1.0, 2.5),
        period("b", "wb", "start_up", 0.0, 1.0),
        period("b", "wb", "training", 1.0, 1.55),
        period("b", "", "slot_empty", 1.55, 2.5),
    ],
)
INCIDENT: dict[str, Any] = {
    "number": 1,
    "unix_s": AT + 1.52,
    "cause": "worker_failed",
    "summary": "rank 1 was ended",
    "noticed_by": "the agent of node b",
    "outcome": "recovered",
    "lasted_s": 0.9,
    "committed": 1,
    "followed_by": 2,
    "workers": ["wb"],
    "lost_s": 2.0,
    "recovery": {"detect_s": 0.03, "persist_s": 0.01, "notify_s": 0.06, "first_step_s": 0.5},
}
EVENTS = [
    (AT + 0.1, "elected", {"address": "h:1"}),
    (AT + 0.9, "generation_formed", {"generation": 1, "reason": "started", "world_size": 2}),
    (AT + 1.3, "checkpoint_committed", {"step": 1, "save_s": 0.2, "bytes": 10}),
    (AT + 1.52, "worker_failed", {"worker": "wb"}),
    (AT + 1.56, "generation_formed", {"generation": 2, "reason": "member_lost", "world_size": 1}),
    (AT + 2.4, "recovered", {}),
]


def built(*incidents: dict[str, Any]) -> dict[str, Any]:
    document = build_trace(TIMELINE, incidents, EVENTS, AT + 2.5).to_document()
    check_trace(document)
    return document


def names(document: dict[str, Any], process: str, thread: str) -> list[str]:
    events = document["traceEvents"]
    pid = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}[process]
    (tid,) = (
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == pid and e["args"]["name"] == thread
    )
    return [e["name"] for e in events if (e["pid"], e["tid"]) == (pid, tid) and e["ph"] in "Xi"]


def test_a_trace_has_a_track_for_each_slot_and_each_kind_of_control_plane_entry() -> None:
    document = built(INCIDENT)
    assert names(document, "node a", "slot 0") == [
        *("start_up", "step 0", "saves", "data wait", "given up at step 1"),
        *("into generation 2", "decision", "join", "sync", "step 1", "training"),
    ]
    assert names(document, "node b", "slot 0") == ["start_up", "training", "slot_empty"]
    assert names(document, "control plane", "generations") == [
        "generation 1: started",
        "generation 2: member_lost",
    ]
    assert names(document, "control plane", "incidents") == [
        *("incident 1: worker_failed", "detect", "persist", "notify", "first_step"),
    ]
    assert names(document, "control plane", "checkpoints") == ["checkpoint of step 1"]
    assert names(document, "control plane", "elections and events") == ["elected", "worker_failed"]


def test_arrows_lead_from_the_failed_slot_to_the_slots_that_changed_group() -> None:
    document = built(INCIDENT)
    stations = [e for e in document["traceEvents"] if e["ph"] in "stf"]
    processes = {
        e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"
    }
    assert [(e["ph"], processes[e["pid"]]) for e in stations] == [
        ("s", "node b"),
        ("t", "control plane"),
        ("t", "control plane"),
        ("f", "node a"),
    ]


def test_incidents_under_way_are_shown_without_phases() -> None:
    under_way = INCIDENT | {"recovery": {}, "lasted_s": None, "followed_by": 0, "workers": []}
    document = built(under_way, under_way | {"number": 2, "unix_s": AT + 2.0})
    assert names(document, "control plane", "incidents") == [
        "incident 1: worker_failed",
        "incident 2: worker_failed",
    ]


def test_an_empty_timeline_gives_a_trace_with_metadata_only() -> None:
    document = build_trace(pb.JobTimeline(), [], [], AT).to_document()
    check_trace(document)
    assert all(e["ph"] == "M" for e in document["traceEvents"])


@given(timeline=messages(pb.JobTimeline))
def test_any_timeline_of_a_coordinator_gives_a_valid_trace(timeline: pb.JobTimeline) -> None:
    document = build_trace(timeline, [INCIDENT], EVENTS, AT + 2.5).to_document()
    check_trace(document)
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("missing", ["unix_s", "workers", "recovery"])
def test_an_incident_without_an_expected_field_raises_lookup_error(missing: str) -> None:
    with pytest.raises(LookupError):
        build_trace(TIMELINE, [{k: v for k, v in INCIDENT.items() if k != missing}], [], AT)
