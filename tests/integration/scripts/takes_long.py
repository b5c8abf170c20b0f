"""Spends SECONDS in or below step INDEX, on all ranks or on rank 1 alone.

Usage: takes_long.py INDEX all|one SECONDS WHAT EPOCHS

WHAT: in the block it compiles, sleeps, loads data in another process, waits inside of C code
(`stuck`), or sleeps past the optimizer (`updated`); `below` it sleeps, or in a `call` of
session.run.
"""

import ctypes
import sys
import time

import torch
from toy import Toy

import elastic

index, ranks, seconds, what = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
epochs = int(sys.argv[5])
torch.compile(lambda x: x, backend="eager")(torch.zeros(2))  # its imports take seconds
toy = Toy(num_workers=int(what == "load"))


def slow_backend(graph, _inputs):
    time.sleep(seconds)
    return graph.forward


def is_slow(committed):
    return committed == index and (ranks == "all" or toy.session.rank == 1)


def take_long(step):
    if what not in ("compile", "sleep", "stuck") or not is_slow(step.index):
        return
    if what == "compile":
        torch.compile(lambda x: x + 1, backend=slow_backend)(torch.zeros(2))
    elif what == "sleep":
        time.sleep(seconds)
    elif seconds > 0:  # a lock that its owner takes again: no signal interrupts that
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


def below(committed):
    if what == "below" and is_slow(committed):
        time.sleep(seconds)
    elif what == "call" and committed == index:
        toy.session.run(lambda: is_slow(committed) and time.sleep(seconds))


def updated(step):
    if what == "updated" and is_slow(step.index):
        time.sleep(seconds)


class Samples(torch.utils.data.Dataset):
    """The toy's samples; rank 1's loader process is slow to load those of step INDEX."""

    loaded = 0

    def __len__(self):
        return len(numbers)

    def __getitem__(self, number):
        self.loaded += 1
        if toy.session.rank == 1 and self.loaded > 4 * index:
            time.sleep(seconds)
        return numbers[number]


if what == "load":
    numbers = toy.data.dataset
    toy.data = elastic.DataLoader(Samples(), batch_size=4, num_workers=1)

toy.train(epochs=epochs, pace_s=0.02, in_step=take_long, updated=updated, below=below)
