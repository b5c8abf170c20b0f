"""A worker that hangs is noticed wherever its script is, replaced, and the time accounted for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.running import Place
from tests.job_process import JobProcess

pytestmark = pytest.mark.timeout(240)

LIMIT_S, JOIN_S = 3.0, 2.0
OPTIONS = (
    *("--hang-timeout-s", str(LIMIT_S), "--pause-timeout-s", str(LIMIT_S)),
    *("--first-step-timeout-s", str(LIMIT_S), "--join-timeout-s", str(JOIN_S)),
    *("--stop-grace-s", "5"),
)
PLACES = ("block", "between", "call", "before")
ALL = [(place, rank) for place in PLACES for rank in (0, 1)]
IN_EVERY_RUN = {("between", 0)}


@pytest.mark.parametrize(
    ("where", "rank"),
    [p if p in IN_EVERY_RUN else pytest.param(*p, marks=pytest.mark.long) for p in ALL],
)
def test_a_hang_is_noticed_and_accounted_for(
    place: Place, tmp_path: Path, where: str, rank: int
) -> None:
    flag = tmp_path / "hangs"
    job = place.start("hangs_somewhere.py", where, rank, flag, options=OPTIONS)
    recovered = job.wait_for_event("recovered")
    hung_at, back_at = float(flag.read_text()), recovered["time"]
    stalled = next(
        e
        for e in job.named("generation_formed")
        if e["time"] > hung_at and e["reason"] in ("stalled", "join_timed_out")
    )
    print(
        f"{where}, rank {rank}: noticed {stalled['time'] - hung_at - LIMIT_S:.2f} s too late, "
        f"accounted {recovered['total_s']:.2f} of {back_at - hung_at:.2f} s"
    )
    assert recovered["total_s"] > LIMIT_S
    phases = ("detect_s", "persist_s", "notify_s", "join_s", "sync_s", "first_step_s")
    assert sum(recovered[p] for p in phases) == pytest.approx(recovered["total_s"], abs=0.01)
    failed = job.wait_for_event("worker_failed")
    assert failed["kind"] == "left_out"
    log = Path(failed["log"]).read_text()
    assert "in hang_at" in log, "the stacks of the one that hung"
    check_trains_on(job)
    spent = job.named("job_ended")[0]["slot_seconds"]
    assert spent["hang"] > 2 * LIMIT_S, "of both slots"


@pytest.mark.long
def test_a_process_that_says_nothing_is_replaced_after_a_patience_of_its_own(
    place: Place, tmp_path: Path
) -> None:
    options = ("--silence-timeout-s", str(LIMIT_S), "--hang-timeout-s", "60", "--stop-grace-s", "5")
    job = place.start("keeps_the_interpreter.py", tmp_path / "silent", options=options)
    failed = job.wait_for_event("worker_failed", kind="left_out")
    assert failed["message"].startswith("was silent for ")
    assert not [e for e in job.named("generation_formed") if e["reason"] == "stalled"]
    check_trains_on(job)


@pytest.mark.long
def test_a_step_that_comes_to_its_end_after_all_is_told(place: Place, tmp_path: Path) -> None:
    options = ("--stop-grace-s", "5")
    job = place.start("hangs_somewhere.py", "block", 1, tmp_path / "hangs", 2, options=options)
    slow = job.wait_for(
        lambda: [e for e in job.named("step_was_slow") if e["lasted_s"] > 1.9], "a slow step"
    )
    assert slow[0]["usual_s"] < 1.0
    assert not job.named("worker_failed")
    check_trains_on(job)


def check_trains_on(job: JobProcess) -> None:
    committed = job.named("recovered")[-1]["committed"] if job.named("recovered") else 0
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.story()
    assert job.named("job_ended")[0]["committed"] > committed
