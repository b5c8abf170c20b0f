"""What a script sets in os.environ above its `import torch`, after its worker has imported it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from elastic.worker.process.late_variables import LateVariables, told
from tests.unit.worker.together import Seat, in_processes


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the tests change is put back."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(distributed, "init_process_group", distributed.init_process_group)
    monkeypatch.setattr(distributed_c10d, "init_process_group", distributed.init_process_group)
    threads, level = torch.get_num_threads(), distributed.get_debug_level()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    distributed.set_debug_level(level)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"}, 2),  # as a fresh torch has it
        ({"OMP_NUM_THREADS": "2,4"}, 2),  # for nested regions
        ({"OMP_NUM_THREADS": "many"}, 1),
        ({"OMP_NUM_THREADS": "0"}, 1),
        ({"NUMEXPR_NUM_THREADS": "2"}, 1),
    ],
)
def test_a_number_of_threads_is_obeyed(
    variables: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateVariables()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert late.obey() == []
    assert torch.get_num_threads() == threads


def test_the_scripts_own_call_for_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateVariables()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(3)
    assert late.obey() == []
    assert torch.get_num_threads() == 3


def test_the_level_for_debugging_is_obeyed_and_a_wrong_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateVariables()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert late.obey() == []
    assert distributed.get_debug_level() == distributed.DebugLevel.INFO
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG"):
        late.obey()


def test_only_variables_that_were_set_too_late_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    late = LateVariables()
    monkeypatch.setenv("OMP_SCHEDULE", "static")  # as before
    for name in (
        "NCCL_DEBUG",
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
    ):
        monkeypatch.setenv(name, "1")  # read when the group forms
    assert late.obey() == []
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    ignored = late.obey()
    assert ignored == ["OMP_PROC_BIND", "TORCHDYNAMO_VERBOSE"]
    assert all(name in told(ignored) for name in [*ignored, "elastic run"])
    assert late.obey() == []  # they are named once


@in_processes(2)
def test_a_script_for_torchrun_is_obeyed_when_it_forms_its_group(seat: Seat) -> None:
    late = LateVariables()
    late.obey_when_group_forms()
    os.environ.update(TORCH_DISTRIBUTED_DEBUG="INFO", OMP_NUM_THREADS="2", RANK=str(seat.rank))
    host, port = seat.exchange(seat.host.endpoint)[0].split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    distributed.init_process_group("gloo", world_size=2)
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 2.0
    assert torch.get_num_threads() == 2
    assert distributed.get_debug_level() == distributed.DebugLevel.INFO
