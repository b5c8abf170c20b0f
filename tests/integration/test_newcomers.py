"""Workers that can never join cost the others only a few changes of the group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.running import CONFIGURATION, Place, steps_of, wait_for_step

ATTEMPTS = 3
ANOTHER = 100  # steps, two seconds or more: time for several newcomers


@pytest.mark.long
def test_newcomers_that_always_fail_are_refused_and_the_others_train_on(
    place: Place, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    job = place.start("refuses_newcomers.py", marker, options=["--max-restarts", "1"], nproc=3)
    wait_for_step(job, 10)
    marker.touch()
    job.kill_worker(job.members()[-1])
    refused = job.wait_for_event("newcomers_refused")
    assert "KeyError" in refused["message"]
    assert "refuses_newcomers.py" in refused["traceback"]
    assert refused["retry_s"] >= 60.0
    job.wait_for_event("recovered", after=job.events.index(refused))
    settled = len(job.named("generation_formed"))
    wait_for_step(job, max(steps_of(job)) + ANOTHER)
    reasons = [g["reason"] for g in job.named("generation_formed")]
    assert len(reasons) == settled, "newcomers were let in all the same"
    assert reasons.count("member_joined") == ATTEMPTS
    # A group may be found broken before the lost member is known: two changes for each failure.
    assert len(reasons) <= 3 + 3 * ATTEMPTS
    assert len(job.named("newcomers_refused")) == 1
    assert len(job.named("worker_failed")) == 1 + ATTEMPTS


@pytest.mark.long
def test_a_newcomer_that_lacks_an_untracked_scheduler_ends_the_job(place: Place) -> None:
    """The newcomer's scheduler makes its second step differ, and all soon compare their states."""
    job = place.start("tracks_no_scheduler.py", nproc=3)
    wait_for_step(job, 10)
    job.kill_worker(job.members()[-1])
    assert job.wait() == CONFIGURATION, job.story()
    (ended,) = job.named("job_ended")
    assert "session.track()" in ended["message"], job.story()
    grown = [g for g in job.named("generation_formed") if g["reason"] == "member_joined"]
    assert ended["committed"] <= grown[-1]["after_step"] + 4, job.story()
