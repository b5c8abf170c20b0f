"""A job without etcd: its one coordinator keeps the state and serves it to the others."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.node import NodeSettings
from elastic.settings.sources import DeviceCounts, load_settings
from elastic.settings.store import StoreKind
from tests.certificates import Certificates, make_certificates, sign
from tests.hosts import Host, network, require_hosts
from tests.integration.loopback_job import NODES, TrainingJob
from tests.integration.running import CONFIGURATION, Place
from tests.job_process import ROOT, CommandProcess
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

STOPPED = 82


class Job(TrainingJob):
    """`scheme` and `environment` say how its coordinator is reached."""

    def __init__(self, place: Place, scheme: str = "http", **environment: str) -> None:
        super().__init__(place, etcd="", **environment)
        self.environment["ELASTIC_ETCD"] = f"{scheme}://{self.address}"

    def start_all(self, **of_the_coordinator: str) -> None:
        """Start everything, and wait until all train. One node comes before the coordinator."""
        self.start_agent(NODES[0])
        self.start_coordinator("--store", "memory", "--agent-grace-s", "20", **of_the_coordinator)
        self.start_agent(NODES[1])
        self.wait_for_full_group()

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
    """Return settings with only the job's certificates: none is set for the store."""
    return {
        "ELASTIC_TLS_CA": str(made.ca),
        "ELASTIC_TLS_CERT": str(made.certificate(name)),
        "ELASTIC_TLS_KEY": str(made.key(name)),
    }


@pytest.fixture
def protected(place: Place, made: Certificates) -> Iterator[Job]:
    with Job(place, "https", **showing(made, "all")) as job:
        yield job


@pytest.fixture
def job(place: Place) -> Iterator[Job]:
    with Job(place) as job:
        yield job


def test_a_job_with_certificates_trains_without_etcd(protected: Job, made: Certificates) -> None:
    job = protected
    job.start_all(**showing(made, "coordinator"))
    (started,) = job.events("coordinator_started")
    assert (started["store"], started["address"]) == ("memory", job.address)
    os.kill(job.worker_pid("a"), signal.SIGKILL)
    job.wait(lambda: job.generation() >= 3 and job.world() == len(NODES), "a whole group again")
    job.wait_for_more_steps()
    # Commands with a wrong configuration are told so, while the job trains.
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
def test_a_restarted_coordinator_adopts_the_group(job: Job) -> None:
    """Its store is empty, but the agents know the newest generation. Three times in a row."""
    job.start_all()
    workers = {node: job.worker_pid(node) for node in NODES}
    generation = job.generation()
    for count in (1, 2, 3):
        job.coordinators[-1].process.send_signal(signal.SIGKILL)
        job.coordinators[-1].process.wait()
        job.wait_for_more_steps()  # without a leader
        job.start_coordinator("--store", "memory", "--agent-grace-s", "20")
        job.wait(lambda: len(job.events("store_rolled_back")) == count, "the group's adoption")  # noqa: B023
        assert job.events("store_rolled_back")[-1]["generation"] == generation
        job.wait_for_more_steps()
        assert job.generation() == generation, "the group that there was trains on"
        assert {node: job.worker_pid(node) for node in NODES} == workers
    os.kill(workers["b"], signal.SIGKILL)
    job.wait(lambda: job.generation() > generation + 1 and job.world() == 2, "a new group")
    job.wait_for_more_steps()
    job.stop_all()
    assert not job.events("stray_group_ended")


@pytest.mark.long
def test_a_coordinator_that_was_frozen_leads_the_same_group_again(job: Job) -> None:
    """When it is thawed, all leases have expired by its own clock, even the leader's."""
    job.start_all()
    generation, elections = job.generation(), len(job.events("elected"))
    workers = {node: job.worker_pid(node) for node in NODES}
    job.coordinators[-1].process.send_signal(signal.SIGSTOP)
    for node in NODES:
        job.agents[node][-1].wait_for_event("coordinator_lost")
    time.sleep(4.0)  # longer than each lease
    job.coordinators[-1].process.send_signal(signal.SIGCONT)
    job.wait(lambda: len(job.events("elected")) > elections, "another term")
    for node in NODES:
        job.agents[node][-1].wait_for_event("registration_gone")
    job.wait_for_more_steps(20)
    assert job.generation() == generation
    assert {node: job.worker_pid(node) for node in NODES} == workers
    job.stop_all()


@pytest.mark.long
def test_agents_that_restart_together_with_the_coordinator_adopt_their_workers(job: Job) -> None:
    job.start_all()
    workers = {node: job.worker_pid(node) for node in NODES}
    for process in (job.coordinators[-1], *(job.agents[node][-1] for node in NODES)):
        process.process.send_signal(signal.SIGKILL)
    job.start_coordinator("--store", "memory", "--agent-grace-s", "20")
    job.start_agents()
    job.wait(lambda: job.events("store_rolled_back"), "the group's adoption")
    job.wait_for_more_steps()
    assert {node: job.worker_pid(node) for node in NODES} == workers
    job.stop_all()


@pytest.mark.long
def test_a_coordinator_that_serves_after_the_end_keeps_agents_from_training(job: Job) -> None:
    """The run's end is known only as long as the coordinator's process lives."""
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


# ---- what the documents say


def blocks(document: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_agent_and_coordinator_can_load_the_documented_settings_file(tmp_path: Path) -> None:
    (text,) = blocks("docs/MANY_NODES.md", "toml")
    file = tmp_path / "job.toml"
    file.write_text(text)
    agent, coordinator = (
        load_settings(
            settings,
            {"script": "a.py"} if settings is NodeSettings else {},
            {},
            file,
            lambda: DeviceCounts(0, 1),
        )
        for settings in (NodeSettings, CoordinatorSettings)
    )
    assert coordinator.store.store is StoreKind.MEMORY
    assert agent.store.etcd == ("https://n1:29400",)
    assert agent.security == coordinator.security
    assert agent.security.tls_ca == Path("ca.pem")


class Machine:
    """A host that runs a document's commands, with the files that were copied there."""

    def __init__(self, host: Host, first: Host, exported: str) -> None:
        self.host, self._first, self._exported = host, first, exported

    def start(self, command: str) -> CommandProcess:
        """Start an `elastic` command of the document, with n1's address in place of its name."""
        elastic = shlex.join((sys.executable, "-m", "elastic.cli"))
        said = command.replace("n1:", f"{self._first.address}:")
        said = said.replace("examples/", f"{ROOT}/examples/")
        said = said.replace("elastic ", f"exec {elastic} ", 1)
        files = shlex.quote(str(self.host.files))
        named = {"PYTHONPATH": str(ROOT), "ELASTIC_LOG_DIR": str(self.host.files / "logs")}
        script = f"cd {files}; {self._exported}\n{said}"
        return self.host.start("sh", "-c", script, environment=named)

    def asked(self, command: str) -> dict[str, Any]:
        """Return the answer of a command, which must succeed."""
        process = self.start(f"{command} --output json")
        assert process.wait() == 0, process.story()
        answer: dict[str, Any] = json.loads("\n".join(process.output))
        return answer


@pytest.mark.long
@pytest.mark.parametrize("document", ["README.md", "docs/MANY_NODES.md"])
def test_the_documented_commands_train_on_three_machines(document: str, tmp_path: Path) -> None:
    """The README's use certificates, the other's do not. Each machine is a network namespace."""
    require_hosts()
    (block,) = (b for b in blocks(document, "sh") if "--store memory" in b)
    lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
    issued = [shlex.split(line) for line in lines if line.startswith("elastic certs")]
    exported = next((line for line in lines if line.startswith("export")), "")
    coordinate = next(line for line in lines if line.startswith("elastic coordinator"))
    attend = next(line for line in lines if line.startswith("elastic agent"))
    attend = attend.replace("train.py", "examples/digits.py").replace("node 8", "node 2")
    way = " ".join(re.findall(r"--etcd \S+|--insecure", attend))
    with network("n1", "n2", "n3") as net:
        first = net.host("n1")
        for words in issued:
            named = {"elastic": sys.executable, "n1": first.address, "authority": tmp_path / "made"}
            command = [named.get(word, word) for word in words]
            done = first.run(command[0], "-m", "elastic.cli", *command[1:])
            assert done.returncode == 0, done.stderr
        for host in net.hosts:
            for name in ("ca.pem", "digits.pem", "digits.key") if issued else ():
                (host.files / name).write_bytes((tmp_path / "made" / name).read_bytes())
        one, two, three = (Machine(host, first, exported) for host in net.hosts)
        coordinator = one.start(coordinate)
        agents = [machine.start(attend) for machine in (one, two, three)]
        coordinator.wait_for(
            lambda: any('"world_size": 6' in line for line in coordinator.output), "a group of all"
        )
        eventually(lambda: committed(three.asked(f"elastic status {way}")) > 0, "steps", 30.0)
        stopping = two.start(f"elastic stop {way}")
        assert stopping.wait() == 0, stopping.story()
        for process in (coordinator, *agents):
            assert process.wait() == STOPPED, process.story()


def committed(status: dict[str, Any]) -> int:
    """Return the most steps that a worker has committed, by `elastic status`."""
    return max((w["committed"] for node in status["nodes"] for w in node["workers"]), default=0)
