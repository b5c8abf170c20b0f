"""In its sixth step rank 1 calls C code that holds the GIL for ever, unless FILE exists.

It makes FILE first. The C code locks a mutex that the thread already holds: the signal that asks
for stacks does not interrupt that.
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
