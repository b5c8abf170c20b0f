"""The directory of a node stays for its next agent, and only one agent at a time has it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.runtime.run_directory import NodeDirectory, RunDirectory, remove_if_abandoned
from tests.unit.runtime.test_run_directory import runtime

__all__ = ["runtime"]


@pytest.fixture
def directory(runtime: Path) -> Iterator[NodeDirectory]:
    del runtime
    made = NodeDirectory("job", "n1")
    yield made
    made.close()


def test_a_node_directory_is_private_and_stays(runtime: Path, directory: NodeDirectory) -> None:
    assert directory.path.name == "job@n1"
    assert runtime in directory.path.parents
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "start-token").touch()
    directory.close()
    again = NodeDirectory("job", "n1")
    assert again.path == directory.path
    assert (again.path / "start-token").exists()
    again.close()


def test_only_one_agent_at_a_time_holds_a_node_directory(directory: NodeDirectory) -> None:
    with pytest.raises(ConfigurationError, match=r"'n1' of the job 'job' runs.*--node-name"):
        NodeDirectory("job", "n1")
    for job, node in (("job", "n2"), ("other", "n1")):
        NodeDirectory(job, node).close()
    directory.close()
    NodeDirectory("job", "n1").close()


def test_sweeps_leave_a_living_agents_directory(runtime: Path, directory: NodeDirectory) -> None:
    del runtime
    other = RunDirectory("other")
    assert directory.path.exists()
    remove_if_abandoned(directory.path)
    assert directory.path.exists()
    other.remove()


def test_workers_that_outlive_the_agent_keep_the_directory(directory: NodeDirectory) -> None:
    """The workers have inherited the descriptor `hold`."""
    worker = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[directory.hold.fileno()],
    )
    directory.close()
    remove_if_abandoned(directory.path)
    assert directory.path.exists()
    second = NodeDirectory("job", "n1")  # the next agent, while they live
    remove_if_abandoned(directory.path)
    assert directory.path.exists()
    assert worker.stdin is not None
    worker.stdin.close()
    worker.wait()
    remove_if_abandoned(directory.path)
    assert directory.path.exists()  # that agent lives
    second.close()
    remove_if_abandoned(directory.path)
    assert not directory.path.exists()


def test_a_given_parent_directory_is_used(runtime: Path) -> None:
    parent = runtime / "state" / "agents"
    made = NodeDirectory("job", "n1", parent)
    assert made.path == parent / "job@n1"
    made.close()


@pytest.mark.parametrize("has_parent", [True, False])
def test_long_names_give_distinct_paths_fit_for_sockets(runtime: Path, has_parent: bool) -> None:
    parent = runtime / "state" if has_parent else None
    job, node = "j" * 200, "n" * 253
    made = NodeDirectory(job, node, parent)
    other = NodeDirectory(job, "n" * 252 + "m", parent)
    assert made.path != other.path
    assert len(str(made.path / "coordinator.sock")) <= 107
    with pytest.raises(ConfigurationError, match="another agent of the node"):
        NodeDirectory(job, node, parent)
    made.close()
    again = NodeDirectory(job, node, parent)
    assert again.path == made.path
    again.close()
    other.close()


def test_a_parent_that_cannot_be_used_is_refused(runtime: Path) -> None:
    file = runtime / "file"
    file.touch()
    with pytest.raises(ConfigurationError, match=r"cannot use .*file/job@n1.*--state-dir"):
        NodeDirectory("job", "n1", file)
    with pytest.raises(ConfigurationError, match=r"too long a path.*--state-dir"):
        NodeDirectory("job", "n1", runtime / ("x" * 100))


def test_different_jobs_and_nodes_have_different_directories(runtime: Path) -> None:
    del runtime
    one, other = NodeDirectory("a-b", "c"), NodeDirectory("a", "b-c")
    run = RunDirectory("a")
    third = NodeDirectory("a", str(os.getpid()))
    assert len({one.path, other.path, third.path, run.path}) == 4
    for directory in (one, other, third):
        directory.close()
    run.remove()


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(runtime: Path, mode: int) -> None:
    (runtime / "job@n1").mkdir()
    (runtime / "job@n1").chmod(mode)
    with pytest.raises(ConfigurationError, match=r"not private to this user \(owner \d+, mode d"):
        NodeDirectory("job", "n1", runtime)


def test_a_symbolic_link_in_place_of_the_lock_is_refused(runtime: Path) -> None:
    (runtime / "job@n1").mkdir(mode=0o700)
    precious = runtime / "precious"
    precious.write_text("content")
    (runtime / "job@n1" / "agent.lock").symlink_to(precious)
    with pytest.raises(ConfigurationError, match="symbolic link"):
        NodeDirectory("job", "n1", runtime)
    assert precious.read_text() == "content"


def test_a_directory_removed_under_its_agent_is_locked_again(directory: NodeDirectory) -> None:
    (directory.path / "agent.sock").touch()
    assert not directory.is_incomplete("agent.sock")
    hold = directory.hold
    shutil.rmtree(directory.path.parent)
    assert directory.is_incomplete("agent.sock")
    directory.restore()
    assert directory.hold is hold, "others have been given it"
    assert not directory.is_incomplete()
    with pytest.raises(ConfigurationError, match="runs on this machine"):
        NodeDirectory("job", "n1")


def test_a_removed_directory_is_left_to_an_agent_that_took_it(directory: NodeDirectory) -> None:
    shutil.rmtree(directory.path)
    another = NodeDirectory("job", "n1")
    assert directory.is_incomplete()
    with pytest.raises(OSError, match="unavailable"):
        directory.restore()
    assert not another.is_incomplete()
    another.close()
