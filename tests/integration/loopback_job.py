"""A job of several nodes on this machine's loopback, with real coordinators and agents."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from elastic.settings.tls_files import TlsFiles
from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.etcd_cluster import free_ports
from tests.integration.running import Place
from tests.job_process import DEADLINE_S, CommandProcess, Event
from tests.waiting import eventually

NODES = ("a", "b")
Job = TypeVar("Job", bound="LoopbackJob")


class LoopbackJob:
    """`script` and its arguments run on every node; every command gets `environment`."""

    def __init__(
        self,
        place: Place,
        script: tuple[str | Path, ...],
        *,
        etcd: str,
        job: str = "loopback",
        **environment: str,
    ) -> None:
        self.files = place.files
        self.environment = {
            **place.environment,
            "ELASTIC_ETCD": etcd,
            "ELASTIC_JOB": job,
            **environment,
        }
        self._place = place
        self._script = script
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self.coordinators: list[CommandProcess] = []
        """All that were started, oldest first."""
        self.agents: dict[str, list[CommandProcess]] = {}
        """All that were started on each node, oldest first."""
        self._processes: list[CommandProcess] = []

    # ---- processes

    def start(
        self, *arguments: str | Path, under: tuple[str, ...] = (), **environment: str
    ) -> CommandProcess:
        """Start any `elastic` command. `under` is a command that runs it, such as unshare."""
        command = [*under, sys.executable, "-m", "elastic.cli", *map(str, arguments)]
        process = CommandProcess(command, environment=self.environment | environment)
        self._processes.append(process)
        return process

    def start_coordinator(self, *options: str | Path, **environment: str) -> CommandProcess:
        """Start a coordinator at the job's address, in place of the one before."""
        return self._coordinate(self.address, *options, **environment)

    def start_candidate(self, *options: str | Path) -> CommandProcess:
        """Start another coordinator, at an address of its own. Any of them may lead."""
        (port,) = free_ports(1)
        return self._coordinate(f"127.0.0.1:{port}", *options)

    def _coordinate(self, address: str, *options: str | Path, **environment: str) -> CommandProcess:
        where = ("--listen", address, "--advertise", address, "--events-file", "/dev/stderr")
        coordinator = self.start("coordinator", *where, *options, **environment)
        self.coordinators.append(coordinator)
        return coordinator

    def start_agent(
        self, node: str, *options: str | Path, under: tuple[str, ...] = (), **environment: str
    ) -> CommandProcess:
        agent = self.start(*self.agent_command(node, *options), under=under, **environment)
        self.agents.setdefault(node, []).append(agent)
        return agent

    def agent_command(self, node: str, *options: str | Path) -> tuple[str | Path, ...]:
        names = ("--node-name", node, "--node-host", "127.0.0.1", "--node-ttl-s", "2")
        names += ("--machine", f"machine-of-{node}")  # the job takes the nodes for several machines
        return ("agent", *names, "--log-dir", self.files / "logs", *options, *self._script)

    def start_agents(self, *options: str | Path) -> None:
        for node in NODES:
            self.start_agent(node, *options)

    def output_of(self, *command: str) -> str:
        """Return what an operator's command prints; it must succeed."""
        process = self.start(*command)
        assert process.wait() == 0, process.story()
        return "\n".join(process.output)

    def __enter__(self: Job) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and remove what a next agent of a node could adopt."""
        for process in self._processes:
            process.close()
        self._place.kill_all()
        for directory in self._place.run_directories():
            shutil.rmtree(directory)

    # ---- what is known

    def events(self, name: str, **fields: Any) -> list[Event]:
        """Return the events with this name and these fields, of all coordinators."""
        return [
            event
            for coordinator in self.coordinators
            for event in coordinator.named(name)
            if all(event.get(key) == value for key, value in fields.items())
        ]

    def generation(self) -> int:
        """Return the number of the newest generation that was announced; 0 before the first."""
        return max((e["generation"] for e in self.events("generation_formed")), default=0)

    def world(self) -> int:
        """Return the number of members of the newest group; 0 before the first."""
        return max(
            ((e["generation"], e["world_size"]) for e in self.events("generation_formed")),
            default=(0, 0),
        )[1]

    def worker(self, node: str) -> str:
        """Return the node's member of the newest group."""
        formed = max(self.events("generation_formed"), key=lambda e: int(e["generation"]))
        (worker,) = [m for m in formed["members"] if m.startswith(f"{node}-")]
        return worker

    def worker_pid(self, node: str) -> int:
        """Return the pid of the node's member of the newest group."""
        worker = self.worker(node)
        started = [e for agent in self.agents[node] for e in agent.named("worker_started")]
        return next(int(e["pid"]) for e in started if e["worker"] == worker)

    def story(self) -> str:
        """Return what the last six processes have written, for a failing test."""
        return "\n".join(f"--- {p.process.args}\n{p.story()}" for p in self._processes[-6:])

    # ---- waiting

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the condition holds; fail with the story after the deadline."""
        eventually(condition, lambda: f"no {what}\n{self.story()}", deadline_s)


class TrainingJob(LoopbackJob):
    """Two nodes that train as long as the test lasts. `steps` are the records of their steps."""

    def __init__(self, place: Place, *, step_s: float = 0.05, **named: str) -> None:
        out = place.files / "out"
        out.mkdir()
        script = (TRAINER, out, "--epochs", "100000", "--step-s", str(step_s))
        super().__init__(place, script, **named)
        self.steps = StepRecords(out)

    def wait_for_full_group(self) -> None:
        """Wait until all nodes train in one group."""
        self.wait(lambda: self.world() == len(NODES), "a group of all")
        self.wait_for_more_steps()

    def wait_for_more_steps(self, steps: int = 10) -> None:
        """Wait until this many more steps are committed."""
        reached = self.steps.newest()
        self.wait(lambda: self.steps.newest() >= reached + steps, f"{steps} more steps")


@contextlib.contextmanager
def training_job(
    place: Place, options: Mapping[str, Sequence[str | Path]] = MappingProxyType({}), **named: str
) -> Iterator[TrainingJob]:
    """A job that trains. `options` are each agent's, by node; `named` are those of TrainingJob."""
    with TrainingJob(place, **named) as job:
        job.start_coordinator()
        for node in NODES:
            job.start_agent(node, *options.get(node, ()))
        job.wait_for_full_group()
        yield job


def tls_environment(files: TlsFiles) -> dict[str, str]:
    """Return the settings with which a command presents these certificates."""
    return {
        "ELASTIC_TLS_CA": str(files.ca),
        "ELASTIC_TLS_CERT": str(files.certificate),
        "ELASTIC_TLS_KEY": str(files.key),
    }
