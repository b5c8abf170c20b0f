"""SIGRTMIN+1 ends an agent and leaves its workers, which train on, to the next agent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ExitCode
from elastic.runtime.leave_signals import RESTART_SIGNAL
from elastic.runtime.orphans import is_zombie
from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.integration.loopback_job import TrainingJob, training_job
from tests.integration.running import Place, command_line
from tests.job_process import CommandProcess

pytestmark = pytest.mark.timeout(400)

MANY_TIMES = 8
NO_SPARES = ("--spares", "0")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def place_of_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.closing(Place(tmp_path_factory.mktemp("restart"))) as place:
        yield place


@pytest.fixture(scope="module")
def job(place_of_job: Place, etcd: EtcdCluster) -> Iterator[TrainingJob]:
    """A job that trains."""
    options = dict.fromkeys(("a", "b"), NO_SPARES)
    with training_job(place_of_job, options, etcd=etcd.endpoints()) as job:
        yield job


def test_a_job_trains_on_while_an_agent_restarts_twice_in_a_row(job: TrainingJob) -> None:
    with undisturbed(job):
        for _ in range(2):
            again(job, "a")
    assert {e["node"] for e in job.events("node_lost")} == {"a"}
    assert not job.events("incident"), "nothing was lost"


@pytest.mark.long
def test_many_restarts_of_an_agent_keep_its_workers(job: TrainingJob) -> None:
    with undisturbed(job):
        for _ in range(MANY_TIMES):
            again(job, "a")
            job.wait_for_more_steps(2)


@pytest.mark.long
def test_an_agent_that_restarts_keeps_its_workers_place_while_a_step_takes_long(
    job: TrainingJob,
) -> None:
    with undisturbed(job):
        held = job.files / "out" / "held"
        held.touch()
        job.wait(lambda: time.monotonic() > job.steps.commits()[-1]["at"] + 1.5, "a long step")
        again(job, "a")
        held.unlink()


@pytest.mark.long
def test_an_agent_with_a_wrong_configuration_says_so_and_the_next_one_adopts(
    job: TrainingJob, place_of_job: Place
) -> None:
    settings = place_of_job.files / "agent.toml"
    settings.write_text("[agent]\nspares = many\n")
    with undisturbed(job):
        restart(job.agents["b"][-1])
        wrong = job.start_agent("b", "--config", settings)
        assert wrong.wait() == ExitCode.CONFIGURATION
        assert str(settings) in wrong.story()
        job.wait_for_more_steps()
        settings.write_text("[agent]\nspares = 0\n")
        job.start_agent("b", "--config", settings).wait_for_event("worker_adopted")
        job.wait_for_more_steps()


@pytest.mark.long
def test_sighup_changes_nothing_and_says_so(job: TrainingJob) -> None:
    daemons = [*(agents[-1] for agents in job.agents.values()), job.coordinators[-1]]
    with undisturbed(job):
        for daemon in daemons:
            for process in {daemon.process.pid, *job_processes(job)}:
                os.kill(process, signal.SIGHUP)
            assert "SIGHUP changes nothing" in daemon.wait_for_event("warning")["message"]


@pytest.mark.long
def test_the_signal_to_all_processes_of_a_node_ends_only_the_agent(job: TrainingJob) -> None:
    """`systemctl kill` signals all of them."""
    with undisturbed(job):
        agent = job.agents["a"][-1]
        for process in sorted(job_processes(job)):
            os.kill(process, RESTART_SIGNAL)
        for node in ("a", "b"):
            assert job.agents[node][-1].wait() == ExitCode.TEMPORARY
            job.start_agent(node, *NO_SPARES).wait_for_event("worker_adopted")
        assert agent.named("handing_over")


@pytest.mark.long
def test_an_agent_restarts_while_it_starts_workers_and_while_a_group_forms(
    place: Place, etcd: EtcdCluster
) -> None:
    """The first restart is before the zygote has imported torch, the second before workers are up,
    the third as soon as the group is announced."""
    with TrainingJob(place, etcd=etcd.endpoints(), job="early") as job:
        job.start_coordinator()
        job.start_agent("b", *NO_SPARES)
        first = job.start_agent("a", *NO_SPARES)
        first.wait_for_event("registration_held")
        restart(first)
        second = job.start_agent("a", *NO_SPARES)
        second.wait_for_event("agent_started")
        started = job.files / "logs"
        job.wait(lambda: list(started.glob("a-*.log")) or second.named("worker_started"), "worker")
        restart(second)
        third = job.start_agent("a", *NO_SPARES)
        third.wait_for_event("worker_adopted")
        job.wait(lambda: job.world() == 2, "a group of both")
        restart(third)
        job.start_agent("a", *NO_SPARES).wait_for_event("worker_adopted")
        job.wait_for_more_steps(20)
        assert job.world() == 2
        assert not job.events("worker_failed"), job.story()
        titles = [command_line(pid) for pid in place.processes()]
        assert len([t for t in titles if t == "elastic zygote"]) == 2, titles
        assert len([t for t in titles if t.startswith("elastic worker a")]) == 1, titles


@pytest.mark.long
def test_workers_that_no_agent_adopts_are_ended_after_their_grace(
    place: Place, etcd: EtcdCluster
) -> None:
    with TrainingJob(place, etcd=etcd.endpoints(), job="left") as job:
        job.start_coordinator("--min-workers", "1")
        agent = job.start_agent("a", *NO_SPARES, "--grace-s", "3")
        job.wait_for_more_steps()
        at_work = node_processes(job)
        ended_at = restart(agent)
        job.wait_for_more_steps()
        job.wait(lambda: not node_processes(job) & at_work, "end of what the agent left")
        assert 2.5 < time.monotonic() - ended_at < 10.0


@pytest.mark.long
def test_a_signal_to_leave_after_a_restart_saves_and_leaves(
    place: Place, etcd: EtcdCluster
) -> None:
    """It comes before the next agent knows its workers."""
    saving = ("--checkpoint-dir", place.files / "checkpoints")
    with TrainingJob(place, etcd=etcd.endpoints(), job="signalled") as job:
        coordinator = job.start_coordinator(*saving)
        agent = job.start_agent("a", *saving, "--checkpoint-every", "1000000", *NO_SPARES)
        job.wait_for_more_steps()
        restart(agent)
        following = job.start_agent("a", *saving, "--checkpoint-every", "1000000", *NO_SPARES)
        following.wait_for_event("agent_started")
        following.process.terminate()
        assert following.wait() == ExitCode.TERMINATED, job.story()
        assert coordinator.wait() == ExitCode.TERMINATED, job.story()
        (ended,), (saved,) = job.events("job_ended"), job.events("checkpoint_committed")
        assert ended["committed"] == saved["step"] == job.steps.newest() + 1


@pytest.mark.long
def test_a_node_that_leaves_is_not_kept_by_a_restart(place: Place, etcd: EtcdCluster) -> None:
    with training_job(place, etcd=etcd.endpoints(), job="leaving") as job:
        agent = job.agents["a"][-1]
        agent.process.terminate()
        agent.process.send_signal(RESTART_SIGNAL)
        assert agent.wait() == ExitCode.TERMINATED, job.story()
        assert not agent.named("handing_over")


def restart(agent: CommandProcess) -> float:
    """End an agent as a restart of its unit does; return when it had ended."""
    began_at_s = time.monotonic()
    agent.process.send_signal(RESTART_SIGNAL)
    assert agent.wait() == ExitCode.TEMPORARY, agent.story()
    ended_at_s = time.monotonic()
    (told,) = agent.named("handing_over")
    assert told["reason"] == "SIGRTMIN+1"
    assert ended_at_s - began_at_s < 5.0, "it ends at once"
    return ended_at_s


def again(job: TrainingJob, node: str) -> None:
    """Restart the agent of a node, and wait until its coordinator has contact again."""
    connected = len(job.events("node_connected", node=node))
    restart(job.agents[node][-1])
    job.start_agent(node, *NO_SPARES).wait_for_event("worker_adopted")
    job.wait(lambda: len(job.events("node_connected", node=node)) > connected, "a connection")


@contextlib.contextmanager
def undisturbed(job: TrainingJob) -> Iterator[None]:
    """Assert that no worker ends, no step is lost or made twice, and nothing is left behind."""
    job.wait_for_more_steps()
    generation, began_at_s, before = job.generation(), time.monotonic(), node_processes(job)
    failed, lost = len(job.events("worker_failed")), len(job.events("group_broken"))
    yield
    job.wait_for_more_steps()
    assert job.generation() == generation, job.story()
    assert len(job.events("worker_failed")) == failed
    assert len(job.events("group_broken")) == lost
    assert not job.steps.repeated(began_at_s)
    for rows in job.steps.by_process().values():
        committed = [row["step"] for row in rows if row["kind"] == "commit"]
        assert committed == list(range(committed[0], committed[0] + len(committed)))
    job.wait(lambda: node_processes(job) == before, f"{before}, but {node_processes(job)}")
    assert not [pid for pid in before if is_zombie(pid)]


def job_processes(job: TrainingJob) -> set[int]:
    """Return the agents and all processes that outlive them."""
    return {a[-1].process.pid for a in job.agents.values()} | node_processes(job)


def node_processes(job: TrainingJob) -> set[int]:
    """Return what outlives the agents: keepers, zygotes, writers of logs, workers."""
    mark = b"_ELASTIC_RUN_DIRECTORY="
    sockets = job.environment["XDG_RUNTIME_DIR"].encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(v.startswith(mark) and sockets in v for v in variables):
                found.add(int(entry.name))
    return found
