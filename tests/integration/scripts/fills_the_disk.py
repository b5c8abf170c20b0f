"""From its eighth step on the disk is full: FILE takes what is left. Arguments: FILE [EPOCHS]"""

import contextlib
import pathlib
import sys

from toy import Toy

filler = pathlib.Path(sys.argv[1])
toy = Toy()


def fill(step):
    if step.index == 7 and toy.session.rank == 0:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


toy.train(epochs=int(sys.argv[2]) if len(sys.argv) > 2 else 2, in_step=fill)
