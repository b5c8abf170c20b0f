"""The reaper collects children that nobody waits for, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

from elastic.runtime.orphans import OrphanReaper, children, is_zombie
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
