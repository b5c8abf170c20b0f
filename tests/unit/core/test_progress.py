"""How far the job is, and when a step lasts suspiciously long."""

from __future__ import annotations

import pytest

from elastic.core.coordinator.progress import ProgressWatch, StallPolicy


def watch(floor_s: float = 60.0, factor: float = 10.0) -> ProgressWatch:
    return ProgressWatch(StallPolicy(floor_s=floor_s, factor=factor))


def test_the_count_goes_back_only_as_rank_0_says() -> None:
    progress = watch()
    progress.observe(7, 0.0)
    progress.advance(5, 1.0)
    assert progress.committed == 7
    progress.advance(9, 2.0)
    assert progress.committed == 9
    progress.observe(4, 3.0)
    assert progress.committed == 4


@pytest.mark.parametrize(
    ("step_s", "in_step_s", "stuck"),
    [
        (0.0, 0.5, False),  # nothing is known of the usual step: half a second
        (0.0, 0.51, True),
        (0.01, 0.5, False),
        (0.01, 0.51, True),
        (2.0, 2.7, False),  # 1.25 x usual + 0.3 s
        (2.0, 2.9, True),
        (2.0, 0.0, False),  # between steps a script may take its time
    ],
)
def test_a_member_that_waits_for_longer_than_usual_is_stuck(
    step_s: float, in_step_s: float, stuck: bool
) -> None:
    progress = watch()
    progress.probed(step_s=step_s, in_step_s=in_step_s)
    assert progress.stuck is stuck


def test_the_last_answer_counts_and_a_new_group_begins_anew() -> None:
    progress = watch()
    progress.probed(step_s=0.1, in_step_s=9.0)
    progress.probed(step_s=0.1, in_step_s=0.1)
    assert not progress.stuck
    progress.probed(step_s=0.1, in_step_s=9.0)
    progress.regroup()
    assert not progress.stuck


def test_an_answer_that_knows_no_usual_step_keeps_the_one_known() -> None:
    progress = watch()
    progress.observe(5, 0.0, step_s=4.0)
    progress.probed(step_s=0.0, in_step_s=5.0)
    assert not progress.stuck


def test_a_probe_is_no_report_of_rank_0() -> None:
    progress = watch(floor_s=1.0)
    progress.observe(5, 0.0, step_s=0.1, in_step_s=0.0)
    progress.probed(step_s=0.1, in_step_s=50.0)
    assert not progress.stalled
    assert progress.committed == 5


@pytest.mark.parametrize(
    ("floor_s", "in_step_s", "stalled"),
    [(5.0, 5.0, False), (5.0, 5.1, True), (0.5, 1.9, False), (0.5, 2.1, True), (0.0, 99.0, False)],
)
def test_stalled(floor_s: float, in_step_s: float, stalled: bool) -> None:
    progress = watch(floor_s=floor_s)
    progress.observe(1, 0.0, step_s=0.2, in_step_s=in_step_s)
    assert progress.stalled is stalled
    progress.regroup()
    assert not progress.stalled


def test_breaks_in_a_row_without_a_step_between() -> None:
    progress = watch()
    progress.observe(3, 0.0)
    progress.count_break()
    progress.count_break()
    assert progress.fruitless_breaks == 2
    progress.observe(4, 1.0)
    assert progress.fruitless_breaks == 0
    progress.count_break()
    assert progress.fruitless_breaks == 1


def test_the_step_after_a_notice() -> None:
    progress = watch()
    assert progress.step_after(0.35, 9.0) == 1
    progress.observe(10, 1.0, step_s=0.1)
    assert progress.step_after(0.35, 1.0) == 10 + 1 + 4
    assert progress.step_after(0.35, 1.2) == 10 + 1 + 6
    assert progress.step_after(0.35, 99.0) == 10 + 1 + 14  # ten steps old at most
    progress.observe(11, 99.0, step_s=0.001)
    assert progress.step_after(0.35, 99.0) == 11 + 1 + 20
