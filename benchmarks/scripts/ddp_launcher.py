"""Starts the workers of a plain DDP script as elastic starts its own: forks that share a session.

    python benchmarks/scripts/ddp_launcher.py WORKERS SCRIPT [ARGUMENTS...]

A comparison of step times with torchrun is biased. torchrun gives each worker its own session, so
the kernel's autogroups (sched_autogroup_enabled) schedule each worker as its own group; elastic's
workers share one. With more threads than cores, that alone changes the time of a step.
"""

import gc
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

# elastic's zygote imports the same modules before it forks.
import torch._dynamo.utils
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401


def main() -> None:
    workers, script, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    port = _free_port()
    gc.collect()
    gc.freeze()
    pids = [_fork(rank, workers, port, script, arguments) for rank in range(workers)]
    signal.signal(signal.SIGTERM, lambda *_: _kill(pids))
    for pid in pids:
        os.waitpid(pid, 0)


def _fork(rank: int, workers: int, port: int, script: str, arguments: list[str]) -> int:
    pid = os.fork()
    if pid > 0:
        return pid
    os.setpgid(0, 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(workers),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    sys.exit()


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
