"""The group waits for a step that compiles, but not for one that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.running import Place, steps_of
from tests.job_process import WITH_COMPILER

IMPATIENT = ["--hang-timeout-s", "2", "--hang-factor", "1", "--join-timeout-s", "1"]
LONG_S = 6


@pytest.mark.parametrize(
    ("index", "ranks", "what"),
    [
        pytest.param(0, "all", "compile", marks=pytest.mark.long),
        pytest.param(0, "one", "sleep", marks=pytest.mark.long),
        pytest.param(3, "one", "compile", marks=pytest.mark.long),
    ],
)
def test_a_first_or_compiling_step_is_no_hang(
    place: Place, index: int, ranks: str, what: str
) -> None:
    job = place.start(
        "takes_long.py", index, ranks, LONG_S, what, 1, options=IMPATIENT, **WITH_COMPILER
    )
    assert job.wait() == 0, job.story()
    assert [g["reason"] for g in job.named("generation_formed")] == ["started"], job.story()
    assert not job.named("worker_failed")
    usual = job.named("progress")[-1]["step_s"]
    assert usual < 1.0, "a slow step is no usual one"


@pytest.mark.parametrize(
    ("index", "what", "options"),
    [
        pytest.param(3, "load", [], marks=pytest.mark.long),
        pytest.param(3, "sleep", [], marks=pytest.mark.long),
        pytest.param(0, "sleep", ["--first-step-timeout-s", "3"], marks=pytest.mark.long),
        pytest.param(3, "compile", ["--first-step-timeout-s", "3"], marks=pytest.mark.long),
    ],
)
def test_a_step_beyond_its_timeout_is_a_hang(
    place: Place, index: int, what: str, options: list[str]
) -> None:
    options = [*IMPATIENT, *options]
    job = place.start(
        "takes_long.py", index, "one", 1000, what, 1000, options=options, **WITH_COMPILER
    )
    job.wait_for_event("generation_formed", reason="stalled")
    failure = job.wait_for_event("worker_failed", kind="left_out")
    assert "takes_long.py" in Path(failure["log"]).read_text(), "its stacks tell where it hung"
    (verdict,) = job.named("hang")
    told = {"load": "loading data, in `__getitem__`", "sleep": "in `take_long`"}
    assert f"{told.get(what, '')}, takes_long.py:" in verdict["verdict"]
    assert f"in {verdict['ranks'][0]['place'].rpartition('/')[2]}" in failure["message"]


@pytest.mark.long
def test_a_cold_compiler_cache_costs_no_worker_its_place(place: Place, tmp_path: Path) -> None:
    cache = str(tmp_path / "inductor")
    job = place.start(
        "compiles.py", options=IMPATIENT, TORCHINDUCTOR_CACHE_DIR=cache, **WITH_COMPILER
    )
    assert job.wait() == 0, job.story()
    assert [g["reason"] for g in job.named("generation_formed")] == ["started"], job.story()
    assert max(steps_of(job)) == 8
