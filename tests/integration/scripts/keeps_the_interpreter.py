"""Rank 1 calls C code that keeps the interpreter for ever in its sixth step, once: until FILE.

It locks a mutex that it holds: a signal, by which others ask for stacks, does not end that.
"""

import ctypes
import pathlib
import sys

from toy import Toy

marker = pathlib.Path(sys.argv[1])
toy = Toy()


def keep(step):
    if step.index == 5 and toy.session.rank == 1 and not marker.exists():
        marker.touch()
        mutex, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        c.pthread_mutex_lock(mutex)
        c.pthread_mutex_lock(mutex)


toy.train(epochs=100_000, pace_s=0.02, in_step=keep)
