"""Processes set the titles that ps(1) shows."""

from __future__ import annotations

import subprocess
import sys

_SHOW = """
import sys
from pathlib import Path
from elastic.runtime.process_title import set_title, set_worker_title
{call}
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode())
print("MARK=here" in Path("/proc/self/environ").read_bytes().decode().split("\\0"))
import os
print("SPT_NOENV" in os.environ)
"""


def shown(call: str) -> list[str]:
    """The title, whether the environment in /proc is whole, and whether SPT_NOENV is left in it."""
    process = subprocess.run(
        [sys.executable, "-c", _SHOW.format(call=call)],
        capture_output=True,
        text=True,
        check=True,
        env={"MARK": "here", "PYTHONPATH": ":".join(sys.path)},
    )
    return process.stdout.splitlines()


def test_a_process_title_has_role_and_name() -> None:
    assert shown("set_title('agent', 'node-1')") == ["elastic agent node-1", "True", "False"]


def test_a_worker_title_has_name_rank_and_script() -> None:
    call = "set_worker_title('node-1-3', '/home/me/train.py')"
    assert shown(call)[0] == "elastic worker node-1-3: train.py"
    call = "set_worker_title('node-1-3', '/home/me/train.py', 2)"
    assert shown(call)[0] == "elastic worker node-1-3 rank 2: train.py"


def test_an_undecodable_name_is_shown_escaped() -> None:
    assert shown(r"set_title('run', 'a\udcff')")[0] == r"elastic run a\udcff"


def test_a_title_that_is_too_long_leaves_the_environment_whole() -> None:
    title, whole, more = shown("set_title('agent', 'n' * 5000)")
    assert title.startswith("elastic agent nnn")
    assert (whole, more) == ("True", "False")
