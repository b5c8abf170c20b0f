"""Stops processes of nodes for a while, with and without their network, and watches from outside
that never two groups train at once: `python -m tests.chaos.stops --help`.

One job trains on hosts of its own (tests/hosts) while one case follows another. A case stops some
of the processes of each node that trains (agent, keeper, zygote, worker, or all, as a pause of the
host does), for a time around the isolation time, and may cut the node off meanwhile. Then they go
on one after another, in random order, and the job must train again.

The judge reads only what the script itself has written: when it began and committed each step, in
which generation, by the clock that all processes share.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.records import Record
from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.hosts import Host, Network, network
from tests.job_process import CommandProcess, descendants

ISOLATION_S, NODE_TTL_S = 6.0, 2.0
PROCESSES = ("agent", "keeper", "zygote", "worker")
STOPPED = (
    *((name,) for name in PROCESSES),
    *itertools.combinations(PROCESSES, 2),
    PROCESSES,
)
DURATIONS_S = (1.0, ISOLATION_S / 2, ISOLATION_S, 2 * ISOLATION_S, 2.5 * ISOLATION_S)
"""In the last two the other nodes form a group without this one before it goes on."""
NETWORKS = ("up", "cut meanwhile", "cut for longer")
_LONGER_S = ISOLATION_S / 2
_PORT = 29400
_PAGE_PORT, _PAGE_S = 9400, 20.0
_STORE = "s"
_SETTLED_S = 90.0
_WAKES_WITHIN_S = 0.3
_SAVED_EVERY_S = 1.0
_TOLD_WITHIN_S, _MOST_NEW = 10.0, 10
_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens to each node that trains."""

    stopped: tuple[str, ...]
    lasts_s: float
    network: str
    seed: int

    def __str__(self) -> str:
        return f"{'+'.join(self.stopped)} for {self.lasts_s:g} s, network {self.network}"


def matrix(seed: int = 0) -> list[Case]:
    """All cases, in a random order."""
    whole = itertools.product(STOPPED, DURATIONS_S, NETWORKS)
    cases = [
        Case(stopped=stopped, lasts_s=lasts_s, network=net, seed=number)
        for number, (stopped, lasts_s, net) in enumerate(whole)
    ]
    random.Random(seed).shuffle(cases)
    return cases


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The job: a group of `workers` nodes with a worker each, and one more node that waits."""

    workers: int = 1
    step_s: float = 0.05


@dataclass(kw_only=True)
class Judgement:
    """What the records say of a whole job."""

    begun_late: list[str] = dataclasses.field(default_factory=list)
    """Steps that were begun in a group after a later one had begun, and committed."""
    in_flight: int = 0
    """Steps that were begun before, and committed in the older group after that."""
    given_up: int = 0
    """Committed steps of groups from which no later group went on."""


def judge(rows: dict[str, list[Record]]) -> Judgement:
    """Judge the steps of all processes."""
    found = Judgement()
    steps: list[tuple[int, int, float, float]] = []  # generation, step, begun and committed at
    for own in rows.values():
        begun: dict[tuple[int, int], float] = {}
        for row in own:
            key = row["generation"], row["step"]
            if row["kind"] == "block":
                begun[key] = row["at"]
            elif row["kind"] == "commit" and key in begun:
                steps.append((*key, begun[key], row["at"]))
    first: dict[int, float] = {}
    for generation, _, begun_at, _ in steps:
        first[generation] = min(begun_at, first.get(generation, begun_at))
    for generation, step, begun_at, committed_at in steps:
        later = min((at for g, at in first.items() if g > generation), default=None)
        if later is not None and begun_at > later:
            found.begun_late.append(f"step {step} of {generation}, {begun_at - later:.2f} s late")
        elif later is not None and committed_at > later:
            found.in_flight += 1
    reached: dict[int, tuple[int, int]] = {}
    for generation, step, _, _ in steps:
        low, high = reached.get(generation, (step, step))
        reached[generation] = min(low, step), max(high, step)
    newest = -1
    for _, (low, high) in sorted(reached.items()):
        found.given_up += max(0, newest + 1 - low)
        newest = high
    return found


class StoppingJob:
    """A job on a network of its own. Files go to `files`."""

    def __init__(self, net: Network, files: Path, shape: Shape) -> None:
        self.net, self.files, self.shape = net, files, shape
        self.out = files / "out"
        self.out.mkdir(parents=True)
        self.steps = StepRecords(self.out)
        self.agents: dict[str, CommandProcess] = {}
        self._steps_lost: dict[int, int] = {}  # by incident
        store = net.host(_STORE)
        self.address = f"{store.address}:{_PORT}"
        self.coordinator = store.elastic(
            *("coordinator", "--store", "memory", "--insecure", "--job", "stops"),
            *("--listen", self.address, "--advertise", self.address),
            *("--checkpoint-dir", files / "checkpoints", "--ledger", files / "ledger.jsonl"),
            *("--isolation-timeout-s", str(ISOLATION_S), "--quarantine-after", "0"),
            *("--max-workers", str(shape.workers), "--min-workers", str(shape.workers)),
            *("--max-restarts", "100000", "--agent-grace-s", "4", "--gather-timeout-s", "0"),
            *("--join-timeout-s", "4", "--events-file", files / "events"),
        )
        for host in self.nodes():
            self.start_agent(host)

    def nodes(self) -> list[Host]:
        return [host for host in self.net.hosts if host.name != _STORE]

    def start_agent(self, host: Host) -> None:
        self.agents[host.name] = host.elastic(
            *("agent", "--etcd", self.address, "--insecure", "--job", "stops"),
            *("--node-name", host.name, "--node-host", host.address, "--machine", host.name),
            *("--node-ttl-s", str(NODE_TTL_S), "--isolation-timeout-s", str(ISOLATION_S)),
            *("--log-dir", self.files / "logs" / host.name, "--record-samples", "--spares", "0"),
            *("--checkpoint-dir", self.files / "checkpoints"),
            *("--checkpoint-every", str(max(1, round(_SAVED_EVERY_S / self.shape.step_s)))),
            *("--grace-s", "60"),
            *(TRAINER, self.out, "--epochs", "100000", "--record-blocks"),
            *("--step-s", str(self.shape.step_s)),
        )

    # ---- what is true now

    def wait_trained(self, since_s: float, what: str) -> None:
        """Wait until a whole group has committed some steps since then."""
        deadline = time.monotonic() + _SETTLED_S

        def trained() -> bool:
            by_generation: dict[int, list[Record]] = defaultdict(list)
            for row in self.steps.commits(since_s=since_s):
                by_generation[row["generation"]].append(row)
            newest = by_generation.get(max(by_generation, default=-1), [])
            hosts = {row["host"] for row in newest}
            many = len({row["step"] for row in newest}) >= _STEPS
            return many and len(hosts) == self.shape.workers

        while not trained():
            assert time.monotonic() < deadline, f"no training after: {what}\n{self.story()}"
            assert self.coordinator.process.poll() is None, self.story()
            time.sleep(0.1)

    def wait_saved(self) -> None:
        """Wait for the first checkpoint: a job that loses all of its workers before it ends."""
        deadline = time.monotonic() + _SETTLED_S
        while "checkpoint_committed" not in self._told():
            assert time.monotonic() < deadline, f"no checkpoint\n{self.story()}"
            time.sleep(0.1)

    def _told(self) -> str:
        events = self.files / "events"
        return events.read_text() if events.exists() else ""

    def story(self) -> str:
        agents = (f"--- {name}\n{agent.story()}" for name, agent in self.agents.items())
        return "\n".join([self._told(), self.coordinator.story(), *agents])

    def processes_of(self, host: str) -> dict[str, list[int]]:
        """The pids of a node's processes, by their roles."""
        agent = self.agents[host].process.pid
        below = list(descendants(agent))
        keepers = [pid for pid in below if _parent(pid) == agent]
        zygotes = [pid for pid in below if _parent(pid) in keepers]
        workers = [pid for pid in below if _parent(pid) in zygotes]
        return {"agent": [agent], "keeper": keepers, "zygote": zygotes, "worker": workers}

    # ---- cases

    def strike(self, case: Case) -> None:
        """Let the case happen to the nodes that train, and wait until the job trains again."""
        chance = random.Random(case.seed)
        self.wait_trained(time.monotonic(), f"the start of {case}")
        self.wait_saved()
        hosts = sorted(self.steps.at_work())
        targets = [
            [pid for role in case.stopped for pid in self.processes_of(host)[role]]
            for host in hosts
        ]
        if case.network != "up":
            self.net.cut(*(self.net.host(name) for name in hosts))
        _signal([pid for pids in targets for pid in pids], signal.SIGSTOP)
        time.sleep(case.lasts_s)
        if case.network == "cut meanwhile":
            self.net.heal()
        for pids in targets:
            chance.shuffle(pids)
            for pid in pids:
                _signal([pid], signal.SIGCONT)
                time.sleep(chance.choice((0.0, chance.uniform(0.0, _WAKES_WITHIN_S))))
        if case.network == "cut for longer":
            time.sleep(_LONGER_S)
            self.net.heal()
        for host in hosts:
            assert self.agents[host].process.poll() is None, f"{case}\n{self.story()}"
        self.wait_trained(time.monotonic(), str(case))

    def judge(self) -> Judgement:
        return judge(self.steps.by_process())

    def told_steps_lost(self) -> int:
        """How many steps the records of all incidents say were lost. Old records are forgotten, so
        ask often."""
        first = max(1, max(self._steps_lost, default=0) - _MOST_NEW)
        for number in itertools.count(first):
            incident = self._ask(f"/page/incident/{number}")
            if incident is None:
                return sum(self._steps_lost.values())
            self._steps_lost[number] = int(incident["steps_lost"])
        raise AssertionError("unreachable")

    def told_at_last(self, expected: int) -> int:
        """`told_steps_lost` once it is as expected, or after a while: a node that was cut off tells
        what happened there when it is back."""
        deadline = time.monotonic() + _TOLD_WITHIN_S
        while (told := self.told_steps_lost()) != expected and time.monotonic() < deadline:
            time.sleep(0.2)
        return told

    def _ask(self, path: str) -> dict[str, Any] | None:
        """What the coordinator's page answers; None: there is no such thing."""
        with self.net.host(_STORE).connect("127.0.0.1", _PAGE_PORT, _PAGE_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
            with connection.makefile("rb") as file:
                head, _, body = file.read().partition(b"\r\n\r\n")
        return dict(json.loads(body)) if b" 200 " in head.splitlines()[0] else None


@contextlib.contextmanager
def stopping_job(files: Path, shape: Shape) -> Iterator[StoppingJob]:
    names = "abc"[: shape.workers + 1]
    with network(*names, _STORE) as net:
        yield StoppingJob(net, files, shape)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="0:165", help="FIRST:END of the cases in random order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="in the group")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("files", type=Path)
    options = parser.parse_args()
    first, end = map(int, options.cases.split(":"))
    shape = Shape(workers=options.workers, step_s=options.step_s)
    bad = 0
    pending = matrix(options.seed)[first:end]
    for attempt in itertools.count():
        if not pending:
            break
        with stopping_job(options.files / str(attempt), shape) as job:
            late = in_flight = given_up = 0
            while pending:
                case, began_at = pending.pop(0), time.monotonic()
                failure = ""
                try:
                    job.strike(case)
                except AssertionError as error:
                    failure = str(error)
                found = job.judge()
                line = {
                    "case": str(case),
                    "took_s": round(time.monotonic() - began_at, 1),
                    "begun_late": found.begun_late[late:][:3],
                    "in_flight": found.in_flight - in_flight,
                    "steps_lost": found.given_up - given_up,
                    "told": job.told_at_last(found.given_up) if not failure else None,
                    "in_all": found.given_up,
                    "failure": failure.splitlines()[:1],
                }
                late, in_flight = len(found.begun_late), found.in_flight
                given_up = found.given_up
                bad += bool(line["begun_late"]) or bool(failure)
                print(json.dumps(line), flush=True)
                if failure:
                    (options.files / f"failure-{attempt}").write_text(failure)
                    break
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
