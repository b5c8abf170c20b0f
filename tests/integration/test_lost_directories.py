"""A job outlives the removal of its sockets and logs."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from elastic.runtime.leave_signals import RESTART_SIGNAL
from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import training_job
from tests.integration.running import Place, command_line, wait_for_step
from tests.waiting import eventually


@pytest.mark.long
def test_a_job_replaces_workers_after_its_sockets_and_logs_were_removed(place: Place) -> None:
    """A logout removes $XDG_RUNTIME_DIR."""
    script = ["steady.py", "--epochs", 100_000, "--pace-s", 0.02]
    job = place.start(*script, options=["--job", "lost"])
    wait_for_step(job, 5)
    shutil.rmtree(place.sockets / place.run_directories()[0].parent.name)
    shutil.rmtree(place.files / "logs")
    job.wait_for_event("run_directory_made_anew")
    for _ in range(2):  # the second time with a worker that has started since
        lost, known = job.members()[0], len(job.events)
        job.kill_worker(lost)
        job.wait_for_event("generation_formed", after=known, world_size=2)
        reached = committed(place) + 5
        eventually(lambda n=reached: committed(place) >= n, job.story)
    started = job.named("worker_started")[-1]["worker"]
    assert list((place.files / "logs").glob(f"*/{started}.log")), "logs go on"
    assert place.elastic("stop", "--job", "lost").returncode == 0
    job.wait()


def committed(place: Place) -> int:
    status = place.elastic("status", "--job", "lost", "--output", "json")
    assert status.returncode == 0, status.stderr
    return int(json.loads(status.stdout)["progress"]["committed"])


@pytest.mark.long
def test_a_node_replaces_workers_after_its_sockets_were_removed(
    place: Place, etcd: EtcdCluster
) -> None:
    with training_job(place, etcd=etcd.endpoints()) as job:
        for directory in place.run_directories():
            shutil.rmtree(directory)
        (agent,) = job.agents["a"]
        agent.wait_for_event("run_directory_made_anew")
        for _ in range(2):
            before = job.generation()
            os.kill(job.worker_pid("a"), signal.SIGKILL)
            job.wait(lambda b=before: job.generation() >= b + 2 and job.world() == 2, "both")
            job.wait_for_more_steps()
        # The sockets by which the next agent finds a zygote are gone with the directory: it starts
        # another one, and ends the first with its workers.
        before = job.generation()
        agent.process.send_signal(RESTART_SIGNAL)
        agent.wait()
        job.start_agent("a")
        job.wait(lambda: job.generation() >= before + 2 and job.world() == 2, "both")
        job.wait_for_more_steps()
        assert len([p for p in place.processes() if command_line(p) == "elastic zygote"]) == 2
