"""Workers are counted by the processors and GPUs that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.runtime.devices import hidden_gpus, usable_cpus, visible_gpus


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def cgroup(folder: Path, line: str, files: dict[str, str]) -> tuple[Path, Path]:
    """The process's cgroup file, and a root with these files."""
    own, root = folder / "cgroup", folder / "root"
    own.write_text(line + "\n")
    root.mkdir()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return own, root


V1 = "4:cpu,cpuacct:/job"


@pytest.mark.parametrize(
    ("line", "files", "cpus"),
    [
        ("0::/", {}, 16),
        ("0::/job", {"job/cpu.max": "max 100000"}, 16),
        ("0::/job", {"job/cpu.max": "400000 100000"}, 4),
        ("0::/job", {"job/cpu.max": "250000 100000"}, 2),
        ("0::/job", {"job/cpu.max": "50000 100000"}, 1),
        ("0::/slice/job", {"slice/cpu.max": "300000 100000", "slice/job/cpu.max": "max 100000"}, 3),
        ("0::/on/the/host", {"cpu.max": "200000 100000"}, 2),
        ("0::/job", {"job/cpu.max": "no quota"}, 16),
        (V1, {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 16),
    ],
)
def test_the_quota_of_a_cgroup_limits_the_processors(
    tmp_path: Path, line: str, files: dict[str, str], cpus: int
) -> None:
    assert usable_cpus(*cgroup(tmp_path, line, files)) == cpus


UUIDS = ["GPU-1a2b0000-0000", "GPU-1a2c0000-0000", "GPU-ffff0000-0000"]


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a machine with three GPUs."""
    devices, driver = tmp_path / "dev", tmp_path / "gpus"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (devices / name).touch()
    for number, uuid in enumerate(UUIDS):
        place = driver / f"0000:0{number}:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text(f"Model: \t x\nGPU UUID: \t {uuid}\n")
    return devices, driver


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("none", 0),
        ("1", 1),
        ("2, 0", 2),
        ("0,7,1", 1),
        ("0,-1,1", 1),
        ("9", 0),
        ("1,1", 0),
        (UUIDS[2], 1),
        (f"{UUIDS[0]},{UUIDS[2]}", 2),
        ("GPU-1a2b,GPU-1a2c", 2),
        ("GPU-1a2,GPU-ffff", 0),
        ("GPU-ffff,GPU-0000", 1),
        ("GPU-ffff,GPU-ffff", 0),
        ("MIG-4e1c,MIG-99aa", 1),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    machine: tuple[Path, Path], visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(*machine) == count
    assert (repr(visible) in hidden_gpus()) is (visible is not None)


def test_names_of_gpus_are_believed_where_the_driver_tells_none(
    machine: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert visible_gpus(machine[0], tmp_path / "missing") == 2
