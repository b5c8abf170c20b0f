"""The soak test distinguishes figures that grow from figures that go up and down."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.soak import Series, of_directory, of_process, trend

MINUTES = 10


def series(slope_per_minute: float, noise: float, warm_up: float = 0.0) -> Series:
    """A sample every 5 s; values rise by `warm_up` in the first third."""
    rng = random.Random(1)
    samples = []
    for i in range(MINUTES * 12):
        filled = min(1.0, i / (MINUTES * 4)) * warm_up
        value = 100.0 + filled + slope_per_minute * i / 12 + rng.gauss(0.0, noise)
        samples.append((5.0 * i, value))
    return samples


@pytest.mark.parametrize(
    ("slope_per_minute", "noise", "warm_up", "grows"),
    [
        (0.0, 0.0, 0.0, False),
        (0.0, 3.0, 0.0, False),
        (0.0, 0.2, 50.0, False),  # caches that fill
        (0.5, 0.2, 0.0, True),
        (0.5, 0.0, 50.0, True),
        (-2.0, 0.1, 0.0, False),
        (0.01, 0.0, 0.0, False),  # negligible: less than one in the whole time
    ],
)
def test_growth_is_distinguished_from_noise(
    slope_per_minute: float, noise: float, warm_up: float, grows: bool
) -> None:
    found = trend(series(slope_per_minute, noise, warm_up))
    assert found.grows(1.0) is grows
    assert found.per_hour == pytest.approx(60.0 * slope_per_minute, abs=30.0 * noise + 0.1)


def test_a_single_outlier_is_no_growth() -> None:
    samples = series(0.0, 0.0)
    samples[-1] = (samples[-1][0], 1000.0)
    assert not trend(samples).grows(1.0)


def test_threads_and_descriptors_of_a_process_are_counted() -> None:
    before = dict(of_process(os.getpid()))
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    after = dict(of_process(os.getpid()))
    ends.set()
    thread.join()
    for descriptor in descriptors:
        os.close(descriptor)
    assert after["threads"] == before["threads"] + 1
    assert after["descriptors"] == before["descriptors"] + 5
    assert after["MiB"] > 1.0


def test_files_in_a_directory_are_counted_with_their_size(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(10_240))
    found = dict(of_directory(tmp_path))
    assert found["files"] == 2
    assert found["KiB"] >= 10.0
