"""Measures one coordinator with up to 1,000 agents: forming a group, steady state, a lost node.

    python -m benchmarks.load                     # 10, 100 and 1,000 agents, about 2 minutes
    python -m benchmarks.load --agents 1000

The coordinator is the real command in a process of its own, with a one-member etcd. The agents are
streams of one load process on loopback: each says hello, reports one worker, and answers
generations as an agent does. To find how long the coordinator's control loop pauses (undisturbed,
while it is scraped, while its page is open), the benchmark sends one small request (gRPC's health
check) after the other. A pause is the longest time to an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.report import command_line, save, show
from elastic.rpc.control_client import OPTIONS
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc
from elastic.v1 import job_pb2
from tests.etcd_cluster import etcd_cluster, free_ports

JOB = "load"
_PROGRESS_S = 0.2
_STEADY_S = 10.0
_DEADLINE_S = 120.0
_ISOLATION_S = 60.0
_SCRAPES = 20
_SCRAPE_EVERY_S = 0.5  # more often than any Prometheus scrapes
_ASK_EVERY_S = 0.002
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class FakeAgent:
    """A stream to the coordinator that acts as an agent with one worker."""

    def __init__(self, number: int) -> None:
        self.node = f"node-{number:04}"
        self.worker = f"{self.node}-1"
        self.joined = 0
        self.training_at = 0.0
        self._outgoing: asyncio.Queue[pb.AgentMessage | None] = asyncio.Queue()
        self._progress: asyncio.Task[None] | None = None
        self._committed = 0
        self._leaves: pb.CoordinatorMessage | None = None

    async def attend(self, channel: grpc.aio.Channel) -> None:
        hello = pb.AgentHello(node=self.node, host="127.0.0.1", slots=1)
        hello.isolation_timeout_s = _ISOLATION_S
        self._send(hello=hello)
        self._report("PREPARING", 0)
        call: Any = pb_grpc.ControlStub(channel).Attend(self._messages())
        try:
            async for message in call:
                if message.HasField("generation"):
                    self._announced(message.generation)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            if self._progress is not None:
                self._progress.cancel()
            self._outgoing.put_nowait(None)

    def ready(self) -> None:
        """Report that the worker waits for a group."""
        self._report("READY", 0)

    def hang_up(self) -> None:
        """End the stream, as a lost node does."""
        self._outgoing.put_nowait(None)

    def _announced(self, generation: job_pb2.Generation) -> None:
        ranks = [m.worker for m in generation.members]
        if self._progress is not None:
            self._progress.cancel()
        if self.worker not in ranks:
            return
        self._report("JOINING", generation.number)
        self.joined = generation.number
        self._report("TRAINING", generation.number)
        self.training_at = time.monotonic()
        if ranks[0] == self.worker:
            self._progress = asyncio.ensure_future(self._make_progress(generation.number))

    async def _make_progress(self, generation: int) -> None:
        while True:
            self._committed += 2
            self._send(
                progress=job_pb2.Progress(
                    worker=self.worker,
                    generation=generation,
                    committed=self._committed,
                    step_s=0.1,
                    samples_per_s=1000.0,
                )
            )
            await asyncio.sleep(_PROGRESS_S)

    def _report(self, phase: str, generation: int) -> None:
        status = job_pb2.WorkerStatus(
            worker=self.worker,
            phase=f"WORKER_PHASE_{phase}",
            slot=0,
            generation=generation,
            acknowledged=generation,
            endpoint="127.0.0.1:1",
            has_state=generation > 0,
        )
        self._send(view=pb.NodeView(workers=[status]))

    def _send(self, **kind: Any) -> None:
        self._outgoing.put_nowait(pb.AgentMessage(**kind))

    async def _messages(self) -> AsyncIterator[pb.AgentMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message


class Usage:
    """CPU and memory of another process."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self._began = (time.monotonic(), self._cpu_s())

    def cores(self) -> float:
        """Return the cores used, on average since this object was made."""
        at, cpu_s = self._began
        return (self._cpu_s() - cpu_s) / (time.monotonic() - at)

    def memory_mib(self) -> float:
        """Return the resident memory now."""
        status = (self._proc / "status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def _cpu_s(self) -> float:
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main() -> None:
    options = _parse()
    rows, documents = [], []
    for agents in options.agents:
        found = _measure(agents)
        documents.append(found)
        rows.append([str(agents), *(f"{found[name]:.3f}" for name in _COLUMNS)])
        print(f"{agents} agents: {found}", flush=True)
    show("One coordinator", ["agents", *_COLUMNS], rows)
    save("load", {"options": vars(options), "measured": documents})


_COLUMNS = (
    *("formed_s", "reformed_s", "joined_s", "steady_cores", "steady_mib", "peak_mib"),
    *("scrape_s", "scrape_most_s", "scrape_mb", "pause_s", "pause_scraped_s", "pause_page_s"),
)


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--agents", nargs="+", type=int, default=[10, 100, 1000])
    return parser.parse_args()


def _measure(agents: int) -> dict[str, float]:
    address, page = (f"127.0.0.1:{port}" for port in free_ports(2))
    with tempfile.TemporaryDirectory() as scratch, etcd_cluster(size=1, durable=True) as etcd:
        log = (Path(scratch) / "events").open("w")
        command = [sys.executable, "-m", "elastic.cli", "coordinator", "--job", JOB]
        command += ["--listen", address, "--etcd", etcd.endpoints(), "--min-workers", "1"]
        command += ["--gather-timeout-s", "60", "--agent-grace-s", "0", "--planned-interval-s", "0"]
        command += ["--isolation-timeout-s", str(_ISOLATION_S), "--http-address", page]
        with log, subprocess.Popen(command, stdout=log, stdin=subprocess.DEVNULL) as coordinator:
            try:
                return asyncio.run(_drive(agents, address, page, coordinator.pid))
            finally:
                coordinator.kill()


async def _drive(agents: int, address: str, page: str, pid: int) -> dict[str, float]:
    fleet = [FakeAgent(number) for number in range(agents)]
    channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in fleet]
    await asyncio.wait_for(channels[0].channel_ready(), _DEADLINE_S)
    await asyncio.sleep(1.0)  # the coordinator listens before it is elected
    streams = [asyncio.ensure_future(a.attend(c)) for a, c in zip(fleet, channels, strict=True)]
    try:
        await asyncio.sleep(2.0 + agents / 200)  # until all are connected
        began = time.monotonic()
        for agent in fleet:
            agent.ready()
        formed_s = await _until_all(fleet, 1) - began
        usage = Usage(pid)
        await asyncio.sleep(_STEADY_S)
        steady, steady_mib = usage.cores(), usage.memory_mib()
        watched = await _watch(channels[0], f"http://{page}")
        began = time.monotonic()
        fleet[-1].hang_up()
        reformed_s = await _until_all(fleet[:-1], 2) - began
        return {
            "agents": agents,
            "formed_s": formed_s,
            "reformed_s": reformed_s,
            "joined_s": await _join(agents, address, fleet[:-1]),
            "steady_cores": steady,
            "steady_mib": steady_mib,
            "peak_mib": usage.memory_mib(),
            **watched,
        }
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for channel in channels:
            await channel.close()


async def _watch(channel: grpc.aio.Channel, page: str) -> dict[str, float]:
    """Return how long scrapes take, and the longest pause of the control loop in three cases: with
    no observer, while it is scraped, and while its page is open."""
    loop = asyncio.get_running_loop()
    taken: list[tuple[float, int]] = []

    def scrape() -> None:
        began = time.monotonic()
        with urllib.request.urlopen(f"{page}/metrics", timeout=_DEADLINE_S) as answer:
            size = len(answer.read())
        taken.append((time.monotonic() - began, size))

    async def scrapes() -> None:
        for _ in range(_SCRAPES):
            await loop.run_in_executor(None, scrape)
            await asyncio.sleep(_SCRAPE_EVERY_S)

    def look() -> None:
        ends_at = time.monotonic() + _SCRAPES * _SCRAPE_EVERY_S
        with urllib.request.urlopen(f"{page}/page/stream", timeout=_DEADLINE_S) as stream:
            while time.monotonic() < ends_at and stream.readline():
                pass

    async def looks() -> None:
        await loop.run_in_executor(None, look)

    async def nobody() -> None:
        await asyncio.sleep(_SCRAPES * _SCRAPE_EVERY_S)

    pauses = [await _longest_answer(channel, beside) for beside in (nobody, scrapes, looks)]
    times_s = sorted(seconds for seconds, _ in taken)
    return {
        "scrape_s": times_s[len(times_s) // 2],
        "scrape_most_s": times_s[-1],
        "scrape_mb": max(size for _, size in taken) / 1e6,
        **dict(zip(("pause_s", "pause_scraped_s", "pause_page_s"), pauses, strict=True)),
    }


async def _longest_answer(
    channel: grpc.aio.Channel, beside: Callable[[], Coroutine[Any, Any, None]]
) -> float:
    """Return the longest seconds to an answer, of requests in sequence while `beside` runs."""
    health: Any = health_pb2_grpc.HealthStub(channel)
    gc.freeze()  # a collection over a thousand agents would pause this process
    gc.disable()
    goes_on, longest_s = asyncio.ensure_future(beside()), 0.0
    while not goes_on.done():
        began = time.monotonic()
        await health.Check(health_pb2.HealthCheckRequest())
        longest_s = max(longest_s, time.monotonic() - began)
        await asyncio.sleep(_ASK_EVERY_S)
    await goes_on
    gc.enable()
    return longest_s


async def _join(agents: int, address: str, fleet: Sequence[FakeAgent]) -> float:
    """Add one node; return the seconds until all train with it.

    The planned change takes effect at once: fake workers do not wait for a step boundary."""
    newcomer = FakeAgent(agents)
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stream = asyncio.ensure_future(newcomer.attend(channel))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        newcomer.ready()
        ended = await _until_all([*fleet, newcomer], 3)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    return ended - began


async def _until_all(fleet: Sequence[FakeAgent], generation: int) -> float:
    """Return when the last agent began to train in `generation`; TimeoutError if one is late."""
    deadline = time.monotonic() + _DEADLINE_S
    while any(agent.joined < generation for agent in fleet):
        if time.monotonic() > deadline:
            late = sum(agent.joined < generation for agent in fleet)
            raise TimeoutError(f"{late} agents never came to train in generation {generation}")
        await asyncio.sleep(0.005)
    return max(agent.training_at for agent in fleet)


if __name__ == "__main__":
    main()
