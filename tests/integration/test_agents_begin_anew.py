"""SIGHUP restarts an agent in the same process, and its workers train on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator

import pytest

from elastic.runtime.orphans import children, is_zombie
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports
from tests.integration.loopback_job import TrainingJob, training_job
from tests.integration.running import Place, command_line
from tests.job_process import CommandProcess
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

MANY_TIMES = 50
TERMINATED = 143
_AS_FIRST_PROCESS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def place_of_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.closing(Place(tmp_path_factory.mktemp("anew"))) as place:
        yield place


@pytest.fixture(scope="module")
def http_of_b() -> str:
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def job(place_of_job: Place, etcd: EtcdCluster, http_of_b: str) -> Iterator[TrainingJob]:
    """A job that trains; the agent of node b reads its settings from a file."""
    settings = place_of_job.files / "agent.toml"
    settings.write_text("[agent]\nspares = 0\n")
    options = {"b": ("--config", settings, "--http-address", http_of_b)}
    with training_job(place_of_job, options, etcd=etcd.endpoints()) as job:
        yield job


def test_a_job_trains_on_while_an_agent_restarts_in_its_process(job: TrainingJob) -> None:
    _begins_anew(job, job.agents["a"][-1], job.agents["a"][-1].process.pid, times=2)


@pytest.mark.long
def test_an_agent_that_restarts_keeps_its_workers_place_while_a_step_takes_long(
    job: TrainingJob,
) -> None:
    agent, generation, pid = job.agents["a"][-1], job.generation(), job.worker_pid("a")
    connected = len(job.events("node_connected", node="a"))
    held = job.files / "out" / "held"
    held.touch()
    job.wait(lambda: time.monotonic() > job.steps.commits()[-1]["at"] + 1.5, "a long step")
    agent.process.send_signal(signal.SIGHUP)
    job.wait(
        lambda: len(job.events("node_connected", node="a")) > connected, "the agent in contact"
    )
    held.unlink()
    job.wait_for_more_steps(5)
    assert (job.generation(), job.worker_pid("a")) == (generation, pid)


@pytest.mark.long
def test_many_restarts_of_an_agent_leak_nothing_and_keep_its_workers(job: TrainingJob) -> None:
    _begins_anew(job, job.agents["a"][-1], job.agents["a"][-1].process.pid, times=MANY_TIMES)


@pytest.mark.long
@pytest.mark.parametrize("times", [MANY_TIMES])
def test_an_agent_with_pid_1_restarts_in_its_process(
    place: Place, etcd: EtcdCluster, times: int
) -> None:
    """The agent is PID 1, as in a container, so it also reaps orphans."""
    with TrainingJob(place, etcd=etcd.endpoints(), job="first-process") as job:
        job.start_coordinator()
        job.start_agent("b")
        agent = job.start_agent("a", under=_AS_FIRST_PROCESS)
        job.wait_for_full_group()
        (pid,) = children(agent.process.pid)
        _begins_anew(job, agent, pid, times=times)


@pytest.mark.long
def test_an_agent_runs_on_when_its_new_settings_are_invalid(
    job: TrainingJob, place_of_job: Place, http_of_b: str
) -> None:
    settings, agent = place_of_job.files / "agent.toml", job.agents["b"][-1]
    generation = job.generation()
    settings.write_text("[agent]\nspares = many\n")
    agent.process.send_signal(signal.SIGHUP)
    refused = agent.wait_for_event("not_begun_anew")
    assert str(settings) in refused["reason"]
    job.wait_for_more_steps()
    settings.write_text("[agent]\nspares = 0\n")
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_event("worker_adopted")
    with urllib.request.urlopen(f"http://{http_of_b}/healthz", timeout=10) as answer:
        assert answer.status == 200
    assert job.generation() == generation


@pytest.mark.long
def test_an_agent_runs_on_when_its_start_count_cannot_be_written(
    job: TrainingJob, place_of_job: Place
) -> None:
    """A directory is in the way of the count, so the write fails as in a full directory."""
    agent, generation = job.agents["b"][-1], job.generation()
    (counted,) = (
        path for path in place_of_job.sockets.rglob("starts") if path.parent.name.endswith("@b")
    )
    refusals, starts = len(agent.named("not_begun_anew")), len(_begun(agent))
    in_the_way = counted.with_name(f"starts.{agent.process.pid}")
    in_the_way.mkdir()
    agent.process.send_signal(signal.SIGHUP)
    job.wait(lambda: len(agent.named("not_begun_anew")) > refusals, "the refusal")
    assert str(counted) in agent.named("not_begun_anew")[-1]["reason"]
    job.wait_for_more_steps()
    in_the_way.rmdir()
    agent.process.send_signal(signal.SIGHUP)
    job.wait(lambda: len(_begun(agent)) > starts, "a start anew")
    job.wait_for_more_steps()
    assert job.generation() == generation


@pytest.mark.long
def test_a_signal_while_an_agent_restarts_in_its_process_saves_and_leaves(
    place: Place, etcd: EtcdCluster
) -> None:
    """It comes before the new program has handlers, and before it knows its workers."""
    saving = ("--checkpoint-dir", place.files / "checkpoints")
    with TrainingJob(place, etcd=etcd.endpoints(), job="signalled") as job:
        coordinator = job.start_coordinator(*saving)
        agent = job.start_agent("a", *saving, "--checkpoint-every", "1000000", "--spares", "0")
        job.wait_for_more_steps()
        agent.process.send_signal(signal.SIGHUP)
        agent.wait_for_event("begins_anew")
        agent.process.terminate()
        assert agent.wait() == TERMINATED, job.story()
        assert coordinator.wait() == TERMINATED, job.story()
        (ended,), (saved,) = job.events("job_ended"), job.events("checkpoint_committed")
        assert ended["committed"] == saved["step"] == job.steps.newest() + 1
        assert _begun(agent)
        assert not agent.named("warning"), job.story()


def _begins_anew(job: TrainingJob, agent: CommandProcess, pid: int, *, times: int) -> None:
    job.wait_for_more_steps()
    generation, began_at_s, before = job.generation(), time.monotonic(), len(_begun(agent))
    workers, descriptors = _processes_below(pid), []
    for turn in range(1, times + 1):
        connected = len(job.events("node_connected", node="a"))
        for process in [pid, *workers] if turn == 1 else [pid]:  # at first as `pkill -HUP elastic`
            os.kill(process, signal.SIGHUP)
        job.wait(lambda t=turn: len(_begun(agent)) == before + t, f"start anew {turn}")
        job.wait(
            lambda c=connected: len(job.events("node_connected", node="a")) > c,
            "the agent in contact",
        )
        job.wait_for_more_steps(5)
        descriptors.append(_descriptors(pid))
    assert _processes_below(pid) == workers
    assert command_line(pid) == "elastic agent a"
    titles = {command_line(process) for process in workers}
    assert {"elastic keeper", "elastic zygote"} < titles
    assert any(re.fullmatch(r"elastic worker a-\S+ rank \d: float64_trainer.py", t) for t in titles)
    assert job.generation() == generation
    assert not job.steps.repeated(began_at_s)
    eventually(lambda: not _zombies(pid), lambda: f"zombies: {_zombies(pid)}")
    eventually(
        lambda: _descriptors(pid) <= descriptors[0],
        lambda: f"descriptors {descriptors}, now {_descriptors(pid)}",
    )


def _begun(agent: CommandProcess) -> list[object]:
    return [e for e in agent.named("agent_started") if e["begun_anew"]]


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _processes_below(pid: int) -> set[int]:
    below = set(children(pid))
    for child in list(below):
        below |= _processes_below(child)
    return below


def _zombies(pid: int) -> list[int]:
    return [p for p in _processes_below(pid) if is_zombie(p)]
