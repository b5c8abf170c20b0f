"""The log of each living worker is known, and the newest logs of ended workers are kept."""

from __future__ import annotations

from pathlib import Path

from elastic.agent.logs import WorkerLogs


def test_the_log_of_a_worker_is_known_while_the_worker_lives() -> None:
    logs = WorkerLogs(Path("/logs"))
    assert logs.begin("a") == Path("/logs/a.log")
    logs.adopt("b", Path("/earlier/b.log"))
    assert [logs.path(w) for w in "abc"] == [Path("/logs/a.log"), Path("/earlier/b.log"), None]
    logs.end("a")
    assert logs.next_stale() is None
    assert ["a" in logs, "b" in logs] == [False, True]


def test_the_newest_logs_are_kept_after_any_number_of_workers(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path, kept=10)
    for number in range(1000):
        logs.begin(f"w{number}").touch()
        logs.end(f"w{number}")
        while (stale := logs.next_stale()) is not None:
            stale.unlink()
    assert {log.stem for log in tmp_path.iterdir()} == {f"w{n}" for n in range(990, 1000)}
    assert len(logs._ended) == 10
    assert not logs._living


def test_the_end_of_an_unknown_worker_is_ignored() -> None:
    logs = WorkerLogs(Path("/logs"), kept=1)
    logs.end("a")
    assert not logs._ended


def test_the_number_of_remembered_logs_is_bounded_if_none_can_be_removed() -> None:
    logs = WorkerLogs(Path("/logs"), kept=10)
    for number in range(1000):
        logs.begin(f"w{number}")
        logs.end(f"w{number}")
    assert len(logs._ended) == 100


def test_a_worker_of_a_node_with_a_long_name_has_a_log(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path)
    one, other = (logs.begin(f"{'n' * 253}-98c0.1-{n}") for n in (1, 2))
    assert one != other
    for path in (one, other):
        path.touch()
        path.with_suffix(".error.json").touch()
