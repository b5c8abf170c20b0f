"""Collectors of logs get lines that name their job, and old logs do not pile up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.integration.running import Place

GONE = 2**22 + 1  # above every process id
WHOSE = {"job": "job", "run": "default", "node": "local"}


def test_each_line_is_json_that_names_its_job_and_old_logs_are_removed(place: Place) -> None:
    logs = place.files / "logs"
    earlier = [logs / f"job-2026010{n}-000000-{GONE}" for n in range(1, 6)]
    for directory in earlier:
        directory.mkdir(parents=True)
        (directory / "zygote.log").touch()
    options = ["--console", "json", "--keep-logs", "3"]
    job = place.start("steady.py", "--epochs", 1, options=options)
    assert job.wait() == 0, job.story()
    assert job.messages == []
    assert job.output
    for line in [*map(json.loads, job.output), *job.events]:
        assert line.items() >= WHOSE.items(), line
        assert line["severity"] in ("info", "warning")
        assert line["time"] > 1e9
    assert {json.loads(line)["event"] for line in job.output} == {"worker_output"}
    assert {json.loads(line)["rank"] for line in job.output} <= {0, 1, None}
    present = Path(job.named("job_started")[0]["log_dir"])
    assert set(logs.iterdir()) == {present, *earlier[3:]}
    (removed,) = job.named("logs_removed")
    assert removed["directories"] == 3
    shutil.rmtree(logs)
