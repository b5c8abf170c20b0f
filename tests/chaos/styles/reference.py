"""Runs styles undisturbed, each as a world of one, in forks of a process that has imported torch.

python -m tests.chaos.styles.reference NAME EPOCHS OUT [NAME EPOCHS OUT ...]
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

# A first step imports these. That takes seconds, and the forks share it.
import torch._dynamo.utils
import torch.nn.parallel
import torch.optim  # noqa: F401

import elastic
from tests.chaos.styles import worker


def main() -> int:
    _ = elastic.Session  # imports what it needs, too
    triples = list(zip(*[iter(sys.argv[1:])] * 3, strict=True))
    return max(_fork(name, epochs, Path(out)) for name, epochs, out in triples)


def _fork(name: str, epochs: str, out: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            log = os.open(out / "output.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            worker.main([name, str(out), "--epochs", epochs])
            code = 0
        except BaseException as error:  # noqa: BLE001 - any error ends this fork
            traceback.print_exc()
            code = int(getattr(error, "exit_code", 1))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    (out / "exit_code").write_text(str(code))
    return abs(code)


if __name__ == "__main__":
    sys.exit(main())
