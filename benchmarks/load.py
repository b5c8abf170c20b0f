"""One coordinator with up to a thousand agents: forming a group, steady state, a lost node.

    python -m benchmarks.load                     # 10, 100 and 1,000 agents, about 2 minutes
    python -m benchmarks.load --agents 1000

The coordinator is the real command in a process of its own, on a one-member etcd. The agents are
streams of one load process on loopback: each says hello, reports one worker, and answers
generations as an agent would.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.report import save, show
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
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class FakeAgent:
    """One stream with one worker."""

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
        """Until the stream ends."""
        hello = pb.AgentHello(node=self.node, host="127.0.0.1", slots=1)
        hello.isolation_timeout_s = _ISOLATION_S
        self._say(hello=hello)
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
        """Its worker waits for a group."""
        self._report("READY", 0)

    def hang_up(self) -> None:
        """The node is gone."""
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
            self._say(
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
            heard=generation,
            endpoint="127.0.0.1:1",
            took_part=generation > 0,
        )
        self._say(view=pb.NodeView(workers=[status]))

    def _say(self, **kind: Any) -> None:
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
        """Share of one core since this was made."""
        at, cpu_s = self._began
        return (self._cpu_s() - cpu_s) / (time.monotonic() - at)

    def memory_mib(self) -> float:
        """Resident now."""
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


_COLUMNS = ("formed_s", "reformed_s", "joined_s", "steady_cores", "steady_mib", "peak_mib")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", nargs="+", type=int, default=[10, 100, 1000])
    return parser.parse_args()


def _measure(agents: int) -> dict[str, float]:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch, etcd_cluster(size=1, durable=True) as etcd:
        log = (Path(scratch) / "events").open("w")
        command = [sys.executable, "-m", "elastic.cli", "coordinator", "--job", JOB]
        command += ["--listen", address, "--etcd", etcd.endpoints(), "--min-workers", "1"]
        command += ["--gather-timeout-s", "60", "--agent-grace-s", "0", "--planned-interval-s", "0"]
        command += ["--isolation-timeout-s", str(_ISOLATION_S)]
        with log, subprocess.Popen(command, stdout=log, stdin=subprocess.DEVNULL) as coordinator:
            try:
                return asyncio.run(_drive(agents, address, coordinator.pid))
            finally:
                coordinator.kill()


async def _drive(agents: int, address: str, pid: int) -> dict[str, float]:
    fleet = [FakeAgent(number) for number in range(agents)]
    channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in fleet]
    await asyncio.wait_for(channels[0].channel_ready(), _DEADLINE_S)
    await asyncio.sleep(1.0)  # it listens before it is elected
    streams = [asyncio.ensure_future(a.attend(c)) for a, c in zip(fleet, channels, strict=True)]
    try:
        await asyncio.sleep(2.0 + agents / 200)  # all are connected
        began = time.monotonic()
        for agent in fleet:
            agent.ready()
        formed_s = await _until_all(fleet, 1) - began
        usage = Usage(pid)
        await asyncio.sleep(_STEADY_S)
        steady, steady_mib = usage.cores(), usage.memory_mib()
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
        }
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for channel in channels:
            await channel.close()


async def _join(agents: int, address: str, fleet: Sequence[FakeAgent]) -> float:
    """One more node; the planned change takes effect at once, since nobody holds."""
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
    """When the last of them has come to train in `generation`."""
    deadline = time.monotonic() + _DEADLINE_S
    while any(agent.joined < generation for agent in fleet):
        if time.monotonic() > deadline:
            late = sum(agent.joined < generation for agent in fleet)
            raise TimeoutError(f"{late} agents never came to train in generation {generation}")
        await asyncio.sleep(0.005)
    return max(agent.training_at for agent in fleet)


if __name__ == "__main__":
    main()
