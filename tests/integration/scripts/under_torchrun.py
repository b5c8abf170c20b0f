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


print(f"out {rank}")
print(f"err {rank}", file=sys.stderr)
if action == "reads" and rank == "0":
    print(f"read {sys.stdin.readline().strip()}")
if action == "fails" and rank == "0":
    sys.exit(3)
if action == "raises" and rank == "1":
    raise ValueError("no such corpus")
if action == "recovers" and rank == "1" and attempt == "0":
    sys.exit(4)
if action == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if action == "waits":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, told)
    Path(directory, f"{rank}-ready").touch()
    time.sleep(600)
if action in ("fails", "raises", "killed") or (action == "recovers" and attempt == "0"):
    time.sleep(600)  # until torchrun ends this process, too
