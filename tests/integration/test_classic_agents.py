"""A script written for torchrun under agents: nodes are lost, come back and leave."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place
from tests.job_process import CommandProcess, descendants

TERMINATED = 143
NODES = ("a", "b")


class TwoNodes:
    """One coordinator, and the agents of two nodes on loopback."""

    def __init__(self, job: LoopbackJob) -> None:
        self._job = job
        self._killed: list[CommandProcess] = []
        self.coordinator = job.start_coordinator()
        self.agents = {node: self.start_agent(node) for node in NODES}

    def start_agent(self, node: str) -> CommandProcess:
        return self._job.start_agent(node, "--console", "all")

    def kill_node(self, node: str) -> None:
        """Kill the agent and all its descendants at once, so that none has time to end others."""
        agent = self.agents[node].process.pid
        for pid in (agent, *descendants(agent)):
            os.kill(pid, signal.SIGSTOP)
        for pid in (agent, *descendants(agent)):
            os.kill(pid, signal.SIGKILL)
        self.agents[node].wait()
        self._killed.append(self.agents[node])

    def wait_trained(self, world: int, restart: int) -> None:
        """Wait until every process of this restart has started and rank 0 has trained 20 steps."""
        for rank in range(world):
            self._wait_said(rf"start {rank}/{world} restart {restart} at step (\d+) pid \d+")
        rank0 = self._wait_said(rf"start 0/{world} restart {restart} at step (\d+) pid \d+")
        self._wait_said(rf"step {int(rank0[1]) + 20}")

    def started(self) -> list[tuple[int, int]]:
        """Return (restart, world size) of every process that has started, sorted."""
        pattern = r"start \d+/(\d+) restart (\d+) at"
        found = [m for line in self._output() if (m := re.search(pattern, line))]
        return sorted((int(m[2]), int(m[1])) for m in found)

    def story(self) -> str:
        return self._job.story()

    def _output(self) -> list[str]:
        agents = {*self._killed, *self.agents.values()}
        return [line for agent in agents for line in list(agent.output)]

    def _wait_said(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            matches = (re.search(pattern + "$", line) for line in self._output())
            return next(filter(None, matches), None)

        match: re.Match[str] = self.agents["a"].wait_for(found, f"{pattern}\n{self.story()}")
        return match


@pytest.fixture
def nodes(place: Place, etcd: EtcdCluster, tmp_path: Path) -> Iterator[TwoNodes]:
    script = (SCRIPTS / "plain_ddp.py", tmp_path / "checkpoint")
    script += ("--steps", "100000", "--pace-s", "0.02")
    with LoopbackJob(place, script, etcd=etcd.endpoints(), ELASTIC_INSECURE="true") as job:
        yield TwoNodes(job)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_each_change_of_nodes_costs_one_restart(nodes: TwoNodes) -> None:
    nodes.agents["a"].wait_for(lambda: any(w == 2 for _, w in nodes.started()), "two nodes")
    # One node may have trained alone before the other came.
    first = max(restart for restart, world in nodes.started() if world == 2)
    nodes.wait_trained(2, first)

    nodes.kill_node("b")
    nodes.wait_trained(1, first + 1)

    nodes.agents["b"] = nodes.start_agent("b")
    nodes.wait_trained(2, first + 2)

    nodes.agents["b"].process.send_signal(signal.SIGTERM)
    assert nodes.agents["b"].wait() == TERMINATED, nodes.story()
    nodes.wait_trained(1, first + 3)

    nodes.agents["a"].process.send_signal(signal.SIGTERM)
    assert nodes.agents["a"].wait() == TERMINATED, nodes.story()
    assert nodes.coordinator.wait() == TERMINATED, nodes.story()
    after = [(restart - first, world) for restart, world in nodes.started() if restart >= first]
    assert after == [(0, 2), (0, 2), (1, 1), (2, 2), (2, 2), (3, 1)], nodes.story()
