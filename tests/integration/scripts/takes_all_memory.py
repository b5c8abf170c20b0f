"""Trains; at step 30 rank 1 takes memory until it is killed, unless MARK exists. It makes MARK.

Usage: takes_all_memory.py MARK
"""

import os
import sys
from pathlib import Path

from toy import Toy

mark = Path(sys.argv[1])
toy = Toy(samples=512)


def take(step):
    if step.index == 30 and toy.session.rank == 1 and not mark.exists():
        mark.touch()
        taken = []
        while True:
            taken.append(os.urandom(2**20) * 64)


toy.train(epochs=3, in_step=take)
