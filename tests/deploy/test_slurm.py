"""deploy/slurm/elastic.sbatch on a real Slurm: a job trains to its end, is saved and requeued at
the time limit, and survives the loss of a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_cluster import SlurmCluster, missing_requirement, slurm_cluster
from tests.etcd_cluster import BINARIES
from tests.job_process import ROOT, Event

SCRIPT = ROOT / "deploy" / "slurm" / "elastic.sbatch"
STEADY = ROOT / "tests" / "integration" / "scripts" / "steady.py"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


def test_bash_accepts_the_syntax_of_the_script() -> None:
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_removes_only_certificates_that_it_has_made(tmp_path: Path) -> None:
    """The shared directory is the user's, with certificates of his own in it."""
    programs, shared, made = tmp_path / "bin", tmp_path / "shared", tmp_path / "made"
    programs.mkdir()
    (shared / "tls").mkdir(parents=True)
    (shared / "tls" / "mine.key").write_text("mine")
    shared.chmod(0o2775)
    for name, text in {
        "scontrol": "echo ' NodeAddr=127.0.0.1 '",
        "srun": "exit 0",
        "elastic": f'test "$1 $2" = "certs init" && stat -c "%a %n" "$3" > {made}; exit 0',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURMD_NODENAME": "n1",
        "SHARED_DIR": str(shared),
        "ELASTIC_ETCD": "http://127.0.0.1:1",
    }
    for given in ({}, {"ELASTIC_INSECURE": "true"}):
        done = subprocess.run(
            ["bash", SCRIPT, "train.py"],
            env=environment | given,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert (shared / "tls" / "mine.key").read_text() == "mine"
        assert shared.stat().st_mode & 0o7777 == 0o2775
        assert [path.name for path in shared.glob("tls*")] == ["tls"]
    mode, place = made.read_text().split()
    assert mode.endswith("700")
    assert Path(place).parent == shared


class Job:
    """A submitted job, and the files that it leaves on the shared disk."""

    def __init__(
        self, cluster: SlurmCluster, files: Path, *arguments: str | Path, time: str
    ) -> None:
        self.cluster = cluster
        self.shared = files / "shared"
        command = files / "elastic"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m elastic.cli "$@"\n')
        command.chmod(0o755)
        environment = {
            "ELASTIC": str(command),
            "ETCD": str(BINARIES / "etcd"),
            "PYTHONPATH": str(ROOT),
            "SHARED_DIR": str(self.shared),
            "ELASTIC_CHECKPOINT_DIR": str(files / "checkpoints"),
            "ELASTIC_LOG_DIR": str(files / "logs"),
            "ELASTIC_STATE_DIR": str(files),
            "ELASTIC_CHECKPOINT_EVERY": "10",
            "ELASTIC_DRAIN_TIMEOUT_S": "30",
        }
        options = ["--nodes=3", f"--time={time}"]
        self.number = cluster.submit(*options, SCRIPT, STEADY, *arguments, environment=environment)

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.cluster.job(self.number)["Restarts"])

    def events(self, name: str) -> list[Event]:
        try:
            lines = (self.shared / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["event"] == name]

    def end(self) -> dict[str, str]:
        self.cluster.wait_for(lambda: self.state in ENDED, "end of the job")
        return self.cluster.job(self.number)


@pytest.fixture
def files() -> Iterator[Path]:
    """A short path, because paths of sockets have a length limit."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def cluster(files: Path) -> Iterator[SlurmCluster]:
    if missing := missing_requirement():
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    place = files / "cluster"
    place.mkdir()
    with slurm_cluster(place) as made:
        yield made


pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_a_job_trains_to_its_end_and_leaves_nothing(cluster: SlurmCluster, files: Path) -> None:
    job = Job(cluster, files, "--epochs", "3", time="5")
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.story()
    assert job.events("generation_formed")[-1]["world_size"] == 3
    assert cluster.processes_of_jobs() == []
    assert list(job.shared.glob("tls*")) == []


@pytest.mark.long
def test_a_job_that_gets_sigterm_is_saved_requeued_and_resumed(
    cluster: SlurmCluster, files: Path
) -> None:
    """Slurm sends this SIGTERM before the time limit, because the script sets --signal."""
    job = Job(cluster, files, "--epochs", "40", "--pace-s", "0.05", time="5")
    cluster.wait_for(lambda: _trained(job), "steps")
    cluster.run("scancel", "--batch", "--signal=TERM", job.number)
    cluster.wait_for(lambda: job.restarts == 1, "its requeue")
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.story()
    restored = [event["committed"] for event in job.events("state_restored")]
    assert restored[0] == 0 < restored[1], "it went on from what was saved"
    text = (cluster.directory / f"elastic-{job.number}.out").read_text()
    assert "elastic: the job is saved and is requeued" in text
    assert cluster.processes_of_jobs() == []


@pytest.mark.long
def test_the_others_train_on_without_a_requeue_when_a_node_is_lost(
    cluster: SlurmCluster, files: Path
) -> None:
    job = Job(cluster, files, "--epochs", "60", "--pace-s", "0.1", time="5")
    cluster.wait_for(lambda: _trained(job), "steps")
    cluster.kill_node("n2")
    cluster.wait_for(
        lambda: job.events("generation_formed")[-1]["world_size"] == 2, "a group of two"
    )
    ended = job.end()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), cluster.story()
    (lost,) = job.events("recovered")
    assert lost["committed"] > 0


def _trained(job: Job) -> bool:
    formed = job.events("generation_formed")
    return (
        bool(formed) and formed[-1]["world_size"] == 3 and bool(job.events("checkpoint_committed"))
    )
