"""A job without etcd: its one coordinator keeps the state and serves it to the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.certificates import Certificates, make_certificates, sign
from tests.integration.loopback_job import NODES, TrainingJob
from tests.integration.running import CONFIGURATION, Place

pytestmark = pytest.mark.timeout(120)

STOPPED = 82


class Job(TrainingJob):
    """`scheme` and `environment`: how its coordinator is reached."""

    def __init__(self, place: Place, scheme: str = "http", **environment: str) -> None:
        super().__init__(place, etcd="", **environment)
        self.environment["ELASTIC_ETCD"] = f"{scheme}://{self.address}"

    def start_all(self, **of_the_coordinator: str) -> None:
        """It trains. Nodes may come before the coordinator."""
        self.start_agent(NODES[0])
        self.start_coordinator("--store", "memory", "--agent-grace-s", "20", **of_the_coordinator)
        self.start_agent(NODES[1])
        self.wait(lambda: self.world() == len(NODES), "a group of all")
        self.trains_on()

    def stop_all(self) -> None:
        assert self.start("stop").wait() == 0, self.story()
        for process in (self.coordinators[-1], *(self.agents[node][-1] for node in NODES)):
            assert process.wait() == STOPPED, self.story()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = make_certificates(tmp_path_factory.mktemp("store") / "made")
    names = "IP:127.0.0.1,DNS:loopback.job.elastic"
    sign(made, "all", names=names)
    for role in ("coordinator", "viewer"):
        sign(made, role, names=f"{names},DNS:{role}.loopback.job.elastic")
    return made


def showing(made: Certificates, name: str) -> dict[str, str]:
    """The job's certificates alone: none is named for the store."""
    return {
        "ELASTIC_TLS_CA": str(made.ca),
        "ELASTIC_TLS_CERT": str(made.certificate(name)),
        "ELASTIC_TLS_KEY": str(made.key(name)),
    }


@pytest.fixture
def job(place: Place, made: Certificates) -> Iterator[Job]:
    job = Job(place, "https", **showing(made, "all"))
    try:
        yield job
    finally:
        job.close()


def test_a_job_with_certificates_trains_without_etcd(job: Job, made: Certificates) -> None:
    job.start_all(**showing(made, "coordinator"))
    (started,) = job.events("coordinator_started")
    assert (started["store"], started["address"]) == ("memory", job.address)
    os.kill(job.worker_pid("a"), signal.SIGKILL)
    job.wait(lambda: job.generation() >= 3 and job.world() == len(NODES), "a whole group again")
    job.trains_on()
    # Whoever comes to it wrongly is told so, while it trains.
    second = job.start("coordinator", "--store", "memory", "--listen", job.address)
    several = job.start("status", ELASTIC_ETCD=f"https://{job.address},https://127.0.0.1:1")
    viewer = job.start(*job.agent_command("c"), **showing(made, "viewer"))
    looking = job.start("status", "--output", "json", **showing(made, "viewer"))
    runs = job.start("jobs", "--output", "json")
    assert second.wait() == several.wait() == viewer.wait() == CONFIGURATION
    assert "is in use by another process" in second.messages[-1]
    assert "as the only endpoint" in several.messages[-1]
    assert "agent.loopback.job.elastic" in viewer.story()
    assert looking.wait() == runs.wait() == 0, looking.story()
    assert json.loads("\n".join(looking.output))["phase"] == "running"
    (run,) = json.loads("\n".join(runs.output))
    assert (run["state"], run["coordinator"]) == ("running", job.address)
    job.stop_all()


@pytest.mark.long
def test_a_coordinator_that_is_started_again_adopts_the_group(place: Place) -> None:
    """Its store is empty; the agents know the newest generation. Three times in a row."""
    job = Job(place)
    try:
        job.start_all()
        workers = {node: job.worker_pid(node) for node in NODES}
        generation = job.generation()
        for count in (1, 2, 3):
            job.coordinators[-1].process.send_signal(signal.SIGKILL)
            job.coordinators[-1].process.wait()
            job.trains_on()  # under nobody
            job.start_coordinator("--store", "memory", "--agent-grace-s", "20")
            job.wait(lambda: len(job.events("store_rolled_back")) == count, "the group's adoption")  # noqa: B023
            assert job.events("store_rolled_back")[-1]["generation"] == generation
            job.trains_on()
            assert job.generation() == generation, "the group that there was trains on"
            assert {node: job.worker_pid(node) for node in NODES} == workers
        os.kill(workers["b"], signal.SIGKILL)
        job.wait(lambda: job.generation() > generation + 1 and job.world() == 2, "a new group")
        job.trains_on()
        job.stop_all()
        assert not job.events("stray_group_ended")
    finally:
        job.close()


@pytest.mark.long
def test_agents_that_are_started_again_with_the_coordinator_find_their_workers(
    place: Place,
) -> None:
    job = Job(place)
    try:
        job.start_all()
        workers = {node: job.worker_pid(node) for node in NODES}
        for process in (job.coordinators[-1], *(job.agents[node][-1] for node in NODES)):
            process.process.send_signal(signal.SIGKILL)
        job.start_coordinator("--store", "memory", "--agent-grace-s", "20")
        for node in NODES:
            job.start_agent(node)
        job.wait(lambda: job.events("store_rolled_back"), "the group's adoption")
        job.trains_on()
        assert {node: job.worker_pid(node) for node in NODES} == workers
        job.stop_all()
    finally:
        job.close()


def test_after_its_end_it_tells_it_as_long_as_it_serves(place: Place) -> None:
    """Nothing of the run is kept beyond the coordinator's process."""
    job = Job(place)
    try:
        job.start_agent("a")
        coordinator = job.start_coordinator("--store", "memory", "--after-end", "serve")
        job.wait(lambda: job.world() == 1, "a group")
        assert job.start("stop").wait() == 0
        assert job.agents["a"][-1].wait() == STOPPED, job.story()
        again = job.start_agent("a")
        assert again.wait() == STOPPED, job.story()
        assert not again.named("worker_started")
        coordinator.process.terminate()
        assert coordinator.wait() == STOPPED
    finally:
        job.close()
