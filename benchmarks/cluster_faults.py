"""Causes each fault of benchmarks.cluster once, waits for full recovery, and returns figures.

Times start before the fault, so they include what the harness needs to cause it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any, cast

from benchmarks.cluster_steps import MarkedSteps, longest_s, steps_again, usual_step_s
from tests.cluster import JOINER, NODES, Cluster

Figures = dict[str, float]

_BEFORE_S = 3.0  # of steady training, which gives the usual step
_SETTLE_STEPS = 15
_WATCH_S = 6.0  # longer than the election of another leader takes


class Faults:
    """Causes faults on one running cluster; each method returns the figures of one fault."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._steps = cast(MarkedSteps, cluster.steps)

    def node_killed(self) -> Figures:
        """Kill all processes of a host; measure up to the next committed step of the others."""
        began_s = self._steady()
        at_s = time.monotonic()
        self._cluster.net.host("c").kill_all()
        self._cluster.wait_trained(_SETTLE_STEPS, "a", "b")
        figures = self._next_step(began_s, at_s, "a", "b")
        record = self._cluster.events("recovered")[-1]
        figures |= {f"phase_{key}": record[key] for key in record if key.endswith("_s")}
        return figures

    def link_cut(self) -> Figures:
        """Cut the link of a host silently; heal it after the others have trained on."""
        began_s = self._steady()
        saved = len(self._cluster.events("checkpoint_committed"))
        at_s = time.monotonic()
        self._cluster.net.cut(self._cluster.net.host("c"))
        self._cluster.wait_trained(_SETTLE_STEPS, "a", "b")
        figures = self._next_step(began_s, at_s, "a", "b")
        figures["steps_of_the_cut_off_side"] = len(self._alone(at_s))
        figures["checkpoints_meanwhile"] = len(self._cluster.events("checkpoint_committed")) - saved
        healed_s = time.monotonic()
        self._cluster.net.heal()
        self._cluster.wait_trained(1, *NODES)
        figures["healed_to_a_step_with_it_s"] = time.monotonic() - healed_s
        return figures

    def leader_killed(self) -> Figures:
        """Kill the leader with SIGKILL; after that, kill the next leader and a worker at once.

        The harness is idle while it watches steps, for the same time before and after the kill:
        its own work would take CPU time from the workers.
        """
        self._steady()
        began_s = time.monotonic()
        time.sleep(_WATCH_S)
        old, new = self._cluster.leader(), self._cluster.follower()
        connected = len(self._cluster.events("node_connected"))
        generation, at_s, at_unix_s = self._cluster.generation(), time.monotonic(), time.time()
        self._cluster.coordinators[old][-1].process.kill()
        time.sleep(_WATCH_S)
        self._cluster.wait(lambda: self._cluster.leader() == new, "another leader")
        elected = self._cluster.events("elected")[-1]
        back = self._cluster.wait_for_event("node_connected", after=connected + len(NODES) - 1)
        self._cluster.wait_trained(_SETTLE_STEPS, *NODES)
        rows = self._steps.commits(since_s=began_s)
        before = [r for r in rows if r["at"] < at_s]
        figures = {
            "usual_step_s": usual_step_s(before),
            "longest_before_s": longest_s(before, *NODES),
            "longest_step_s": longest_s(
                [r for r in rows if at_s - 1.0 < r["at"] < at_s + _WATCH_S], *NODES
            ),
            "new_leader_s": elected["time"] - at_unix_s,
            "all_nodes_connected_s": back["time"] - at_unix_s,
            "generations_formed": self._cluster.generation() - generation,
            "steps_lost": steps_again(self._steps.marks(began_s))[1],
        }
        return figures | {f"worker_{k}": v for k, v in self._leader_and_worker().items()}

    def store_stopped(self, outage_s: float) -> Figures:
        """Stop a majority of etcd by SIGTERM for `outage_s`; kill a node 2 s before the restart."""
        began_s = self._steady()
        cluster = self._cluster
        stopped, at_s = cluster.etcd.members[:2], time.monotonic()
        cluster.etcd.stop(*stopped)
        time.sleep(max(0.0, at_s + outage_s - 2.0 - time.monotonic()))
        lost_s = time.monotonic()
        meanwhile = [r for r in self._steps.commits(since_s=at_s) if r["at"] < lost_s]
        cluster.net.host("c").kill_all()
        time.sleep(max(0.0, at_s + outage_s - time.monotonic()))
        launched_s = time.monotonic()
        for member in stopped:
            cluster.etcd.launch(member)
        cluster.etcd.wait_healthy(*cluster.etcd.members)
        healthy_s = time.monotonic()
        cluster.wait_trained(_SETTLE_STEPS, "a", "b")
        usual_s = usual_step_s([r for r in self._steps.commits(since_s=began_s) if r["at"] < at_s])
        next_s = min(r["at"] for r in self._steps.commits(since_s=lost_s + 1.0))
        return {
            "usual_step_s": usual_s,
            "longest_step_s": longest_s(meanwhile, *NODES),
            "steps_meanwhile": len({r["step"] for r in meanwhile}),
            "started_to_next_step_s": next_s - launched_s,
            "healthy_to_next_step_s": next_s - healthy_s,
            "steps_lost": steps_again(self._steps.marks(began_s))[1],
        }

    def agent_restarted(self, pause_s: float = 1.0) -> Figures:
        """Kill an agent with SIGKILL, and start another one before its workers' grace is over."""
        began_s = self._steady()
        cluster, at_s = self._cluster, time.monotonic()
        generation, pid = cluster.generation(), cluster.member_pid("b")
        connected = len(cluster.events("node_connected", node="b"))
        cluster.agent("b").process.kill()
        cluster.agent("b").wait()
        time.sleep(pause_s)
        cluster.start_agent("b")
        cluster.wait_for_event("node_connected", after=connected, node="b")
        back_s = time.monotonic() - at_s
        cluster.wait_trained(_SETTLE_STEPS, *NODES)
        rows = self._steps.commits(since_s=began_s)
        again, lost = steps_again(self._steps.marks(began_s))
        return {
            "usual_step_s": usual_step_s([r for r in rows if r["at"] < at_s]),
            "longest_step_s": longest_s([r for r in rows if r["at"] > at_s - 1.0], *NODES),
            "back_in_contact_s": back_s,
            "same_process": float(cluster.member_pid("b") == pid),
            "generations_formed": cluster.generation() - generation,
            "steps_again": again,
            "steps_lost": lost,
        }

    def node_joins(self) -> Figures:
        """Add a fourth node; measure how long the others wait for it."""
        began_s = self._steady()
        received = len(self._cluster.events("state_received"))
        before = self._cluster.generation()
        started_s = time.monotonic()
        self._cluster.start_agent(JOINER)
        self._cluster.wait_trained(_SETTLE_STEPS, *NODES, JOINER)
        transfer = self._cluster.wait_for_event("state_received", after=received)
        rows = self._steps.commits(since_s=began_s)
        changed_s = min(r["at"] for r in rows if r["generation"] > before)
        usual_s = usual_step_s([r for r in rows if r["at"] > changed_s])
        around = [r for r in rows if abs(r["at"] - changed_s) < 2.0]
        again, _ = steps_again(self._steps.marks(began_s))
        self._cluster.agent(JOINER).process.terminate()
        self._cluster.agent(JOINER).wait()
        self._cluster.wait_trained(_SETTLE_STEPS, *NODES)
        return {
            "usual_step_s": usual_s,
            "started_to_first_step_s": changed_s - started_s,
            "stall_s": max(0.0, longest_s(around, *NODES) - usual_s),
            "bytes": transfer["bytes"],
            "sync_s": transfer["sync_s"],
            "bytes_per_s": transfer["bytes"] / transfer["sync_s"],
            "steps_again": again,
        }

    def flapping(self, how: str, duration_s: float, period_s: float = 2.0) -> Figures:
        """Disturb a fourth node every `period_s`: cut or heal its link, or kill its worker."""
        cluster = self._cluster
        cluster.settle(*NODES, JOINER)
        began_s = self._steady(*NODES, JOINER)
        usual_s = usual_step_s(self._steps.commits(since_s=began_s))
        before, at_s = cluster.generation(), time.monotonic()
        rounds = int(duration_s / period_s)
        for number in range(rounds):
            if how == "process":
                self._kill_joiner()
            elif number % 2 == 0:
                cluster.net.cut(cluster.net.host(JOINER))
            else:
                cluster.net.heal()
            time.sleep(max(0.0, at_s + (number + 1) * period_s - time.monotonic()))
        ended_s = time.monotonic()
        cluster.net.heal()
        rows = [r for r in self._steps.commits(since_s=at_s) if r["at"] < ended_s]
        changes = cluster.generation() - before
        again, lost = steps_again([m for m in self._steps.marks(at_s) if m.at_s < ended_s])
        cluster.settle(*NODES)
        own = {r["step"] for r in rows if r["host"] == "a"}
        return {
            "usual_step_s": usual_s,
            "steps_per_s": len(own) / (ended_s - at_s),
            "steps_per_s_undisturbed": 1.0 / usual_s,
            "longest_step_s": longest_s(rows, *NODES),
            "changes_per_minute": changes * 60.0 / (ended_s - at_s),
            "steps_again": again,
            "steps_lost": lost,
        }

    # ---- parts

    def _steady(self, *nodes: str) -> float:
        """Train undisturbed for a while; return when that began."""
        nodes = nodes or NODES
        self._cluster.settle(*nodes)
        self._cluster.wait_trained(_SETTLE_STEPS, *nodes)
        began_s = time.monotonic()
        time.sleep(_BEFORE_S + self._chance.uniform(0.0, 0.5))
        return began_s

    def _next_step(self, began_s: float, at_s: float, *hosts: str) -> Figures:
        """Return the time to the first step of a later group, and the steps computed again."""
        rows = self._steps.commits(since_s=began_s)
        before = [r for r in rows if r["at"] <= at_s]
        group = max(r["generation"] for r in before)
        usual_s = usual_step_s(before)
        after = [r["at"] for r in rows if r["generation"] > group and r["host"] in hosts]
        again, lost = steps_again(self._steps.marks(began_s))
        return {
            "usual_step_s": usual_s,
            "next_step_s": min(after) - at_s,
            "less_a_step_s": min(after) - at_s - usual_s,
            "steps_again": again,
            "steps_lost": lost,
        }

    def _alone(self, since_s: float) -> set[tuple[int, int]]:
        """Return (step, generation) of the steps that only host c has committed."""
        theirs, own = (
            {(r["step"], r["generation"]) for r in self._steps.commits(since_s=at_s, host=host)}
            for host, at_s in (("a", since_s - 1.0), ("c", since_s))
        )
        return own - theirs

    def _leader_and_worker(self) -> dict[str, Any]:
        began_s = self._steady()
        old, new = self._cluster.leader(), self._cluster.follower()
        victim, at_s = self._cluster.member_pid("b"), time.monotonic()
        self._cluster.coordinators[old][-1].process.kill()
        os.kill(victim, signal.SIGKILL)
        self._cluster.wait(lambda: self._cluster.leader() == new, "another leader")
        self._cluster.wait_trained(_SETTLE_STEPS, *NODES)
        return self._next_step(began_s, at_s, "a", "c")

    def _kill_joiner(self) -> None:
        """Kill the worker of the fourth node, if it is a member yet."""
        members = [m for m in self._cluster.members() if m.startswith(f"{JOINER}-")]
        pids = self._cluster.worker_pids(JOINER)
        if members and members[0] in pids:
            try:
                os.kill(pids[members[0]], signal.SIGKILL)
            except ProcessLookupError:
                return
