"""The session keeps its promises on a backend that behaves like NCCL (tests/nccl_manners.py).

An aborted operation looks like a success and leaves garbage. A step or an evaluation that does not
check whether the group still exists takes the garbage for its result.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import records
from tests.chaos.kills import job_of, kill_at_random_steps, wait_until
from tests.chaos.test_kills import TRAINER, check_outcome
from tests.job_process import JobProcess

SCRIPT = Path(__file__).parent / "scripts" / "nccl_manners_trainer.py"

Rows = dict[str, list[records.Record]]


def train(
    script: Path, out: Path, *options: str, nproc: int, kills: int, seed: int
) -> tuple[JobProcess, Rows]:
    """Run a job and kill some of its members. It must end well and lose no other worker."""
    with job_of(script, out, *options, nproc=nproc) as job:
        kill_at_random_steps(job, out, seed=seed, kills=kills)
        assert job.wait(150) == 0, job.story()
    assert len(job.named("worker_failed")) == kills, job.story()
    return job, records.read(out)


@pytest.mark.timeout(240)
def test_kills_do_not_change_the_weights(tmp_path: Path) -> None:
    """The weights are those that one process computes, so no gradient was garbage."""
    options = ["--nccl-manners", "--epochs", "12", "--step-s", "0.02"]
    job, _ = train(TRAINER, tmp_path, *options, nproc=2, kills=2, seed=2)
    check_outcome(job, tmp_path, epochs=12)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [3, pytest.param(8, marks=pytest.mark.long)])
def test_an_aborted_member_feeds_no_garbage_to_others_that_hear_later(
    tmp_path: Path, kills: int
) -> None:
    """At each kill two others are left in the all-reduce, and announcements reach them at different
    times. One that aborts there must not let the other take garbage and commit its step."""
    epochs = 4 + 4 * kills
    options = ["--nccl-manners", "--epochs", str(epochs), "--step-s", "0.03"]
    with job_of(TRAINER, tmp_path, *options, "--news-late-s", "0.3", nproc=3) as job:
        for kill in range(kills):
            wait_until(job, lambda: records.members_at_work(tmp_path) == 3, "group of three")
            target = records.newest_step(tmp_path) + 5 + kill
            wait_until(job, lambda: records.newest_step(tmp_path) >= target, f"step {target}")  # noqa: B023
            job.kill_worker(job.members()[-1])  # not rank 0, which hosts their store
            formed = len(job.named("generation_formed"))
            job.wait_for(lambda: len(job.named("generation_formed")) > formed, "a new group")  # noqa: B023
        assert job.wait(150) == 0, job.story()
    check_outcome(job, tmp_path, epochs)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "figure", "seed"),
    [(["--log-loss"], "logged", 7), (["--evaluate-every", "1"], "value", 9)],
    ids=["below its steps", "in an evaluation"],
)
def test_kills_do_not_change_the_figures_that_the_script_reduces(
    tmp_path: Path, options: list[str], figure: str, seed: int
) -> None:
    job, found = train(SCRIPT, tmp_path, *options, nproc=3, kills=4, seed=seed)
    assert records.check_equal_weights(found) > 0
    records.check_nothing_lost(found, job.named("generation_formed"))
    wrong = [r for rows in found.values() for r in rows if r.get(figure, 1.0) != 1.0]
    assert not wrong


@pytest.mark.long
def test_a_job_that_asks_for_the_nccl_watchdog_is_refused_before_training(tmp_path: Path) -> None:
    with job_of(SCRIPT, tmp_path, nproc=1, TORCH_NCCL_ASYNC_ERROR_HANDLING="1") as job:
        assert job.wait() == 78, job.story()
    (failed,) = job.named("worker_failed")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in failed["message"]
    assert records.newest_step(tmp_path) == -1
