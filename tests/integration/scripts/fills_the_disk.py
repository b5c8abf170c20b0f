"""Fills the disk in its eighth step: FILE takes what is left. Arguments: FILE [EPOCHS]

Before that it waits for the background saves to "checkpoints", beside FILE, to be complete."""

import contextlib
import pathlib
import sys
import time

from toy import Toy

filler = pathlib.Path(sys.argv[1])
checkpoints = filler.parent / "checkpoints"
toy = Toy()


def wait_for_saves():
    deadline = time.monotonic() + 60.0
    newest = checkpoints / "step-000000006"
    while not all(
        (saved / "manifest.json").exists() for saved in [newest, *checkpoints.glob("step-*")]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fill(step):
    if step.index == 7 and toy.session.rank == 0:
        wait_for_saves()
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


toy.train(epochs=int(sys.argv[2]) if len(sys.argv) > 2 else 2, in_step=fill)
