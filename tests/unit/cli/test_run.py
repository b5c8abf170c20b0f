"""What `elastic run` gives to its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli.run import Command, _job_options, _node_options, worker_environment
from elastic.settings.run import Launch, RunSettings


def test_workers_inherit_no_secret_of_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_PASSWORD", "hunter2")
    monkeypatch.setenv("ELASTIC_ETCD_USER", "me")
    monkeypatch.setenv("WANDB_API_KEY", "the script's own")
    environment = worker_environment(2, "127.0.0.1", classic=False)
    assert "hunter2" not in environment.values()
    assert environment["ELASTIC_ETCD_USER"] == "me"
    assert environment["WANDB_API_KEY"] == "the script's own"


def test_a_silent_process_and_a_long_step_have_patience_of_their_own(tmp_path: Path) -> None:
    settings = RunSettings(hang_timeout_s=3.0, silence_timeout_s=7.0, launch=Launch.ELASTIC)
    command = Command(settings=settings, argv=["train.py"])
    assert _job_options(settings, None).stall.floor_s == 3.0
    assert _node_options(command, tmp_path, tmp_path).silence_s == 7.0
