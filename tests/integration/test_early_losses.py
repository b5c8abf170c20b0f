"""Losses in the first steps, in which it is still being learnt what blocks change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.running import Place


@pytest.mark.long
@pytest.mark.parametrize("megabytes", [16, 500])
def test_a_worker_lost_in_each_of_the_first_steps_changes_no_weight(
    place: Place, tmp_path: Path, megabytes: int
) -> None:
    calm, struck = tmp_path / "undisturbed", tmp_path / "struck"
    for directory in (calm, struck):
        directory.mkdir()
    (calm / "calm").touch()
    job = place.start("dies_early.py", calm, str(megabytes), nproc=1)
    assert job.wait() == 0, job.story()
    job = place.start("dies_early.py", struck, str(megabytes), nproc=6)
    assert job.wait() == 0, job.story()
    assert len(list(struck.glob("died-*"))) == 5, job.story()
    truth = torch.load(calm / "weights-0.pt")
    found = [torch.load(path) for path in sorted(struck.glob("weights-*.pt"))]
    assert found, job.story()
    for weights in found:
        assert all(map(torch.equal, weights, found[0])), "members differ"
        for mine, right in zip(weights, truth, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)
