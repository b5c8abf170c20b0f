"""A member whose state differs after a loss, unseen, is found before a step of it is committed."""

from __future__ import annotations

from pathlib import Path

from tests.integration.running import Place


def test_a_change_that_nothing_sees_is_found_before_the_next_step_and_undone(
    place: Place, tmp_path: Path
) -> None:
    job = place.start("differs_after_a_loss.py", tmp_path, nproc=4)
    assert job.wait() == 0, job.story()
    reasons = [g["reason"] for g in job.named("generation_formed")]
    assert "group_broken" in reasons, "they had compared all before they began"
    (differed,) = job.named("state_differed")
    assert differed["details"]["names"] == "model.frozen.weight", job.story()
    assert differed["details"]["step"] == "12", job.story()
    assert {each.read_text() for each in tmp_path.glob("sum-*")} == {"0.0"}, job.story()
