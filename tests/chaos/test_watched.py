"""A cluster that is watched through many faults: its accounts, and the alerts of a real Prometheus.

The rules are those that are deployed, and beside them the same ones for a world in which all goes
twenty times as fast: a fault that has to last for five minutes has to for 15 seconds there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.cluster_faults import FAULTS, Fault, kill_worker
from tests.cluster import JOINER, NODES, STORES, Cluster, network_with_etcd
from tests.cluster_audit import check_all
from tests.deploy.expressions import RULES
from tests.hosts import require_hosts
from tests.job_process import CommandProcess
from tests.prometheus import Prometheus, prometheus

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

CHAOS_S = 600.0
FEWEST_FAULTS = 20
AGREE = 0.01
COORDINATOR_PORT, AGENT_PORT = 9400, 9401
QUICKER = 20
QUICK = "quick"
"""Names of alerts of the quick rules end so."""
ALERTS_S = 120.0

FOUND_WITHOUT_A_FAULT = {"productive", "data_wait", "slower_rank", "checkpoint_stall"}
"""Kinds of time that no incident is needed for."""


class WatchedCluster(Cluster):
    """Every daemon of it is scraped."""

    def start_coordinator(self, name: str) -> CommandProcess:
        address = f"{self.net.host(name).address}:{COORDINATOR_PORT}"
        common = self.coordinator_options
        self.coordinator_options = (*common, "--http-address", address)
        try:
            return super().start_coordinator(name)
        finally:
            self.coordinator_options = common

    def start_stranger(
        self, on: str, node: str, *options: str | Path, arguments: tuple[str, ...] = ()
    ) -> CommandProcess:
        address = f"{self.net.host(on).address}:{AGENT_PORT}"
        watched = ("--http-address", address)
        return super().start_stranger(on, node, *options, *watched, arguments=arguments)

    def targets(self) -> list[str]:
        coordinators = [
            f"{self.net.host(name).address}:{COORDINATOR_PORT}" for name in self.coordinators
        ]
        agents = [f"{self.net.host(name).address}:{AGENT_PORT}" for name in (*NODES, JOINER)]
        return coordinators + agents

    def report(self) -> dict[str, Any]:
        return json.loads(self.ask("report", "--output", "json"))  # type: ignore[no-any-return]

    def clear_all(self) -> None:
        for name in NODES:
            self.ask("nodes", "--clear", name)


def quick(rules: Path) -> str:
    """The rules for a world that is QUICKER: durations, ranges, and limits in seconds."""
    document = yaml.safe_load(rules.read_text())

    def seconds(found: re.Match[str]) -> float:
        return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]

    for group in document["groups"]:
        group["name"] += QUICK
        for rule in group["rules"]:
            text = rule["expr"]
            text = re.sub(r"\[(\d+)([smh])\]", lambda f: f"[{seconds(f) / QUICKER:g}s]", text)
            text = re.sub(r"(?<=[<>] )\d{2,}\b", lambda f: f"{int(f[0]) / QUICKER:g}", text)
            text = re.sub(r"\b(job:elastic_\w+:\w+)", rf"\1_{QUICK}", text)
            rule["expr"] = text
            if "for" in rule:
                found = re.fullmatch(r"(\d+)([smh])", rule["for"])
                assert found is not None
                rule["for"] = f"{seconds(found) / QUICKER:g}s"
            if "alert" in rule:
                rule["alert"] += QUICK
            else:
                rule["record"] += f"_{QUICK}"
    return yaml.safe_dump(document)


def firing(watcher: Prometheus, *, quick: bool) -> set[str]:
    """Names of the alerts that fire now."""
    names = {s["metric"]["alertname"] for s in watcher.ask('ALERTS{alertstate="firing"}')}
    return {n.removesuffix(QUICK) for n in names if n.endswith(QUICK) == quick}


def fired(watcher: Prometheus, since_s: float, *, quick: bool) -> set[str]:
    """Names of those that have fired at any time since then, in Unix seconds."""
    window = f"{max(1, round(time.time() - since_s))}s"
    found = watcher.ask(f'count_over_time(ALERTS{{alertstate="firing"}}[{window}])')
    names = {s["metric"]["alertname"] for s in found}
    return {n.removesuffix(QUICK) for n in names if n.endswith(QUICK) == quick}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedCluster]:
    require_hosts()
    with network_with_etcd() as (net, etcd):
        cluster = WatchedCluster(net, etcd, tmp_path_factory.mktemp("watched"))
        cluster.agent_options += ("--node-ttl-s", "3")
        cluster.coordinator_options += ("--agent-grace-s", "3", "--min-workers", "2")
        cluster.coordinator_options += ("--max-restarts", "20", "--restart-window-s", "60")
        yield cluster


@pytest.fixture(scope="module")
def watcher(cluster: WatchedCluster) -> Iterator[Prometheus]:
    quick_rules = cluster.files / "quick.yml"
    quick_rules.write_text(quick(RULES))
    with prometheus(
        cluster.files / "prometheus",
        targets=cluster.targets(),
        rules=[RULES, quick_rules],
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


def lost(report: dict[str, Any]) -> float:
    """Slot-seconds for which there must be a cause."""
    return sum(s for kind, s in report["kinds"].items() if kind not in FOUND_WITHOUT_A_FAULT)


def costs(report: dict[str, Any]) -> dict[int, float]:
    """Slot-seconds of each incident that it was the cause of."""
    return {
        i["number"]: sum(s for k, s in i["seconds"].items() if k not in FOUND_WITHOUT_A_FAULT)
        for i in report["incidents"]
    }


def check_attributed(
    name: str, fault: Fault, before: dict[str, Any], after: dict[str, Any]
) -> float:
    """What was lost in the meantime stands under incidents of this fault, and of its nodes; how
    much that was."""
    last = max(costs(before), default=0)
    added = {number: s for number, s in costs(after).items() if number > last}
    lost_s = lost(after) - lost(before)
    assert sum(added.values()) >= lost_s * (1 - AGREE) - 0.1, (name, added, lost_s)
    nodes = {n for i in after["incidents"] if i["number"] in added for n in i["nodes"]}
    assert nodes == fault.nodes, (name, [i for i in after["incidents"] if i["number"] in added])
    assert bool(added) == bool(fault.nodes), (name, added)
    return lost_s


def check_sums(report: dict[str, Any], wall_s: float, joined_s: float) -> None:
    """Kinds add up to wall time times wanted slots: joined_s is for how long there was a fourth."""
    total_s = sum(report["kinds"].values())
    assert abs(total_s - report["slot_seconds"]) <= AGREE * total_s, report
    expected_s = len(NODES) * wall_s + joined_s
    assert abs(total_s - expected_s) <= AGREE * expected_s, (total_s, expected_s, report)


def test_ten_minutes_of_chaos_are_accounted_for_and_alert_nobody_in_vain(
    cluster: WatchedCluster, watcher: Prometheus
) -> None:
    before = settled(cluster)
    began, began_at = time.time(), time.monotonic()
    begin_total_s = sum(before["kinds"].values())
    draw, left = random.Random(11), list[str]()
    done: list[tuple[str, float]] = []
    joined_s = 0.0
    while time.monotonic() - began_at < CHAOS_S or len(done) < FEWEST_FAULTS:
        left = left or draw.sample(sorted(FAULTS), len(FAULTS))
        name = left.pop()
        fault, at = FAULTS[name], time.monotonic()
        fault.begin(cluster)
        time.sleep(draw.uniform(0.0, 2.0))  # any instant of the fault
        fault.end(cluster)
        joined_s += time.monotonic() - at if fault.nodes == {JOINER} else 0.0
        after = settled(cluster)
        done.append((name, check_attributed(name, fault, before, after)))
        before = after
        print(f"{time.monotonic() - began_at:5.0f} s: {name}, {done[-1][1]:.2f} slot-s", flush=True)
    wall_s = time.monotonic() - began_at
    total_s = sum(before["kinds"].values()) - begin_total_s
    expected_s = len(NODES) * wall_s + joined_s
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
