"""A job of many nodes on this machine's loopback: one coordinator at a time, and agents."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from elastic.settings.tls_files import TlsFiles
from tests.chaos.kills import ENVIRONMENT
from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.etcd_cluster import free_ports
from tests.integration.running import Place
from tests.job_process import DEADLINE_S, CommandProcess, Event
from tests.waiting import eventually

NODES = ("a", "b")
Job = TypeVar("Job", bound="LoopbackJob")


class LoopbackJob:
    """`script` and its arguments run on every node; `environment` is that of every command."""

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
        """One after the other."""
        self.agents: dict[str, list[CommandProcess]] = {}
        """Of each node, one after the other."""
        self._processes: list[CommandProcess] = []

    # ---- processes

    def start(
        self, *arguments: str | Path, under: tuple[str, ...] = (), **environment: str
    ) -> CommandProcess:
        """Any `elastic` command; `under` another one that runs it."""
        command = [*under, sys.executable, "-m", "elastic.cli", *map(str, arguments)]
        process = CommandProcess(command, environment=self.environment | environment)
        self._processes.append(process)
        return process

    def start_coordinator(self, *options: str | Path, **environment: str) -> CommandProcess:
        """In the place of the one before."""
        return self._coordinate(self.address, *options, **environment)

    def start_candidate(self, *options: str | Path) -> CommandProcess:
        """A coordinator beside the others, each of which may lead."""
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
        """The node's."""
        agent = self.start(*self.agent_command(node, *options), under=under, **environment)
        self.agents.setdefault(node, []).append(agent)
        return agent

    def agent_command(self, node: str, *options: str | Path) -> tuple[str | Path, ...]:
        """The arguments of `elastic` for an agent of this job."""
        names = ("--node-name", node, "--node-host", "127.0.0.1", "--node-ttl-s", "2")
        names += ("--machine", f"machine-of-{node}")  # several, as far as the job is told
        return ("agent", *names, "--log-dir", self.files / "logs", *options, *self._script)

    def start_agents(self, *options: str | Path) -> None:
        """Those of all nodes, with the same options."""
        for node in NODES:
            self.start_agent(node, *options)

    def tells(self, *command: str) -> str:
        """What an operator's command says; it must succeed."""
        told = self.start(*command)
        assert told.wait() == 0, told.story()
        return "\n".join(told.output)

    def __enter__(self: Job) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of it; nothing of a node is kept for a next agent."""
        for process in self._processes:
            process.close()
        self._place.kill_all()
        for directory in self._place.run_directories():
            shutil.rmtree(directory)

    # ---- what is known

    def events(self, name: str, **fields: Any) -> list[Event]:
        """Those of this name and with these fields, of all coordinators."""
        return [
            event
            for coordinator in self.coordinators
            for event in coordinator.named(name)
            if all(event.get(key) == value for key, value in fields.items())
        ]

    def generation(self) -> int:
        """The newest that was announced; 0 before the first."""
        return max((e["generation"] for e in self.events("generation_formed")), default=0)

    def world(self) -> int:
        """The number of members of the newest group."""
        return max(
            ((e["generation"], e["world_size"]) for e in self.events("generation_formed")),
            default=(0, 0),
        )[1]

    def worker(self, node: str) -> str:
        """The node's member of the newest group."""
        formed = max(self.events("generation_formed"), key=lambda e: int(e["generation"]))
        (worker,) = [m for m in formed["members"] if m.startswith(f"{node}-")]
        return worker

    def worker_pid(self, node: str) -> int:
        """That member's process."""
        worker = self.worker(node)
        started = [e for agent in self.agents[node] for e in agent.named("worker_started")]
        return next(int(e["pid"]) for e in started if e["worker"] == worker)

    def story(self) -> str:
        """What all processes have said, for a failing test."""
        return "\n".join(f"--- {p.process.args}\n{p.story()}" for p in self._processes[-6:])

    # ---- waiting

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Until it holds; fails with the whole story after the deadline."""
        eventually(condition, lambda: f"no {what}\n{self.story()}", deadline_s)


class TrainingJob(LoopbackJob):
    """Two nodes that train for as long as the test lasts; `steps` are those they have done."""

    def __init__(self, place: Place, *, step_s: float = 0.05, **named: str) -> None:
        out = place.files / "out"
        out.mkdir()
        script = (TRAINER, out, "--epochs", "100000", "--step-s", str(step_s))
        super().__init__(place, script, **named, **ENVIRONMENT)
        self.steps = StepRecords(out)

    def all_train(self) -> None:
        """In one group."""
        self.wait(lambda: self.world() == len(NODES), "a group of all")
        self.trains_on()

    def trains_on(self, steps: int = 10) -> None:
        """As many more are committed."""
        reached = self.steps.newest()
        self.wait(lambda: self.steps.newest() >= reached + steps, f"{steps} more steps")


@contextlib.contextmanager
def training_job(
    place: Place, options: Mapping[str, Sequence[str | Path]] = MappingProxyType({}), **named: str
) -> Iterator[TrainingJob]:
    """It trains. `options`: of a node's agent. Other arguments are those of LoopbackJob."""
    with TrainingJob(place, **named) as job:
        job.start_coordinator()
        for node in NODES:
            job.start_agent(node, *options.get(node, ()))
        job.all_train()
        yield job


def tls_environment(files: TlsFiles) -> dict[str, str]:
    """Settings of any command that shows these certificates."""
    return {
        "ELASTIC_TLS_CA": str(files.ca),
        "ELASTIC_TLS_CERT": str(files.certificate),
        "ELASTIC_TLS_KEY": str(files.key),
    }
