"""A whole cluster on hosts in miniature: etcd, coordinators, agents, and a job that trains.

etcd's members are on the hosts e1, e2 and e3, coordinators on e1 and e2, agents on a, b and c. The
host d is for a node that joins.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster_steps import StepRecords
from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.hosts import Host, Network, network
from tests.job_process import CommandProcess, Event

NODES, STORES, COORDINATORS = ("a", "b", "c"), ("e1", "e2", "e3"), ("e1", "e2")
JOINER = "d"
TRAINER = Path(__file__).parent / "chaos" / "scripts" / "float64_trainer.py"
DEADLINE_S = 60.0
_PORT = 29400
_POLL_S = 0.02
_EVENTS_TO_STDERR = ("sh", "-c", 'exec "$@" 1>&2', "sh")


class Cluster:
    """One job on one network. Files go to `files`."""

    def __init__(self, net: Network, etcd: EtcdCluster, files: Path, job: str = "first") -> None:
        self.net, self.etcd, self.files, self.job = net, etcd, files, job
        self.out = files / "out"
        self.out.mkdir(parents=True)
        self.steps = StepRecords(self.out)
        self.script: tuple[str | Path, ...] = (TRAINER, self.out, "--epochs", "100000")
        self.script += ("--step-s", "0.05", "--weights-every", "50")
        self.agent_options: tuple[str, ...] = ("--record-samples",)
        self.coordinator_options: tuple[str, ...] = ()
        self.coordinators: dict[str, list[CommandProcess]] = {name: [] for name in COORDINATORS}
        """Those started on each host, oldest first."""
        self._cleared = 0
        self.agents: dict[str, list[CommandProcess]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ELASTIC_ETCD": self.etcd.endpoints(),
            "ELASTIC_INSECURE": "true",
            "ELASTIC_JOB": self.job,
        }

    # ---- processes

    def settle(self, *nodes: str) -> None:
        """Start and end daemons until both coordinators run and exactly these nodes train."""
        for name, processes in self.coordinators.items():
            if not processes or processes[-1].process.poll() is not None:
                self.start_coordinator(name)
        for name, agents in self.agents.items():
            if name not in nodes and agents[-1].process.poll() is None:
                agents[-1].process.terminate()
        for name in nodes:
            if name not in self.agents or self.agent(name).process.poll() is not None:
                self.start_agent(name)
        self.wait_trained(5, *nodes)

    def start_coordinator(self, name: str) -> CommandProcess:
        host = self.net.host(name)
        address = f"{host.address}:{_PORT}"
        process = host.start(
            *_EVENTS_TO_STDERR,
            *(sys.executable, "-m", "elastic.cli", "coordinator"),
            *("--listen", address, "--advertise", address),
            *("--ledger", self.ledger(name), "--checkpoint-dir", self.files / "checkpoints"),
            *self.coordinator_options,
            environment=self.environment,
        )
        self.coordinators[name].append(process)
        return process

    def start_agent(self, name: str, *options: str | Path) -> CommandProcess:
        """Start an agent of the node on the host of the same name."""
        agent = self.start_agent_on(name, name, *options)
        self.agents.setdefault(name, []).append(agent)
        return agent

    def start_agent_on(
        self, on: str, node: str, *options: str | Path, arguments: tuple[str, ...] = ()
    ) -> CommandProcess:
        """Start an agent of any node on any host. arguments: more arguments for the script."""
        host = self.net.host(on)
        return host.elastic(
            *("agent", "--node-name", node, "--node-host", host.address, "--machine", on),
            *("--log-dir", self.files / "logs" / node),
            *("--checkpoint-dir", self.files / "checkpoints", "--checkpoint-every", "100"),
            *self.agent_options,
            *options,
            *self.script,
            *arguments,
            environment=self.environment,
        )

    def agent(self, name: str) -> CommandProcess:
        """The newest agent of a node."""
        return self.agents[name][-1]

    def operator(self, *arguments: str) -> CommandProcess:
        """Start an operator's command on a host that has neither a node nor a coordinator."""
        return self.net.host(STORES[-1]).elastic(*arguments, environment=self.environment)

    def run_operator(self, *arguments: str) -> str:
        """Run an operator's command, which must succeed; returns its output."""
        command = self.operator(*arguments)
        assert command.wait() == 0, command.story()
        command.close()
        return "\n".join(command.output)

    def clear_lost_nodes(self) -> None:
        """Clear the nodes that were lost since the last call, so that none has failed too often."""
        lost = self.events("node_lost")
        for name in sorted({event["node"] for event in lost[self._cleared :]}):
            self.run_operator("nodes", "--clear", name)
        self._cleared = len(lost)

    def node_states(self) -> dict[str, str]:
        """The state of each node, from `elastic nodes`."""
        nodes = json.loads(self.run_operator("nodes", "--output", "json"))
        return {node["node"]: node["state"] for node in nodes}

    def worker_pids(self, name: str) -> dict[str, int]:
        """The pids of all workers that the node's agents have started or adopted, by name."""
        pids: dict[str, int] = {}
        for agent in self.agents[name]:
            pids |= {
                e["worker"]: e["pid"]
                for e in agent.events
                if e["event"] in ("worker_started", "worker_adopted")
            }
        return pids

    def member_pid(self, name: str) -> int:
        """The pid of the node's member of the newest group."""
        (worker,) = [m for m in self.members() if _node_of(m) == name]
        return self.worker_pids(name)[worker]

    def ledger(self, coordinator: str) -> Path:
        return self.files / f"ledger-{coordinator}.jsonl"

    # ---- what the coordinators say

    def events(self, name: str, **fields: Any) -> list[Event]:
        """The events of this name and with these fields of all coordinators, oldest first. Each
        also has its `coordinator`."""
        return sorted(
            (
                {**event, "coordinator": coordinator}
                for coordinator, processes in self.coordinators.items()
                for process in processes
                for event in process.named(name)
                if all(event.get(key) == value for key, value in fields.items())
            ),
            key=lambda event: float(event["time"]),
        )

    def leader(self) -> str:
        """The host of the coordinator that was elected last."""
        return str(self.events("elected")[-1]["coordinator"])

    def follower(self) -> str:
        return next(name for name in COORDINATORS if name != self.leader())

    def generation(self) -> int:
        """The newest generation that was announced; 0 before the first."""
        return max((e["generation"] for e in self._formed()), default=0)

    def members(self) -> list[str]:
        """The workers of the newest group, by rank."""
        newest = max(self._formed(), key=lambda e: int(e["generation"]), default={"members": []})
        return list(newest["members"])

    def _formed(self) -> list[Event]:
        """Events with generations. If a leader dies after it has written a generation and before it
        announces it, the next leader does that as it is elected."""
        return self.events("generation_formed") + self.events("elected")

    def nodes(self) -> set[str]:
        return {_node_of(member) for member in self.members()}

    # ---- waiting

    def wait(
        self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S
    ) -> float:
        """Wait until the condition holds; returns the seconds that took. Fails with the whole story
        after the deadline, or if no coordinator runs."""
        began_at = time.monotonic()
        while not condition():
            late = time.monotonic() > began_at + deadline_s
            if late or not any(p[-1].process.poll() is None for p in self.coordinators.values()):
                raise AssertionError(f"no {what} within {deadline_s} s\n{self.story()}")
            time.sleep(_POLL_S)
        return time.monotonic() - began_at

    def wait_for_event(self, name: str, *, after: int = 0, **fields: Any) -> Event:
        """Wait for the next such event after the first `after` ones."""
        self.wait(lambda: len(self.events(name, **fields)) > after, f"event {name} {fields}")
        return self.events(name, **fields)[after]

    def wait_trained(self, steps: int, *nodes: str, deadline_s: float = DEADLINE_S) -> float:
        """Wait until a group of exactly these nodes, or any group, has committed more steps."""
        began_at = time.monotonic()

        def trained() -> bool:
            rows = self.steps.commits(since_s=began_at)
            newest = max((row["generation"] for row in rows), default=-1)
            rows = [row for row in rows if row["generation"] == newest]
            hosts = {row["host"] for row in rows}
            if nodes and (hosts != set(nodes) or self.nodes() != set(nodes)):
                return False
            return len({row["step"] for row in rows}) >= steps

        return self.wait(trained, f"{steps} steps of {nodes or 'anybody'}", deadline_s)

    def story(self) -> str:
        coordinators = [
            f"--- coordinator {name}\n{process.story()}"
            for name, processes in self.coordinators.items()
            for process in processes
        ]
        agents = [
            f"--- agent {name}, exit code {agent.process.poll()}\n{agent.story()}"
            for name, agents in self.agents.items()
            for agent in agents[-2:]
        ]
        return "\n".join([*coordinators, *agents])

    def processes(self) -> list[int]:
        """The pids of all processes on all hosts, except etcd's."""
        members = {m.process.pid for m in self.etcd.members if m.process is not None}
        return [pid for host in self.net.hosts for pid in host.processes() if pid not in members]


@contextlib.contextmanager
def network_with_etcd(*, durable: bool = False) -> Iterator[tuple[Network, EtcdCluster]]:
    """A network without a job, with etcd (see `etcd_cluster`). Nothing is left of it afterwards."""
    with network(*NODES, JOINER, *STORES) as net:
        stores: list[Host] = [net.host(name) for name in STORES]
        with etcd_cluster(machines=stores, durable=durable) as etcd:
            yield net, etcd


def _node_of(worker: str) -> str:
    return worker.partition("-")[0]
