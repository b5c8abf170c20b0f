"""Real agents and coordinators tell a service manager their state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ExitCode
from elastic.runtime.leave_signals import RESTART_SIGNAL
from elastic.runtime.service_notice import NOTICE_VARIABLES
from tests.etcd_cluster import EtcdCluster, free_ports
from tests.integration.loopback_job import TrainingJob
from tests.integration.running import Place
from tests.job_process import CommandProcess
from tests.service_manager import FakeServiceManager, service_manager

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def job(place: Place, etcd: EtcdCluster) -> Iterator[TrainingJob]:
    with TrainingJob(place, etcd=etcd.endpoints(), job="served") as job:
        yield job


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeServiceManager]:
    with service_manager(tmp_path / "n", watchdog_s=1.0) as manager:
        yield manager


def test_an_agent_is_ready_once_registered(job: TrainingJob, manager: FakeServiceManager) -> None:
    agent = job.start_agent("a", **manager.environment)
    ready = manager.wait_for("READY=1")
    assert manager.all_of("STATUS")[0] == "registering in etcd"
    manager.wait_for("STATUS=waiting for a group, without a coordinator", after=ready)
    manager.wait_for("WATCHDOG=1", after=ready)
    agent.process.terminate()
    stop = manager.wait_for("STOPPING=1", after=ready)
    assert "EXTEND_TIMEOUT_USEC=35000000" in manager.messages[stop]
    assert agent.wait() == ExitCode.TERMINATED
    assert manager.count("READY=1") == 1


@pytest.mark.long
def test_an_agent_tells_its_status_from_start_through_a_restart_to_its_end(
    job: TrainingJob, manager: FakeServiceManager
) -> None:
    agent = job.start_agent("a", **manager.environment)
    ready = manager.wait_for("READY=1")
    job.start_coordinator("--gather-timeout-s", "1")
    manager.wait_for("STATUS=generation 1, step ", after=ready)
    manager.wait_for("WATCHDOG=1", after=ready)
    for worker in agent.named("worker_started"):
        variables = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        assert not [v for v in variables if v.split(b"=")[0].decode() in NOTICE_VARIABLES]

    agent.process.send_signal(RESTART_SIGNAL)
    stop = manager.wait_for("STOPPING=1", after=ready)
    assert agent.wait() == ExitCode.TEMPORARY
    agent = job.start_agent("a", **manager.environment)
    anew = manager.wait_for("READY=1", after=stop)
    manager.wait_for("STATUS=generation 1, step ", after=anew)

    agent.process.terminate()
    stop = manager.wait_for("STOPPING=1", after=anew)
    manager.wait_for("STATUS=leaving: SIGTERM", after=anew)
    assert agent.wait() == ExitCode.TERMINATED


@pytest.mark.long
def test_a_coordinator_tells_its_status_as_leader_follower_and_after_the_end(
    job: TrainingJob, manager: FakeServiceManager, tmp_path: Path
) -> None:
    def start() -> CommandProcess:
        (port,) = free_ports(1)
        options = ("--listen", f"127.0.0.1:{port}", "--events-file", "/dev/stderr")
        # Agents of an earlier leader could come back for this long, and a stop waits for them.
        options += ("--join-timeout-s", "2", "--agent-grace-s", "2")
        return job.start("coordinator", *options, **environment)

    environment = manager.environment
    leader = start()
    ready = manager.wait_for("READY=1")
    manager.wait_for("STATUS=leads, no group yet")
    manager.wait_for("WATCHDOG=1", after=ready)
    with service_manager(tmp_path / "f") as other:
        environment = other.environment
        follower = start()
        other.wait_for("READY=1")
        other.wait_for("STATUS=follows")
        follower.process.terminate()
        other.wait_for("STOPPING=1")
        assert follower.wait() == ExitCode.TERMINATED
        assert not other.count("WATCHDOG=1")
    assert job.start("stop").wait() == 0
    assert leader.wait() == ExitCode.STOPPED
    manager.wait_for("STOPPING=1", after=ready)

    with service_manager(tmp_path / "e") as again:
        environment = again.environment
        assert start().wait() == ExitCode.STOPPED
        assert again.wait_for("READY=1") < again.wait_for("STOPPING=1")
        agent = job.start_agent("a", **environment)
        assert agent.wait() == ExitCode.STOPPED
        assert again.count("READY=1") == 2
