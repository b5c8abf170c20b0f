"""A job on several hosts keeps one lineage when hosts, links, coordinators, etcd or agents fail.

The job trains on three hosts. Three others have etcd, and two of these a coordinator. The scenarios
take turns on one running job. After each, its ledgers and records are checked for promises P1 to
P3, and at the end of a job its weights for P4.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import JOINER, NODES, Cluster, network_with_etcd
from tests.cluster_audit import check_all, check_lineage
from tests.hosts import require_hosts

pytestmark = pytest.mark.timeout(240)

LEFT = 128 + signal.SIGTERM
CONFIGURATION, DRAINED, STOPPED, REFUSED = 78, 80, 82, 83


class Ground:
    """A network on which one job runs after another. A new network follows a failed test."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._numbers = itertools.count()
        self._stack = contextlib.ExitStack()
        self.cluster: Cluster | None = None

    def running(self) -> Cluster:
        if self.cluster is None:
            net, etcd = self._stack.enter_context(network_with_etcd())
            self.cluster = Cluster(net, etcd, self._new_files())
        self.cluster.settle(*NODES)
        self.cluster.clear_lost_nodes()
        return self.cluster

    def next_job(self) -> Cluster:
        """Start another job on the network. The last one is stopped, unless a test has done so."""
        ended = self.cluster
        if ended is None or ended.processes():
            ended = self.running()
            ended.run_operator("stop")
            check_saved_and_left(ended, STOPPED)
        self.cluster = Cluster(ended.net, ended.etcd, self._new_files(), job="next")
        self.cluster.settle(*NODES)
        return self.cluster

    def clear(self) -> None:
        self._stack.close()
        self.cluster = None

    def _new_files(self) -> Path:
        return self._files / str(next(self._numbers))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    require_hosts()
    ground = Ground(tmp_path_factory.mktemp("many-nodes"))
    try:
        yield ground
    finally:
        ground.clear()


@pytest.fixture
def cluster(ground: Ground, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster whose three nodes train. After a test that passed, its lineage is checked."""
    failed = request.session.testsfailed
    try:
        cluster = ground.running()
        yield cluster
        if request.session.testsfailed == failed:
            check_lineage(cluster)
    except BaseException:
        ground.clear()
        raise
    if request.session.testsfailed > failed:
        ground.clear()


def longest_gap_s(cluster: Cluster, since_s: float, host: str) -> float:
    """The longest time without a commit of `host` since its first one after `since_s`."""
    instants = [row["at"] for row in cluster.steps.commits(since_s=since_s, host=host)]
    instants.append(time.monotonic())
    return max(later - earlier for earlier, later in itertools.pairwise(instants))


# ---- hosts and links


def test_the_others_go_on_without_a_host_whose_processes_are_killed(cluster: Cluster) -> None:
    cluster.net.host("c").kill_all()
    cluster.wait_trained(10, "a", "b")
    recovered = cluster.events("recovered")[-1]
    assert (recovered["reason"], len(recovered["lost"])) == ("member_lost", 1)
    cluster.start_agent("c")
    cluster.wait_trained(10, *NODES)


@pytest.mark.long
@pytest.mark.parametrize(
    "lost",
    [
        "both ways",
        pytest.param("outgoing", marks=pytest.mark.long),
        pytest.param("incoming", marks=pytest.mark.long),
        "link down",
    ],
)
def test_a_cut_off_host_commits_at_most_one_step_and_rejoins(cluster: Cluster, lost: str) -> None:
    host = cluster.net.host("c")
    if lost == "both ways":
        cluster.net.cut(host)
    elif lost == "link down":
        host.link_down()
    elif lost == "outgoing":
        host.drop_outgoing()
    else:
        host.drop_incoming()
    cut_at_s = time.monotonic()
    cluster.wait_trained(20, "a", "b")
    own = cluster.steps.commits(since_s=cut_at_s, host="c")
    assert len({row["step"] for row in own}) <= 1, own  # a step that was all but complete
    agents = len(cluster.events("node_connected", node="c"))
    cluster.net.heal()
    cluster.wait_for_event("node_connected", after=agents, node="c")
    cluster.wait_trained(10, *NODES)
    assert cluster.agent("c").process.poll() is None


@pytest.mark.long
def test_a_leader_cut_off_with_a_minority_decides_nothing_and_is_deposed(cluster: Cluster) -> None:
    old, new = cluster.leader(), cluster.follower()
    cluster.net.cut(cluster.net.host(old), cluster.net.host("a"))
    cut_at_s, clock_s = time.monotonic(), time.time()
    cluster.wait(lambda: cluster.leader() == new, "another leader")
    cluster.wait_trained(20, "b", "c")
    assert len({r["step"] for r in cluster.steps.commits(since_s=cut_at_s, host="a")}) <= 1
    for name in ("generation_formed", "checkpoint_committed"):
        told = [e for e in cluster.events(name) if e["coordinator"] == old]
        assert not [e for e in told if e["time"] > clock_s], told
    deposed = len(cluster.events("deposed"))
    cluster.net.heal()
    assert cluster.wait_for_event("deposed", after=deposed)["coordinator"] == old
    cluster.wait_trained(10, *NODES)
    assert cluster.leader() == new


# ---- coordinators and the store


def test_a_new_leader_adopts_the_group_of_a_killed_leader(cluster: Cluster) -> None:
    follower = cluster.operator("events", "--follow", "--output", "json")
    follower.wait_for(lambda: follower.output, "remembered events")
    old, new, generation = cluster.leader(), cluster.follower(), cluster.generation()
    connected = len(cluster.events("node_connected"))
    killed_at_s = time.monotonic()
    cluster.coordinators[old][-1].process.kill()
    cluster.wait(lambda: cluster.leader() == new, "another leader")
    cluster.wait_for_event("node_connected", after=connected + len(NODES) - 1)
    cluster.wait_trained(20, *NODES)
    assert longest_gap_s(cluster, killed_at_s, "a") < 2.0  # there was no leader for longer
    assert cluster.generation() == generation

    def told() -> list[str]:
        entries = map(json.loads, follower.output)
        return [e["address"] for e in entries if e["event"] == "elected"]

    address = cluster.net.host(new).address
    follower.wait_for(lambda: told()[-1].startswith(address), "the new leader's election")
    follower.close()


@pytest.mark.long
def test_the_job_recovers_when_a_worker_and_the_leader_die_together(cluster: Cluster) -> None:
    old, new, generation = cluster.leader(), cluster.follower(), cluster.generation()
    victim = cluster.member_pid("b")
    cluster.coordinators[old][-1].process.kill()
    os.kill(victim, signal.SIGKILL)
    cluster.wait(lambda: cluster.leader() == new, "another leader")
    cluster.wait_trained(10, *NODES)
    formed = [e for e in cluster.events("generation_formed") if e["generation"] > generation]
    assert [(e["reason"], e["world_size"]) for e in formed] == [
        ("member_lost", 2),
        ("member_joined", 3),
    ], cluster.story()


def check_no_stall(cluster: Cluster) -> None:
    """Training goes on for longer than the leader's lease lasts, in the same group."""
    generation, began_at_s = cluster.generation(), time.monotonic()
    time.sleep(5.0)
    assert longest_gap_s(cluster, began_at_s, "a") < 2.0
    assert cluster.generation() == generation


@pytest.mark.long
def test_training_goes_on_while_a_majority_of_the_store_is_frozen(cluster: Cluster) -> None:
    frozen, generation = cluster.etcd.members[:2], cluster.generation()
    for member in frozen:
        member.freeze()
    try:
        check_no_stall(cluster)
        cluster.net.host("c").kill_all()
        cluster.wait(lambda: cluster.events("node_lost", node="c"), "the loss of c")
        assert cluster.generation() == generation
    finally:
        for member in frozen:
            member.thaw()
    cluster.wait_trained(10, "a", "b")


@pytest.mark.long
def test_training_goes_on_while_a_majority_of_the_store_is_stopped(cluster: Cluster) -> None:
    stopped, generation = cluster.etcd.members[1:], cluster.generation()
    cluster.etcd.stop(*stopped)
    check_no_stall(cluster)
    failed = len(cluster.events("worker_failed"))
    os.kill(cluster.member_pid("c"), signal.SIGKILL)
    cluster.wait_for_event("worker_failed", after=failed)
    assert cluster.generation() == generation
    for member in stopped:
        cluster.etcd.launch(member)
    cluster.etcd.wait_healthy(*cluster.etcd.members)
    cluster.wait_trained(10, *NODES)


# ---- agents


@pytest.mark.long
def test_a_restarted_agent_adopts_its_workers_without_a_new_group(cluster: Cluster) -> None:
    generation, pid, killed_at_s = cluster.generation(), cluster.member_pid("b"), time.monotonic()
    connected = len(cluster.events("node_connected", node="b"))
    cluster.agent("b").process.kill()
    cluster.agent("b").wait()
    agent = cluster.start_agent("b")
    assert agent.wait_for_event("worker_adopted")["pid"] in cluster.worker_pids("b").values()
    cluster.wait_for_event("node_connected", after=connected, node="b")
    cluster.wait_trained(20, *NODES)
    assert (cluster.generation(), cluster.member_pid("b")) == (generation, pid)
    assert not cluster.steps.repeated(killed_at_s)


@pytest.mark.long
def test_a_fourth_node_joins_and_leaves_while_strangers_are_refused(cluster: Cluster) -> None:
    twin = cluster.start_agent_on(JOINER, "a")
    other = cluster.start_agent_on(JOINER, "other", arguments=("--batch-size", "5"))
    began_at_s = time.monotonic()
    cluster.settle(*NODES, JOINER)
    assert other.wait() == REFUSED
    assert "--batch-size 5" in other.messages[-1]
    assert twin.wait() == CONFIGURATION
    assert f"taken by an agent on host '{cluster.net.host('a').address}'" in twin.messages[-1]
    cluster.agent(JOINER).process.terminate()
    assert cluster.agent(JOINER).wait() == LEFT
    cluster.wait_trained(10, *NODES)
    assert not cluster.steps.repeated(began_at_s)
    assert not cluster.net.host(JOINER).processes()


@pytest.mark.long
def test_a_flapping_node_does_not_keep_the_others_from_training(cluster: Cluster) -> None:
    notice = cluster.files / "notice"
    agent = cluster.start_agent(
        JOINER, "--preemption-file", notice, "--preemption-interval-s", "0.1"
    )
    cluster.wait_trained(5, *NODES, JOINER)
    for _ in range(2):
        cluster.net.cut(cluster.net.host(JOINER))
        cluster.wait_trained(5, *NODES)
        cluster.net.heal()
        cluster.wait_trained(5, *NODES, JOINER)
    noticed_at_s = time.monotonic()
    notice.touch()
    assert agent.wait() == LEFT
    cluster.wait_trained(10, *NODES)
    assert not cluster.steps.repeated(noticed_at_s)


@pytest.mark.long
def test_a_drained_node_stays_away_until_it_is_cleared(cluster: Cluster) -> None:
    drained_at_s = time.monotonic()
    cluster.run_operator("drain", "c")
    assert cluster.agent("c").wait() == DRAINED
    cluster.wait_trained(10, "a", "b")
    assert not cluster.steps.repeated(drained_at_s)
    assert cluster.start_agent("c").wait() == DRAINED  # sent away at once
    (released,) = cluster.agent("c").named("released")
    assert released["reason"].endswith("`elastic nodes --clear c` lets it come back")
    assert cluster.node_states() == {"a": "ready", "b": "ready", "c": "drained"}
    cluster.run_operator("nodes", "--clear", "c")
    cluster.start_agent("c")
    cluster.wait_trained(10, *NODES)


@pytest.mark.long
def test_a_node_that_fails_repeatedly_is_quarantined_until_it_is_cleared(cluster: Cluster) -> None:
    cluster.run_operator("nodes", "--clear", "c")  # forget failures in other tests
    quarantined = len(cluster.events("node_quarantined"))
    for _ in range(3):
        cluster.wait_trained(5, *NODES)
        failed = len(cluster.events("worker_failed", node="c"))
        os.kill(cluster.member_pid("c"), signal.SIGKILL)
        cluster.wait_for_event("worker_failed", after=failed, node="c")
    cluster.wait_for_event("node_quarantined", after=quarantined, node="c")
    cluster.wait_trained(10, "a", "b")
    assert cluster.node_states() == {"a": "ready", "b": "ready", "c": "quarantined"}
    cluster.run_operator("nodes", "--clear", "c")
    cluster.wait_trained(10, *NODES)


# ---- the end


def check_saved_and_left(cluster: Cluster, code: int) -> None:
    """Check that the job ends everywhere with `code`, and that its last step is saved."""
    agents = {name: cluster.agent(name).wait() for name in NODES}
    coordinators = {name: p[-1].wait() for name, p in cluster.coordinators.items()}
    assert {*agents.values(), *coordinators.values()} == {code}, (agents, coordinators)
    assert not cluster.processes()
    committed = cluster.events("job_ended")[-1]["committed"]
    assert cluster.events("checkpoint_committed")[-1]["step"] == committed
    check_all(cluster)


def test_a_stopped_job_is_saved_and_leaves_no_process(cluster: Cluster) -> None:
    cluster.run_operator("stop")
    check_saved_and_left(cluster, STOPPED)


@pytest.mark.long
def test_a_job_is_saved_when_all_its_agents_get_sigterm(ground: Ground) -> None:
    cluster = ground.next_job()
    for name in NODES:
        cluster.agent(name).process.terminate()
    check_saved_and_left(cluster, LEFT)
