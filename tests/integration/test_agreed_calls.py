"""Workers are killed in session.evaluate and session.on_rank0; the results are those without."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.integration.running import Place


def test_an_evaluation_and_the_work_of_rank_0_survive_the_workers_in_them(
    place: Place, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    options = ("--pause-timeout-s", "1", "--hang-timeout-s", "2")
    job = place.start("dies_in_calls.py", notes, 5, nproc=3, options=options)
    assert job.wait() == 0, job.story()
    assert ["SIGKILL" in e["message"] for e in job.named("worker_failed")] == [True, True]
    assert not job.named("hang")
    assert (notes / "written").read_text().split() == ["0", "0"], "once by each of two workers"
    rows = [line.split(" ", 1) for line in (notes / "evaluated").read_text().splitlines()]
    batches = [tuple(json.loads(samples)) for _, samples in rows]
    done = sorted(sample for batch in {*batches} for sample in batch)
    assert done == [float(n) for n in range(101)]
    again = len(batches) - len({*batches})
    lost = min(Counter(worker for worker, _ in rows).values())
    assert again <= lost, "only what the killed worker had done was done again"
