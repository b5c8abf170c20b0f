"""Fails in its fourth step: on all ranks, on rank 1 alone, or there only until FILE exists."""

import pathlib
import sys

from toy import Toy

ranks, marker = sys.argv[1], pathlib.Path(sys.argv[2])
toy = Toy()


def fail(step):
    concerned = ranks == "all" or toy.session.rank == 1
    if step.index == 3 and concerned and not marker.exists():
        if ranks == "once":
            marker.touch()
        raise ValueError("bad sample")


toy.train(in_step=fail)
