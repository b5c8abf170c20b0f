"""Fails in its fourth step while FILE does not exist: on all ranks, or on rank 1 alone.
Arguments: all|one|once FILE. With `once`, the failure on rank 1 makes FILE."""

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
