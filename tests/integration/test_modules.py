"""`elastic run -m PACKAGE.MODULE` trains through lost workers, and finds modules as Python does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import (
    CONFIGURATION,
    SCRIPTS,
    USAGE,
    Place,
    all_messages,
    command_line,
    steps_of,
    wait_for_step,
)

ALL = ["--console", "all"]
# The global batch is the same for every number of workers, and so is the result.
ELASTIC = """\
import argparse
import pickle
import sys

from .toy import Toy

class Kept:
    pass

assert isinstance(pickle.loads(pickle.dumps(Kept())), Kept)
assert (__name__, __package__, __spec__.name) == ("__main__", "pkg", "pkg.train")
assert sys.argv[0] == __file__
parser = argparse.ArgumentParser()
parser.add_argument("--pace-s", type=float, default=0.0)
toy = Toy(global_batch=8)
toy.train(epochs=10, pace_s=parser.parse_args().pace_s)
print(f"weights {toy.model.weight.sum().item():.6f}")
"""
STEPS = 60


@pytest.fixture
def package(place: Place) -> Path:
    """A package in the directory where jobs start, which is nowhere else on Python's path."""
    path = place.files / "pkg"
    path.mkdir()
    (path / "__init__.py").write_text("")
    (path / "train.py").write_text(ELASTIC)
    shutil.copy(SCRIPTS / "toy.py", path)
    shutil.copy(SCRIPTS / "plain_ddp.py", path / "plain.py")
    return path


def weights(output: list[str]) -> set[float]:
    return {float(line.partition("weights ")[2]) for line in output if "weights " in line}


@pytest.mark.long
@pytest.mark.usefixtures("package")
def test_an_elastic_module_trains_through_a_killed_worker(place: Place) -> None:
    alone = place.python("-m", "pkg.train")
    assert alone.returncode == 0, alone.stderr
    (expected,) = weights(alone.stdout.splitlines())
    job = place.start_module("pkg.train", "--pace-s", "0.05", options=ALL)
    wait_for_step(job, 10)
    victim = job.members()[1]
    assert command_line(job.pid_of(victim)) == f"elastic worker {victim} rank 1: pkg.train"
    assert command_line(job.process.pid) == "elastic run job: pkg.train"
    job.kill_worker(victim)
    assert job.wait() == 0, job.story()
    assert job.named("recovered")
    assert steps_of(job) == list(range(1, STEPS + 1)), job.story()
    found = weights(job.output)
    assert found, job.story()
    assert all(one == pytest.approx(expected, abs=1e-5) for one in found), (found, expected)


@pytest.mark.long
@pytest.mark.usefixtures("package")
def test_a_module_for_torchrun_trains_through_a_killed_worker(place: Place) -> None:
    arguments = [place.files / "checkpoint", "--steps", 60, "--pace-s", 0.05]
    job = place.start_module("pkg.plain", *arguments, options=ALL)
    wait_for_step(job, 12)
    victim = job.members()[1]
    assert command_line(job.pid_of(victim)) == f"elastic worker {victim} rank 1: pkg.plain"
    job.kill_worker(victim)
    assert job.wait() == 0, job.story()
    assert steps_of(job)[-1] == 60
    starts = [line for line in job.output if " start " in line]
    assert sum("restart 1 at step 1" in line for line in starts) == 2, starts
    assert sum(line.endswith(("end 0/2", "end 1/2")) for line in job.output) == 2, job.story()


@pytest.mark.long
@pytest.mark.usefixtures("package")
def test_the_traceback_of_a_failing_module_names_its_file(place: Place) -> None:
    (place.files / "pkg/fails.py").write_text("import elastic\nfrom . import nothing\n")
    job = place.start_module("pkg.fails", nproc=1, options=["--max-restarts", "0"])
    assert job.wait() == 1, job.story()
    assert "cannot import name 'nothing' from 'pkg'" in all_messages(job)
    assert str(place.files / "pkg/fails.py") in job.named("worker_failed")[0]["traceback"]


@pytest.mark.long
@pytest.mark.usefixtures("package")
def test_an_agent_takes_the_module_from_the_environment(place: Place, etcd: EtcdCluster) -> None:
    """PYTHONPATH says where the package is, ELASTIC_MODULE that the name is that of a module."""
    path = os.pathsep.join([str(place.files), os.environ.get("PYTHONPATH", "")])
    environment = {"ELASTIC_MODULE": "true", "ELASTIC_SCRIPT": "pkg.train", "PYTHONPATH": path}
    environment["ELASTIC_INSECURE"] = "true"
    with LoopbackJob(place, (), etcd=etcd.endpoints(), **environment) as job:
        coordinator = job.start_coordinator()
        agent = job.start_agent("a", "--nproc-per-node", "2", "--console", "all")
        assert agent.wait() == 0, job.story()
        assert coordinator.wait() == 0, job.story()
        assert len(weights(agent.output)) == 1, job.story()


@pytest.mark.parametrize("command", ["run", "agent"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pkg.trian", "the package 'pkg'"),
        ("pkg", "has no __main__.py"),
        (
            "pkg/train.py",
            "leave out -m (or give --no-module), or give the module's name, 'pkg.train'",
        ),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_module_that_cannot_be_run_is_refused_at_once(
    place: Place, command: str, name: str, told: str
) -> None:
    etcd = ["--etcd", "127.0.0.1:1", "--insecure"] if command == "agent" else []
    result = place.elastic(command, *etcd, "-m", name, "--lr", "0.1")
    assert result.returncode == CONFIGURATION
    assert repr(name) in result.stderr
    assert told in result.stderr
    assert not (place.files / "logs").exists()


@pytest.mark.parametrize("command", ["run", pytest.param("agent", marks=pytest.mark.long)])
def test_a_command_without_a_module_name_is_refused(place: Place, command: str) -> None:
    etcd = ["--etcd", "127.0.0.1:1", "--insecure"] if command == "agent" else []
    result = place.elastic(command, *etcd, "-m")
    assert result.returncode == USAGE
    assert f"elastic {command} [options] -m MODULE [arguments]" in result.stderr
    result = place.elastic(command, *etcd, ELASTIC_MODULE="yes")
    assert result.returncode == CONFIGURATION
    assert "script is missing" in result.stderr
