"""The all-reduces of the doctor tell a slow network from one whose ports are closed."""

from __future__ import annotations

import json
import subprocess
import sys

TRIES = """
import json, os, socket, sys, time
import torch.distributed as dist
from elastic.worker import trial
from tests.listening import listens

plain, sizes, places = dist.all_reduce, [], set()

def stalls(tensor):
    if tensor.numel() > 1:
        raise RuntimeError("timed out")
    plain(tensor)

def takes_long(tensor):
    if tensor.numel() > 1:
        sizes.append(tensor.numel())
        time.sleep(trial._TRIED_S)
        places.update(where.rpartition(":")[0] for where in listens(os.getpid()))
    plain(tensor)

for network in (stalls, takes_long):
    dist.all_reduce = network
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = trial._all_reduce(0, 1, "127.0.0.1", port, "lo", 20.0)
    print(json.dumps(found))
    dist.destroy_process_group()
print(json.dumps(sizes))
print(json.dumps(sorted(places)))
"""


def test_all_reduces_on_a_slow_network_are_told_from_closed_ports() -> None:
    """A large one is not repeated if it takes long. The trial listens only at its own address."""
    ended = subprocess.run([sys.executable, "-c", TRIES], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    stalled, slow, sizes, places = map(json.loads, ended.stdout.splitlines())
    assert stalled["stalled_bytes"] == 2**20
    assert "timed out" in stalled["stalled"]
    assert stalled["latency_s"] > 0.0
    assert "bytes_per_s" in slow
    assert "stalled_bytes" not in slow
    assert sizes == [2**18]
    assert places == ["127.0.0.1"]
