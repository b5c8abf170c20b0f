"""Collectors of logs get lines that name their job, and old logs do not pile up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.running import Place, steps_of, wait_for_step

TERMINATED = 143
GONE = 2**22 + 1  # above every process id
WHOSE = {"job": "job", "run": "default", "node": "local"}


def test_each_line_is_json_that_names_its_job_and_old_logs_are_removed(place: Place) -> None:
    logs = place.files / "logs"
    earlier = [logs / f"job-2026010{n}-000000-{GONE}" for n in range(1, 6)]
    for directory in earlier:
        directory.mkdir(parents=True)
        (directory / "zygote.log").touch()
    options = ["--console", "json", "--keep-logs", "3"]
    job = place.start("steady.py", "--epochs", 1, options=options)
    assert job.wait() == 0, job.story()
    assert job.messages == []
    assert job.output
    for line in [*map(json.loads, job.output), *job.events]:
        assert line.items() >= WHOSE.items(), line
        assert line["severity"] in ("info", "warning")
        assert line["time"] > 1e9
    assert {json.loads(line)["event"] for line in job.output} == {"worker_output"}
    assert {json.loads(line)["rank"] for line in job.output} <= {0, 1, None}
    present = Path(job.named("job_started")[0]["log_dir"])
    assert set(logs.iterdir()) == {present, *earlier[3:]}
    (removed,) = job.named("logs_removed")
    assert removed["directories"] == 3
    shutil.rmtree(logs)


@pytest.fixture
def disk(place: Place) -> Iterator[Path]:
    """A file system for the job's logs that can be frozen; it works again at the test's end."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    image, logs = place.files / "image", place.files / "logs"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    logs.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, logs], check=False).returncode != 0:
        pytest.skip("there are no loop devices")
    yield logs
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["fsfreeze", "-u", logs], check=True, stderr=subprocess.DEVNULL)
    subprocess.run(["umount", "-l", logs], check=True)


@pytest.mark.long
def test_a_job_recovers_and_ends_while_the_disk_of_its_logs_hangs(place: Place, disk: Path) -> None:
    job = place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.02)
    wait_for_step(job, 20)
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    started = job.named("worker_started")
    os.kill(started[0]["pid"], signal.SIGKILL)
    job.wait_for(lambda: job.named("output_lost"), "a word on the logs")
    job.wait_for(lambda: len(job.named("worker_started")) > len(started), "another worker")
    wait_for_step(job, steps_of(job)[-1] + 50)
    (failed,) = job.named("worker_failed")
    assert "step" in failed["log_tail"]
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == TERMINATED, job.story()
    subprocess.run(["fsfreeze", "-u", disk], check=True)
