"""What `elastic run` gives to its workers."""

from __future__ import annotations

import pytest

from elastic.cli.run import worker_environment


def test_workers_inherit_no_secret_of_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_PASSWORD", "hunter2")
    monkeypatch.setenv("ELASTIC_ETCD_USER", "me")
    monkeypatch.setenv("WANDB_API_KEY", "the script's own")
    environment = worker_environment(2, "127.0.0.1", classic=False)
    assert "hunter2" not in environment.values()
    assert environment["ELASTIC_ETCD_USER"] == "me"
    assert environment["WANDB_API_KEY"] == "the script's own"
