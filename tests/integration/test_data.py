"""Data sets of unusual sizes."""

from __future__ import annotations

import pytest

from tests.integration.running import CONFIGURATION, Place, steps_of


@pytest.mark.parametrize(
    ("samples", "nproc"), [(3, 2), (1, 3)], ids=["less than a batch", "one sample, three workers"]
)
def test_a_data_set_smaller_than_one_batch_trains(place: Place, samples: int, nproc: int) -> None:
    job = place.start("steady.py", "--samples", samples, "--epochs", 3, nproc=nproc)
    assert job.wait() == 0, job.story()
    assert steps_of(job) == [1, 2, 3]


def test_an_empty_data_set(place: Place) -> None:
    job = place.start("steady.py", "--samples", 0)
    assert job.wait() == CONFIGURATION, job.story()
    assert "TensorDataset" in job.named("job_ended")[0]["message"]
