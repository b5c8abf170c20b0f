"""A script that fails or misuses the API ends its job with an exit code and the reason."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.integration.running import (
    CONFIGURATION,
    FAILED,
    SCRIPTS,
    Place,
    all_messages,
    steps_of,
    tracebacks,
)


@pytest.mark.parametrize(
    ("script", "arguments", "names"),
    [
        pytest.param(
            "raises_before_init.py", [], ["ValueError: no such corpus"], marks=pytest.mark.long
        ),
        pytest.param(
            "raises_after_init.py", [], ["ValueError: no such corpus"], marks=pytest.mark.long
        ),
        ("asks_for_its_rank.py", [], ["has not been initialized", "session.steps()"]),
        pytest.param(
            "raises_in_step.py",
            ["all", "no-marker"],
            ["ValueError: bad sample"],
            marks=pytest.mark.long,
        ),
        ("raises_in_step.py", ["one", "no-marker"], ["ValueError: bad sample"]),
        pytest.param("exits.py", ["sys.exit(3)"], ["sys.exit(3)"], marks=pytest.mark.long),
        ("exits.py", ["os._exit(0)"], ["exit code 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_failure_that_repeats_without_progress_ends_the_job(
    place: Place, script: str, arguments: list[str], names: list[str]
) -> None:
    job = place.start(script, *arguments, options=["--min-workers", "2"])
    assert job.wait() == FAILED, job.story()
    (ended,) = job.named("job_ended")
    assert ended["exit_code"] == FAILED
    failures = job.named("worker_failed")
    assert 2 <= len(failures) <= 6, "one round of at most three workers, and another"
    for name in names:
        assert name in ended["message"], job.story()
    if script.startswith("raises"):
        assert f'{SCRIPTS / script}", line ' in tracebacks(job)
    assert any(failure["log"] in ended["message"] for failure in failures)


def test_a_single_failure_of_one_rank_costs_one_restart(place: Place, tmp_path: Path) -> None:
    job = place.start("raises_in_step.py", "once", tmp_path / "failed")
    assert job.wait() == 0, job.story()
    (failure,) = job.named("worker_failed")
    assert failure["kind"] == "exception"
    assert sorted(set(steps_of(job))) == list(range(1, max(steps_of(job)) + 1))


@pytest.mark.parametrize(
    ("script", "names"),
    [
        pytest.param("differs.py", ["ModelMismatch", "model.weight"], marks=pytest.mark.long),
        pytest.param("endless_data.py", ["ConfigurationError", "Stream"], marks=pytest.mark.long),
        ("never_joins.py", ["elastic.init()", "never_joins.py", "--launch torchrun"]),
        pytest.param("never_steps.py", ["session.steps"], marks=pytest.mark.long),
        pytest.param(
            "forgets_backward.py", ["StepMisused", "step.backward"], marks=pytest.mark.long
        ),
        pytest.param("forgets_with.py", ["StepMisused", "with step"], marks=pytest.mark.long),
        pytest.param(
            "adds_a_layer.py",
            ["StepMisused", "Sequential", "new: 2.weight, 2.bias"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_error_that_no_restart_can_fix_ends_the_job_at_once(
    place: Place, script: str, names: list[str]
) -> None:
    job = place.start(script, options=["--launch", "elastic"])
    assert job.wait() == CONFIGURATION, job.story()
    (ended,) = job.named("job_ended")
    for name in names:
        assert name in ended["message"], job.story()
    failed = {failure["worker"] for failure in job.named("worker_failed")}
    assert len(failed) <= 2, "something was tried again"  # any two: the spare may come first


@pytest.mark.long
def test_a_script_that_hangs_before_its_first_step_is_ended_with_its_stacks(place: Place) -> None:
    options = ["--start-timeout-s", "1", "--spares", "0"]
    job = place.start("hangs_before_steps.py", options=options, nproc=1)
    assert job.wait() == FAILED, job.story()
    first, second = job.named("worker_failed")
    assert {first["kind"], second["kind"]} == {"start_timeout"}
    assert "hangs_before_steps.py" in Path(first["log"]).read_text()  # where it hung
    assert "session.steps()" in all_messages(job)


def test_leaving_the_loop_early_finishes_the_job_and_saves_it(place: Place, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    job = place.start("breaks_off.py", options=["--checkpoint-dir", checkpoints])
    assert job.wait() == 0, job.story()
    assert "[rank 0] stopped early" in job.output
    assert job.named("job_finished")[0]["committed"] == 5
    assert [p.name for p in checkpoints.glob("step-*")] == ["step-000000005"], (
        "the result was not kept"
    )


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["raise"]], ids=["ends", "raises"])
def test_files_that_a_script_leaves_open_are_written_as_under_plain_python(
    place: Place, how: list[str]
) -> None:
    ours, plain = place.files / "ours", place.files / "plain"
    job = place.start("leaves_files_open.py", ours, *how, nproc=1, options=["--max-restarts", "0"])
    assert job.wait() == (FAILED if how else 0), job.story()
    place.python(str(SCRIPTS / "leaves_files_open.py"), str(plain), *how)
    assert ours.read_bytes() == plain.read_bytes() != b""
    packed = [gzip.decompress(Path(f"{path}.gz").read_bytes()) for path in (ours, plain)]
    assert packed[0] == packed[1] != b""
