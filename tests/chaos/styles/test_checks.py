"""The checks of a style's run find each kind of fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.chaos.styles import state
from tests.chaos.styles.catalogue import STYLES
from tests.chaos.styles.checks import wrong_in
from tests.chaos.styles.killer import Kill
from tests.chaos.styles.running import Run, story

Row = dict[str, Any]
STYLE = STYLES["plain_sgd"]
STEPS = 8
DIED = 12  # pid of worker "w2", which was killed when it had committed two steps


def row(pid: int, step: int) -> Row:
    weight = torch.full((2, 2), 1.0 / (step + 1), dtype=torch.float64)
    leaves = [("model.weight", weight)]
    return {
        "kind": "commit",
        "step": step,
        "generation": 1 if step < 2 else 2,
        "rank": pid - 10,
        "samples": [0, step * 8, step * 8 + 8],
        "lr_factor": 1.0,
        "digests": {"model": state.digest(leaves)},
        "figures": {"model": state.figures(leaves)},
    }


def write(out: Path, records: dict[int, list[Row]]) -> None:
    for pid, rows in records.items():
        lines = [json.dumps(r) + "\n" for r in rows]
        (out / f"steps-{pid}.jsonl").write_text("".join(lines))


@pytest.fixture
def records() -> dict[int, list[Row]]:
    return {
        10: [row(10, step) for step in range(STEPS)],
        11: [row(11, step) for step in range(STEPS)],
        DIED: [row(DIED, step) for step in range(2)],
    }


@pytest.fixture
def one(tmp_path: Path) -> Run:
    out = tmp_path / "one"
    out.mkdir()
    write(out, {1: [row(10, step) for step in range(STEPS)]})
    return Run(style=STYLE, out=out, exit_code=0, took_s=1.0, epochs=1)


@pytest.fixture
def job(tmp_path: Path) -> Run:
    out = tmp_path / "job"
    out.mkdir()
    ledger = [
        {"step": s, "epoch": 0, "generation": 1, "world_size": 3, "start": 8 * s, "stop": 8 * s + 8}
        for s in range(STEPS)
    ]
    (out / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ledger))
    events: list[Row] = [
        {"event": "worker_started", "worker": f"w{pid - 10}", "pid": pid} for pid in (10, 11, DIED)
    ]
    events += [
        {"event": "generation_formed", "generation": 1, "after_step": None, "reason": "started"},
        {"event": "worker_failed", "worker": "w2", "kind": "signal", "message": "killed"},
        {"event": "generation_formed", "generation": 2, "after_step": None, "reason": "lost"},
    ]
    kill = Kill(at=0.0, worker="w2", aim="member", step=1)
    return Run(style=STYLE, out=out, exit_code=0, took_s=1.0, epochs=1, events=events, kills=[kill])


def test_a_good_run_has_nothing_wrong(job: Run, one: Run, records: dict[int, list[Row]]) -> None:
    write(job.out, records)
    assert wrong_in(job, one) == []


def differing_digest(records: dict[int, list[Row]]) -> None:
    records[11][3]["digests"]["model"] = "other"


def differing_digest_of_the_dead_before_its_last_step(records: dict[int, list[Row]]) -> None:
    records[DIED][0]["digests"]["model"] = "other"


def other_trajectory(records: dict[int, list[Row]]) -> None:
    for pid in (10, 11):
        records[pid][2]["figures"]["model"]["model.weight"][0] += 1e-8


def other_samples(records: dict[int, list[Row]]) -> None:
    for pid in (10, 11):
        records[pid][1]["samples"] = [0, 0, 8]


def skipped_step(records: dict[int, list[Row]]) -> None:
    del records[10][1]


@pytest.mark.parametrize(
    ("spoil", "key_word"),
    [
        (differing_digest, "differ"),
        (differing_digest_of_the_dead_before_its_last_step, "differ"),
        (other_trajectory, "trajectory"),
        (other_samples, "recorded"),
        (skipped_step, "lost"),
    ],
)
def test_a_fault_in_the_records_is_found(
    job: Run,
    one: Run,
    records: dict[int, list[Row]],
    spoil: Callable[[dict[int, list[Row]]], None],
    key_word: str,
) -> None:
    spoil(records)
    write(job.out, records)
    wrong = wrong_in(job, one)
    assert wrong
    assert all(key_word in each for each in wrong), wrong


def test_the_last_step_of_a_killed_worker_may_differ_from_the_survivors(
    job: Run, one: Run, records: dict[int, list[Row]]
) -> None:
    records[DIED][-1]["digests"]["model"] = "other"
    write(job.out, records)
    assert wrong_in(job, one) == []


def test_the_last_step_of_killed_workers_counts_if_no_survivor_has_recorded_it(
    job: Run, one: Run, records: dict[int, list[Row]]
) -> None:
    """The survivor joined with their state after that step, before they were killed."""
    del records[10][:2]
    del records[11][2:]
    write(job.out, records)
    kills = [*job.kills, replace(job.kills[0], worker="w1")]
    assert wrong_in(replace(job, kills=kills), one) == []


def stood_still(worker: str) -> Row:
    message = "hung for 0.5 s in a lost group"
    return {"event": "worker_failed", "worker": worker, "kind": "left_out", "message": message}


@pytest.mark.parametrize(("workers", "wrong"), [(["w0"], 0), (["w0", "w1"], 1)])
def test_only_one_worker_that_gloo_leaves_waiting_is_excused(
    job: Run, one: Run, records: dict[int, list[Row]], workers: list[str], wrong: int
) -> None:
    write(job.out, records)
    events = [*job.events, *map(stood_still, workers)]
    assert len(wrong_in(replace(job, events=events), one)) == wrong


@pytest.mark.parametrize(
    ("changes", "key_word"),
    [
        ({"exit_code": None}, "running"),
        ({"exit_code": 1}, "ended"),
        ({"kills": []}, "lost"),
        ({"complete": False}, "full group"),
    ],
)
def test_a_bad_end_is_found(
    job: Run, one: Run, records: dict[int, list[Row]], changes: dict[str, Any], key_word: str
) -> None:
    write(job.out, records)
    wrong = wrong_in(replace(job, **changes), one)
    assert any(key_word in each for each in wrong), wrong


def test_a_step_missing_from_the_ledger_is_found(
    job: Run, one: Run, records: dict[int, list[Row]]
) -> None:
    write(job.out, records)
    lines = job.ledger.read_text().splitlines(keepends=True)
    job.ledger.write_text("".join(lines[:-1]))
    assert any("ledger" in each for each in wrong_in(job, one))


def test_a_script_that_is_not_refused_as_expected_is_found(job: Run, one: Run) -> None:
    refused = replace(job, style=STYLES["refused_not_distributed"])
    assert any("refused" in each for each in wrong_in(refused, one))


def test_a_story_has_the_options_that_repeat_the_run(job: Run) -> None:
    assert "--style plain_sgd --kills 1 --seed 0" in story(job)


def test_a_digest_shows_a_changed_bit_and_figures_bound_the_difference() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = state.parts({"model": model})["model"]
    digest, figures = state.digest(before), state.figures(before)
    with torch.no_grad():
        model.weight[0, 0] = torch.nextafter(model.weight[0, 0], torch.tensor(9.0))
    after = state.parts({"model": model})["model"]
    assert state.digest(after) != digest
    (old, norm), (new, _) = figures["model.weight"], state.figures(after)["model.weight"]
    assert 0 < abs(new - old) < 1e-6 * norm
