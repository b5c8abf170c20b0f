"""A job whose workers are killed at random moments ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.chaos import problem, records
from tests.chaos.kills import job_of, kill_at_random_steps
from tests.job_process import JobProcess

TRAINER = Path(__file__).parent / "scripts" / "float64_trainer.py"


def check_outcome(job: JobProcess, out: Path, epochs: int) -> None:
    steps = problem.lineage(out / "ledger.jsonl")
    problem.check_every_sample_once(steps, epochs)
    found = records.read(out)
    assert records.check_equal_weights(found) > len(steps)
    records.check_nothing_lost(found, job.named("generation_formed"))
    finals = [torch.load(p, weights_only=True, map_location="cpu") for p in out.glob("final-*.pt")]
    (initial,) = [
        torch.load(p, weights_only=True, map_location="cpu")
        for p in out.glob("initial-*.pt")
        if any(r["rank"] == 0 and r["step"] == 0 for r in found[p.stem.replace("initial", "steps")])
    ][:1]
    expected = problem.solve(initial, steps, records.factors(found))
    for final in finals:
        for name, value in final.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


def check_accounts(job: JobProcess, nproc: int) -> None:
    """Check P8: the time of all slots is accounted for, within 1%."""
    (connected,), (finished,) = job.named("node_connected"), job.named("job_finished")
    wall_s = (finished["time"] - connected["time"]) * nproc
    spent = finished["slot_seconds"]
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.01), spent
    assert {"productive", "recomputed", "join", "state_transfer", "first_step"} <= set(spent)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("nproc", "kills", "options"),
    [
        pytest.param(2, 4, ["--batch-size", "5"], marks=pytest.mark.long),
        (3, 2, ["--batch-size", "4", "--accumulate", "3", "--loaders", "1"]),
        pytest.param(
            *(3, 5, ["--batch-size", "4", "--accumulate", "3", "--loaders", "1"]),
            marks=pytest.mark.long,
        ),
        pytest.param(3, 5, ["--batch-size", "2", "--global-batch", "20"], marks=pytest.mark.long),
        pytest.param(4, 6, ["--batch-size", "3"], marks=pytest.mark.long),
    ],
)
def test_kills_change_neither_the_samples_nor_the_weights(
    tmp_path: Path, nproc: int, kills: int, options: list[str]
) -> None:
    epochs = max(6, 2 * kills + 2)
    options = ["--epochs", str(epochs), "--step-s", "0.02", *options]
    with job_of(TRAINER, tmp_path, *options, nproc=nproc) as job:
        kill_at_random_steps(job, tmp_path, seed=nproc, kills=kills)
        assert job.wait(150) == 0, job.story()
    check_outcome(job, tmp_path, epochs)
    check_accounts(job, nproc)


@pytest.mark.long
def test_uneven_shares_give_the_exact_gradient(tmp_path: Path) -> None:
    """Three workers divide a global batch of 8 as 3, 3, 2."""
    options = ["--epochs", "2", "--batch-size", "2", "--global-batch", "8"]
    with job_of(TRAINER, tmp_path, *options, nproc=3) as job:
        assert job.wait() == 0, job.story()
    check_outcome(job, tmp_path, epochs=2)
