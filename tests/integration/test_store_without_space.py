"""An etcd that runs out of space under a job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.chaos.kills import ENVIRONMENT
from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.etcd_cluster import etcd_cluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import Place

NODES = ("a", "b")


@pytest.mark.timeout(120)
def test_training_goes_on_and_a_loss_waits_for_space(place: Place, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    steps = StepRecords(tmp_path / "out")
    with etcd_cluster("--quota-backend-bytes=1000000", size=1) as cluster:
        script = (TRAINER, tmp_path / "out", "--epochs", "100000", "--step-s", "0.02")
        job = LoopbackJob(place, script, etcd=cluster.endpoints(), **ENVIRONMENT)
        try:
            job.start_coordinator()
            for node in NODES:
                job.start_agent(node)
            job.wait(lambda: job.world() == len(NODES), "a group of all")
            generation = job.generation()

            cluster.fill()
            reached = steps.newest()
            job.wait(lambda: steps.newest() >= reached + 50, "fifty steps")
            assert job.generation() == generation

            os.kill(job.worker_pid("b"), signal.SIGKILL)
            job.wait(
                lambda: any("NOSPACE alarm" in e["message"] for e in job.events("warning")),
                "a warning",
            )
            assert job.generation() == generation

            cluster.make_space()
            job.wait(lambda: job.events("recovered"), "recovery")
            job.wait(lambda: job.world() == len(NODES), "both workers")
            assert not job.events("deposed")
        finally:
            job.close()
