"""Trains beside a command that is detached twice, as daemons detach themselves."""

import os
import subprocess
import sys

from toy import Toy

toy = Toy()
detached = f"setsid sh -c 'sleep 1000; : daemon-of-{os.getpid()}' &"
subprocess.run(["sh", "-c", detached], check=True)
toy.train(epochs=int(sys.argv[1]), pace_s=0.02)
