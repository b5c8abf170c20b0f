"""Which settings there are, and how they relate."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.settings.run import RunSettings, describe_run_settings


def test_the_set_of_options_is_frozen() -> None:
    """Before adding to this list, look for an option that can be derived or dropped instead."""
    assert [row.name for row in describe_run_settings()] == [
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
        "log_dir",
        "console",
        "output",
        "listen",
        "job",
        "seed",
        "start_timeout_s",
        "join_timeout_s",
        "gather_timeout_s",
        "hang_timeout_s",
        "hang_factor",
        "stop_grace_s",
    ]


def test_every_field_can_be_set() -> None:
    fields = {field.name for field in dataclasses.fields(RunSettings)}
    assert fields - {"nnodes_min", "nnodes_max"} | {"nnodes"} == {
        row.name for row in describe_run_settings()
    }


def test_a_description_is_a_row_for_the_documentation() -> None:
    rows = {row.name: row for row in describe_run_settings()}
    assert rows["nnodes"].default == "1:1"
    assert rows["console"].default == "rank0"
    assert rows["restart_window_s"].environment_name == "ELASTIC_RESTART_WINDOW_S"
    assert all(row.help.endswith(".") and "\n" not in row.help for row in rows.values())


def test_world_size_follows_from_nodes_and_processes() -> None:
    settings = RunSettings(nproc_per_node=4, nnodes_min=2, nnodes_max=3)
    assert (settings.min_world_size, settings.max_world_size) == (2, 12)
    assert dataclasses.replace(settings, min_workers=7).min_world_size == 7


@pytest.mark.parametrize(
    "broken", [{"nnodes_min": 2}, {"nnodes_min": 0}, {"min_workers": 2}, {"min_workers": 0}]
)
def test_contradictory_fields_are_a_programming_error(broken: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        RunSettings(**broken)  # type: ignore[arg-type]
