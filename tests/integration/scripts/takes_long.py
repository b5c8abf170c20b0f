"""Spends SECONDS in step INDEX, on all ranks or on rank 1 alone: compiles, or sleeps.

Usage: takes_long.py INDEX all|one SECONDS compile|sleep EPOCHS
"""

import sys
import time

import torch
from toy import Toy

index, ranks, seconds, what = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
epochs = int(sys.argv[5])
torch.compile(lambda x: x, backend="eager")(torch.zeros(2))  # imports much, for seconds
toy = Toy()


def slow_backend(graph, _inputs):
    time.sleep(seconds)
    return graph.forward


def take_long(step):
    if step.index != index or (ranks == "one" and toy.session.rank != 1):
        return
    if what == "compile":
        torch.compile(lambda x: x + 1, backend=slow_backend)(torch.zeros(2))
    else:
        time.sleep(seconds)


toy.train(epochs=epochs, pace_s=0.02, in_step=take_long)
