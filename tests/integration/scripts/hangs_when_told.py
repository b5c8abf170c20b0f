"""Trains until it is stopped. When FOLDER/hang exists, rank 1 removes it and hangs."""

import sys
import time
from pathlib import Path

from torch import nn
from toy import Toy

order = Path(sys.argv[1]) / "hang"


class Net(nn.Linear):
    def forward(self, x):
        if toy.session.rank == 1 and order.exists():
            order.unlink()
            time.sleep(3600)
        return super().forward(x)


toy = Toy(samples=100_000, module=Net(4, 1), batch_size=2)
toy.train(epochs=100, pace_s=0.01)
