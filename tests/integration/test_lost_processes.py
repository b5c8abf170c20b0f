"""When one of its processes is killed or frozen, a job goes on or leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elastic.runtime.orphans import children
from tests.integration.running import Place, command_line, steps_of, wait_for_step
from tests.job_process import JobProcess, descendants, is_alive
from tests.waiting import eventually

KEEPER = "elastic keeper"
OWN_CHILDREN = 5  # of each worker of children.py: two loaders, sleep, sh and its sleep
NOT_SAVED = 84


def keeper_of(job: JobProcess) -> int:
    """Wait for the job's keeper, its only child, and return its pid."""

    def found() -> list[int]:
        return [p for p in children_of(job.process.pid) if KEEPER in command_line(p)]

    eventually(found, job.story)
    return found()[0]


def zygote_of(job: JobProcess) -> int:
    """Wait for the zygote, the keeper's only child, and return its pid."""
    keeper = keeper_of(job)

    def found() -> list[int]:
        return [p for p in children_of(keeper) if KEEPER not in command_line(p)]

    eventually(found, job.story)
    return found()[0]


def kill_at_once(pids: list[int]) -> None:
    """Stop all of them before killing any, so that none sees another's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    return list(children(pid))


def family_of(job: JobProcess, worker: str) -> list[int]:
    """Return a worker and everything it has started, once that is complete."""
    pid = job.pid_of(worker)

    def complete() -> bool:
        return len(list(descendants(pid))) == OWN_CHILDREN

    eventually(complete, lambda: f"{[command_line(p) for p in descendants(pid)]}")
    return [pid, *descendants(pid)]


def eventually_gone(pids: list[int], deadline_s: float = 5.0) -> None:
    eventually(
        lambda: not any(map(is_alive, pids)),
        lambda: f"still there: {[command_line(p) for p in pids if is_alive(p)]}",
        deadline_s,
    )


def daemon_of(place: Place, worker: int) -> int:
    """Return the process that daemons.py has detached from this worker."""
    mark = f"daemon-of-{worker}"

    def found() -> list[int]:
        return [p for p in place.processes() if mark in command_line(p)]

    eventually(found, lambda: str([command_line(p) for p in place.processes()]))
    return found()[0]


def wait_for_replacement(job: JobProcess, lost: str) -> None:
    """Wait until two members train again."""
    job.wait_for(lambda: len(job.members()) == 2 and lost not in job.members(), "a replacement")
    wait_for_step(job, max(steps_of(job)) + 3)


def test_no_process_is_left_behind_by_a_killed_worker_or_agent(place: Place) -> None:
    job = place.start("children.py", 100_000)
    wait_for_step(job, 3)
    first = job.members()[1]
    family = family_of(job, first)
    job.kill_worker(first)
    eventually_gone(family)
    wait_for_replacement(job, first)
    everybody = list(descendants(job.process.pid))
    for member in job.members():
        assert set(family_of(job, member)) < set(everybody) | set(descendants(job.process.pid))
    job.process.kill()
    eventually_gone(everybody)
    eventually(lambda: not place.processes(), lambda: str(place.processes()))
    eventually(lambda: not place.run_directories(), lambda: str(place.run_directories()))


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(("agent", "keeper"), marks=pytest.mark.long),
        pytest.param(("agent", "zygote"), marks=pytest.mark.long),
        pytest.param(("keeper",), marks=pytest.mark.long),
        pytest.param(("keeper", "zygote"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_one_of_agent_keeper_and_zygote_is_enough_to_end_everything(
    place: Place, killed: tuple[str, ...]
) -> None:
    job = place.start("children.py", 100_000)
    wait_for_step(job, 3)
    families = [pid for member in job.members() for pid in family_of(job, member)]
    pids = {"agent": job.process.pid, "keeper": keeper_of(job), "zygote": zygote_of(job)}
    started = len(job.named("worker_started"))
    kill_at_once([pids[name] for name in killed])
    eventually_gone(families)
    if "agent" not in killed:
        job.wait_for(lambda: len(job.named("worker_started")) > started, "new workers")
        job.process.kill()
    eventually(lambda: not place.processes(), lambda: str(place.processes()))


@pytest.mark.long
def test_the_end_of_a_worker_does_not_end_the_daemons_of_others(place: Place) -> None:
    job = place.start("daemons.py", 100_000)
    wait_for_step(job, 3)
    first, second = job.members()
    daemons = {worker: daemon_of(place, job.pid_of(worker)) for worker in (first, second)}
    job.kill_worker(second)
    eventually_gone([daemons[second]])
    wait_for_replacement(job, second)
    assert is_alive(daemons[first])
    job.process.kill()
    eventually_gone([daemons[first]])


def test_a_killed_zygote_costs_the_steps_since_the_last_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "5"]
    job = place.start("children.py", 10, options=options)
    saved = job.wait_for_event("checkpoint_committed")
    families = [pid for member in job.members() for pid in family_of(job, member)]
    os.kill(zygote_of(job), signal.SIGKILL)
    job.wait_for_event("zygote_lost")
    eventually_gone(families)
    assert job.wait() == 0, job.story()
    restored = job.named("state_restored")[-1]
    assert restored["committed"] >= saved["step"]
    assert restored["source"] == f"checkpoint of step {restored['committed']}"
    assert all("zygote" in failed["message"] for failed in job.named("worker_failed"))
    assert job.named("job_finished")[0]["committed"] == 60
    assert place.elastic("checkpoint", "verify", checkpoints).returncode == 0


@pytest.mark.long
def test_a_job_killed_while_it_warms_up_leaves_nothing_behind(place: Place) -> None:
    job = place.start("steady.py", nproc=1)
    zygote = zygote_of(job)
    job.process.kill()
    eventually_gone([zygote], deadline_s=30.0)  # it notices once it has imported torch
    eventually(lambda: not place.run_directories(), lambda: str(place.run_directories()))


@pytest.mark.long
def test_a_zygote_killed_while_it_warms_up_is_started_again(place: Place) -> None:
    job = place.start("steady.py", nproc=1)
    os.kill(zygote_of(job), signal.SIGKILL)
    job.wait_for_event("zygote_lost")
    assert job.wait() == 0, job.story()


def test_a_zygote_that_never_gets_ready_ends_the_job(place: Place, tmp_path: Path) -> None:
    torch = tmp_path / "modules" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('libcudart.so.13 not found')\n")
    job = place.start("steady.py", PYTHONPATH=str(torch.parent))
    assert job.wait() == 75, job.story()
    (message,) = job.messages
    log = next(Path(word.rstrip(".,")) for word in message.split() if "zygote.log" in word)
    assert "libcudart.so.13" in log.read_text()


def test_a_frozen_worker_is_replaced(place: Place) -> None:
    job = place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.02)
    wait_for_step(job, 3)
    frozen = job.members()[1]
    began = time.time()
    job.kill_worker(frozen, signal.SIGSTOP)
    failed = job.wait_for_event("worker_failed", worker=frozen)
    assert failed["kind"] == "left_out"
    assert failed["time"] - began < 6.0  # 2.3 s where no other process competes
    eventually_gone([job.pid_of(frozen)])
    wait_for_replacement(job, frozen)


@pytest.mark.parametrize(
    ("nproc", "number"),
    [(1, signal.SIGKILL), pytest.param(2, signal.SIGSTOP, marks=pytest.mark.long)],
    ids=["killed", "stopped"],
)
def test_a_job_without_checkpoints_does_not_start_over_when_all_members_are_lost(
    place: Place, nproc: int, number: int
) -> None:
    """Spares are ready, but only lost members knew what was trained."""
    job = place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.02, nproc=nproc)
    wait_for_step(job, 20)
    for member in job.members():
        job.kill_worker(member, number)
    assert job.wait() == NOT_SAVED, job.story()
    ended = job.named("job_ended")[0]
    assert (ended["exit_code"], ended["severity"]) == (NOT_SAVED, "error")
    assert ended["committed"] >= 20  # not the 0 of the spare that joined
    assert "there is no checkpoint" in ended["message"]
    assert [e["source"] for e in job.named("state_restored")] == ["initial"]


@pytest.mark.long
def test_a_job_whose_processes_are_all_paused_goes_on_with_the_same_workers(place: Place) -> None:
    """A paused container stops all processes, and so does Slurm when it suspends a job."""
    options = ("--silence-timeout-s", "2", "--hang-timeout-s", "2")
    job = place.start("steady.py", "--epochs", "100000", "--pace-s", "0.05", options=options)
    wait_for_step(job, 5)
    for number, pause_s in ((signal.SIGSTOP, 4.0), (signal.SIGCONT, 0.0)):
        for pid in place.processes():
            os.kill(pid, number)
        time.sleep(pause_s)
    reached = max(steps_of(job))
    wait_for_step(job, reached + 20)
    assert job.named("worker_failed") == []
    assert job.named("hang") == []
    assert steps_of(job) == sorted(steps_of(job))


@pytest.mark.long
def test_a_job_ends_although_its_zygote_is_stopped(place: Place) -> None:
    job = place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.05)
    wait_for_step(job, 5)
    os.kill(zygote_of(job), signal.SIGSTOP)
    job.kill_worker(job.members()[1])
    job.wait_for_event("recovered")  # with the spare; the zygote never forks the next one
    job.process.terminate()
    assert job.wait() == 143, job.story()
    (warning,) = job.named("warning")
    assert "the zygote does not answer" in warning["message"]


def test_a_worker_that_blocks_in_a_step_is_replaced_with_its_stacks_in_its_log(
    place: Place, tmp_path: Path
) -> None:
    options = ["--hang-timeout-s", "1", "--join-timeout-s", "1"]
    # A pause on a busy machine may count as a hang, and the block may be the next group's first.
    options += ["--first-step-timeout-s", "10"]
    job = place.start("blocks.py", tmp_path / "blocked", options=options)
    failed = job.wait_for_event("worker_failed")
    assert failed["kind"] == "left_out"
    assert [e for e in job.named("generation_formed") if e["reason"] == "stalled"]
    assert "in block_for_ever" in Path(failed["log"]).read_text()
    wait_for_replacement(job, failed["worker"])
    assert sorted(set(steps_of(job))) == list(range(1, max(steps_of(job)) + 1))


def test_the_last_member_gives_its_state_away_while_its_script_is_stuck_in_torch(
    place: Place, tmp_path: Path
) -> None:
    """gloo never wakes a thread that waits for the rest of a message from a peer that died."""
    stands = tmp_path / "stands"
    job = place.start("stands_still.py", stands)
    eventually(stands.exists, job.story)
    rank_0, rank_1 = job.members()
    job.kill_worker(rank_0)
    failed = job.wait_for_event("worker_failed", worker=rank_1)
    assert failed["kind"] == "left_out", job.story()
    assert job.wait() == 0, job.story()
    assert len(job.named("state_restored")) == 1, job.story()  # once, at the start
    steps = steps_of(job)
    assert steps == sorted(steps), "steps were lost"
