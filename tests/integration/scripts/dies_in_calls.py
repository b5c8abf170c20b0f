"""Three workers train the toy. After step 2 rank 0 takes its time in session.on_rank0, after step 4
one of them is killed in an evaluation, after step 8 rank 0 in session.on_rank0.

Usage: dies_in_calls.py DIRECTORY EPOCHS
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from toy import Toy

directory, epochs = Path(sys.argv[1]), int(sys.argv[2])
toy = Toy()
session = toy.session
held_out = TensorDataset(torch.arange(101.0, dtype=torch.float64))


def note(name, text):
    """Append a line with one write, which survives a kill."""
    with (directory / name).open("a", buffering=1) as file:
        file.write(f"{text}\n")


def die_once(name):
    try:
        (directory / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def look(batch):
    if session.committed == 4:
        if session.rank == 1 and batch[0][0] > 40:
            die_once("died in the evaluation")
        note("evaluated", f"{os.getpid()} {batch[0].tolist()}")
    return {"mean": batch[0].mean(), "of": (batch[0].sum(), 0.0)}


def write():
    note("written", session.rank)
    die_once("died as rank 0")
    return {"committed": session.committed}


def below(committed):
    if committed == 2:  # longer than members may keep each other waiting
        session.on_rank0(time.sleep, 3)
    if committed % 4 == 0 and session.committed:
        found = session.evaluate(look, held_out, batch_size=7)
        assert found["mean"] == 50.0, found
    if committed == 8:
        assert session.on_rank0(write) == {"committed": 8}
    ranks = session.gather(session.rank)
    assert ranks == list(range(session.world_size)), ranks
    assert session.mean(session.rank) == (session.world_size - 1) / 2


toy.train(epochs=epochs, pace_s=0.02, below=below)
