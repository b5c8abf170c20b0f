"""Rank 1 blocks for ever in its sixth step, unless FILE exists; it makes FILE first."""

import pathlib
import sys
import threading

from toy import Toy

marker = pathlib.Path(sys.argv[1])
toy = Toy()


def block_for_ever(step):
    if step.index == 5 and toy.session.rank == 1 and not marker.exists():
        marker.touch()
        threading.Event().wait()


toy.train(epochs=100_000, pace_s=0.02, in_step=block_for_ever)
