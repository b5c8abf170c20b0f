"""Counts the processors and GPUs that this process may use."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NUMBER = re.compile(r"[+-]?\d+")


def usable_cpus(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """The processors of this process's affinity, or as many as the quota of its cgroup and of
    those above it is worth, rounded down; at least 1."""
    quotas = (quota for quota in _quotas(own, root) if quota > 0.0)
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quotas(own: Path, root: Path) -> Iterator[float]:
    """Yield the processors that each cgroup allows, v2 and v1. In a container the path in /proc may
    be the host's, while only the process's own cgroup is mounted."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v1 = "cpu" in controllers.split(",")
        if not is_v1 and controllers:
            continue
        mount = root / "cpu" if is_v1 else root
        place = mount / path.lstrip("/")
        for folder in {mount, place, *(p for p in place.parents if mount in p.parents)}:
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                if is_v1:
                    quota = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                else:
                    quota, period = (folder / "cpu.max").read_text().split()  # "max": no quota
                yield int(quota) / int(period)


def visible_gpus(
    devices: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia/gpus")
) -> int:
    """How many NVIDIA GPUs CUDA shows to this process, without torch, which takes seconds to
    import. CUDA_VISIBLE_DEVICES is read as CUDA does: the list ends at the first name that is no
    device, and a repeated name makes it empty. Of MIG devices a process sees one."""
    count = len([d for d in os.listdir(devices) if d.removeprefix("nvidia").isdigit()])
    names = os.environ.get(_VISIBLE)
    if names is None:
        return count
    words = [word.strip() for word in names.split(",")]
    if words[0].startswith("MIG-"):
        return min(count, 1)
    if words[0].startswith("GPU-"):
        return min(count, _named(words, list(_uuids(driver))))
    return _numbered(words, count)


def hidden_gpus() -> str:
    """Why no GPU is visible although there may be some; empty if nothing hides them."""
    names = os.environ.get(_VISIBLE)
    return "" if names is None else f"{_VISIBLE} is {names!r}"


def _numbered(words: list[str], count: int) -> int:
    seen: list[int] = []
    for word in words:
        found = _NUMBER.match(word)
        number = int(found[0]) if found else -1
        if number in seen:
            return 0
        if not 0 <= number < count:
            break
        seen.append(number)
    return len(seen)


def _named(words: list[str], uuids: list[str]) -> int:
    """Names may be shortened to a unique beginning. Without known ids, all names are believed."""
    seen: list[str] = []
    for word in words:
        matches = [uuid for uuid in uuids if uuid.startswith(word)] if uuids else [word]
        if not word.startswith("GPU-") or len(matches) != 1:
            break
        if matches[0] in seen:
            return 0
        seen.append(matches[0])
    return len(seen)


def _uuids(driver: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for folder in sorted(driver.iterdir()):
            for line in (folder / "information").read_text().splitlines():
                if line.startswith("GPU UUID:"):
                    yield line.partition(":")[2].strip()
