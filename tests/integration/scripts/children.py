"""Trains with data loader processes and commands of its own, one of them a session leader."""

import subprocess
import sys

from toy import Toy

toy = Toy(num_workers=2, persistent_workers=True)
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sh", "-c", "sleep 1000; true"], start_new_session=True)
toy.train(epochs=int(sys.argv[1]), pace_s=0.02)
