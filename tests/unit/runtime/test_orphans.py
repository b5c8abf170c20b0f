"""The reaper collects children that nobody waits for, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elastic.runtime.orphans import OrphanReaper, children, end_marked, is_zombie
from tests.waiting import eventually

_DEADLINE_S = 10.0


def ended_child() -> int:
    """The pid of a child that has ended and that nobody has waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    eventually(lambda: is_zombie(pid), deadline_s=_DEADLINE_S)
    return pid


def test_a_child_that_nobody_waits_for_is_collected_at_the_second_reap() -> None:
    reaper, pid = OrphanReaper(), ended_child()
    reaper.reap()
    assert is_zombie(pid)

    def collected() -> bool:
        reaper.reap()  # /proc may leave out children while others end (proc(5))
        return pid not in children()

    eventually(collected, deadline_s=_DEADLINE_S)


def test_a_child_that_somebody_waits_for_keeps_its_exit_code() -> None:
    reaper, pid = OrphanReaper(), ended_child()
    reaper.reap()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    reaper.reap()


def test_living_children_are_left_alone() -> None:
    reaper = OrphanReaper()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    orphan = ended_child()

    def collected() -> bool:
        reaper.reap()
        return orphan not in children()

    eventually(collected, deadline_s=_DEADLINE_S)
    assert living.poll() is None
    living.communicate(b"\n")
    assert living.returncode == 0


def test_reaping_without_children_does_nothing() -> None:
    OrphanReaper().reap()


_CLEANS = """
def main(file):
    input_ended = sys.stdin.read()
    time.sleep(0.2)
    open(file, "w").close()

import sys, time  # as multiprocessing starts its own: resource_tracker import main;
main(sys.argv[1])
"""


def test_a_helper_that_removes_shared_memory_may_end_its_work(tmp_path: Path) -> None:
    """It begins when the other processes, which hold its pipe, are gone."""
    cleaned, mark = tmp_path / "cleaned", str(tmp_path)
    environment = {**os.environ, "MARK": mark}
    cleans = [sys.executable, "-c", _CLEANS, str(cleaned)]
    cleaner = subprocess.Popen(cleans, stdin=subprocess.PIPE, env=environment)
    assert cleaner.stdin is not None
    user = subprocess.Popen(["sleep", "1000"], stdout=cleaner.stdin, env=environment)
    cleaner.stdin.close()
    assert end_marked("MARK", mark) == []
    assert cleaned.exists()
    user.wait()
    cleaner.wait()
