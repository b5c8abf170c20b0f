"""A worker that the kernel kills because memory ran out is replaced, and the cause is told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.running import SCRIPTS, Place
from tests.job_process import DEADLINE_S, ROOT

pytestmark = pytest.mark.long

_LIMIT_BYTES = 2 * 2**30  # a job of two workers takes 0.8 GiB
_IN_CGROUP = 'echo $$ > "$0" && exec "$@"'


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit, below the test's own. Skips the test where none can be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    root = Path("/sys/fs/cgroup")
    for _, controllers, path in lines:
        v1 = "memory" in controllers.split(",")
        if not v1 and controllers != "":
            continue
        place = (root / "memory" if v1 else root) / path.lstrip("/") / f"elastic-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            place.mkdir()
            limit = place / ("memory.limit_in_bytes" if v1 else "memory.max")
            try:
                limit.write_text(str(_LIMIT_BYTES))
                yield place
            finally:
                place.rmdir()
            return
    pytest.skip("no memory cgroup can be made here: it takes root, and a controller that is ours")


def test_a_worker_killed_for_its_memory_is_replaced_and_the_cause_is_told(
    place: Place, cgroup: Path
) -> None:
    command = [sys.executable, "-m", "elastic.cli", "run", "--nproc-per-node", "2"]
    command += ["--output", "json", "--log-dir", str(place.files / "logs")]
    command += [str(SCRIPTS / "takes_all_memory.py"), str(place.files / "mark")]
    done = subprocess.run(
        ["sh", "-c", _IN_CGROUP, str(cgroup / "cgroup.procs"), *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, **place.environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (failed,) = [e for e in events if e["event"] == "worker_failed"]
    assert failed["message"].startswith("was ended by SIGKILL (signal 9): the kernel had no memory")
