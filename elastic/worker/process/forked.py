"""What a process forked from the zygote does to become a worker."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.process_title import set_worker_title
from elastic.runtime.stack_file import write_stacks_on_signal
from elastic.v1 import local_pb2 as pb
from elastic.worker import session
from elastic.worker.link import Link
from elastic.worker.process.bootstrap import run_script
from elastic.worker.process.children import die_with_parent
from elastic.worker.process.output import outlive_full_disk
from elastic.worker.process.torchrun import run_classic


def become_worker(request: pb.SpawnRequest, parent: int) -> int:
    """Cut the ties to the zygote, then run the script; return the exit code."""
    _redirect_output(request.log_path)  # first: that is where is looked for what goes wrong
    # A group of its own, but the zygote's session: where the kernel schedules by session
    # (sched_autogroup_enabled) members that have one each, as under torchrun, wake each other more
    # slowly: steps take 5% longer with 2 or 3 workers on 2 cores.
    os.setpgid(0, 0)
    die_with_parent(parent)
    adopt_orphans()  # so that it is known whose daemons they are that outlive it
    os.environ.update(request.environment)
    set_worker_title(request.worker, request.argv[0])
    _reseed()
    faulthandler.enable()  # a segmentation fault leaves its stacks in the log
    write_stacks_on_signal()
    lost: list[Callable[[str], None]] = []
    outlive_full_disk(lambda reason: lost.pop()(reason) if lost else None)
    if request.classic:
        return run_classic(request)
    link = Link(request.worker, request.socket_path)
    lost.append(lambda reason: link.notice("output_lost", {"reason": reason}))
    session.use_link(link)
    return run_script(link, list(request.argv), module=request.module)


def _redirect_output(path: str) -> None:
    """A worker that cannot open its log trains all the same, and writes to the zygote's."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # somebody may have tidied up
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        print(f"the log {path} cannot be opened: {error.strerror}", file=sys.stderr, flush=True)
    else:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reseed() -> None:
    """Forks share the zygote's generators; a fresh interpreter would have seeded its own."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
