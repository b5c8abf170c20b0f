"""torch records gloo's collectives and groups only if the script's environment asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from torch._C import _distributed_c10d

from elastic.worker.group import process_group

# A script for a process of its own, because torch reads the setting once.
_GROUPS = """
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _dump_fr_trace_json

from elastic.worker.group.process_group import Backend

backend = Backend.for_slot(0)
for _ in range(3):
    dist.init_process_group(backend.name, store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
print(_dump_fr_trace_json().decode())
"""


def recorded(environment: dict[str, str]) -> dict[str, Any]:
    """Return torch's record of three groups."""
    known = {k: v for k, v in os.environ.items() if k != "TORCH_FR_BUFFER_SIZE"}
    found = subprocess.run(
        [sys.executable, "-c", _GROUPS],
        env={**known, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    record: dict[str, Any] = json.loads(found.stdout)
    return record


@pytest.mark.skipif(
    not hasattr(_distributed_c10d, "_dump_fr_trace_json"), reason="needs a newer torch"
)
@pytest.mark.parametrize(("environment", "groups"), [({}, 0), ({"TORCH_FR_BUFFER_SIZE": "9"}, 3)])
def test_groups_are_recorded_only_if_the_environment_asks_for_it(
    environment: dict[str, str], groups: int
) -> None:
    record = recorded(environment)
    assert len(record["pg_status"]) == groups  # torch never forgets one
    assert len(record.get("entries", ())) == groups


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_buffer_size_that_is_set_is_kept(name: str) -> None:
    environment = {name: "200"}
    process_group.turn_flight_record_off(environment)
    assert environment == {name: "200"}


def test_a_buffer_size_that_is_not_set_becomes_zero() -> None:
    environment = {"PATH": "/bin"}
    process_group.turn_flight_record_off(environment)
    assert environment == {"PATH": "/bin", "TORCH_FR_BUFFER_SIZE": "0"}
