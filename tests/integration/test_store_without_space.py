"""A job trains on while its etcd has no space."""

from __future__ import annotations

import os
import signal

import pytest

from tests.etcd_cluster import etcd_cluster
from tests.integration.loopback_job import NODES, training_job
from tests.integration.running import Place


@pytest.mark.long
@pytest.mark.timeout(120)
def test_training_goes_on_without_space_and_a_recovery_waits_for_it(place: Place) -> None:
    with (
        etcd_cluster("--quota-backend-bytes=1000000", size=1) as cluster,
        training_job(place, etcd=cluster.endpoints()) as job,
    ):
        generation = job.generation()
        cluster.fill()
        job.wait_for_more_steps(50)
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
