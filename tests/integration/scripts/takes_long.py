"""Spends SECONDS in step INDEX, on all ranks or on rank 1 alone: compiles, sleeps, or loads data
in another process.

Usage: takes_long.py INDEX all|one SECONDS compile|sleep|load EPOCHS
"""

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


def take_long(step):
    if what == "load" or step.index != index or (ranks == "one" and toy.session.rank != 1):
        return
    if what == "compile":
        torch.compile(lambda x: x + 1, backend=slow_backend)(torch.zeros(2))
    else:
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

toy.train(epochs=epochs, pace_s=0.02, in_step=take_long)
