"""A hang is noticed wherever the script is; the worker is replaced, the time accounted for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic.agent.worker_server import STOPPED_AFTER_S
from tests.integration.running import Place
from tests.job_process import Event, JobProcess
from tests.waiting import eventually

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
    assert "hangs_somewhere.py:" in failed["message"]
    verdict = job.named("hang")[0]
    assert [odd["rank"] for odd in verdict["ranks"]] == [rank]
    assert f"rank {rank} (node local) has not" in verdict["verdict"]
    assert "`hang_at`, hangs_somewhere.py:" in verdict["verdict"]
    incident = job.wait_for_event("incident")
    assert (incident["cause"], incident["outcome"]) == ("hang", "recovered")
    assert verdict["verdict"] in incident["summary"]
    log = Path(failed["log"])  # which a thread of the agent writes
    eventually(lambda: "in hang_at" in log.read_text(), "the stacks of the one that hung")
    check_trains_on(job)
    spent = job.named("job_ended")[0]["slot_seconds"]
    assert spent["hang"] > 2 * LIMIT_S, "of both slots"


WORDS = {
    "data": "loading data, in `__getitem__`, hangs_again.py:",
    "forward": "in the forward pass, in `forward`, hangs_again.py:",
    "lock": "in the forward pass, in `forward`, hangs_again.py:",
    "collective": "in a collective that the others have not entered, in `forward`, hangs_again.py:",
    "between": "between two steps, in hangs_again.py:",
    "call": "in session.run, in `evaluate`, hangs_again.py:",
    "stopped": "is stopped by a signal",
}
AGAIN = 20
NOTICED_S = 2.0  # after the deadline


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", WORDS)
def test_each_verdict_on_a_hang_names_its_rank_and_place(
    place: Place, tmp_path: Path, where: str
) -> None:
    options = (
        *("--hang-timeout-s", "2", "--pause-timeout-s", "2", "--first-step-timeout-s", "2"),
        *("--join-timeout-s", "1", "--stop-grace-s", "5", "--max-restarts", "1000"),
    )
    # After an extra collective the ranks' messages no longer match: a job can hang so only once.
    jobs, times = (AGAIN, 1) if where == "collective" else (1, AGAIN)
    for number in range(jobs):
        flags = tmp_path / f"flags-{number}"
        flags.mkdir()
        with place.start(
            "hangs_again.py", flags, *[where] * times, options=options, nproc=3
        ) as job:
            for hang in range(times):
                check_verdict(job, flags / str(hang), where)


def check_verdict(job: JobProcess, flag: Path, where: str) -> None:
    job.wait_for(flag.exists, f"hang {flag.name}")
    hung_at, rank, _ = flag.read_text().split()
    limit_s = STOPPED_AFTER_S if where == "stopped" else 2.0
    name, text = ("worker_failed", "message") if where == "stopped" else ("hang", "verdict")

    def told() -> list[Event]:
        return [e for e in job.named(name) if e["time"] > float(hung_at)]

    event = job.wait_for(told, f"the verdict on hang {flag.name} ({where})")[0]
    late_s = event["time"] - float(hung_at) - limit_s
    print(f"{where}, rank {rank}: {late_s:.2f} s after the deadline: {event[text]}")
    assert WORDS[where] in event[text]
    if name == "hang":
        assert [odd["rank"] for odd in event["ranks"]] == [int(rank)]
    assert late_s < NOTICED_S
    if where != "collective":
        job.wait_for_event("recovered", after=job.events.index(event))


@pytest.mark.long
def test_a_silent_process_is_replaced_after_the_silence_timeout(
    place: Place, tmp_path: Path
) -> None:
    options = ("--silence-timeout-s", str(LIMIT_S), "--hang-timeout-s", "60", "--stop-grace-s", "5")
    job = place.start("keeps_the_interpreter.py", tmp_path / "silent", options=options)
    failed = job.wait_for_event("worker_failed", kind="left_out")
    assert failed["message"].startswith("did not respond for ")
    assert "in `keep`, keeps_the_interpreter.py:" in failed["message"]
    assert not [e for e in job.named("generation_formed") if e["reason"] == "stalled"]
    check_trains_on(job)


@pytest.mark.long
def test_a_step_that_ends_late_is_slow_and_costs_no_worker(place: Place, tmp_path: Path) -> None:
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
