"""In step 6 rank 1 blocks for good inside of torch, as if gloo waited for the rest of a message.
Argument: FILE. It makes FILE before, and does not block if FILE exists."""

import pathlib
import sys

import torch
import torch.distributed as dist
from toy import Toy

stands = pathlib.Path(sys.argv[1])
toy = Toy(samples=400)
inside_of_torch = str(pathlib.Path(torch.__file__).parent / "waits.py")
exec(compile("import time\n\ndef wait():\n    time.sleep(3600)\n", inside_of_torch, "exec"))


def stand(step):
    if step.index == 6 and dist.get_rank() == 1 and not stands.exists():
        stands.touch()
        wait()  # noqa: F821 - compiled above


toy.train(pace_s=0.02, in_step=stand)
