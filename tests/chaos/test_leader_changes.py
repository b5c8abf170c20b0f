"""What a job counts does not change if its leader dies in the middle of a fault."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.cluster_faults import FAULTS, Fault, freeze_store
from tests.cluster import NODES, Cluster, network_with_etcd
from tests.cluster_audit import check_lineage
from tests.hosts import require_hosts

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

AGAIN = 3
_LATEST_S = 0.5  # the leader dies at most this long after the fault has begun
_AGREE = 0.01  # the share of the time passed that the accounts may miss


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_hosts()
    with network_with_etcd() as (net, etcd):
        cluster = Cluster(net, etcd, tmp_path_factory.mktemp("leader-changes"))
        cluster.agent_options += ("--node-ttl-s", "3")
        cluster.coordinator_options += ("--agent-grace-s", "3", "--max-restarts", "1000")
        yield cluster


def status(cluster: Cluster) -> dict[str, Any]:
    return json.loads(cluster.run_operator("status", "--output", "json"))  # type: ignore[no-any-return]


def incidents(cluster: Cluster) -> dict[int, tuple[str, str]]:
    """The cause and outcome of each incident, by its number."""
    found = json.loads(cluster.run_operator("incidents", "--output", "json"))
    return {i["number"]: (i["cause"], i["outcome"]) for i in found}


def change(cluster: Cluster, fault: Fault, die_after_s: float | None) -> dict[str, Any]:
    """Inject the fault and return what it adds to the counts, which must agree with the events.
    die_after_s: when the leader is killed after the start of the fault; None: never."""
    cluster.settle(*NODES)
    for name in NODES:
        cluster.run_operator("nodes", "--clear", name)
    before, known_incidents, at = status(cluster), incidents(cluster), time.time()
    known = {r["generation"] for r in before["recoveries"]}
    fault.begin(cluster)
    if die_after_s is not None:
        time.sleep(die_after_s)  # any instant of the fault
        elected = len(cluster.events("elected"))
        cluster.coordinators[cluster.leader()][-1].process.kill()
        if fault.begin is freeze_store:
            fault.end(cluster)  # until then nobody can lead
        cluster.wait_for_event("elected", after=elected)
    fault.end(cluster)
    cluster.settle(*NODES)
    cluster.wait(lambda: set(NODES) <= cluster.node_states().keys(), "the agents of all")
    cluster.wait_trained(10, *NODES)
    after, until = status(cluster), time.time()
    assert after["started_unix_s"] == before["started_unix_s"]
    told = {e["generation"] for e in cluster.events("recovered") if at < e["time"] < until}
    recovered = {r["generation"] for r in after["recoveries"]} - known
    assert recovered == told
    saved = [e["step"] for e in cluster.events("checkpoint_committed") if e["time"] < until]
    assert after["checkpoint_step"] >= max(saved[:-1], default=0)
    accounted_s = after["accounts"]["slot_seconds"] - before["accounts"]["slot_seconds"]
    least_s = (until - at) * len(NODES)
    assert accounted_s > least_s * (1 - _AGREE) - 1.0, (accounted_s, least_s)
    failed = {e["worker"] for e in cluster.events("worker_failed") if at < e["time"] < until}
    return {
        "recoveries": len(recovered),
        "failed": len(failed),
        "incidents": [i for n, i in incidents(cluster).items() if n not in known_incidents],
        "restarts": after["restarts"] - before["restarts"],
        "failures": {n["node"]: n["failures"] for n in after["nodes"] if n["node"] in NODES},
    }


@pytest.mark.parametrize("name", FAULTS)
def test_counts_do_not_change_if_the_leader_dies_in_a_fault(cluster: Cluster, name: str) -> None:
    fault, delays = FAULTS[name], random.Random(name)
    undisturbed = change(cluster, fault, None)
    print(f"{name}: {undisturbed}")
    for _ in range(AGAIN):
        after_s = delays.uniform(0.0, _LATEST_S)
        found = change(cluster, fault, after_s)
        assert found == undisturbed, f"the leader died {after_s:.3f} s after the fault had begun"
    check_lineage(cluster)
