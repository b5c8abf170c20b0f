"""Checkpoints that cannot be written, are damaged, or belong to another model."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.running import CONFIGURATION, FAILED, Place, steps_of, tiny_disk

NOT_SAVED = 84
TERMINATED = 143
EPOCHS = 3  # of six steps with two workers: checkpoints of steps 6, 12 and 18


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with three checkpoints of steady.py. Tests must not change it."""
    files = tmp_path_factory.mktemp("originals")
    checkpoints = files / "checkpoints"
    with contextlib.closing(Place(files)) as place:
        options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "6"]
        job = place.start("steady.py", "--epochs", EPOCHS, options=options)
        assert job.wait() == 0, job.story()
        yield checkpoints


@pytest.fixture
def checkpoints(originals: Path, tmp_path: Path) -> Path:
    """A copy of `originals` that a test may change."""
    return Path(shutil.copytree(originals, tmp_path / "checkpoints"))


def shard(checkpoints: Path, step: int, index: int = 0) -> Path:
    name = f"shard-{index:05}-of-00002-*.safetensors"
    (found,) = (checkpoints / f"step-{step:09}").glob(name)
    return found


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def problems(place: Place, checkpoints: Path) -> dict[str, list[str]]:
    """Return the problems that `elastic checkpoint verify` finds, by step."""
    result = place.elastic("checkpoint", "verify", checkpoints, "--output", "json")
    found: dict[str, list[str]] = json.loads(result.stdout)
    assert result.returncode == (1 if any(found.values()) else 0)
    return found


def test_a_job_resumes_from_the_newest_intact_checkpoint(place: Place, checkpoints: Path) -> None:
    flipped, truncated = shard(checkpoints, 18), shard(checkpoints, 12, index=1)
    flip_a_bit(flipped)
    truncate(truncated)
    found = problems(place, checkpoints)
    assert {step for step, problem in found.items() if problem} == {"18", "12"}

    options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "6"]
    job = place.start("steady.py", "--epochs", EPOCHS, options=options)
    assert job.wait() == 0, job.story()
    newest, older = job.named("checkpoint_damaged")
    assert flipped.name in newest["details"]["reason"]
    assert truncated.name in older["details"]["reason"]
    assert job.named("state_restored")[0]["committed"] == 6
    assert not job.named("checkpoint_abandoned")
    assert steps_of(job) == list(range(7, 19))
    assert problems(place, checkpoints) == {"18": [], "12": [], "6": []}


def test_on_resume_the_checkpoints_rate_wins_and_the_scripts_batch_size(
    place: Place, checkpoints: Path
) -> None:
    arguments = ["--epochs", EPOCHS + 1, "--lr", 0.5, "--show-rate", "--batch-size", 12]
    job = place.start("steady.py", *arguments, options=["--checkpoint-dir", checkpoints])
    assert job.wait() == 0, job.story()
    assert steps_of(job) == [19, 20], "48 samples, 24 a step"
    assert any(line.endswith("] rate 0.1") for line in job.output), job.story()


@pytest.mark.long
def test_a_job_ends_if_all_checkpoints_are_damaged(place: Place, checkpoints: Path) -> None:
    for step in (6, 12, 18):
        truncate(shard(checkpoints, step))
    job = place.start("steady.py", options=["--checkpoint-dir", checkpoints])
    assert job.wait() == CONFIGURATION, job.story()
    message = job.named("job_ended")[0]["message"]
    assert all(f"step-{step:09}" in message for step in (6, 12, 18))
    assert not steps_of(job)
    assert len(list(checkpoints.glob("step-*"))) == 3, "they are evidence"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--features", "5"], ["model.weight", "[1, 4]", "[1, 5]"]),
        (["--name", "network"], ["'model'", "'network'"]),
        (["--optimizer", "Adam"], ["momentum", "betas", "Adam"]),
    ],
    ids=["other shapes", "other names", "another optimizer"],
)
def test_a_checkpoint_of_another_model_ends_the_job_at_once(
    place: Place, checkpoints: Path, arguments: list[str], names: list[str]
) -> None:
    job = place.start("steady.py", *arguments, options=["--checkpoint-dir", checkpoints])
    assert job.wait() == CONFIGURATION, job.story()
    message = job.named("job_ended")[0]["message"]
    assert all(name in message for name in names), message
    assert job.named("worker_failed")[-1]["worker"] in ("local-1", "local-2"), "at once"
    assert not any(problems(place, checkpoints).values())


def test_a_full_disk_does_not_stop_training(place: Place, originals: Path, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", size_kib=256) as disk:
        checkpoints = disk / "checkpoints"
        shutil.copytree(originals / "step-000000006", checkpoints / "step-000000006")
        options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "3"]
        job = place.start("fills_the_disk.py", disk / "filler", options=options)
        assert job.wait() == NOT_SAVED, job.story()
        abandoned = job.named("checkpoint_abandoned")
        assert {event["step"] for event in abandoned} == {9, 12}
        assert all(str(checkpoints) in event["message"] for event in abandoned)
        finished = job.named("job_ended")[0]
        assert (finished["exit_code"], finished["severity"]) == (NOT_SAVED, "error")
        assert finished["committed"] == 12
        assert "No space left" in finished["message"]
        assert "6 steps since the checkpoint of step 6 are not saved" in finished["message"]
        assert problems(place, checkpoints) == {"6": []}


@pytest.mark.long
def test_a_stopped_job_that_cannot_be_saved_says_so(place: Place, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", size_kib=256) as disk:
        checkpoints, filler = disk / "checkpoints", disk / "filler"
        options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "3"]
        options += ["--stop-grace-s", "2"]
        job = place.start("fills_the_disk.py", filler, 100000, options=options)
        job.wait_for_event("checkpoint_abandoned")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == NOT_SAVED, job.story()
        assert len(job.named("save_retried")) == 1
        ended = job.named("job_ended")[0]
        assert ended["exit_code"] == NOT_SAVED
        assert "save within 2 s of: SIGTERM; the last save failed (" in ended["message"]
        assert "No space left" in ended["message"]
        newest = max(saved["step"] for saved in job.named("checkpoint_committed"))
        assert f"since the checkpoint of step {newest} are not saved" in ended["message"]
        filler.unlink()
        assert problems(place, checkpoints) == {"3": [], "6": []}
        left = [path.name for path in checkpoints.glob("step-*/shard-*")]
        assert len(left) == 4, f"parts of what was given up stay on the disk: {left}"


@pytest.mark.long
def test_the_last_save_succeeds_if_space_is_made_in_time(place: Place, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", size_kib=256) as disk:
        checkpoints, filler = disk / "checkpoints", disk / "filler"
        options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "3"]
        job = place.start("fills_the_disk.py", filler, 100000, options=options)
        job.wait_for_event("checkpoint_abandoned")
        job.process.send_signal(signal.SIGTERM)
        retried = job.wait_for_event("save_retried")
        assert "No space left" in retried["message"]
        filler.unlink()
        assert job.wait() == TERMINATED, job.story()
        committed = job.named("job_ended")[0]["committed"]
        assert job.named("checkpoint_committed")[-1]["step"] == committed == retried["step"]
        assert not problems(place, checkpoints)[str(committed)]


def test_checkpoint_ls_shows_damaged_and_unfinished_ones(place: Place, checkpoints: Path) -> None:
    truncate(checkpoints / "step-000000012" / "manifest.json")
    (checkpoints / "step-000000018" / "manifest.json").unlink()
    result = place.elastic("checkpoint", "ls", checkpoints, "--output", "json")
    assert result.returncode == 0
    listed: dict[str, Any] = json.loads(result.stdout)
    assert listed["unfinished"] == [18]
    damaged, intact = listed["checkpoints"]
    assert damaged["step"] == 12
    assert str(checkpoints) in damaged["state"]
    assert (intact["step"], intact["world_size"], intact["epoch"]) == (6, 2, 0)

    table = place.elastic("checkpoint", "ls", checkpoints)
    assert table.returncode == 0
    assert {"6", "12", "18"} <= set(table.stdout.replace(":", " ").split())


def test_verify_of_one_step_names_its_damaged_file(place: Place, checkpoints: Path) -> None:
    flip_a_bit(shard(checkpoints, 12))
    assert place.elastic("checkpoint", "verify", checkpoints, "--step", "18").returncode == 0
    bad = place.elastic("checkpoint", "verify", checkpoints, "--step", "12")
    assert bad.returncode == FAILED
    assert shard(checkpoints, 12).name in bad.stdout
    missing = place.elastic("checkpoint", "verify", checkpoints, "--step", "7")
    assert missing.returncode == CONFIGURATION
    assert all(word in missing.stderr for word in ("7", "18", "12", "6", str(checkpoints)))


@pytest.mark.long
def test_two_jobs_in_one_directory_do_not_take_each_others_checkpoints(
    place: Place, tmp_path: Path
) -> None:
    """The directory was copied with the command. The job that came first cannot save any more."""
    options = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", "5"]
    script = ["steady.py", "--epochs", 1000, "--pace-s", 0.02]
    first = place.start(*script, options=[*options, "--job", "first"], nproc=1)
    first.wait_for_event("checkpoint_committed")
    second = place.start(*script, options=[*options, "--job", "second"], nproc=1)
    second.wait_for_event("checkpoint_committed")
    abandoned = first.wait_for_event("checkpoint_abandoned")
    assert "a run of job second has saved in" in abandoned["message"]
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == NOT_SAVED, first.story()
    assert "job second" in first.named("job_ended")[0]["message"]
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == TERMINATED, second.story()
    saved = second.named("checkpoint_committed")[-1]["step"]
    assert second.named("job_ended")[0]["committed"] == saved
    assert place.elastic("checkpoint", "verify", tmp_path / "checkpoints").returncode == 0
