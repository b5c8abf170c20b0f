"""A cluster keeps right accounts through many faults, and a real Prometheus gives right alerts.

Prometheus has the deployed rules and a quick copy of them, in which all times are twenty times
shorter: where a deployed rule needs a fault of five minutes, its copy needs one of 15 seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster_faults import (
    FAULTS,
    Fault,
    clear_quarantined,
    fail_once_too_often,
    freeze_store,
    join,
    leave,
    thaw_store,
)
from tests.cluster import JOINER, NODES, STORES, Cluster, network_with_etcd
from tests.cluster_audit import check_all
from tests.deploy.expressions import QUICK, RULES, quick_rules
from tests.hosts import require_hosts
from tests.job_process import CommandProcess
from tests.prometheus import Prometheus, prometheus
from tests.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

CHAOS_S = 600.0
FEWEST_FAULTS = 20
WANTED = 4
NOTHING_LOST_S = 0.5
AGREE = 0.01
COORDINATOR_PORT, AGENT_PORT = 9400, 9401
FOUND_WITHOUT_A_FAULT = {
    "productive",
    "data_wait",
    "slower_rank",
    "checkpoint_stall",
    "session_run",
}
"""Kinds of time that need no incident as their cause."""


class WatchedCluster(Cluster):
    """A cluster in which every daemon serves its metrics."""

    def start_coordinator(self, name: str) -> CommandProcess:
        address = f"{self.net.host(name).address}:{COORDINATOR_PORT}"
        common = self.coordinator_options
        self.coordinator_options = (*common, "--http-address", address)
        try:
            return super().start_coordinator(name)
        finally:
            self.coordinator_options = common

    def start_agent_on(
        self, on: str, node: str, *options: str | Path, arguments: tuple[str, ...] = ()
    ) -> CommandProcess:
        address = f"{self.net.host(on).address}:{AGENT_PORT}"
        watched = ("--http-address", address)
        return super().start_agent_on(on, node, *options, *watched, arguments=arguments)

    def targets(self) -> list[str]:
        coordinators = [
            f"{self.net.host(name).address}:{COORDINATOR_PORT}" for name in self.coordinators
        ]
        agents = [f"{self.net.host(name).address}:{AGENT_PORT}" for name in (*NODES, JOINER)]
        return coordinators + agents

    def report(self) -> dict[str, Any]:
        return json.loads(self.run_operator("report", "--output", "json"))  # type: ignore[no-any-return]

    def clear_all(self) -> None:
        for name in NODES:
            self.run_operator("nodes", "--clear", name)


def fired(watcher: Prometheus, since_s: float, *, quick: bool) -> set[str]:
    """Names of the alerts, quick or deployed, that have fired since `since_s` in Unix seconds."""
    window = f"{max(1, round(time.time() - since_s))}s"
    found = watcher.ask(f'count_over_time(ALERTS{{alertstate="firing"}}[{window}])')
    names = {s["metric"]["alertname"] for s in found}
    return {n.removesuffix(QUICK) for n in names if n.endswith(QUICK) == quick}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[WatchedCluster]:
    require_hosts()
    with network_with_etcd() as (net, etcd):
        cluster = WatchedCluster(net, etcd, tmp_path)
        cluster.agent_options += ("--node-ttl-s", "3")
        cluster.coordinator_options += ("--agent-grace-s", "3", "--min-workers", "2")
        cluster.coordinator_options += ("--max-restarts", "20", "--restart-window-s", "60")
        yield cluster


@pytest.fixture
def watcher(cluster: WatchedCluster) -> Iterator[Prometheus]:
    quick = cluster.files / "quick.yml"
    quick.write_text(quick_rules())
    with prometheus(
        cluster.files / "prometheus",
        targets=cluster.targets(),
        rules=[RULES, quick],
        every="1s",
        host=cluster.net.host(STORES[-1]),
    ) as watcher:
        yield watcher


# ---- accounts


def settled(cluster: WatchedCluster) -> dict[str, Any]:
    """The report, once all train and the fault is over."""
    cluster.settle(*NODES)
    cluster.wait(lambda: set(NODES) <= cluster.node_states().keys(), "the agents of all")
    cluster.clear_all()
    cluster.wait_trained(20, *NODES)
    return cluster.report()


def costs(report: dict[str, Any]) -> dict[str, float]:
    """Slot-seconds that need a cause, by the node that caused them; "": no node did."""
    return {n["node"]: _with_a_cause(n["kinds"]) for n in report["nodes"]}


def _with_a_cause(kinds: dict[str, float]) -> float:
    return sum(s for kind, s in kinds.items() if kind not in FOUND_WITHOUT_A_FAULT)


def check_attributed(
    name: str, fault: Fault, before: dict[str, Any], after: dict[str, Any]
) -> float:
    """Check that only the nodes of this fault are charged for what was lost between the two
    reports, and that new incidents concern only these nodes. Return the loss in slot-seconds.

    The joiner's slot is empty while its node is away. Workers that start because an operator asked
    for it have no node as their cause.
    """
    known = costs(before)
    lost = {node: s - known.get(node, 0.0) for node, s in costs(after).items()}
    if fault.is_planned:
        lost.pop("", None)
    elsewhere_s = sum(lost.get(n, 0.0) for n in lost if n not in {*fault.nodes, JOINER})
    own_s = sum(lost.get(n, 0.0) for n in fault.nodes)
    assert elsewhere_s <= AGREE * own_s + 0.1, (name, lost)
    last = max((i["number"] for i in before["incidents"]), default=0)
    added = [i for i in after["incidents"] if i["number"] > last]
    assert {n for i in added for n in i["nodes"]} <= fault.nodes, (name, added)
    assert added or own_s < NOTHING_LOST_S, (name, lost)
    return own_s


def test_ten_minutes_of_chaos_are_accounted_for_without_a_false_alert(
    cluster: WatchedCluster, watcher: Prometheus
) -> None:
    settled(cluster)
    join(cluster)
    leave(cluster)  # from now on four slots are wanted
    before = settled(cluster)
    began, began_at = time.time(), time.monotonic()
    begin_total_s = sum(before["kinds"].values())
    draw, left = random.Random(11), list[str]()
    done: list[tuple[str, float]] = []
    while time.monotonic() - began_at < CHAOS_S or len(done) < FEWEST_FAULTS:
        left = left or draw.sample(sorted(FAULTS), len(FAULTS))
        name = left.pop()
        fault = FAULTS[name]
        fault.begin(cluster)
        time.sleep(draw.uniform(0.0, 2.0))  # any instant of the fault
        fault.end(cluster)
        after = settled(cluster)
        done.append((name, check_attributed(name, fault, before, after)))
        before = after
        print(f"{time.monotonic() - began_at:5.0f} s: {name}, {done[-1][1]:.2f} slot-s", flush=True)
    wall_s = time.monotonic() - began_at
    total_s = sum(before["kinds"].values()) - begin_total_s
    expected_s = WANTED * wall_s
    print(f"{len(done)} faults; {total_s:.1f} slot-s accounted of {expected_s:.1f}")
    assert abs(total_s - expected_s) <= AGREE * expected_s
    assert abs(sum(before["kinds"].values()) - before["slot_seconds"]) <= 0.1
    assert {name for name, _ in done} == set(FAULTS)
    alerts = fired(watcher, began, quick=False)
    slow = [e for e in cluster.events("recovered") if e["time"] > began and e["total_s"] > 10.0]
    expected = {"ElasticNodeQuarantined"} | ({"ElasticRecoverySlow"} if slow else set())
    assert alerts == expected
    print(f"alerts: {sorted(alerts)}")
    check_all(cluster)


# ---- alerts


class Troubles:
    """Brings about what each alert is for, for as short a time as the quick rules need."""

    def __init__(self, cluster: WatchedCluster, watcher: Prometheus) -> None:
        self.cluster = cluster
        self.watcher = watcher
        self.disk = cluster.files / "logs" / "b"
        self.saves = cluster.files / "checkpoints"

    def firing(self) -> set[str]:
        """Names of the quick alerts that fire now."""
        names = {s["metric"]["alertname"] for s in self.watcher.ask(FIRING)}
        return {n.removesuffix(QUICK) for n in names if n.endswith(QUICK)}

    def wait_firing(self, *names: str) -> None:
        self.cluster.wait(lambda: set(names) <= self.firing(), f"alerts {names}", 300.0)

    def below_minimum(self) -> None:
        for name in ("b", "c"):
            self.cluster.net.host(name).kill_all()
        self.wait_firing("ElasticBelowMinimum", "ElasticNoProgress")

    def store_frozen(self) -> None:
        freeze_store(self.cluster)
        self.wait_firing("ElasticLeaderInDoubt", "ElasticStoreUnreachable")
        time.sleep(10.0)  # makes the recovery a slow one
        thaw_store(self.cluster)
        self.wait_firing("ElasticRecoverySlow")

    def no_coordinator(self) -> None:
        for processes in self.cluster.coordinators.values():
            processes[-1].process.kill()
            processes[-1].wait()
        names = {"ElasticNoLeader", "ElasticAgentWithoutCoordinator"}
        eventually(lambda: names <= self.firing(), lambda: f"{self.firing()}", 60.0, every_s=0.5)
        elected = len(self.cluster.events("elected"))
        self.cluster.settle(*NODES)
        self.cluster.wait_for_event("elected", after=elected)

    def store_emptied(self) -> None:
        self.cluster.etcd.ctl("del", "--prefix", "", machine=self.cluster.net.host(STORES[0]))
        self.wait_firing("ElasticStoreRolledBack")

    def quarantine(self) -> None:
        fail_once_too_often(self.cluster)
        self.wait_firing("ElasticNodeQuarantined")
        clear_quarantined(self.cluster)

    def not_finite(self) -> None:
        mark = self.cluster.out / "not-finite"
        mark.touch()
        self.wait_firing("ElasticLossNotFinite")
        mark.unlink()

    def many_restarts(self) -> None:
        while "ElasticRestartBudgetLow" not in self.firing():
            failed = len(self.cluster.events("worker_failed"))
            os.kill(self.cluster.member_pid("c"), signal.SIGKILL)
            self.cluster.wait_for_event("worker_failed", after=failed)
            self.cluster.wait_trained(3)
            self.cluster.run_operator("nodes", "--clear", "c")
            self.cluster.wait_trained(3, *NODES)

    def straggler(self) -> None:
        mark = self.cluster.out / "slow-c"
        mark.touch()
        self.wait_firing("ElasticStraggler")
        mark.unlink()

    def broken_saves(self) -> None:
        """Make saves fail until `mended_saves`. No daemon that saves there can start meanwhile."""
        self.saves.rename(self.saves.with_name("aside"))
        self.saves.touch()
        self.wait_firing("ElasticCheckpointFailing")

    def mended_saves(self) -> None:
        self.saves.unlink()
        self.saves.with_name("aside").rename(self.saves)

    def full_disk(self) -> None:
        ballast = self.disk / "ballast"
        ballast.write_bytes(bytes(int(0.95 * DISK_BYTES)))
        self.wait_firing("ElasticDiskFilling")
        ballast.unlink()


FIRING = 'ALERTS{alertstate="firing"}'
DISK_BYTES = 8 << 20
SAVES = {"ElasticCheckpointFailing", "ElasticCheckpointStale"}
EXPECTED: dict[Callable[[Troubles], None], set[str]] = {
    Troubles.no_coordinator: {"ElasticNoLeader", "ElasticAgentWithoutCoordinator"},
    Troubles.below_minimum: {
        "ElasticBelowMinimum",
        "ElasticNoProgress",
        "ElasticRecoverySlow",  # because it waits for nodes
    },
    # Before saves break: its leader knows of no earlier checkpoint, and counts from its start.
    Troubles.store_emptied: {"ElasticStoreRolledBack"},
    Troubles.broken_saves: {"ElasticCheckpointFailing"},
    Troubles.full_disk: {"ElasticDiskFilling"},
    Troubles.not_finite: {"ElasticLossNotFinite"},
    Troubles.straggler: {"ElasticStraggler"},
    Troubles.quarantine: {"ElasticNodeQuarantined"},
    Troubles.store_frozen: {
        "ElasticLeaderInDoubt",
        "ElasticStoreUnreachable",
        "ElasticRecoverySlow",
    },
    Troubles.many_restarts: {"ElasticRestartBudgetLow"},
}
OVER_THE_TIME = {"ElasticGoodputLow", *SAVES}
"""Alerts that may fire in any trouble: so many faults cost time, and saves fail in most of them."""


def test_each_alert_fires_for_its_fault_and_for_nothing_else(
    cluster: WatchedCluster, watcher: Prometheus
) -> None:
    troubles = Troubles(cluster, watcher)
    troubles.disk.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", troubles.disk], check=True
    )
    try:
        settled(cluster)
        began = time.time()
        for trouble, expected in EXPECTED.items():
            lingering, since = troubles.firing(), time.time()
            trouble(troubles)
            settled(cluster)
            found = fired(watcher, since, quick=True)
            print(f"{time.time() - began:5.0f} s: {trouble.__name__}: {sorted(found)}", flush=True)
            assert expected <= found
            assert found <= expected | lingering | OVER_THE_TIME
        troubles.wait_firing("ElasticCheckpointStale")
        assert fired(watcher, began, quick=True) >= OVER_THE_TIME
        troubles.mended_saves()
        cluster.wait(lambda: not troubles.firing() - {"ElasticGoodputLow"}, "end of alerts", 300.0)
    finally:
        subprocess.run(["umount", "--lazy", troubles.disk], check=True)
