"""The cgroup's count distinguishes out-of-memory kills from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.agent.zygote_process import OutOfMemory

V1 = "9:name=systemd:/\n4:cpu,memory:/own/group\n0::/\n"
V2 = "0::/own/group\n"


class Cgroup:
    def __init__(self, files: Path, lines: str, counter: str) -> None:
        self.own, self.root = files / "cgroup", files / "fs"
        self.own.write_text(lines)
        self.counter = self.root / counter
        self.counter.parent.mkdir(parents=True)
        self.kill(0)

    def kill(self, count: int) -> None:
        self.counter.write_text(f"oom 7\noom_kill {count}\nunder_oom 0\n")

    def watch(self) -> OutOfMemory:
        return OutOfMemory(self.own, self.root)


@pytest.mark.parametrize(
    ("lines", "counter"),
    [
        (V2, "own/group/memory.events"),
        (V2, "memory.events"),  # a container sees its own cgroup as the root
        (V2, "unified/own/group/memory.events"),
        (V1, "memory/own/group/memory.oom_control"),
        (V1, "memory/memory.oom_control"),
    ],
)
def test_only_kills_since_the_watch_began_count(tmp_path: Path, lines: str, counter: str) -> None:
    cgroup = Cgroup(tmp_path, lines, counter)
    cgroup.kill(3)
    watch = cgroup.watch()
    assert not watch.has_killed(10.0)
    cgroup.kill(4)
    assert watch.has_killed(11.0)


def test_a_kill_of_long_ago_is_not_taken_for_the_current_one(tmp_path: Path) -> None:
    cgroup = Cgroup(tmp_path, V2, "own/group/memory.events")
    watch = cgroup.watch()
    cgroup.kill(1)
    watch.look(10.0)
    assert watch.has_killed(11.0)
    assert not watch.has_killed(100.0)
    cgroup.kill(2)
    assert watch.has_killed(101.0)


@pytest.mark.parametrize("content", ["", "oom_kill", "oom_kill many\n", "\0\xff"])
def test_a_count_that_cannot_be_read_is_no_kill(tmp_path: Path, content: str) -> None:
    cgroup = Cgroup(tmp_path, V2, "own/group/memory.events")
    watch = cgroup.watch()
    cgroup.counter.write_text(content)
    assert not watch.has_killed(1.0)
    cgroup.counter.unlink()
    assert not watch.has_killed(2.0)


def test_without_a_cgroup_no_kill_is_reported(tmp_path: Path) -> None:
    assert not OutOfMemory(tmp_path / "none", tmp_path).has_killed(1.0)
