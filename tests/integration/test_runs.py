"""A run that has ended stays ended, whatever is restarted; one that all nodes left goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence

import pytest

from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.integration.loopback_job import NODES, LoopbackJob
from tests.integration.running import Place
from tests.job_process import CommandProcess

pytestmark = pytest.mark.timeout(240)

STOPPED, LEFT, CONFIGURATION, NOT_SAVED = 82, 143, 78, 84
JOB = "loopback"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=1) as cluster:
        yield cluster


class Runs(LoopbackJob):
    """A job that trains and saves checkpoints. All its processes can be started again."""

    def __init__(self, place: Place, etcd: EtcdCluster, nodes: Sequence[str], *script: str) -> None:
        out = place.files / "out"
        out.mkdir()
        super().__init__(
            place,
            (TRAINER, out, *script),
            etcd=etcd.endpoints(),
            job=JOB,
            ELASTIC_DRAIN_TIMEOUT_S="5",
            ELASTIC_CHECKPOINT_DIR=str(place.files / "checkpoints"),
        )
        self.etcd, self.nodes = etcd, nodes
        self.steps = StepRecords(out)

    def start_all(self, *options: str) -> list[CommandProcess]:
        coordinator = self.start_coordinator(*options)
        return [coordinator, *(self.start_agent(node, *options) for node in self.nodes)]

    def ended(self, processes: list[CommandProcess]) -> int:
        """Wait for all processes, and return the exit code that they must have in common."""
        codes = [process.wait() for process in processes]
        assert len(set(codes)) == 1, (codes, self.story())
        return codes[0]

    def keys(self) -> list[str]:
        listed = self.etcd.ctl("get", "--prefix", "--keys-only", "elastic/")
        return listed.split()

    def run_operator(self, *command: str) -> CommandProcess:
        process = self.start(*command)
        process.wait()
        return process

    def runs(self) -> list[tuple[str, str, int]]:
        """Return the id, state and exit code (-1: none) of each run, from `elastic jobs`."""
        listed = json.loads("\n".join(self.run_operator("jobs", "--output", "json").output))
        return [(r["run_id"], r["state"], (r["end"] or {}).get("exit_code", -1)) for r in listed]


@pytest.fixture
def finished(place: Place, etcd: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """A job that has finished. Its parameter is the nodes."""
    with Runs(place, etcd, request.param, "--epochs", "2") as job:
        assert job.ended(job.start_all()) == 0
        yield job
        job.run_operator("forget")
        assert job.keys() == []


def job_agents(job: Runs) -> list[CommandProcess]:
    return [agents[-1] for agents in job.agents.values()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("finished", "times"),
    [(["a"], 1), pytest.param(NODES, 20, marks=pytest.mark.long)],
    indirect=["finished"],
)
def test_a_finished_job_is_not_trained_again(finished: Runs, times: int) -> None:
    trained = finished.steps.newest()
    assert finished.keys() == [f"elastic/{JOB}/ended/default"]
    for _ in range(times):
        processes = finished.start_all()
        assert finished.ended(processes) == 0
        for process in processes:
            (said,) = process.named("already_ended")
            assert "elastic forget default" in said["message"]
            assert not process.named("worker_started")
    assert finished.steps.newest() == trained
    told = json.loads("\n".join(finished.run_operator("status", "--output", "json").output))
    assert (told["phase"], told["meaning"], told["committed"]) == ("ended", "finished", trained + 1)
    assert finished.run_operator("stop").process.returncode == CONFIGURATION
    assert finished.runs() == [("default", "ended", 0)]
    assert finished.keys() == [f"elastic/{JOB}/ended/default"]
    assert finished.ended(finished.start_all("--run-id", "again")) == 0
    assert finished.runs() == [("default", "ended", 0), ("again", "ended", 0)]
    assert finished.run_operator("forget", "again").process.returncode == 0
    unknown = finished.run_operator("forget", "again")
    assert unknown.process.returncode == CONFIGURATION
    assert unknown.output == []
    assert "has no run 'again'" in unknown.messages[-1]


@pytest.fixture
def running(place: Place, etcd: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """A job that trains as long as the test lasts. Its parameter is the nodes, two by default."""
    nodes = getattr(request, "param", NODES)
    with Runs(place, etcd, nodes, "--epochs", "100000", "--step-s", "0.05") as job:
        job.start_all()
        job.wait(lambda: job.steps.newest() >= 10, "ten steps")
        yield job
        job.run_operator("forget")
        assert job.keys() == []


@pytest.mark.long
@pytest.mark.parametrize("running", [["a"]], indirect=True)
def test_a_stopped_job_stays_stopped_until_its_end_is_forgotten(running: Runs) -> None:
    assert running.run_operator("forget", "another").process.returncode == CONFIGURATION
    refused = running.run_operator("forget")
    assert refused.process.returncode == CONFIGURATION
    assert "under way (coordinator 127.0.0.1" in refused.story()
    assert running.run_operator("stop", "--reason", "maintenance").process.returncode == 0
    assert running.ended([running.coordinators[-1], *job_agents(running)]) == STOPPED
    (last_word,) = job_agents(running)[0].named("agent_ended")
    assert (last_word["exit_code"], last_word["message"]) == (STOPPED, "maintenance")
    assert running.keys() == [f"elastic/{JOB}/ended/default"]
    trained = running.steps.newest()
    again = running.start_all()
    assert running.ended(again) == STOPPED
    assert "exit code 82: maintenance; train again" in again[0].named("already_ended")[0]["message"]
    assert running.steps.newest() == trained
    assert running.run_operator("forget").process.returncode == 0
    running.start_all()
    running.wait(lambda: running.steps.newest() > trained + 10, "steps beyond those before")
    assert running.events("state_restored")[-1]["source"].startswith("checkpoint of step")
    running.run_operator("stop")
    running.ended([running.coordinators[-1], *job_agents(running)])


@pytest.mark.long
@pytest.mark.parametrize("running", [["a"], NODES], indirect=True)
def test_a_job_that_all_nodes_have_left_goes_on_when_they_are_back(running: Runs) -> None:
    for agent in job_agents(running):
        agent.process.send_signal(signal.SIGTERM)
    assert running.ended([*job_agents(running), running.coordinators[-1]]) == LEFT
    assert running.runs() == [("default", "left", LEFT)]
    trained = running.steps.newest()
    running.start_all()
    running.wait(lambda: running.steps.newest() > trained + 10, "steps beyond those before")
    assert running.events("state_restored")[-1]["source"].startswith("checkpoint of step")
    assert running.runs() == [("default", "running", -1)]
    running.run_operator("stop")
    running.ended([running.coordinators[-1], *job_agents(running)])


@pytest.mark.long
def test_agents_that_leave_without_a_coordinator_tell_what_is_not_saved(running: Runs) -> None:
    (coordinator,) = running.coordinators
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.wait() == LEFT
    for agent in job_agents(running):
        agent.process.send_signal(signal.SIGTERM)
    assert running.ended(job_agents(running)) == NOT_SAVED
    for agent in job_agents(running):
        (told,) = agent.named("not_saved")
        assert told["committed"] > told["checkpoint"]
        assert told["reason"] == "no coordinator"
        (late,) = agent.named("leave_timed_out")
        assert late["reason"] == "no coordinator released its workers"
    running.start_all()
    running.wait(lambda: bool(running.events("generation_formed", reason="started")), "a group")
    running.run_operator("stop")
    running.ended([running.coordinators[-1], *job_agents(running)])
