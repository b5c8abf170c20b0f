"""Runs torchrun on three hosts of a network in miniature, with the c10d rendezvous."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.jobs import ROOT, SCRIPTS
from benchmarks.scripts.step_log import Mark, StepLogReader, commits
from tests.cluster import NODES
from tests.hosts import Network

_PORT = 29500
_POLL_S = 0.05
_STEADY_STEPS = 15


@contextmanager
def torchrun_job(net: Network, files: Path, size: str, rendezvous: str) -> Iterator[StepLogReader]:
    """Run a job on all nodes, with a checkpoint every 20 steps; yield the reader of its marks.

    `rendezvous`: options for --rdzv-conf."""
    marks = files / "marks"
    marks.mkdir(parents=True)
    first = net.host(NODES[0]).address
    environment = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see benchmarks.jobs
    }
    agents = []
    for name in NODES:
        host = net.host(name)
        options = ["--nnodes", f"2:{len(NODES)}", "--nproc-per-node", "1", "--max-restarts", "100"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{_PORT}"]
        options += ["--rdzv-id", files.name, "--local-addr", host.address]
        # By itself, torchrun decides this by host names, which do not resolve here.
        is_host = f"is_host={int(name == NODES[0])}"
        options += ["--rdzv-conf", ",".join(filter(None, (is_host, rendezvous)))]
        script = [str(SCRIPTS / "torchrun_train.py"), "--log-dir", str(marks), "--size", size]
        script += ["--checkpoint", str(files / "checkpoint.pt"), "--checkpoint-every", "20"]
        module = [sys.executable, "-m", "torch.distributed.run"]
        agents.append(host.start(*module, *options, *script, environment=environment))
    try:
        yield StepLogReader(marks)
    except RuntimeError as error:
        story = "\n".join(f"{agent.messages[-20:]}" for agent in agents)
        raise RuntimeError(f"{error}\n{story}") from error
    finally:
        for name in NODES:
            net.host(name).kill_all()
        for agent in agents:
            agent.close()


def kill_a_node(net: Network, log: StepLogReader) -> float:
    """Return the seconds from the kill to the next committed step of the others."""
    _wait(lambda: _steps_of_newest(log, len(NODES)) >= _STEADY_STEPS, log, 120.0)
    time.sleep(2.0)
    at_s = time.monotonic()
    net.host(NODES[-1]).kill_all()

    def after() -> list[Mark]:
        return [m for m in commits(log.marks()) if m.at_s > at_s and m.world_size < len(NODES)]

    _wait(lambda: bool(after()), log, 300.0)
    return after()[0].at_s - at_s


def _steps_of_newest(log: StepLogReader, world_size: int) -> int:
    found = commits(log.marks())
    newest = max((m.generation for m in found), default=-1)
    return sum(m.rank == 0 and m.world_size == world_size for m in found if m.generation == newest)


def _wait(condition: object, log: StepLogReader, limit_s: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"torchrun: waited {limit_s} s; last marks: {log.marks()[-5:]}")
        time.sleep(_POLL_S)
