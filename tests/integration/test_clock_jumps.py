"""A job trains on while wall clocks are set, even to a time after its certificates expire."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Certificates, make_certificates, sign_for_job
from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import NODES, TrainingJob, tls_environment, training_job
from tests.integration.running import CONFIGURATION, Place
from tests.wall_clock import WallClock

pytestmark = pytest.mark.timeout(180)

JOB = "clocks"
DAY_S = 24 * 3600


class Clocked:
    """A job with certificates for two days. Its coordinator and its agents share a clock."""

    def __init__(self, job: TrainingJob, clock: WallClock, made: Certificates) -> None:
        self.job, self.clock, self.made = job, clock, made

    def troubles(self) -> int:
        """Return how often a node was lost or the leadership was in doubt."""
        return sum(len(self.job.events(name)) for name in ("node_lost", "leadership_in_doubt"))

    def recovers(self) -> None:
        """Kill a worker, and check that the job recovers and that the times told are plausible."""
        recovered = len(self.job.events("recovered"))
        os.kill(self.job.worker_pid("b"), signal.SIGKILL)
        self.job.wait(lambda: len(self.job.events("recovered")) > recovered, "recovery")
        report = self.job.events("recovered")[recovered]
        phases = {name: value for name, value in report.items() if name.endswith("_s")}
        assert all(0 <= value < 30 for value in phases.values()), phases
        ahead_s = report["time"] - time.time()
        assert abs(ahead_s - self.clock.offset_s) < DAY_S / 2
        self.job.wait(lambda: self.job.world() == len(NODES), "both workers")
        self.job.wait_for_more_steps()


@pytest.fixture
def clocked(place: Place, etcd: EtcdCluster, tmp_path: Path) -> Iterator[Clocked]:
    made = make_certificates(tmp_path / "made")
    papers = tls_environment(sign_for_job(made, JOB))
    clock = WallClock(tmp_path / "clock")
    environment = {**papers, **clock.environment}
    with training_job(place, etcd=etcd.endpoints(), job=JOB, **environment) as job:
        yield Clocked(job, clock, made)
    started = [*job.coordinators, *(agent for own in job.agents.values() for agent in own)]
    clock.forget(process.process.pid for process in started)


@pytest.mark.long
def test_clock_jumps_do_not_disturb_training(clocked: Clocked) -> None:
    for offset_s in (DAY_S, -DAY_S):
        generation = clocked.job.generation()
        before = clocked.troubles()  # a busy machine may have caused some
        clocked.clock.set(offset_s)
        clocked.job.wait_for_more_steps()
        assert clocked.job.generation() == generation
        assert clocked.troubles() == before
        clocked.recovers()


@pytest.mark.long
def test_expired_certificates_are_replaced_while_the_job_trains(clocked: Clocked) -> None:
    generation = clocked.job.generation()
    clocked.clock.set(3 * DAY_S)
    clocked.recovers()  # streams that are up stay up
    newcomer = clocked.job.start("status")
    assert newcomer.wait() == CONFIGURATION
    assert "expired" in newcomer.messages[-1]

    clocked.job.coordinators[-1].process.kill()
    refused = clocked.job.start_coordinator()
    assert refused.wait() == CONFIGURATION
    assert "expired" in refused.messages[-1]
    clocked.job.wait_for_more_steps()

    sign_for_job(clocked.made, JOB, days=10)
    formed = clocked.job.generation()
    clocked.job.start_coordinator()
    clocked.job.wait(lambda: len(clocked.job.events("node_connected")) >= 4, "both agents")
    clocked.job.wait_for_more_steps()
    assert clocked.job.generation() == formed > generation
    clocked.recovers()
