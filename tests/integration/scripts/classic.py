"""A script for torchrun that ends in one of several ways: classic.py NAME FOLDER"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

rank = int(os.environ["RANK"])
end, place = sys.argv[1], Path(sys.argv[2])


def environment():
    (place / f"{rank}.json").write_text(json.dumps(dict(os.environ)))
    (place / f"{rank}.seed").write_text(str(torch.initial_seed()))


def nothing():
    print("hello", flush=True)


def closes_its_output():
    nothing()
    sys.stdout.close()
    sys.stderr = None


def raises():
    print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    if rank == 0:
        raise ValueError("no such corpus")


@record
def raises_recorded():
    raises()


def exits():
    sys.exit(3 if rank == 0 else 0)


def early():
    """Rank 0 succeeds at once, although its peers use its store for another second."""
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 0:
        return
    store = dist.distributed_c10d._get_default_store()
    for number in range(20):
        store.set(f"late/{rank}/{number}", "here")
        time.sleep(0.05)
    print(f"rank {rank} is done", flush=True)


def saves_at_sigterm():
    """Saves only what its loader process still hands out then."""
    ours, theirs = multiprocessing.Pipe()
    loader = multiprocessing.get_context("fork").Process(target=loads, args=(theirs,), daemon=True)
    loader.start()

    def save(*_):
        time.sleep(0.3)  # a signal to the loader would have arrived by now
        ours.send("more")
        if ours.poll(10.0) and ours.recv() == "data":
            (place / f"saved-{rank}").touch()
        sys.exit(7 * rank)

    signal.signal(signal.SIGTERM, save)
    waits()


def loads(connection):
    while connection.recv():
        connection.send("data")


def ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    waits()


def waits():
    print("ready", flush=True)
    (place / f"ready-{rank}").touch()
    while True:
        time.sleep(0.1)


def hidden():
    importlib.import_module("elastic").init()


if __name__ == "__main__":
    globals()[end]()
