"""A leader's memory use does not grow over a day of events, and it writes little to the store.

The simulated day takes minutes: its clock jumps ahead as soon as nothing is left to do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import itertools
import json
import random
import selectors
import statistics
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.history import JobHistory
from elastic.coordinator.leadership import lead
from elastic.coordinator.node_registry import NodeRegistry
from elastic.coordinator.operators import Operators
from elastic.coordinator.page import PageBuilder
from elastic.coordinator.totals import Totals
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.documents import to_json
from elastic.core.histogram import STEP_BOUNDS_S
from elastic.runtime.journal import EntryCounts, Journal, RecentEntries
from elastic.runtime.loop_watch import LoopPauses
from elastic.store.interface import Entry, Guard
from elastic.store.job_documents import NodeDocument
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2, stacks_pb2
from tests.unit.coordinator.agents import agent, options

HOUR_S = 3600.0
HOURS = 24
FILLED_AFTER = 8
"""Hours after which all bounded histories are full: curves, incidents, periods of slots. Workers
are killed more often in these hours, to fill them."""
MOST_GROWTH = 1.05
JOB = "job"
NODES, SLOTS = 4, 2
AGENT_GRACE_S, ISOLATION_TIMEOUT_S = 10.0, 120.0
STEP_S = 2.0
KILL_EVERY_S, LOSE_EVERY_S, HANG_EVERY_S, DRAIN_EVERY_S = 40.0, 700.0, 1900.0, 2900.0
FILL_EVERY_S = 10.0  # kills of the first hours
LOOK_EVERY_S = 15.0
LONGEST_STANDSTILL_S = 600.0
TROUBLED_HOURS = 0.2
MANY_INCIDENTS = 25
MOST_OF_A_CALM_HOUR = 800_000
"""Bytes: 19 MB a day."""
LONG_TEXT = "".join(f"line {n} of what it has said last\n" for n in range(300))


class Clock(selectors.DefaultSelector):
    """A selector that moves the simulated clock on instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += max(timeout, 1e-6)
        return ready


class AtOnce(concurrent.futures.ThreadPoolExecutor):
    """Runs work in the caller: the simulated clock would overtake a thread."""

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future's waiter gets it
            done.set_exception(error)
        return done


class Node:
    """An agent and its workers, which follow the coordinator's orders."""

    def __init__(self, name: str, day: Day) -> None:
        self.name = name
        self.day = day
        self.token = f"{next(day.numbers):08x}"
        self.stream = agent(
            name,
            self.token,
            slots=SLOTS,
            machine=f"of-{name}",
            isolation_timeout_s=ISOLATION_TIMEOUT_S,
        )
        self.workers: dict[str, job_pb2.WorkerStatus] = {}
        self.once = 0
        self.group = job_pb2.Generation()
        self._listening: asyncio.Future[None] | None = None

    async def arrive(self) -> None:
        """Register the node, connect its agent and start a worker in each slot."""
        document = NodeDocument(
            start_token=self.token,
            host=f"{self.name}.test",
            slots=SLOTS,
            version="",
            command_digest="d",
            started_unix_s=time.time(),
            machine=f"of-{self.name}",
        )
        await self.day.store.put(self._key(), to_json(document))
        self.day.nodes.append(self)
        self.day.daemon.agent_connected(self.stream)
        for slot in range(SLOTS):
            self.start_worker(slot)
        self._listening = asyncio.ensure_future(self._listen())

    def _key(self) -> str:
        return JobKeys(JOB).node(self.name)

    def start_worker(self, slot: int) -> None:
        worker = f"{self.name}-{next(self.day.numbers)}"
        self.workers[worker] = job_pb2.WorkerStatus(
            worker=worker,
            phase=job_pb2.WORKER_PHASE_READY,
            slot=slot,
            endpoint=f"{self.name}.test:{20_000 + slot}",
            pid=1000 + slot,
        )
        self.tell_view()

    def kill(self, worker: str) -> None:
        """Report the worker as killed and start another one in its slot."""
        status = self.workers.pop(worker)
        failure = job_pb2.Failure(
            worker=worker,
            kind=job_pb2.FAILURE_KIND_SIGNAL,
            code=9,
            retryable=True,
            message=f"{worker} was ended by SIGKILL",
            log=f"/var/log/{worker}",
            log_tail=LONG_TEXT,
        )
        self.say(failure=failure, once=self._told_once())
        self.start_worker(status.slot)

    async def lose(self) -> None:
        """Disconnect and unregister the node."""
        self.day.nodes.remove(self)
        self.day.daemon.agent_lost(self.stream)
        await self.day.store.delete(self._key())
        if self._listening is not None:
            self._listening.cancel()

    def tell_view(self) -> None:
        self.say(view=pb.NodeView(workers=self.workers.values()))

    def say(self, **kind: Any) -> None:
        self.day.daemon.agent_said(self.stream, pb.AgentMessage(**kind))

    def _told_once(self) -> pb.Once:
        self.once += 1
        return pb.Once(source=f"{self.name}@{self.token}", number=self.once)

    async def _listen(self) -> None:
        while (message := await self.stream._outgoing.get()) is not None:
            if isinstance(message, bytes):
                message = pb.CoordinatorMessage.FromString(message)
            match message.WhichOneof("kind"):
                case "generation":
                    self._form(message.generation)
                case "replace" if message.replace.worker in self.workers:
                    self.kill(message.replace.worker)
                case "drained":
                    await self.lose()
                case "stacks":
                    self._tell_stacks(message.stacks)

    def _form(self, group: job_pb2.Generation) -> None:
        if group.HasField("leave_after"):
            self.day.leave_after = group.leave_after
        self.group = group
        committed = self.day.committed
        members = {member.worker for member in group.members}
        for worker, status in self.workers.items():
            if worker not in members and status.phase == job_pb2.WORKER_PHASE_TRAINING:
                status.phase = job_pb2.WORKER_PHASE_READY
        for member in group.members:
            status = self.workers.get(member.worker)
            if status is None or status.generation >= group.number:
                continue
            status.phase = job_pb2.WORKER_PHASE_TRAINING
            status.generation = status.acknowledged = status.trained_in = group.number
            status.has_state = True
            status.committed = committed
            reformed = job_pb2.Reformed(
                worker=member.worker,
                generation=group.number,
                committed=committed,
                join_s=0.1,
                sync_s=0.1,
                first_step_s=STEP_S,
                out_s=1.0,
                spent=self.day.spent(group.number),
            )
            self.say(reformed=reformed, once=self._told_once())
        self.tell_view()

    def _tell_stacks(self, request: stacks_pb2.StacksRequest) -> None:
        frames = [
            stacks_pb2.Frame(file=f"/home/of/train_{n}.py", line=n, function="forward")
            for n in range(40)
        ]
        thread = stacks_pb2.ThreadStack(name="MainThread", frames=frames)
        workers = [
            stacks_pb2.WorkerStacks(
                worker=worker,
                request=request.request,
                answer=stacks_pb2.ANSWER_GIVEN,
                place=stacks_pb2.PLACE_FORWARD,
                place_s=1.0,
                committed=self.day.committed,
                generation=status.generation,
                processes=[stacks_pb2.ProcessStacks(pid=status.pid, threads=[thread])],
            )
            for worker, status in self.workers.items()
        ]
        self.say(stacks=stacks_pb2.NodeStacks(request=request.request, workers=workers))


class Day:
    """The events of one job's day, drawn from a seed."""

    def __init__(
        self,
        daemon: CoordinatorDaemon,
        operators: Operators,
        history: JobHistory,
        store: MemoryStore,
        clock: Clock,
    ) -> None:
        self.daemon = daemon
        self.store = store
        self.operators = operators
        self.clock = clock
        self.numbers = itertools.count(1)
        self.committed = 0
        self.leave_after = 0
        self.nodes: list[Node] = []
        self._counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self._history = history
        self._draw = random.Random(5)
        self._page = PageBuilder()
        self._began = clock.now
        self._committed_at = clock.now
        self._stands_since: float | None = None
        self._stands_in = 0

    def spent(self, generation: int) -> job_pb2.TimeSpent:
        passed_s = self.clock.now - self._began
        return job_pb2.TimeSpent(
            generation=generation,
            committed=self.committed,
            steps=self.committed,
            steps_s=0.9 * passed_s,
            data_s=0.1 * passed_s,
        )

    async def live(
        self, hours: float, kill_every_s: float = KILL_EVERY_S, *, calm: bool = False
    ) -> None:
        """Run the job until `hours` after its start. calm: nothing but steps happens."""
        while len(self.nodes) < NODES:
            await Node(f"node-{next(self.numbers)}", self).arrive()
        due = {
            self._kill: kill_every_s,
            self._lose: LOSE_EVERY_S,
            self._stand: HANG_EVERY_S,
            self._drain: DRAIN_EVERY_S,
            self._look: LOOK_EVERY_S,
        }
        if calm:
            due = {self._look: LOOK_EVERY_S}
        at = {what: self.clock.now + every_s for what, every_s in due.items()}
        while self.clock.now < self._began + hours * HOUR_S:
            await asyncio.sleep(STEP_S)
            self._step()
            for what, every_s in due.items():
                if self.clock.now >= at[what]:
                    at[what] = self.clock.now + every_s * self._draw.uniform(0.5, 1.5)
                    await what()
            assert not self.daemon.ended.done(), self.daemon.ended.result()
            assert self.clock.now - self._committed_at < LONGEST_STANDSTILL_S, (
                self.operators.status()
            )

    def _step(self) -> None:
        """Let all members commit a step unless the group hangs. Rank 0 reports progress and curve,
        the others their time and pace."""
        group = max((node.group for node in self.nodes), key=lambda g: g.number)
        if group.number != self._stands_in:
            self._stands_since = None
        if not group.members:
            return
        in_step_s = self.clock.now - self._stands_since if self._stands_since else 0.0
        if not in_step_s:
            self.committed += 1
            self._committed_at = self.clock.now
            self._counts[len(STEP_BOUNDS_S) // 2] += 1
        pace = job_pb2.Pace(
            generation=group.number,
            committed=self.committed,
            steps=self.committed,
            total_s=STEP_S * self.committed,
            data_s=0.1 * self.committed,
            arrivals=self.committed,
            reductions=self.committed,
        )
        for node in list(self.nodes):
            for worker, status in list(node.workers.items()):
                if status.generation != group.number:
                    continue
                status.committed = self.committed
                if group.members[0].worker != worker:
                    spent = self.spent(group.number)
                    node.say(worker_time=job_pb2.WorkerTime(worker=worker, spent=spent))
                    node.say(worker_pace=job_pb2.WorkerPace(worker=worker, pace=pace))
                    continue
                values = {"loss": 1.0 / self.committed, f"of-{self.committed % 500}": 1.0}
                point = job_pb2.CurvePoint(
                    step=self.committed - 1,
                    generation=group.number,
                    run=group.incarnation,
                    unix_s=self.clock.now,
                    values={"loss": 1.0 / self.committed},
                )
                node.say(curve=local_pb2.CurvePoints(points=[point]))
                node.say(
                    progress=job_pb2.Progress(
                        worker=worker,
                        generation=group.number,
                        committed=self.committed,
                        step_s=STEP_S,
                        in_step_s=in_step_s,
                        samples_per_s=16.0,
                        reported=values,
                        step_counts=self._counts,
                        steps_total_s=STEP_S * self.committed,
                        samples=32 * self.committed,
                        spent=self.spent(group.number),
                        pace=pace,
                    )
                )

    async def _kill(self) -> None:
        if self._stands_since is not None:
            return  # a new group would end the hang before it counts as one
        node = self._draw.choice(self.nodes)
        node.kill(self._draw.choice(list(node.workers)))

    async def _lose(self) -> None:
        node = self._draw.choice(self.nodes)
        await node.lose()
        await asyncio.sleep(20.0)
        # Half of the nodes that come are new machines, as with spot instances.
        is_new = self._draw.random() < 0.5
        name = f"node-{next(self.numbers)}" if is_new else node.name
        await Node(name, self).arrive()

    async def _stand(self) -> None:
        """Let the group hang until the next generation."""
        self._stands_since = self.clock.now
        self._stands_in = max(node.group.number for node in self.nodes)

    async def _drain(self) -> None:
        node = self._draw.choice(self.nodes)
        await self.operators.drain(node.name, "")
        await asyncio.sleep(30.0)
        if node in self.nodes:
            await node.lose()
        await self.operators.clear(node.name)
        await Node(node.name, self).arrive()

    async def _look(self) -> None:
        """Read what a scrape, the page and the commands read."""
        self.operators.figures()
        self._page.document(self.operators.view())
        self.operators.status().SerializeToString()
        self.operators.incidents()
        for width in self._history.curves.ranges:
            self._history.curves.curve(width, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + clock.now)
    for made in classes_of_the_product():
        defaults = made.__init__.__kwdefaults__ or {}
        positional = made.__init__.__defaults__ or ()
        if real in defaults.values():
            simulated = {n: time.monotonic if d is real else d for n, d in defaults.items()}
            monkeypatch.setattr(made.__init__, "__kwdefaults__", simulated)
        if real in positional:
            changed = tuple(time.monotonic if d is real else d for d in positional)
            monkeypatch.setattr(made.__init__, "__defaults__", changed)
    return clock


def classes_of_the_product() -> list[Any]:
    """The loaded classes whose constructors may have a clock as a default."""
    modules = [m for name, m in sys.modules.items() if name.startswith("elastic.")]
    return [
        made
        for module in modules
        for made in vars(module).values()
        if inspect.isclass(made) and inspect.isfunction(made.__init__)
    ]


@pytest.fixture
def loop(clock: Clock) -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.SelectorEventLoop(clock)
    loop.set_default_executor(AtOnce())
    yield loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def held() -> int:
    """Bytes of all live objects."""
    for _ in range(3):
        gc.collect()
    return tracemalloc.get_traced_memory()[0]


@contextlib.asynccontextmanager
async def a_day(
    clock: Clock, store: MemoryStore, happened: EntryCounts, curve: Path | None = None
) -> AsyncIterator[Day]:
    """Open a job with a leader; nothing has happened in it yet."""
    recent, totals, history = RecentEntries(), Totals(), JobHistory()
    journal = Journal(recent, totals, history, happened)
    of_job = options(
        job=JOB,
        formation=FormationPolicy(
            min_workers=1, max_workers=NODES * SLOTS, agent_grace_s=AGENT_GRACE_S
        ),
        max_restarts=1_000_000,
        restart_window_s=HOUR_S,
        curve=curve,
        quarantine_after=1000,
        isolation_timeout_s=ISOLATION_TIMEOUT_S,
    )
    leadership = await lead(store, job=JOB, candidate="c")
    daemon = CoordinatorDaemon(of_job, store, leadership, journal, totals=totals, history=history)
    registry = daemon.registry = NodeRegistry(
        store, daemon, job=JOB, isolation_timeout_s=ISOLATION_TIMEOUT_S
    )
    following = asyncio.ensure_future(registry.run())
    await daemon.start()
    day = Day(daemon, Operators(daemon, LoopPauses(), recent), history, store, clock)
    try:
        yield day
    finally:
        for node in list(day.nodes):
            await node.lose()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await daemon.close()


async def through_the_day(clock: Clock, directory: Path) -> dict[int, int]:
    """Simulate the day; return the bytes held after each hour from `FILLED_AFTER` on."""
    store, happened, found = MemoryStore(), EntryCounts(), {}
    async with a_day(clock, store, happened, directory / "curve.csv") as day:
        await day.live(FILLED_AFTER, FILL_EVERY_S)
        for hour in range(FILLED_AFTER, HOURS + 1):
            await day.live(hour)
            store.compact(store.revision)  # a real store keeps its history in another process
            found[hour] = held()
        incidents = day.operators.incidents()
        print({hour: f"{count / 1024:.0f} KiB" for hour, count in found.items()}, happened.by_name)
        assert day.committed > 0.7 * HOURS * HOUR_S / STEP_S
        assert json.loads(incidents[-1])["number"] > 0.5 * HOURS * HOUR_S / KILL_EVERY_S
        assert {"hang", "node_drained", "recovered"} <= happened.by_name.keys()
    return found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_leaders_memory_does_not_grow_over_a_day(
    clock: Clock, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    tracemalloc.start()
    try:
        found = loop.run_until_complete(through_the_day(clock, tmp_path))
    finally:
        tracemalloc.stop()
    counts = list(found.values())
    first, last = counts[: len(counts) // 2], counts[len(counts) // 2 :]
    assert statistics.mean(last) <= MOST_GROWTH * statistics.mean(first), found


class CountingStore(MemoryStore):
    """Counts the bytes that are written, by key: etcd keeps each version until it is compacted."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        self.written[key] += len(value)
        return await super().put(key, value, guard=guard, lease=lease)


async def bytes_of_calm_hour(clock: Clock) -> Counter[str]:
    """Simulate an hour of steps after some incidents; return the written bytes by key."""
    store = CountingStore()
    async with a_day(clock, store, EntryCounts()) as day:
        await day.live(TROUBLED_HOURS, FILL_EVERY_S)
        assert len(day.operators.incidents()) >= MANY_INCIDENTS
        store.written.clear()
        await day.live(TROUBLED_HOURS + 1, calm=True)
        return store.written


def test_a_leader_writes_little_while_only_steps_are_committed(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    written = loop.run_until_complete(bytes_of_calm_hour(clock))
    print(written, f"{24 * written.total() / 1e6:.1f} MB a day")
    assert 0 < written.total() < MOST_OF_A_CALM_HOUR
