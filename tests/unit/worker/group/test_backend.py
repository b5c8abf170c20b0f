"""Which device and transport a slot gets, and which of torch's settings are refused."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from elastic.errors import ConfigurationError
from elastic.worker.group import process_group
from elastic.worker.group.process_group import Backend
from tests import nccl_manners
from tests.unit.worker.together import GLOO


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Simulate a node with two GPUs; return the list of devices that were made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
@pytest.mark.parametrize("slot", [0, 1, 100])
def test_any_slot_of_a_node_without_gpus_gets_gloo(slot: int) -> None:
    before = dict(os.environ)
    assert Backend.for_slot(slot) == GLOO
    assert dict(os.environ) == {"TORCH_FR_BUFFER_SIZE": "0", **before}


def test_each_slot_gets_a_gpu_of_its_own(two_gpus: list[torch.device]) -> None:
    backends = [Backend.for_slot(slot) for slot in (0, 1)]
    assert [str(b.device) for b in backends] == ["cuda:0", "cuda:1"]
    assert two_gpus == [b.device for b in backends]
    assert all(b.queues and b.aborts for b in backends)


@pytest.mark.usefixtures("two_gpus")
def test_a_slot_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "4,7")
    with pytest.raises(ConfigurationError, match=r"slot 2 .* 2 .*4,7.*--nproc-per-node 2"):
        Backend.for_slot(2)


@pytest.mark.usefixtures("two_gpus")
def test_the_watchdog_is_off_before_nccl_is_used() -> None:
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    Backend.for_slot(0)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_a_script_may_register_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_choose", process_group._choose)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Backend.register(lambda slot: nccl_manners.BACKEND if slot == 3 else GLOO)
    assert Backend.for_slot(3) is nccl_manners.BACKEND
    assert Backend.for_slot(0) is GLOO


def test_turning_the_watchdog_off_keeps_variables_that_are_set() -> None:
    environment = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    process_group.turn_watchdog_off(environment)
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    }


@pytest.mark.parametrize("value", ["1", "2", "3", " 1", "true"])
@pytest.mark.parametrize(
    "name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG"]
)
def test_a_watchdog_that_the_environment_turns_on_is_refused(name: str, value: str) -> None:
    environment = {name: value}
    with pytest.raises(ConfigurationError, match=rf"{name}={value}"):
        process_group.turn_watchdog_off(environment)
    assert environment == {name: value}


@pytest.mark.parametrize("value", ["0", "", " 0 "])
def test_a_watchdog_that_the_environment_turns_off_is_accepted(value: str) -> None:
    process_group.turn_watchdog_off({"NCCL_ASYNC_ERROR_HANDLING": value})


def test_groups_reform_in_place_only_if_torch_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(backend: str) -> None: ...

    def new(backend: str, *, enable_reconfigure: bool = False) -> None: ...

    nccl = Backend(name="nccl", device=torch.device("cuda", 0))
    monkeypatch.setattr(dist, "init_process_group", old)
    assert not GLOO.reforms_in_place
    monkeypatch.setattr(dist, "init_process_group", new)
    assert GLOO.reforms_in_place
    assert not nccl.reforms_in_place


def test_wait_for_device_asks_only_a_device_that_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("synchronize")

    monkeypatch.setattr(torch.cpu, "Event", Event)
    GLOO.wait_for_device()
    assert said == []
    nccl_manners.BACKEND.wait_for_device()
    assert said == ["record", "synchronize"]
