"""Shows what a script has under torchrun: `under_torchrun.py ACTION DIRECTORY [ARGUMENTS]`.

Each process writes its variables and arguments to DIRECTORY/RANK-ATTEMPT.json first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

action, directory, *arguments = sys.argv[1:]
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
seen = {
    "environment": dict(os.environ),
    "arguments": arguments,
    "name": Path(sys.argv[0]).name,
    "main": __name__,
    "stdout_at_once": bool(getattr(sys.stdout, "write_through", False)),
}
Path(directory, f"{rank}-{attempt}.json").write_text(json.dumps(seen))


def told(number: int, _frame: object) -> None:
    Path(directory, f"{rank}-signal").write_text(signal.Signals(number).name)
    sys.exit(0)


def fails_here(at: str) -> bool:
    """Whether this is the rank that fails; if so, wait until the other one has printed."""
    while rank == at and not Path(directory, f"{1 - int(rank)}-{attempt}.printed").exists():
        time.sleep(0.01)
    return rank == at


sys.stdout.write(f"out {rank}\n")  # at once: print() writes twice
sys.stderr.write(f"err {rank}\n")
Path(directory, f"{rank}-{attempt}.printed").touch()
if action == "reduces":
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    ranks = torch.tensor([int(rank)])
    distributed.all_reduce(ranks)
    sys.stdout.write(f"sum {ranks.item()}\n")
    distributed.destroy_process_group()
if action in ("trains", "breaks"):  # until DIRECTORY/enough is there
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    goes_on = torch.ones(1)
    while goes_on.item():
        Path(directory, f"{rank}-{attempt}-{distributed.get_world_size()}.trains").touch()
        if action == "breaks" and rank == "1" and attempt == "0":
            sys.exit(4)
        goes_on.fill_(not Path(directory, "enough").exists())
        distributed.all_reduce(goes_on, distributed.ReduceOp.MIN)
        time.sleep(0.02)
    distributed.destroy_process_group()
if action == "reads" and rank == "0":
    sys.stdout.write(f"read {sys.stdin.readline().strip()}\n")
if action == "fails" and fails_here("0"):
    sys.exit(3)
if action == "raises" and fails_here("1"):
    raise ValueError("no such corpus")
if action == "recovers" and attempt == "0" and fails_here("1"):
    sys.exit(4)
if action == "killed" and fails_here("1"):
    os.kill(os.getpid(), signal.SIGKILL)
if action == "waits":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, told)
    Path(directory, f"{rank}-ready").touch()
    time.sleep(600)
if action == "ignores":  # rank 1 does not end when it is asked to
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(directory, f"{rank}-ignores").touch()
    while rank == "0" and not Path(directory, "1-ignores").exists():
        time.sleep(0.01)
    sys.exit(5) if rank == "0" else time.sleep(600)
if action in ("fails", "raises", "killed") or (action == "recovers" and attempt == "0"):
    time.sleep(600)  # until torchrun ends this process, too
