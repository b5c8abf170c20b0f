"""A job, its run and its node with names as long as Kubernetes allows, and longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place

JOB = "job-with-a-name-that-tells-all-of-its-parameters-" * 4 + "last"
RUN = "r" * 253
NODE = "pod." + "n" * 249


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_job_with_long_names_trains_to_its_end(place: Place, etcd: EtcdCluster) -> None:
    assert len(JOB) == 200
    assert len(NODE) == 253
    script = (SCRIPTS / "steady.py",)
    with LoopbackJob(place, script, etcd=etcd.endpoints(), job=JOB, ELASTIC_RUN_ID=RUN) as job:
        port = job.address.rpartition(":")[2]
        where = ("--listen", f":{port}", "--advertise", "localhost", "--insecure")
        coordinator = job.start_coordinator(*where, "--gather-timeout-s", "0")
        here = ("--machine", NODE, "--node-host", "localhost")
        agent = job.start_agent(NODE, *here, "--nproc-per-node", "2")
        assert agent.wait() == 0, job.story()
        assert coordinator.wait() == 0, job.story()
        (started,) = job.events("coordinator_started")
        assert started["address"] == f"localhost:{port}"
        (ended,) = job.events("job_finished")
        assert ended["committed"] > 0
        assert any("weights" in line for line in agent.output)
        shown = job.output_of("jobs")
        assert JOB in shown
        assert RUN in shown
        assert {path.name[:200] for path in (Path(place.files) / "logs").iterdir()} == {JOB}


@pytest.mark.long
def test_elastic_run_takes_a_long_name(place: Place) -> None:
    arguments = ("run", "--job", JOB, "--log-dir", "logs", SCRIPTS / "steady.py")
    result = place.elastic(*arguments)
    assert result.returncode == 0, result.stderr
    assert "weights" in result.stdout
