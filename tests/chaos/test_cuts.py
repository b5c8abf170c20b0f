"""Nodes that reach etcd and the coordinator, but not all of each other: the others train on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.hosts import Host, Network, network, require_hosts
from tests.job_process import CommandProcess

pytestmark = pytest.mark.timeout(2400)

HOSTS, CONTROL = ("a", "b", "c", "d"), "e1"
CUTS = 40
GOES_ON_S = 2.0
Pair = tuple[str, str]


class CutCluster(Cluster):
    """Four nodes; etcd and the one coordinator are on a host of their own."""

    def __init__(self, net: Network, etcd: EtcdCluster, files: Path) -> None:
        super().__init__(net, etcd, files)
        self.coordinators = {CONTROL: []}

    def operator(self, *arguments: str) -> CommandProcess:
        return self.net.host(CONTROL).elastic(*arguments, environment=self.environment)

    def cut(self, *pairs: Pair) -> float:
        """Lose what the first host of each pair sends to the second one. Returns the instant."""
        self.net.drop((self.net.host(a), self.net.host(b)) for a, b in pairs)
        return time.monotonic()

    def largest(self, pairs: set[Pair]) -> int:
        """How many hosts can work together, whatever state they hold."""
        return max(
            size
            for size in range(1, len(HOSTS) + 1)
            for hosts in itertools.combinations(HOSTS, size)
            if not any(pair in pairs for pair in itertools.permutations(hosts, 2))
        )

    def trains_with(self, size: int, since_s: float) -> dict[str, Any] | None:
        """The first commit since `since_s` of a generation in which at least this many commit."""
        rows = self.steps.commits(since_s=since_s)
        for generation in sorted({row["generation"] for row in rows}):
            group = [row for row in rows if row["generation"] == generation]
            for step in sorted({row["step"] for row in group}):
                same = [row for row in group if row["step"] == step]
                if len({row["host"] for row in same}) >= size:
                    return {**same[0], "world": len(same)}
        return None

    def restore(self) -> None:
        """Heal the network, and wait until all train together again."""
        self.net.heal()
        for name in HOSTS:
            self.run_operator("nodes", "--clear", name)
        self.wait_trained(3, *HOSTS)


@contextlib.contextmanager
def cut_cluster(files: Path, *nodes: str, options: tuple[str, ...] = ()) -> Iterator[CutCluster]:
    require_hosts()
    with network(*HOSTS, CONTROL) as net:
        store: list[Host] = [net.host(CONTROL)]
        with etcd_cluster(machines=store) as etcd:
            cluster = CutCluster(net, etcd, files)
            cluster.agent_options += options
            cluster.settle(*nodes)
            yield cluster


def no_step_is_lost(cluster: CutCluster) -> None:
    """No step is committed in two generations, and none is left out."""
    by_step: dict[int, set[int]] = {}
    for row in cluster.steps.commits():
        by_step.setdefault(row["step"], set()).add(row["generation"])
    assert sorted(by_step) == list(range(len(by_step)))
    again = {step: found for step, found in by_step.items() if len(found) > 1}
    assert not again, again


def paused_s(cluster: CutCluster, size: int, cut_at: float, *, deadline_s: float = 30.0) -> float:
    """Wait until at least so many nodes commit a step together after a cut; return the longest time
    without a step from the cut until half a second later."""
    cluster.wait(
        lambda: cluster.trains_with(size, cut_at + 1e-3) is not None,
        f"training of {size} nodes",
        deadline_s,
    )
    looked_at = time.monotonic() + 0.5
    cluster.wait(lambda: cluster.steps.commits(since_s=looked_at), "a step")
    at = [cut_at, *(row["at"] for row in cluster.steps.commits(since_s=cut_at))]
    return max(later - earlier for earlier, later in itertools.pairwise(at))


@pytest.mark.long
def test_the_largest_set_that_works_trains_on_after_each_of_40_cuts(tmp_path: Path) -> None:
    draw = random.Random(35)
    directed = list(itertools.permutations(HOSTS, 2))
    longest_s = 0.0
    with cut_cluster(tmp_path, *HOSTS) as cluster:
        for number in range(CUTS):
            pairs = sorted(draw.sample(directed, draw.randint(1, 6)))
            size = cluster.largest(set(pairs))
            took_s = paused_s(cluster, size, cluster.cut(*pairs))
            cuts = " ".join(f"{a}>{b}" for a, b in pairs)
            print(f"{number}: {cuts}: {size} can work, paused {took_s:.2f} s", flush=True)
            longest_s = max(longest_s, took_s)
            cluster.restore()
        no_step_is_lost(cluster)
        assert not cluster.events("job_ended")
    assert longest_s <= GOES_ON_S


@pytest.mark.long
def test_a_node_that_the_others_do_not_reach_leaves_them_in_peace(tmp_path: Path) -> None:
    """First it joins with an address that does not answer, then with the right one; then its
    network loses packets one way."""
    with cut_cluster(tmp_path, "a", "b", "c") as cluster:
        wrong = "10.77.99.1"  # only d itself has a way there
        added = cluster.net.host("d").run("ip", "address", "add", f"{wrong}/32", "dev", "lo")
        added.check_returncode()
        cluster.agents["d"] = [cluster.start_agent_on("d", "d", "--node-host", wrong)]
        refused = cluster.wait_for_event("peers_unreachable")
        assert refused["left_out"] == ["d"]
        assert {found["peer"] for found in refused["unreached"]} == {"d"}
        assert all(found["address"].startswith(f"{wrong}:") for found in refused["unreached"])
        for word in ("node d", wrong, "--node-host"):
            assert word in refused["message"]
        assert cluster.nodes() == {"a", "b", "c"}
        assert cluster.node_states() == {**dict.fromkeys("abc", "ready"), "d": "unreachable"}
        assert f"node d at {wrong}:" in cluster.run_operator("nodes")
        assert f"node d at {wrong}:" in cluster.run_operator("status")
        assert len(cluster.events("generation_formed")) == 1  # nobody was held up
        cluster.agent("d").process.terminate()
        cluster.agent("d").wait()
        cluster.start_agent("d")
        cluster.wait_trained(3, *HOSTS)
        assert set(cluster.node_states().values()) == {"ready"}

        told = len(cluster.events("peers_unreachable"))
        cut_at = cluster.cut(("a", "d"), ("b", "d"), ("c", "d"))
        paused_s(cluster, 3, cut_at)
        cluster.wait_trained(3, "a", "b", "c")
        parted, left_out = cluster.events("peers_unreachable")[told : told + 2]
        assert all("d" in (found["node"], found["peer"]) for found in parted["unreached"])
        assert left_out["left_out"] == ["d"]
        incident = cluster.wait_for_event("incident", cause="unreachable")
        record = json.loads(
            cluster.run_operator("explain", str(incident["number"]), "--output", "json")
        )
        assert record["lost_s"] > 3.0  # a second and more of each of three, and all of one
        assert "node d" in record["summary"]
        cluster.net.heal()
        cluster.wait_trained(3, *HOSTS)  # by itself
        no_step_is_lost(cluster)


@pytest.mark.long
def test_a_firewall_by_port_leaves_out_the_node_behind_it(tmp_path: Path) -> None:
    """It lets the ports of --worker-port-range through, and not those that the kernel chooses for
    gloo: first for a node that joins, then for a member when the group forms again."""
    options = ("--worker-port-range", "29000-29099")
    with cut_cluster(tmp_path, "a", "b", "c", options=options) as cluster:
        d, *others = (cluster.net.host(name) for name in ("d", "a", "b", "c"))
        pairs = [pair for other in others for pair in ((d, other), (other, d))]
        cluster.net.close_ports(pairs)
        cluster.start_agent("d")
        left_out = cluster.wait_for_event("peers_unreachable", left_out=["d"])
        assert all("d" in (found["node"], found["peer"]) for found in left_out["unreached"])
        assert "firewall" in left_out["message"]
        cluster.wait_trained(20, "a", "b", "c")
        # It is tried again, by probes alone: the others do not stop.
        formed = len(cluster.events("generation_formed"))
        for _ in range(2):
            told = len(cluster.events("peers_unreachable"))
            cluster.wait_for_event("peers_unreachable", after=told)
        assert len(cluster.events("generation_formed")) == formed
        cluster.net.heal()
        cluster.run_operator("nodes", "--clear", "d")
        cluster.wait_trained(3, *HOSTS)

        cluster.net.close_ports(pairs)
        told = len(cluster.events("peers_unreachable", left_out=["d"]))
        (worker,) = cluster.worker_pids("a").keys() & set(cluster.members())
        os.kill(cluster.worker_pids("a")[worker], signal.SIGKILL)
        cluster.wait_for_event("peers_unreachable", after=told, left_out=["d"])
        cluster.wait_trained(20, "a", "b", "c")
        no_step_is_lost(cluster)
        assert not cluster.events("job_ended")


@pytest.mark.long
def test_a_job_of_one_node_trains_on_when_a_firewall_by_port_parts_it_from_another(
    tmp_path: Path,
) -> None:
    """No port that the kernel chooses answers anywhere."""
    options = ("--worker-port-range", "29000-29099")
    with cut_cluster(tmp_path, "a", options=options) as cluster:
        a, b = cluster.net.host("a"), cluster.net.host("b")
        cluster.net.close_ports([(a, b), (b, a)])
        cluster.start_agent("b")
        cluster.wait(
            lambda: cluster.events("peers_unreachable", left_out=["b"]), "refusal of b", 180.0
        )
        cluster.wait_trained(20, "a")
        no_step_is_lost(cluster)
        assert not cluster.events("job_ended")
