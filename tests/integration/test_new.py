"""The script that `elastic new` writes trains, also when a worker is killed, and its model can be
exported."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic.cli.main import app
from tests.integration.running import Place


def test_the_new_script_trains_through_a_kill_and_its_model_can_be_exported(
    place: Place, tmp_path: Path
) -> None:
    script, checkpoints = tmp_path / "train.py", tmp_path / "ckpt"
    written = place.elastic("new")
    assert (written.returncode, written.stderr) == (0, "")
    assert "train.py is written" in written.stdout
    job = place.start(script, options=("--checkpoint-dir", checkpoints))
    job.wait_for(lambda: any("epoch 0" in line for line in job.output), "the first epoch")
    job.kill_worker(job.members()[0])
    assert job.wait() == 0, job.story()
    assert len(job.named("worker_failed")) == 1
    last = float([line for line in job.output if "] epoch" in line][-1].split()[-1])
    assert last > 0.9
    file = tmp_path / "model.safetensors"
    told = CliRunner().invoke(
        app, ["export", str(checkpoints), "--name", "model", "--out", str(file)]
    )
    assert told.exit_code == 0, told.output
    assert set(load_file(file)) == {
        f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }
