"""Secrets in a script's arguments are in nothing of a running job that others can read."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.etcd_cluster import free_ports
from tests.integration.running import SCRIPTS, Place, command_line, wait_for_step
from tests.unit.settings.test_masking import ARGUMENTS

SECRET, JOB = "hunter2", ("--job", "secrets")
STEADY = """\
import sys
sys.argv[1:] = ["--epochs", "100000", "--pace-s", "0.02"]
sys.path.insert(0, {folder!r})
import elastic
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""
COMMANDS = (
    ("status",),
    ("status", "--output", "json"),
    ("nodes",),
    ("events",),
    ("incidents", "--output", "json"),
    ("report", "--output", "json"),
    ("stacks",),
    ("explain",),
)


@pytest.mark.long
def test_no_secret_of_an_argument_leaves_the_workers(place: Place, tmp_path: Path) -> None:
    """All ways of tests/unit/settings/test_masking.py at once, after a worker was lost."""
    script, trace = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(STEADY.format(folder=str(SCRIPTS), script=str(SCRIPTS / "steady.py")))
    arguments = [one for way in ARGUMENTS for one in way if one != "--"]
    (port,) = free_ports(1)
    options = ("--http-address", f"127.0.0.1:{port}", "--ledger", tmp_path / "ledger")
    job = place.start(script, *arguments, options=[*options, *JOB])
    wait_for_step(job, 3)
    job.kill_worker(job.members()[0])
    job.wait_for_event("recovered")
    seen = {" ".join(c): _output(place, *c) for c in COMMANDS}
    seen["trace"] = _output(place, "trace", trace) + trace.read_text()
    for path in ("", "metrics", "page/state", "healthz"):
        seen[path] = _page(port, path)
    for pid in place.processes():
        seen[f"title of {pid}"] = command_line(pid)
    seen["its output"] = job.story()
    assert all(seen.values())
    assert any("train.py" in text for where, text in seen.items() if where.startswith("title"))
    assert {where: text for where, text in seen.items() if SECRET in text} == {}


def _output(place: Place, *command: str | Path) -> str:
    done = place.elastic(*command, *JOB)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as answer:
        return answer.read().decode()
