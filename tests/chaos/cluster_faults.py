"""The faults that the chaos tests inject into a cluster, and how each of them ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster import JOINER, NODES, Cluster


@dataclass(frozen=True)
class Fault:
    """One fault.

    begin: injects it. end: removes its cause and starts again what it has ended. nodes: those that
    it affects. is_planned: an operator asks for it, also for the restart of a node.
    """

    begin: Callable[[Cluster], object]
    end: Callable[[Cluster], object] = lambda _: None
    nodes: frozenset[str] = frozenset()
    is_planned: bool = False


B, C = frozenset({"b"}), frozenset({"c"})


def kill_worker(cluster: Cluster) -> None:
    os.kill(cluster.member_pid("c"), signal.SIGKILL)


def kill_workers_of_two(cluster: Cluster) -> None:
    for pid in [cluster.member_pid(name) for name in ("b", "c")]:
        os.kill(pid, signal.SIGKILL)


def kill_host(cluster: Cluster) -> None:
    cluster.net.host("c").kill_all()


def start_again(cluster: Cluster) -> None:
    cluster.wait_trained(5, "a", "b")
    cluster.start_agent("c")


def cut_off(cluster: Cluster) -> None:
    cluster.net.cut(cluster.net.host("c"))


def heal(cluster: Cluster) -> None:
    cluster.wait_trained(5, "a", "b")
    cluster.net.heal()


def kill_agent(cluster: Cluster) -> None:
    cluster.agent("b").process.kill()
    cluster.agent("b").wait()


def drain(cluster: Cluster) -> None:
    cluster.run_operator("drain", "c")


def clear(cluster: Cluster) -> None:
    cluster.agent("c").wait()
    cluster.wait_trained(5, "a", "b")
    cluster.run_operator("nodes", "--clear", "c")
    cluster.start_agent("c")


def join(cluster: Cluster) -> None:
    cluster.start_agent(JOINER)


def leave(cluster: Cluster) -> None:
    cluster.wait_trained(5, *NODES, JOINER)
    cluster.agent(JOINER).process.terminate()
    cluster.agent(JOINER).wait()


def fail_once_too_often(cluster: Cluster) -> None:
    for _ in range(2):
        failed = len(cluster.events("worker_failed", node="c"))
        kill_worker(cluster)
        cluster.wait_for_event("worker_failed", after=failed, node="c")
        cluster.wait_trained(5, *NODES)
    kill_worker(cluster)


def clear_quarantined(cluster: Cluster) -> None:
    cluster.wait_trained(5, "a", "b")
    cluster.wait(lambda: cluster.node_states()["c"] == "quarantined", "a quarantine")
    cluster.run_operator("nodes", "--clear", "c")


def freeze_store(cluster: Cluster) -> None:
    for member in cluster.etcd.members[:2]:
        member.freeze()
    kill_worker(cluster)


def thaw_store(cluster: Cluster) -> None:
    for member in cluster.etcd.members[:2]:
        member.thaw()


def wait_for_save(cluster: Cluster) -> None:
    cluster.wait_for_event(
        "checkpoint_committed", after=len(cluster.events("checkpoint_committed"))
    )


FAULTS = {
    "worker killed": Fault(kill_worker, nodes=C),
    "two workers killed": Fault(kill_workers_of_two, nodes=B | C),
    "host killed": Fault(kill_host, start_again, C),
    "host cut off": Fault(cut_off, heal, C),
    "agent killed": Fault(kill_agent, lambda cluster: cluster.start_agent("b"), B),
    "node drained": Fault(drain, clear, C, is_planned=True),
    "node joins and leaves": Fault(join, leave, frozenset({JOINER}), is_planned=True),
    "node quarantined": Fault(fail_once_too_often, clear_quarantined, C),
    "store frozen": Fault(freeze_store, thaw_store, C),
    "saved": Fault(wait_for_save),
}
"""Each leaves the nodes as they were before it."""
