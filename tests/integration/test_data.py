"""Data sets of unusual sizes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.running import CONFIGURATION, Place, steps_of, wait_for_step
from tests.job_process import JobProcess

TERMINATED = 143


@pytest.mark.parametrize(
    ("samples", "nproc"),
    [
        pytest.param(3, 2, id="less than a batch", marks=pytest.mark.long),
        pytest.param(1, 3, id="one sample, three workers", marks=pytest.mark.long),
    ],
)
def test_a_data_set_smaller_than_one_batch_trains(place: Place, samples: int, nproc: int) -> None:
    job = place.start("steady.py", "--samples", samples, "--epochs", 3, nproc=nproc)
    assert job.wait() == 0, job.story()
    assert steps_of(job) == [1, 2, 3]


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(16, id="2, 1, 1", marks=pytest.mark.long),
        pytest.param(13, id="one is left", marks=pytest.mark.long),
        pytest.param(3, id="1, 1, 1", marks=pytest.mark.long),
    ],
)
def test_batch_norm_never_gets_a_single_sample(place: Place, samples: int) -> None:
    """Three workers take 12 samples a step. Even shares would leave a rank with one in a step."""
    job = place.start("batch_norm.py", "--samples", samples, nproc=3)
    assert job.wait() == 0, job.story()
    assert not job.named("worker_failed")


@pytest.mark.long
def test_drop_last_trains_on_with_fewer_samples_than_the_group_takes(place: Place) -> None:
    """There are 10 samples. Three workers take 12 a step, two 8. A killed worker is replaced."""
    script = ["steady.py", "--samples", 10, "--drop-last", "--epochs", 100000, "--pace-s", 0.01]
    job = place.start(*script, nproc=3)
    wait_for_step(job, 3)
    job.kill_worker(job.members()[-1])
    job.wait_for(lambda: sizes_of(job)[-1] == 3 and len(sizes_of(job)) > 1, "three again")
    assert sizes_of(job)[0] == 3
    wait_for_step(job, max(steps_of(job)) + 20)
    assert len(job.named("worker_failed")) == 1, "the killed one"


def sizes_of(job: JobProcess) -> list[int]:
    """Return the world sizes of all groups so far."""
    return [event["world_size"] for event in job.named("generation_formed")]


@pytest.mark.long
def test_drop_last_with_fewer_samples_than_one_worker_takes_is_refused(place: Place) -> None:
    job = place.start("steady.py", "--samples", 3, "--drop-last")
    assert job.wait() == CONFIGURATION, job.story()
    assert "drop_last" in job.named("job_ended")[0]["message"]


@pytest.mark.long
def test_an_empty_data_set_is_refused(place: Place) -> None:
    job = place.start("steady.py", "--samples", 0)
    assert job.wait() == CONFIGURATION, job.story()
    assert "TensorDataset" in job.named("job_ended")[0]["message"]


def test_loops_of_so_many_steps_end_at_the_same_step_after_a_kill_and_a_resume(
    place: Place, tmp_path: Path
) -> None:
    """A worker is killed in the second of three loops, and the job is stopped in it."""
    length = 30
    options = ["--checkpoint-dir", tmp_path / "checkpoints"]
    job = place.start("several_loops.py", length, options=options, nproc=3)
    wait_for_step(job, length + 5)
    job.kill_worker(job.members()[-1])
    job.wait_for_event("recovered")
    stopped_above = max(steps_of(job)) + 3
    wait_for_step(job, stopped_above)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == TERMINATED, job.story()
    assert stopped_above <= max(steps_of(job)) < 2 * length, job.story()

    resumed = place.start("several_loops.py", length, options=options, nproc=2)
    assert resumed.wait() == 0, resumed.story()
    assert steps_of(resumed) == list(range(max(steps_of(job)) + 1, 3 * length + 1))
    ended = [line.partition("] ")[2] for line in resumed.output if "ended at" in line]
    assert ended[1:] == [f"loop 1 ended at {2 * length}", f"loop 2 ended at {3 * length}"]
