"""Ends its process in its third step, with the exit code of a failure or with 0."""

import os
import sys

from toy import Toy

end = {"sys.exit(3)": lambda: sys.exit(3), "os._exit(0)": lambda: os._exit(0)}[sys.argv[1]]


def leave(step):
    if step.index == 2:
        end()


Toy().train(in_step=leave)
