"""The page's document: the job's state in one word, its nodes, and a bound on its size."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from elastic.coordinator.page import MOST_NODES, JobView, PageBuilder, standby, state_of
from elastic.core.membership import WorkerPhase, WorkerStatus
from elastic.store.job_documents import LeaderDocument
from tests import page_jobs

TRAINS = page_jobs.view()


def having(seen: JobView = TRAINS, **figures: object) -> JobView:
    return replace(seen, figures=replace(seen.figures, **figures))  # type: ignore[arg-type]


def committed(ago_s: float) -> JobView:
    totals = page_jobs.committed_at(TRAINS.figures.totals, TRAINS.at_unix_s - ago_s)
    return having(totals=totals)


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (TRAINS, "training"),
        (page_jobs.gathering(), "gathering"),
        (page_jobs.recovering(), "recovering"),
        (having(phase="waiting"), "waiting"),
        (having(phase="forming"), "forming"),
        (having(phase="draining"), "stopping"),
        (having(step_elapsed_s=2.9), "training"),
        (having(step_elapsed_s=3.1), "standing"),
        (having(step_usual_s=60.0, step_elapsed_s=200.0), "training"),
        (committed(2.0), "training"),
        (committed(4.0), "between"),
        (having(counts_steps=False), "running"),
        (having(phase="finished", exit_code=0), "finished"),
        (having(phase="failed", exit_code=1), "ended"),
        (having(phase="failed", exit_code=130), "stopped"),
        (replace(page_jobs.recovering(), figures=having(exit_code=1).figures), "ended"),
    ],
)
def test_the_state_of_a_job_is_one_word(seen: JobView, word: str) -> None:
    assert state_of(seen) == word


def test_a_job_is_starting_before_its_first_step() -> None:
    totals = page_jobs.committed_at(TRAINS.figures.totals, 0.0)
    assert state_of(having(totals=totals, step_usual_s=0.0)) == "starting"


def test_a_node_is_shown_with_the_workers_in_its_slots() -> None:
    seen = having(
        nodes=(
            page_jobs.node("node-0", 2),
            page_jobs.node("node-1", 2, WorkerPhase.JOINING, state="leaving", reason="SIGTERM"),
            replace(
                page_jobs.node("node-2", 3),
                workers=(
                    WorkerStatus(worker="node-2-0", phase=WorkerPhase.TRAINING, slot=0, pid=1),
                    WorkerStatus(worker="node-2-9", phase=WorkerPhase.SPARE, pid=2),
                    WorkerStatus(
                        worker="node-2-1",
                        phase=WorkerPhase.TRAINING,
                        slot=1,
                        generation=7,
                        broken=True,
                    ),
                ),
            ),
        )
    )
    nodes = PageBuilder().document(seen)["nodes"]
    assert nodes["node-0"]["workers"] == [
        [0, "T", 0, 4000, "node-0-0"],
        [1, "T", 1, 4001, "node-0-1"],
    ]
    assert nodes["node-1"]["state"] == "leaving"
    assert nodes["node-1"]["reason"] == "SIGTERM"
    assert [w[:3] for w in nodes["node-2"]["workers"]] == [[0, "T", 4], [-1, "W", -1], [1, "B", 5]]


def test_a_lost_node_is_shown_with_the_members_it_had() -> None:
    nodes = PageBuilder().document(page_jobs.recovering())["nodes"]
    assert nodes["node-2"]["state"] == "lost"
    assert nodes["node-2"]["workers"] == [[0, "?", 4], [1, "?", 5]]
    later = replace(page_jobs.recovering(), at_unix_s=time.time() + 7200.0)
    assert "node-2" not in PageBuilder().document(later)["nodes"], "after an hour it is forgotten"


def test_an_incident_has_the_phases_of_its_recovery() -> None:
    incidents = PageBuilder().document(TRAINS)["incidents"]
    assert incidents["3"]["reason"] == "signal"
    assert incidents["3"]["phases"]["total_s"] == 0.131
    assert incidents["3"]["committed"] == 4711
    waits = {**page_jobs.RECORD, "recovery": {}}
    without = PageBuilder().document(replace(TRAINS, incidents=(waits,)))["incidents"]
    assert "phases" not in without["3"]


def test_incidents_come_from_their_records_and_planned_changes_from_the_accounts() -> None:
    planned = {**page_jobs.INCIDENT, "number": 4, "reason": "member_joined", "generation": 8}
    failed_save = {**page_jobs.RECORD, "number": 5, "cause": "save_failed", "followed_by": 0}
    saving = {**page_jobs.INCIDENT, "number": 5, "reason": "save_failed", "generation": 0}
    accounts = replace(TRAINS.figures.accounts, incidents=(page_jobs.INCIDENT, planned, saving))
    seen = replace(having(accounts=accounts), incidents=(page_jobs.RECORD, failed_save))
    found = PageBuilder().document(seen)["incidents"]
    assert list(found) == ["3", "4", "5"]
    assert found["3"]["summary"].startswith("rank 3")
    assert found["3"]["followed_by"] == 7
    assert "summary" not in found["4"]
    assert (found["4"]["reason"], found["4"]["followed_by"]) == ("member_joined", 8)
    assert (found["5"]["cause"], found["5"]["followed_by"]) == ("save_failed", 0)


def test_a_time_that_changes_by_a_millisecond_does_not_change_the_document() -> None:
    builder = PageBuilder()
    first = builder.document(TRAINS)["incidents"]["3"]
    moved = {**page_jobs.RECORD, "unix_s": page_jobs.RECORD["unix_s"] + 0.001}
    second = builder.document(replace(TRAINS, incidents=(moved,)))["incidents"]["3"]
    assert second == first


def test_every_document_is_json_whatever_a_script_reports() -> None:
    values = {"loss": math.nan, "up": math.inf, "<b>x</b>": 1.0, "y" * 10_000: 2.0, "\ud800": 3.0}
    for seen in (having(values=values), page_jobs.gathering(), page_jobs.recovering()):
        json.dumps(PageBuilder().document(seen), allow_nan=False).encode()
    shown = PageBuilder().document(having(values=values | {f"v{n}": 1.0 for n in range(10_000)}))
    assert len(shown["values"]) == 12
    assert PageBuilder().document(having(values=values))["values"]["loss"] == "nan"


def test_a_thousand_nodes_fit_and_only_changed_and_lost_nodes_are_made_again() -> None:
    builder, seen = PageBuilder(), page_jobs.large()
    first = builder.document(seen)
    assert len(first["nodes"]) == 1000
    assert len(json.dumps(first)) < 512 * 1024
    changed = list(seen.figures.nodes)
    changed[3] = page_jobs.node("node-3", 8, WorkerPhase.JOINING)
    second = builder.document(having(seen, nodes=tuple(changed)))
    anew = [n for n, row in second["nodes"].items() if row is not first["nodes"][n]]
    assert set(anew) == {"node-3", "node-900"}, "a lost node is made each time"


def test_the_number_of_nodes_is_bounded() -> None:
    many = tuple(page_jobs.node(f"n{n}", 0) for n in range(2 * MOST_NODES))
    assert len(PageBuilder().document(having(nodes=many))["nodes"]) == MOST_NODES


def test_ranks_are_those_of_the_newest_generation() -> None:
    builder = PageBuilder()
    builder.document(TRAINS)
    assert TRAINS.generation is not None
    turned = replace(TRAINS.generation, number=8, members=TRAINS.generation.members[::-1])
    nodes = builder.document(replace(TRAINS, generation=turned))["nodes"]
    assert [w[2] for w in nodes["node-0"]["workers"]] == [5, 4]


def test_a_standby_names_the_leader() -> None:
    nobody = standby("digits", "default", "two:1", None)["head"]
    assert (nobody["state"], nobody["leader"]) == ("standby", "")
    leader = LeaderDocument(candidate="c", address="one:1", page="http://one:9400")
    head = standby("digits", "default", "two:1", leader)["head"]
    assert (head["leader"], head["leader_page"]) == ("one:1", "http://one:9400")
