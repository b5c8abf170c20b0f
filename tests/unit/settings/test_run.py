"""The settings of `elastic run`, and their relations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.settings.fields import options_of
from elastic.settings.limits import NodeRange
from elastic.settings.run import RunSettings
from elastic.settings.shared import Console
from tests.unit.settings.loading import load, problems


def test_the_set_of_options_is_frozen() -> None:
    """Before adding to this list, look for an option that can be derived or dropped instead."""
    assert [option.name for option in options_of(RunSettings)] == [
        "script",
        "args",
        "module",
        "nproc_per_node",
        "nnodes",
        "min_workers",
        "spares",
        "max_restarts",
        "restart_window_s",
        "checkpoint_dir",
        "checkpoint_every",
        "keep_checkpoints",
        "ledger",
        "curve",
        "tensorboard",
        "log_dir",
        "keep_logs",
        "console",
        "output",
        "listen",
        "http_address",
        "metrics_address",
        "job",
        "launch",
        "seed",
        "start_timeout_s",
        "join_timeout_s",
        "gather_timeout_s",
        "hang_timeout_s",
        "silence_timeout_s",
        "first_step_timeout_s",
        "pause_timeout_s",
        "hang_factor",
        "straggler_action",
        "stop_grace_s",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "insecure",
    ]


def test_options_describe_their_default_and_variable() -> None:
    options = {option.name: option for option in options_of(RunSettings)}
    assert options["nnodes"].default == "1:1"
    assert options["console"].default == "rank0"
    assert options["restart_window_s"].variable == "ELASTIC_RESTART_WINDOW_S"


def test_world_size_follows_from_nodes_and_processes() -> None:
    settings = RunSettings(nproc_per_node=4, nnodes=NodeRange(2, 3))
    assert (settings.min_world_size, settings.max_world_size) == (2, 12)
    assert dataclasses.replace(settings, min_workers=7).min_world_size == 7


@pytest.mark.parametrize(
    "broken",
    [
        {"nnodes": NodeRange(2, 1)},
        {"nnodes": NodeRange(0, 1)},
        {"min_workers": 2},
        {"min_workers": 0},
    ],
)
def test_contradictory_fields_are_a_programming_error(broken: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        RunSettings(**broken)


@pytest.mark.parametrize(
    ("written", "runs", "size_bytes"),
    [
        ("10", 10, None),
        ("5GB", None, 5 * 10**9),
        ("2.5 GiB", None, 5 * 2**29),
        ("500mb", None, 500 * 10**6),
        ("10,5GB", 10, 5 * 10**9),
        ("1TiB, 7", 7, 2**40),
    ],
)
def test_logs_are_kept_by_number_by_size_or_both(
    written: str, runs: int | None, size_bytes: int | None
) -> None:
    kept = load(RunSettings, {"keep_logs": written}).keep_logs
    assert (kept.runs, kept.size_bytes, str(kept)) == (runs, size_bytes, written)


def test_live_output_excludes_a_json_console() -> None:
    (told,) = problems(RunSettings, {"output": "live", "console": "json"})
    assert "--output live and --console json cannot be used together" in told
    assert load(RunSettings, {"console": "json"}).console is Console.JSON
