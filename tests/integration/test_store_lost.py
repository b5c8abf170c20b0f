"""A job goes on when its etcd is emptied, starts without its data or is restored from a backup."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.ledger_check import audit
from tests.chaos import problem
from tests.cluster_audit import check_nothing_lost, check_one_lineage
from tests.etcd_cluster import BINARIES, EtcdCluster, etcd_cluster
from tests.integration.loopback_job import NODES, TrainingJob
from tests.integration.running import Place

_STANDSTILL_S = 5.0
_ADOPTED_S = 5.0  # by a new leader
AGAIN = 20
pytestmark = pytest.mark.timeout(600)


class Backed:
    """An etcd of one member, with a backup."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self.etcd = etcd
        self._backup = etcd.directory / "backup"

    def back_up(self) -> None:
        self.etcd.ctl("snapshot", "save", str(self._backup))

    def delete_all(self) -> None:
        self.etcd.ctl("del", "--prefix", "")

    def begin_anew(self) -> None:
        self._replace(lambda _: None)

    def restore(self) -> None:
        self._replace(
            lambda data: subprocess.run(
                [
                    *(BINARIES / "etcdutl", "snapshot", "restore", self._backup),
                    *("--data-dir", data, "--name", self.etcd.members[0].name),
                    f"--initial-cluster={self.etcd.members[0].name}={self.etcd.members[0].peer_url}",
                    f"--initial-advertise-peer-urls={self.etcd.members[0].peer_url}",
                ],
                check=True,
                capture_output=True,
            )
        )

    def _replace(self, fill: Callable[[Path], object]) -> None:
        (member,) = self.etcd.members
        member.kill()
        data = self.etcd.directory / member.name
        shutil.rmtree(data)
        fill(data)
        self.etcd.launch(member)
        self.etcd.wait_healthy(member)


@pytest.fixture(scope="module")
def backed() -> Iterator[Backed]:
    with etcd_cluster(size=1) as etcd:
        yield Backed(etcd)


class Job(TrainingJob):
    """A job of two nodes. Each coordinator writes a ledger of its own."""

    def start_coordinator_with_ledger(self) -> None:
        ledger = self.files / f"ledger-{len(self.coordinators):03}.jsonl"  # sorted by term
        times = ("--leader-ttl-s", "2", "--agent-grace-s", "20")
        limits = ("--quarantine-after", "0", "--max-restarts", "10000")
        self.start_coordinator("--ledger", ledger, *times, *limits)

    def kill_leader(self) -> None:
        self.coordinators[-1].process.send_signal(signal.SIGKILL)
        self.coordinators[-1].process.wait()
        self.start_coordinator_with_ledger()

    def lose_worker(self, node: str) -> None:
        """Kill the node's worker; wait until both nodes hold the state and train on."""
        self._replace_worker(node)
        self.wait(lambda: len(self.steps.together()) == len(NODES), "two that hold the state")
        self.wait_for_more_steps()

    def lose_worker_at_once(self, node: str) -> None:
        """Kill the node's worker; wait for only two steps of the whole group. Where newcomers die
        before the first step, the next newcomers have to wait longer and longer."""
        self._replace_worker(node)
        self.wait(lambda: self.steps.generation() == self.generation(), "a step of all")
        self.wait_for_more_steps(1)

    def _replace_worker(self, node: str) -> None:
        generation = self.generation()
        os.kill(self.worker_pid(node), signal.SIGKILL)
        self.wait(
            lambda: self.generation() > generation + 1 and self.world() == len(NODES),
            "a whole group again",
        )

    def numbers(self) -> list[int]:
        return [e["generation"] for e in self.events("generation_formed")]

    def check(self) -> None:
        """Check the promises P1 to P3 by the ledgers and the workers' own records."""
        ledgers = sorted(self.files.glob("ledger-*.jsonl"))
        lines = [line for path in ledgers for line in path.read_text().splitlines()]
        assert not audit(lines, samples=problem.SAMPLES).problems
        steps = check_nothing_lost(lines)
        check_one_lineage(self.steps.by_process(), {s["step"]: s["generation"] for s in steps})


@pytest.fixture
def job(place: Place, backed: Backed) -> Iterator[Job]:
    """A job that trains. After the test it must end well, and leave only its end and incidents."""
    job = Job(place, etcd=backed.etcd.endpoints(), ELASTIC_RECORD_SAMPLES="1")
    try:
        job.start_coordinator_with_ledger()
        job.start_agents()
        job.wait_for_full_group()
        yield job
        if not job.events("stray_group_ended"):
            numbers = job.numbers()
            assert numbers == sorted(set(numbers)), numbers
        if not job.events("job_ended"):
            assert job.start("stop").wait() == 0
        for process in (job.coordinators[-1], *(job.agents[node][-1] for node in NODES)):
            assert process.wait() == 82, job.story()
        if not any(c.named("stray_group_ended") for c in job.coordinators):
            job.check()
        # Only the end of the run and the records of its incidents are left.
        kept = backed.etcd.ctl("get", "--prefix", "--keys-only", "elastic/").split()
        assert [k for k in kept if "/incidents/" not in k] == ["elastic/loopback/ended/default"]
        assert job.start("forget").wait() == 0
        assert backed.etcd.ctl("get", "--prefix", "--keys-only", "elastic/").split() == []
    finally:
        job.close()
        backed.delete_all()


def commits_go_on(job: Job, since_s: float) -> None:
    """Check that training has not paused because of the store."""
    instants = [row["at"] for row in job.steps.commits(since_s=since_s)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(instants)]
    print(f"longest gap between commits: {max(gaps):.2f} s")
    assert max(gaps) < _STANDSTILL_S


def lose(job: Job, backed: Backed, how: str, leader: str) -> None:
    """Have etcd lose its data; check that the group trains on and can still be changed."""
    lost_s, generation, elections = time.monotonic(), job.generation(), len(job.events("elected"))
    told = len(job.events("store_rolled_back"))
    getattr(backed, how)()
    if leader == "changes":
        job.kill_leader()
        job.wait(lambda: len(job.events("elected")) > elections, "another term")
    if leader == "changes" or how != "restore":
        job.wait(lambda: len(job.events("store_rolled_back")) > told, "the loss to be noticed")
        rolled_back = job.events("store_rolled_back")[told]
        assert rolled_back["generation"] == generation > rolled_back["stored"]
        elected = [e["time"] for e in job.events("elected") if e["time"] <= rolled_back["time"]]
        adopted_s = rolled_back["time"] - elected[-1]
        print(f"{how}, leader {leader}: {generation} for {rolled_back['stored']}", end=", ")
        print(f"{adopted_s:.2f} s after the election")
        assert leader == "stays" or adopted_s < _ADOPTED_S
    job.wait_for_more_steps(20)
    assert job.generation() == generation
    commits_go_on(job, lost_s)
    job.lose_worker("b")
    assert job.numbers()[-1] > generation


@pytest.mark.long
def test_the_job_goes_on_when_an_old_etcd_is_restored(job: Job, backed: Backed) -> None:
    backed.back_up()
    job.lose_worker("a")
    lose(job, backed, "restore", "changes")


@pytest.mark.long
@pytest.mark.parametrize(
    "newcomer", [False, pytest.param(True, marks=pytest.mark.long)], ids=["alone", "after c"]
)
def test_no_second_group_trains_when_etcd_is_emptied_and_all_daemons_restart(
    job: Job, backed: Backed, newcomer: bool
) -> None:
    """Only the workers still know their group. Where a newcomer's group has begun without them,
    they are ended, and others join the newcomer."""
    for agents in job.agents.values():
        agents[-1].process.send_signal(signal.SIGKILL)
    job.coordinators[-1].process.send_signal(signal.SIGKILL)
    generation, before = job.generation(), len(job.coordinators)
    backed.delete_all()
    job.start_coordinator_with_ledger()
    anew = job.coordinators[before]
    if newcomer:
        job.start_agent("c")
        anew.wait_for_event("generation_formed", world_size=1)
    job.start_agents()
    if newcomer:
        anew.wait_for(
            lambda: {e["node"] for e in anew.named("stray_group_ended")} == set(NODES), "both ends"
        )
        for node in NODES:
            job.agents[node][-1].wait_for_event("worker_adopted")
        anew.wait_for(
            lambda: anew.named("generation_formed")[-1]["world_size"] == len(NODES) + 1, "one group"
        )
        assert not anew.named("worker_failed")
        os.kill(job.agents["c"][-1].process.pid, signal.SIGTERM)
        assert job.agents["c"][-1].wait() == 143
        job.wait_for_more_steps()
    else:
        assert anew.wait_for_event("store_rolled_back")["generation"] == generation
        job.wait_for_more_steps(20)
        assert not anew.named("generation_formed"), "the group that there was trains on"
        job.lose_worker("b")


@pytest.mark.long
@pytest.mark.parametrize("leader", ["stays", "changes"])
def test_a_stopping_job_stops_although_etcd_has_lost_the_order(
    place: Place, backed: Backed, leader: str
) -> None:
    job = Job(place, etcd=backed.etcd.endpoints(), step_s=6.0)
    try:
        job.start_coordinator_with_ledger()
        job.start_agents()
        job.wait(lambda: job.steps.newest() >= 1, "steps")
        assert job.start("stop", "--reason", "maintenance").wait() == 0
        job.wait(lambda: job.events("generation_formed", reason="stopping"), "the last group")
        backed.delete_all()
        if leader == "changes":
            job.kill_leader()
        for process in (job.coordinators[-1], *(job.agents[node][-1] for node in NODES)):
            assert process.wait() == 82, job.story()
        assert job.start("forget").wait() == 0
    finally:
        job.close()
        backed.delete_all()


@pytest.mark.long
def test_a_stop_waits_for_the_group_that_an_emptied_etcd_does_not_know(
    job: Job, backed: Backed
) -> None:
    job.wait_for_more_steps(20)
    newest = job.steps.newest()
    job.kill_leader()
    backed.delete_all()
    stop = job.start("stop", "--reason", "maintenance", "--timeout-s", "60")
    assert stop.wait() == 0, stop.story()
    for process in (job.coordinators[-1], *(job.agents[node][-1] for node in NODES)):
        assert process.wait() == 82, job.story()
    assert job.events("job_ended")[-1]["committed"] > newest
    assert job.events("incident") == []


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["delete_all", "begin_anew"])
def test_the_job_goes_on_each_time_that_etcd_is_emptied(job: Job, backed: Backed, how: str) -> None:
    for _ in range(AGAIN):
        for leader in ("stays", "changes"):
            lose(job, backed, how, leader)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("generations", [10, 100, 1000])
def test_the_job_goes_on_each_time_that_an_old_etcd_is_restored(
    job: Job, backed: Backed, generations: int
) -> None:
    """All restores are from one backup, so each loses everything that came after the backup."""
    backed.back_up()
    before = job.generation()
    while job.generation() < before + generations:
        job.lose_worker_at_once("a")
    job.wait_for_more_steps()
    for _ in range(AGAIN):
        for leader in ("stays", "changes"):
            lose(job, backed, "restore", leader)
