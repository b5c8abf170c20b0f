"""The last rank kills itself in a block, in which one other has written to a frozen layer in a way
that nothing sees: through NumPy."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
from torch import nn
from toy import Toy

WIDE, STRUCK_AT, ENDS_AT = 300, 12, 20
killed, changed = Path(sys.argv[1], "killed"), Path(sys.argv[1], "changed")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(4, 1)
        self.frozen = nn.Linear(WIDE, WIDE).requires_grad_(False)

    def forward(self, numbers):
        return self.trained(numbers)


toy = Toy(samples=4000, module=Net())
frozen = toy.model.frozen.weight
built = frozen.double().sum().item()


def first(marker):
    with contextlib.suppress(FileExistsError):
        marker.touch(exist_ok=False)
        return True
    return False


def strike(step):
    rank, world_size = toy.session.rank, toy.session.world_size
    if step.index == STRUCK_AT and rank == 1 and first(changed):
        np.asarray(frozen.detach())[1, 1] += 1.0
    if step.index == STRUCK_AT and rank == world_size - 1 and first(killed):
        os.kill(os.getpid(), signal.SIGKILL)


for step in toy.session.steps(toy.data, epochs=1000):
    with step:
        strike(step)
        for (numbers,) in step.batches():
            step.backward(toy.model(numbers).square().mean())
        toy.optimizer.step()
        toy.optimizer.zero_grad()
    if step.committed and toy.session.committed == ENDS_AT:
        break
Path(sys.argv[1], f"sum-{os.getpid()}").write_text(f"{frozen.double().sum().item() - built}")
