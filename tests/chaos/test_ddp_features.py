"""DDP's options, hooks, AMP, schedulers and scalers keep working after a change of the group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import problem, records
from tests.chaos.kills import job_of, kill_at_random_steps

SCRIPT = Path(__file__).parent / "scripts" / "ddp_features.py"


@pytest.mark.long
def test_every_ddp_feature_keeps_working_after_a_change_of_the_group(tmp_path: Path) -> None:
    with job_of(SCRIPT, tmp_path, nproc=3) as job:
        kill_at_random_steps(job, tmp_path, seed=1, kills=2)
        assert job.wait() == 0, job.story()
    steps = problem.lineage(tmp_path / "ledger.jsonl")
    problem.check_every_sample_once(steps, epochs=6)
    found = records.read(tmp_path)
    assert records.check_equal_weights(found) > len(steps)
    records.check_nothing_lost(found, job.named("generation_formed"))
    scheduled = {
        (r["step"], r["scheduled"]) for rows in found.values() for r in rows if "scheduled" in r
    }
    assert scheduled == {(s["step"], s["step"] + 1) for s in steps}
