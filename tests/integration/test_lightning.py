"""Lightning's Trainer with ElasticStrategy, whose workers are killed: as a run without kills."""

from __future__ import annotations

import csv
import json
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.running import Place, steps_of, wait_for_step
from tests.job_process import JobProcess

pytestmark = pytest.mark.timeout(400)

SCRIPT = "lightning_fit.py"
# Of 10 samples in a step each of three workers has a share of 3 or 4, in micro-batches of 2.
BATCHES = 10
EVERYTHING: dict[str, Any] = {
    "scheduler": "epoch",
    "monitor_rate": True,
    "tests": True,
    "checkpoint": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job has left: the directories of its log, the log's rows, each rank's result."""

    versions: list[str]
    rows: list[dict[str, str]]
    checkpoints: list[str]
    results: dict[int, dict[str, Any]]


def start(place: Place, options: dict[str, Any], *flags: str | Path, nproc: int = 3) -> JobProcess:
    given = json.dumps({"files": str(place.files), **options})
    return place.start(SCRIPT, given, nproc=nproc, options=flags)


def outcome_of(files: Path) -> Outcome:
    versions = sorted(path for path in (files / "curves").iterdir())
    with (versions[0] / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    results = [json.loads(path.read_text()) for path in files.glob("result-*.json")]
    return Outcome(
        versions=[path.name for path in versions],
        rows=rows,
        checkpoints=sorted(path.name for path in files.rglob("*.ckpt")),
        results={result["rank"]: result for result in results},
    )


def run_alone(place: Place, options: dict[str, Any]) -> Outcome:
    """Without an agent: the same script in a world of one, which nothing disturbs."""
    files = place.files / "alone"
    files.mkdir()
    given = json.dumps({"files": str(files), **options})
    done = place.python(Path(__file__).parent / "scripts" / SCRIPT, given)
    assert done.returncode == 0, done.stderr
    return outcome_of(files)


def kill(job: JobProcess, rank: int) -> None:
    """Kill a worker, and wait for the group without it."""
    before = len(job.named("generation_formed"))
    job.kill_worker(job.members()[rank])
    job.wait_for(lambda: len(job.named("generation_formed")) > before, "another group")


def wait_for_line(job: JobProcess, text: str) -> None:
    job.wait_for(lambda: any(line.endswith(text) for line in list(job.output)), text)


def wait_for_members(job: JobProcess, count: int) -> None:
    job.wait_for(lambda: len(job.members()) == count, f"{count} members")


def keys_of(rows: list[dict[str, str]]) -> Counter[tuple[str, ...]]:
    return Counter((row["step"], *sorted(row)) for row in rows)


def require_same(outcome: Outcome, alone: Outcome) -> None:
    """Every worker has the weights, the counts and the values of the run of one; the log has each
    row once, in one directory."""
    (wanted,) = alone.results.values()
    assert outcome.versions == ["version_0"]
    assert keys_of(outcome.rows) == keys_of(alone.rows)
    logged = {(row["step"], *sorted(row)): row for row in outcome.rows}
    for row in alone.rows:
        found = logged[(row["step"], *sorted(row))]
        for name, value in row.items():
            assert float(found[name]) == pytest.approx(float(value), abs=1e-6), (row["step"], name)
    assert outcome.checkpoints == alone.checkpoints
    for rank, result in outcome.results.items():
        assert result["weights"] == pytest.approx(wanted["weights"], abs=1e-8), rank
        assert result["metrics"] == pytest.approx(wanted["metrics"], abs=1e-6), rank
        for name in ("steps", "committed", "epoch", "rates", "predicted"):
            assert result.get(name) == pytest.approx(wanted.get(name)), (rank, name)
        assert Path(result.get("best", "")).name == Path(wanted.get("best", "")).name


def require_quiet(job: JobProcess, kills: int) -> None:
    """No worker is lost but those that were killed, and one that gloo may leave waiting; nor did
    members hold different states."""
    assert kills <= len(job.named("worker_failed")) <= kills + 1, job.story()
    assert not job.named("state_differed"), job.story()
    assert not job.named("untracked_state"), job.story()


def test_two_kills_change_nothing(place: Place) -> None:
    """Rank 1 in an evaluation; then rank 0 in the last epoch, after a worker has joined."""
    options = {**EVERYTHING, "trainer": {"max_epochs": 2, "gradient_clip_val": 0.5}}
    job = start(place, {**options, "pace_s": 0.06, "val_pace_s": 0.05})
    wait_for_line(job, f"evaluates after {BATCHES}")
    kill(job, 1)
    wait_for_members(job, 3)
    wait_for_step(job, max(BATCHES + 3, *steps_of(job)))
    kill(job, 0)
    assert job.wait() == 0, job.story()
    require_quiet(job, 2)
    require_same(outcome_of(place.files), run_alone(place, options))


@pytest.mark.long
def test_ten_kills_change_nothing(place: Place) -> None:
    """Two of rank 0, two in the last epoch, one in an evaluation, one in a save."""
    epochs, pace_s = 12, 0.12
    options = {**EVERYTHING, "trainer": {"max_epochs": epochs, "val_check_interval": 5}}
    job = start(place, {**options, "pace_s": pace_s, "val_pace_s": 0.1, "save_pace_s": 0.2})
    last = BATCHES * (epochs - 1)
    places: list[tuple[str | int, int]] = [
        (4, 1),
        (f"evaluates after {BATCHES}", 2),
        (BATCHES + 8, 0),
        (3 * BATCHES - 1, 1),
        (f"saves after {4 * BATCHES}", 0),
        (5 * BATCHES + 3, 2),
        (7 * BATCHES, 1),
        (8 * BATCHES + 6, 1),
        (last + 2, 2),
        (last + 8, 0),
    ]
    for where, rank in places:
        wait_for_line(job, where) if isinstance(where, str) else wait_for_step(job, where)
        time.sleep(pace_s / 3)
        kill(job, min(rank, len(job.members()) - 1))
        if where != last + 8:
            job.wait_for(lambda: len(job.members()) >= 2, "two members")
    assert job.wait() == 0, job.story()
    require_quiet(job, len(places))
    require_same(outcome_of(place.files), run_alone(place, options))


@pytest.mark.long
def test_fit_after_fit_takes_in_a_worker_that_skips_the_first(place: Place) -> None:
    options = {"trainer": {"max_epochs": 2}, "then_epochs": 2, "tests": True}
    options |= {"scheduler": "plateau"}
    job = start(place, {**options, "pace_s": 0.15})
    wait_for_step(job, 2 * BATCHES + 4)
    kill(job, 1)
    wait_for_members(job, 3)
    wait_for_step(job, max(3 * BATCHES + 2, *steps_of(job)))
    kill(job, 0)
    assert job.wait() == 0, job.story()
    require_same(outcome_of(place.files), run_alone(place, options))


@pytest.mark.long
def test_early_stopping_stops_all_at_one_step(place: Place) -> None:
    options = {
        "early_stopping": {"monitor": "val_loss", "mode": "max", "patience": 2},
        "timer": {"duration": {"hours": 1}},
        "trainer": {"max_epochs": 9, "limit_train_batches": 7, "check_val_every_n_epoch": 2},
    }
    job = start(place, {**options, "pace_s": 0.06})
    wait_for_step(job, 9)
    kill(job, 0)
    wait_for_step(job, 30)
    kill(job, 1)
    assert job.wait() == 0, job.story()
    require_same(outcome_of(place.files), run_alone(place, options))


@pytest.mark.long
@pytest.mark.parametrize("where", [14, "evaluates after 20"])
def test_a_stopped_fit_goes_on_with_fewer_workers(place: Place, where: int | str) -> None:
    options = {"checkpoint": {"monitor": "val_loss"}, "trainer": {"max_epochs": 3}}
    slow = {**options, "pace_s": 0.05, "val_pace_s": 0.05}
    flags = ["--checkpoint-dir", place.files / "elastic", "--checkpoint-every", "4"]
    job = start(place, slow, *flags)
    wait_for_line(job, where) if isinstance(where, str) else wait_for_step(job, where)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.story()
    resumed = start(place, slow, *flags, nproc=2)
    assert resumed.wait() == 0, resumed.story()
    assert steps_of(resumed)[0] >= max(steps_of(job)), "steps were computed again"
    require_same(outcome_of(place.files), run_alone(place, options))


@pytest.mark.long
def test_a_finished_fit_is_passed_and_goes_on_with_more_epochs(place: Place) -> None:
    flags = ["--checkpoint-dir", place.files / "elastic", "--checkpoint-every", "4"]
    for epochs, steps in [(1, BATCHES), (1, 0), (2, BATCHES)]:
        job = start(place, {"trainer": {"max_epochs": epochs}}, *flags, nproc=2)
        assert job.wait() == 0, job.story()
        assert len(steps_of(job)) == steps
    require_same(outcome_of(place.files), run_alone(place, {"trainer": {"max_epochs": 2}}))
