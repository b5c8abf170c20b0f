"""All processes of a node share the page of its lease; no worker trains under another epoch's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from elastic.runtime.training_lease import LAPSE_S, TrainingLease

OTHER = """\
import sys
from elastic.runtime.training_lease import TrainingLease
lease = TrainingLease(int(sys.argv[1]))
own = lease.share()
print("ready", flush=True)
for _ in sys.stdin:
    print(own.holds(), own.is_over(), lease.epoch, lease.valid_until, flush=True)
"""


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.fixture
def lease() -> TrainingLease:
    return TrainingLease.new()


@pytest.fixture
def other(lease: TrainingLease) -> Iterator[subprocess.Popen[str]]:
    """Another process that maps the page, as a worker does."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(lease.descriptor)],
        pass_fds=[lease.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with process:
        yield process
        process.kill()


def seen(other: subprocess.Popen[str]) -> list[str]:
    assert process_has_pipes(other)
    print(file=other.stdin, flush=True)
    return other.stdout.readline().split()  # type: ignore[union-attr]


def process_has_pipes(process: subprocess.Popen[str]) -> bool:
    return process.stdin is not None and process.stdout is not None


def test_another_process_sees_what_the_agent_writes(
    lease: TrainingLease, other: subprocess.Popen[str]
) -> None:
    assert seen(other) == ["False", "False", "1", "None"]
    until = now() + 600.0
    lease.grant(until)
    assert seen(other) == ["True", "False", "1", str(until)]
    lease.grant(now())
    assert seen(other)[:2] == ["False", "False"]
    lease.begin_epoch()
    lease.grant(until)
    assert seen(other) == ["False", "True", "2", str(until)]


def test_the_next_agent_finds_the_page_of_a_process_that_has_it(
    lease: TrainingLease, other: subprocess.Popen[str]
) -> None:
    lease.grant(600.0)
    found = TrainingLease.of_process(other.pid)
    assert found is not None
    assert found.valid_until == 600.0
    found.grant(700.0)
    assert lease.valid_until == 700.0


def test_a_process_without_a_page_or_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert TrainingLease.of_process(process.pid) is None
    finally:
        process.communicate(b"\n")
    assert TrainingLease.of_process(process.pid) is None


def test_a_worker_trains_until_its_lease_lapses_and_again_when_it_is_renewed(
    lease: TrainingLease,
) -> None:
    own = lease.share()
    assert not own.holds()
    lease.grant(now() + 600.0)
    assert own.holds()
    lease.grant(now())
    assert not own.holds()
    assert not own.is_over()
    lease.grant(now() + 600.0)
    assert own.holds()


def test_a_worker_never_trains_under_the_lease_of_a_later_epoch(lease: TrainingLease) -> None:
    lease.grant(now() + 600.0)
    own = lease.share()
    lease.begin_epoch()
    assert not own.holds()
    lease.grant(now() + 600.0)
    assert not own.holds()
    assert own.is_over()
    assert lease.share().holds()


def test_a_lease_is_over_for_good_only_after_it_lapsed_for_a_while(lease: TrainingLease) -> None:
    assert not lease.is_over(now())
    lease.grant(100.0)
    assert not lease.is_over(100.0 + LAPSE_S - 0.01)
    assert lease.is_over(100.0 + LAPSE_S)


def test_a_forked_process_shares_the_page(lease: TrainingLease) -> None:
    pid = os.fork()
    if pid == 0:
        lease.grant(now() + 600.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert lease.share().holds()


def test_the_newest_commit_of_a_node_is_that_of_its_furthest_worker(lease: TrainingLease) -> None:
    one, other = lease.share(), lease.share()
    assert lease.newest_commit == (0, 0)
    one.note_commit(2, 10)
    other.note_commit(2, 9)
    assert lease.newest_commit == (2, 10)
    other.note_commit(5, 3)  # the job has gone back
    assert lease.newest_commit == (5, 3)
