"""The log of each living worker is known, and its output can be read as long as it lives."""

from __future__ import annotations

import os
from pathlib import Path

from elastic.agent.logs import WorkerLogs
from elastic.runtime.log_writer import output_name
from elastic.v1 import local_pb2 as pb


def test_the_log_of_a_worker_is_known_while_the_worker_lives() -> None:
    logs = WorkerLogs(Path("/logs"))
    assert logs.begin("a") == Path("/logs/a.log")
    logs.forked(pb.Spawned(worker="b", log_path="/earlier/b.log", output="/proc/1/fd/9999"))
    found = [logs.get(worker) for worker in "abc"]
    paths = [log and log.path for log in found]
    assert paths == [Path("/logs/a.log"), Path("/earlier/b.log"), None]
    assert found[1] is not None
    assert found[1].last_lines() == ""
    for worker in "abc":
        logs.end(worker)
    assert not any(worker in logs for worker in "abc")


def test_the_last_words_are_read_from_memory_and_stacks_are_added_there(tmp_path: Path) -> None:
    output = os.memfd_create(output_name("a"))
    os.write(output, b"last words\n")
    logs = WorkerLogs(tmp_path)
    path = str(logs.begin("a"))
    held = f"/proc/{os.getpid()}/fd/{output}"
    log = logs.forked(pb.Spawned(worker="a", log_path=path, output=held))
    log.append("stacks\n")
    assert log.last_lines() == "last words\nstacks"
    os.close(output)
    assert log.last_lines(1) == "stacks"
    logs.end("a")


def test_a_worker_of_an_earlier_version_is_read_from_its_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("last words\n")
    logs = WorkerLogs(tmp_path)
    log = logs.forked(pb.Spawned(worker="a", log_path=str(tmp_path / "a.log")))
    log.append("stacks\n")
    assert log.last_lines() == "last words\nstacks"
    logs.end("a")


def test_a_worker_of_a_node_with_a_long_name_has_a_log(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path)
    one, other = (logs.begin(f"{'n' * 253}-98c0.1-{n}") for n in (1, 2))
    assert one != other
    for path in (one, other):
        path.touch()
        path.with_suffix(".error.json").touch()
