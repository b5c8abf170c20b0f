"""A job whose output nobody reads recovers and stops as usual."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place
from tests.job_process import ROOT
from tests.waiting import eventually

STOPPED = 82
DEADLINE_S = 60.0


@contextlib.contextmanager
def unread() -> Iterator[dict[str, Any]]:
    """Pipes that nobody reads, so that they are soon full."""
    ends = [os.pipe() for _ in range(2)]
    yield {"stdout": ends[0][1], "stderr": ends[1][1]}
    for fd in (fd for end in ends for fd in end):
        os.close(fd)


@contextlib.contextmanager
def without_reader() -> Iterator[dict[str, Any]]:
    """Pipes whose reader has ended, as after `| head -1`."""
    ends = [os.pipe() for _ in range(2)]
    for read, _ in ends:
        os.close(read)
    yield {"stdout": ends[0][1], "stderr": ends[1][1]}
    for _, write in ends:
        os.close(write)


@contextlib.contextmanager
def closed() -> Iterator[dict[str, Any]]:
    """Closed standard output and error, as by `>&- 2>&-`."""

    def close() -> None:
        os.close(1)
        os.close(2)

    yield {"preexec_fn": close}


@contextlib.contextmanager
def stopped_terminal() -> Iterator[dict[str, Any]]:
    """A terminal after Ctrl-S: only the kernel's own buffer takes output."""
    master, slave = os.openpty()
    yield {"stdout": slave, "stderr": slave}
    os.close(master)
    os.close(slave)


class Job:
    """`elastic run` of noisy.py, observed only through `elastic status`."""

    def __init__(self, place: Place, streams: dict[str, Any], output: str) -> None:
        self._place = place
        options = ["--output", output, "--console", "all", "--nproc-per-node", "2"]
        options += ["--log-dir", str(place.files / "logs"), "--job", "noisy"]
        command = [sys.executable, "-m", "elastic.cli", "run", *options, str(SCRIPTS / "noisy.py")]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **place.environment},
            start_new_session=True,
            **streams,
        )

    def status(self) -> dict[str, Any]:
        asked = self._place.elastic("status", "--output", "json", "--job", "noisy")
        assert self.process.poll() is None, "it ended"
        return dict(json.loads(asked.stdout)) if asked.returncode == 0 else {}

    def until(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def met() -> bool:
            last.update(self.status())
            return bool(last and condition(last))

        eventually(met, lambda: f"{last}", DEADLINE_S)
        return last


@pytest.mark.parametrize(
    ("streams", "output"),
    [
        pytest.param(unread, "json", id="unread", marks=pytest.mark.long),
        pytest.param(without_reader, "json", id="without a reader", marks=pytest.mark.long),
        pytest.param(closed, "json", id="closed", marks=pytest.mark.long),
        pytest.param(stopped_terminal, "live", id="a stopped terminal", marks=pytest.mark.long),
    ],
)
def test_a_job_whose_output_nobody_reads_recovers_and_stops(
    place: Place, streams: Callable[[], contextlib.AbstractContextManager[Any]], output: str
) -> None:
    with streams() as given:
        job = Job(place, given, output)
        try:
            before = job.until(lambda s: s["progress"]["committed"] >= 20)
            assert before["progress"]["reported"]["event"] == 3.0
            member = before["generation"]["members"][0]["worker"]
            (pid,) = (
                w["pid"] for n in before["nodes"] for w in n["workers"] if w["worker"] == member
            )
            os.kill(pid, signal.SIGKILL)
            after = job.until(
                lambda s: (
                    len(s["generation"]["members"]) == 2
                    and member not in [m["worker"] for m in s["generation"]["members"]]
                    and s["progress"]["committed"] > before["progress"]["committed"] + 20
                )
            )
            assert after["recoveries"][0]["total_s"] < DEADLINE_S
            asked_s = time.monotonic()
            assert place.elastic("stop", "--job", "noisy").returncode == 0
            assert job.process.wait(DEADLINE_S) == STOPPED
            assert time.monotonic() - asked_s < DEADLINE_S
        finally:
            job.process.kill()
            job.process.wait()


@pytest.mark.long
def test_a_full_disk_under_the_events_file_loses_only_events(
    place: Place, etcd: EtcdCluster
) -> None:
    script = (SCRIPTS / "steady.py", "--epochs", "2")
    with LoopbackJob(place, script, etcd=etcd.endpoints()) as job:
        coordinator = job.start_coordinator("--events-file", Path("/dev/full"))
        agent = job.start_agent("a")
        assert agent.wait() == 0, job.story()
        assert coordinator.wait() == 0, job.story()
