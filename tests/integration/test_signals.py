"""SIGTERM and SIGINT to `elastic run`: the first saves and leaves, the second stops at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elastic.runtime.leave_signals import ONE_SIGNAL_S
from tests.chaos.problem import lineage
from tests.integration.running import Place, steps_of, wait_for_step
from tests.job_process import WITH_COMPILER, JobProcess
from tests.waiting import eventually

INTERRUPTED, TERMINATED = 130, 143


def test_the_first_signal_saves_and_a_new_run_goes_on_from_there(
    place: Place, tmp_path: Path
) -> None:
    checkpoints, ledger = tmp_path / "checkpoints", tmp_path / "ledger.jsonl"
    options = ["--checkpoint-dir", checkpoints, "--ledger", ledger]
    saved = 0
    for number, code, nproc in [(signal.SIGTERM, TERMINATED, 2), (signal.SIGINT, INTERRUPTED, 1)]:
        script = ["steady.py", "--epochs", 1000, "--pace-s", 0.02]
        job = place.start(*script, options=options, nproc=nproc)
        wait_for_step(job, saved + 5)
        assert steps_of(job)[0] == saved + 1
        job.process.send_signal(number)
        assert job.wait() == code, job.story()
        (committed,) = job.named("checkpoint_committed")
        saved = committed["step"]
        assert job.named("job_ended")[0]["committed"] == saved
        assert place.elastic("checkpoint", "verify", checkpoints).returncode == 0

    newest = lineage(ledger)[-1]
    epochs = newest["epoch"] + 2
    job = place.start("steady.py", "--epochs", epochs, options=options)
    assert job.wait() == 0, job.story()
    assert job.named("state_restored")[0]["source"] == f"checkpoint of step {saved}"
    assert steps_of(job)[0] == saved + 1 == newest["step"] + 2
    assert_every_sample_once(lineage(ledger), epochs, samples=48)


def assert_every_sample_once(steps: list[dict[str, int]], epochs: int, samples: int) -> None:
    used: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for step in steps:
        used[step["epoch"]] += range(step["start"], step["stop"])
    assert all(found == list(range(samples)) for found in used.values()), used


@pytest.mark.long
def test_a_signal_to_every_process_of_the_job_saves_and_leaves(
    place: Place, tmp_path: Path
) -> None:
    """pkill(1), scancel and service managers signal every process."""
    checkpoints = tmp_path / "checkpoints"
    options = ["--checkpoint-dir", checkpoints]
    job = place.start("steady.py", "--epochs", 1000, "--pace-s", 0.02, options=options)
    wait_for_step(job, 5)
    for process in sorted(place.processes(), reverse=True):  # the command comes last
        os.kill(process, signal.SIGTERM)
    assert job.wait() == TERMINATED, job.story()
    (committed,) = job.named("checkpoint_committed")
    assert job.named("job_ended")[0]["committed"] == committed["step"]
    assert not job.named("worker_failed"), job.story()


def test_the_second_signal_stops_at_once(place: Place, tmp_path: Path) -> None:
    job = blocked_job(place, tmp_path)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for_event("stop_requested")  # no step boundary ever comes
    time.sleep(2 * ONE_SIGNAL_S)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(deadline_s=10.0) == TERMINATED, job.story()
    assert job.named("job_ended")[0]["exit_code"] == TERMINATED


def test_a_signal_ends_a_job_that_reaches_no_step_boundary_in_time(
    place: Place, tmp_path: Path
) -> None:
    job = blocked_job(place, tmp_path, "--stop-grace-s", "1")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(deadline_s=15.0) == TERMINATED, job.story()
    assert "1 s" in job.named("job_ended")[0]["message"]


LONG = pytest.mark.long
TOO_SLOW = ("one load", *("all sleep", "all below", "all call", "one stuck"))
"""Which ranks are at such a place as the others wait for them, or all are there."""
ELSEWHERE = {"one below": 4, "one call": 4, "one updated": 5}
"""Where a rank has no part in the save, and the steps that the others save."""


@pytest.mark.long
@pytest.mark.parametrize(
    "slow", [TOO_SLOW[0], *(pytest.param(s, marks=LONG) for s in (*TOO_SLOW[1:], *ELSEWHERE))]
)
def test_a_signal_gives_up_what_is_too_slow_and_saves_the_state_from_before_it(
    place: Place, tmp_path: Path, slow: str
) -> None:
    """The script's thread waits in its own code, or for samples. The next run goes on from there,
    and repeats the step that was given up."""
    checkpoints, ledger = tmp_path / "checkpoints", tmp_path / "ledger.jsonl"
    options = ["--checkpoint-dir", checkpoints, "--ledger", ledger]
    ranks, what = slow.split()
    job = place.start(
        *["takes_long.py", 4, ranks, 3600, what, 1000],
        options=[*options, "--stop-grace-s", "16"],
        **WITH_COMPILER,
    )
    wait_for_step(job, 4)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == TERMINATED, job.story()
    saved = ELSEWHERE.get(slow, 4)
    ended = job.named("job_ended")[0]
    assert (ended["exit_code"], ended["committed"]) == (TERMINATED, saved), job.story()
    assert job.named("checkpoint_committed")[-1]["step"] == saved
    if what != "updated":  # that cannot be undone, and the worker is replaced
        told = job.named("left_early")[0]["details"]
        assert (told["step"], told["undone"]) == ("4", "true"), job.story()
    assert bool(job.named("worker_failed")) == (slow in ELSEWHERE), job.story()
    assert place.elastic("checkpoint", "verify", checkpoints).returncode == 0

    job = place.start(*["takes_long.py", 4, ranks, 0, what, 2], options=options, **WITH_COMPILER)
    assert job.wait() == 0, job.story()
    assert job.named("state_restored")[0]["source"] == f"checkpoint of step {saved}"
    assert steps_of(job)[0] == saved + 1
    assert_every_sample_once(lineage(ledger), 2, samples=48)


def blocked_job(place: Place, tmp_path: Path, *options: str) -> JobProcess:
    marker = tmp_path / "blocked"
    job = place.start("blocks.py", marker, options=options)
    eventually(marker.exists, job.story, deadline_s=60.0)
    return job


@pytest.mark.long
def test_signals_that_the_parent_has_blocked_reach_the_job(place: Place) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
    try:
        job = place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.02)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_for_step(job, 3)
    killed = job.members()[1]
    job.kill_worker(killed)
    failed = job.wait_for_event("worker_failed", worker=killed)
    assert "SIGKILL" in failed["message"]  # the zygote has reaped it
    job.process.terminate()
    assert job.wait() == TERMINATED, job.story()


def test_a_signal_while_the_zygote_warms_up_ends_the_job(place: Place) -> None:
    job = place.start("steady.py")
    job.wait_for_event("node_connected")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(deadline_s=10.0) == TERMINATED, job.story()
    assert job.named("job_ended")[0]["exit_code"] == TERMINATED
    assert not job.named("worker_started")


@pytest.mark.long
def test_a_signal_while_workers_gather_ends_the_job(place: Place) -> None:
    job = place.start("hangs_before_steps.py")
    job.wait_for(lambda: len(job.named("worker_started")) == 3, "two workers and a spare")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(deadline_s=10.0) == TERMINATED, job.story()
