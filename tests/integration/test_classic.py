"""Unmodified scripts for torchrun get its environment, its restarts and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.running import (
    CONFIGURATION,
    FAILED,
    SCRIPTS,
    Place,
    all_messages,
    steps_of,
    tracebacks,
    wait_for_step,
)
from tests.job_process import JobProcess
from tests.waiting import eventually

TERMINATED = 143
ALL = ["--console", "all"]
# Variables that torchrun sets for itself, that bash sets, or that the tests set.
NOT_COMPARED = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "_", "SHLVL", "XDG_RUNTIME_DIR"}
NOT_COMPARED |= {"TORCHINDUCTOR_CACHE_DIR"}  # some imports of torch set it
# These help to find peers and orphans.
OURS = {"GLOO_SOCKET_IFNAME", "RES_OPTIONS", "_ELASTIC_RUN_DIRECTORY", "_ELASTIC_WORKER"}
# Ports, ids and paths differ, and torchrun's MASTER_ADDR is this host's own name.
DIFFERENT = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def starts(job: JobProcess) -> list[tuple[int, int, int, int, int]]:
    """Return (rank, world size, restart, first step, pid) of every process of plain_ddp.py."""
    pattern = r"\[.*\] start (\d+)/(\d+) restart (\d+) at step (\d+) pid (\d+)"
    found = (re.fullmatch(pattern, line) for line in list(job.output))
    return [tuple(map(int, m.groups())) for m in found if m]  # type: ignore[misc]


def groups(job: JobProcess) -> dict[int, set[int]]:
    """Return the ranks that started, by the number of restarts before."""
    return {
        restart: {rank for rank, _, r, _, _ in starts(job) if r == restart}
        for _, _, restart, _, _ in starts(job)
    }


@pytest.mark.parametrize("victim", ["script", pytest.param("worker", marks=pytest.mark.long)])
def test_a_killed_process_costs_one_restart_of_all(
    place: Place, tmp_path: Path, victim: str
) -> None:
    arguments = [tmp_path / "checkpoint", "--steps", 60, "--pace-s", 0.05]
    job = place.start("plain_ddp.py", *arguments, options=ALL, nproc=3)
    wait_for_step(job, 12)
    worker = job.members()[1]
    if victim == "script":
        os.kill(next(pid for rank, *_, pid in starts(job) if rank == 1), signal.SIGKILL)
    else:
        job.kill_worker(worker)
    assert job.wait() == 0, job.story()
    assert groups(job) == {0: {0, 1, 2}, 1: {0, 1, 2}}, job.story()
    assert len(starts(job)) == 6, "somebody was started more than once"
    resumed = {at for _, world, restart, at, _ in starts(job) if restart == 1 and world == 3}
    assert len(resumed) == 1, "the workers disagree"
    assert resumed.pop() >= 10, "not from the checkpoint"
    assert steps_of(job)[-1] == 60
    formed = [(e["reason"], e["world_size"]) for e in job.named("generation_formed")]
    assert formed == [("started", 3), ("member_lost", 0), ("started", 3)]
    # On a busy machine a peer may lose its connection, raise and report that before it.
    kinds = {failed["worker"]: failed["kind"] for failed in job.named("worker_failed")}
    assert kinds[worker] == "signal"
    assert len(job.named("recovered")) == 1


@pytest.mark.long
def test_a_killed_process_is_the_cause_even_if_its_peers_report_first(
    place: Place, tmp_path: Path
) -> None:
    arguments = [tmp_path / "checkpoint", "--steps", 40, "--pace-s", 0.05]
    options = [*ALL, "--silence-timeout-s", "60"]
    job = place.start("plain_ddp.py", *arguments, options=options, nproc=2)
    wait_for_step(job, 12)
    worker = job.members()[1]
    supervisor = job.pid_of(worker)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(next(pid for rank, *_, pid in starts(job) if rank == 1), signal.SIGKILL)
        # All are restarted now, and the agent has asked the stopped one to end.
        job.wait_for_event("generation_formed", world_size=0)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert job.wait() == 0, job.story()
    assert [f["kind"] for f in job.named("worker_failed")] == ["exception", "signal"]
    (incident,) = job.named("incident")
    assert f"worker {worker})" in incident["summary"], job.story()


def test_the_environment_is_that_of_torchrun_and_ranks_draw_other_numbers(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RES_OPTIONS")  # set for all tests
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    script, options = SCRIPTS / "classic.py", ["--max-restarts", "3"]
    job = place.start(script, "environment", ours, options=options)
    assert job.wait() == 0, job.story()
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    done = place.python(*command, script, "environment", theirs)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        mine, other = (json.loads((d / f"{rank}.json").read_text()) for d in (ours, theirs))
        assert mine.keys() - other.keys() - NOT_COMPARED == OURS
        assert other.keys() - mine.keys() - NOT_COMPARED == set()
        same = other.keys() - NOT_COMPARED - DIFFERENT
        assert {n: mine[n] for n in same} == {n: other[n] for n in same}
        assert mine["TORCHELASTIC_RUN_ID"] == "job"
        assert mine["MASTER_ADDR"] == "127.0.0.1"
    for directory in (ours, theirs):
        assert len({(directory / f"{rank}.seed").read_text() for rank in (0, 1)}) == 2


@pytest.mark.long
@pytest.mark.parametrize("end", [pytest.param("raises", marks=pytest.mark.long), "raises_recorded"])
def test_a_script_that_always_fails_ends_the_job_after_the_restarts(
    place: Place, tmp_path: Path, end: str
) -> None:
    options = [*ALL, "--max-restarts", "2"]
    job = place.start("classic.py", end, tmp_path, options=options)
    assert job.wait() == FAILED, job.story()
    attempts = {line.partition("attempt ")[2] for line in job.output if "attempt" in line}
    assert attempts == {"0", "1", "2"}
    assert "ValueError: no such corpus" in all_messages(job)
    assert 'classic.py", line ' in tracebacks(job)


@pytest.mark.long
def test_an_exit_code_other_than_0_is_a_failure(place: Place, tmp_path: Path) -> None:
    job = place.start("classic.py", "exits", tmp_path, options=["--max-restarts", "0"])
    assert job.wait() == FAILED, job.story()
    assert "exit code 3" in all_messages(job)


@pytest.mark.parametrize(
    ("script", "end"),
    [
        pytest.param("never_joins.py", "nothing", marks=pytest.mark.long),
        pytest.param("classic.py", "nothing", marks=pytest.mark.long),
        pytest.param("classic.py", "closes_its_output", marks=pytest.mark.long),
    ],
)
def test_a_script_that_ends_at_once_finishes_the_job(
    place: Place, tmp_path: Path, script: str, end: str
) -> None:
    job = place.start(script, end, tmp_path, options=[*ALL, "--max-restarts", "2"])
    assert job.wait() == 0, job.story()
    assert not job.named("worker_failed")
    assert sum("hello" in line for line in job.output) == 2


@pytest.mark.long
def test_the_peers_of_a_worker_that_is_done_early_can_finish(place: Place, tmp_path: Path) -> None:
    job = place.start("classic.py", "early", tmp_path, options=ALL, nproc=3)
    assert job.wait() == 0, job.story()
    assert not job.named("worker_failed")
    assert {line for line in job.output if "is done" in line} == {
        "[rank 1] rank 1 is done",
        "[rank 2] rank 2 is done",
    }


def test_sigterm_reaches_the_script_before_its_loaders(place: Place, tmp_path: Path) -> None:
    """What fails at the end is told: rank 1 of this script ends with exit code 7."""
    job = ready(place, "saves_at_sigterm", tmp_path, "--stop-grace-s", "1000")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == TERMINATED, job.story()
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert not job.named("worker_failed")
    (failed,) = job.named("failed_at_end")
    assert "7" in failed["details"]["message"]


@pytest.mark.long
def test_a_script_that_ignores_sigterm_is_killed_after_the_grace(
    place: Place, tmp_path: Path
) -> None:
    job = ready(place, "ignores_sigterm", tmp_path, "--stop-grace-s", "1")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(deadline_s=30.0) == TERMINATED, job.story()


def ready(place: Place, end: str, tmp_path: Path, *options: str) -> JobProcess:
    job = place.start("classic.py", end, tmp_path, options=options)
    eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, job.story, deadline_s=60.0)
    return job


@pytest.mark.long
def test_elastic_init_is_refused_in_a_script_for_torchrun(place: Place, tmp_path: Path) -> None:
    job = place.start("classic.py", "hidden", tmp_path)
    assert job.wait() == CONFIGURATION, job.story()
    assert "--launch elastic" in all_messages(job)
