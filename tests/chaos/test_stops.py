"""Never two groups train at once, whichever processes of a node are stopped, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.stops import (
    DURATIONS_S,
    PROCESSES,
    Case,
    Shape,
    judge,
    matrix,
    stopping_job,
)
from tests.hosts import require_hosts

LONG = DURATIONS_S[-1]
MANY = 20


def run(files: Path, shape: Shape, cases: Sequence[Case]) -> None:
    with stopping_job(files, shape) as job:
        for case in cases:
            job.strike(case)
            assert not (late := job.judge().begun_late), f"{case}: {late}\n{job.story()}"


@pytest.fixture(autouse=True)
def _able() -> None:
    require_hosts()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_workers_of_a_stopped_agent_and_of_a_woken_host_do_not_train_beside_others(
    tmp_path: Path,
) -> None:
    """Both are away for long enough that the other node restores a checkpoint and trains."""
    cases = [
        Case(stopped=("agent",), lasts_s=LONG, network="up", seed=0),
        Case(stopped=PROCESSES, lasts_s=LONG, network="up", seed=1),
    ]
    with stopping_job(tmp_path, Shape()) as job:
        for case in cases:
            before = job.steps.at_work()
            job.strike(case)
            assert job.steps.at_work() != before  # otherwise the case shows nothing
        found = job.judge()
    assert not found.begun_late, found


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [Shape(), Shape(workers=2), Shape(step_s=2.0)], ids=str)
def test_no_two_groups_train_whatever_is_stopped(tmp_path: Path, shape: Shape, seed: int) -> None:
    run(tmp_path, shape, matrix(seed)[:MANY])


# ---- the judge itself


def rows(*steps: tuple[int, int, float, float]) -> dict[str, list[dict[str, object]]]:
    """The records of a process for each generation of (generation, step, begun, committed)."""
    found: dict[str, list[dict[str, object]]] = {}
    for generation, step, begun_at, committed_at in steps:
        for kind, at in (("block", begun_at), ("commit", committed_at)):
            row = {"kind": kind, "generation": generation, "step": step, "at": at}
            found.setdefault(f"steps-{generation}", []).append(row)
    return found


def test_the_judge_finds_steps_beside_those_of_a_later_group() -> None:
    assert not judge(rows((1, 0, 0.0, 1.0), (1, 1, 1.0, 2.0), (2, 2, 3.0, 4.0))).begun_late
    late = judge(rows((1, 0, 0.0, 1.0), (1, 1, 3.5, 4.0), (2, 1, 3.0, 4.0)))
    assert (len(late.begun_late), late.in_flight, late.given_up) == (1, 0, 1)
    in_flight = judge(rows((1, 0, 0.0, 1.0), (1, 1, 2.5, 4.0), (2, 1, 3.0, 4.0)))
    assert (len(in_flight.begun_late), in_flight.in_flight) == (0, 1)


def test_the_matrix_has_each_process_and_pair_at_each_time_and_network() -> None:
    assert len({str(case) for case in matrix()}) == 11 * 5 * 3
    assert matrix(1) != matrix(2)
