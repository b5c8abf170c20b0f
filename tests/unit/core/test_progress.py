"""ProgressWatch: how far the job is, and when a step lasts suspiciously long."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.core.coordinator.events import ProgressReported
from elastic.core.coordinator.progress import ProgressWatch, StallPolicy


def watch(
    floor_s: float = 60.0,
    factor: float = 10.0,
    first_step_s: float = 600.0,
    pause_s: float = 600.0,
) -> ProgressWatch:
    policy = StallPolicy(floor_s=floor_s, factor=factor, first_step_s=first_step_s, pause_s=pause_s)
    return ProgressWatch(policy)


def test_the_committed_count_goes_back_only_with_a_report_of_rank_0() -> None:
    progress = watch()
    progress.observe(7, 0.0)
    progress.advance(5, 1.0)
    assert progress.committed == 7
    progress.advance(9, 2.0)
    assert progress.committed == 9
    progress.observe(4, 3.0)
    assert progress.committed == 4


@pytest.mark.parametrize(
    ("step_s", "longest_s", "in_step_s", "stuck"),
    [
        (0.0, 0.0, 1.0, False),  # the usual step is unknown: one second
        (0.0, 0.0, 1.01, True),
        (0.01, 0.02, 1.0, False),
        (0.01, 0.02, 1.01, True),
        (2.0, 0.0, 2.7, False),  # 1.25 x usual + 0.3 s: the longest one is unknown
        (2.0, 0.0, 2.9, True),
        (0.1, 2.0, 2.7, False),  # 1.25 x longest + 0.3 s
        (0.1, 2.0, 2.9, True),
        (2.0, 4.0, 0.0, False),  # between steps a script may take its time
    ],
)
def test_a_member_that_waits_for_longer_than_the_longest_recent_step_is_stuck(
    step_s: float, longest_s: float, in_step_s: float, stuck: bool
) -> None:
    progress = watch()
    progress.probed(1, 50.0, step_s=step_s, longest_s=longest_s, in_step_s=in_step_s)
    assert progress.stuck is stuck


def test_only_the_last_probe_counts_and_a_new_group_is_not_stuck() -> None:
    progress = watch()
    progress.probed(1, 50.0, step_s=0.1, in_step_s=9.0)
    progress.probed(1, 50.0, step_s=0.1, in_step_s=0.1)
    assert not progress.stuck
    progress.probed(1, 50.0, step_s=0.1, in_step_s=9.0)
    progress.regroup()
    assert not progress.stuck


def test_a_probe_without_a_usual_step_keeps_the_one_that_is_known() -> None:
    progress = watch()
    progress.observe(5, 0.0, step_s=4.0)
    progress.probed(1, 50.0, step_s=0.0, in_step_s=5.0)
    assert not progress.stuck


def test_a_probe_of_a_member_does_not_stall_the_step_or_change_the_committed_count() -> None:
    progress = watch(floor_s=1.0)
    progress.observe(5, 0.0, step_s=0.1, in_step_s=0.0)
    progress.probed(1, 50.0, step_s=0.1, in_step_s=50.0)
    assert not progress.stalled
    assert progress.committed == 5


@pytest.mark.parametrize(
    ("floor_s", "in_step_s", "stalled"),
    [(5.0, 5.0, False), (5.0, 5.1, True), (0.5, 1.9, False), (0.5, 2.1, True), (0.0, 99.0, False)],
)
def test_a_step_stalls_after_its_timeout(floor_s: float, in_step_s: float, stalled: bool) -> None:
    progress = watch(floor_s=floor_s)
    progress.observe(1, 0.0, step_s=0.2, in_step_s=in_step_s)
    assert progress.stalled is stalled
    progress.regroup()
    assert not progress.stalled


def test_a_committed_step_resets_the_count_of_fruitless_breaks() -> None:
    progress = watch()
    progress.observe(3, 0.0)
    progress.count_break()
    progress.count_break()
    assert progress.fruitless_breaks == 2
    progress.observe(4, 1.0)
    assert progress.fruitless_breaks == 0
    progress.count_break()
    assert progress.fruitless_breaks == 1


def test_the_step_reached_after_a_notice_is_estimated_from_the_usual_step() -> None:
    progress = watch()
    assert progress.step_after(0.35, 9.0) == 1
    progress.observe(10, 1.0, step_s=0.1)
    assert progress.step_after(0.35, 1.0) == 10 + 1 + 4
    assert progress.step_after(0.35, 1.2) == 10 + 1 + 6
    assert progress.step_after(0.35, 99.0) == 10 + 1 + 14  # elapsed time: ten steps at most
    progress.observe(11, 99.0, step_s=0.001)
    assert progress.step_after(0.35, 99.0) == 11 + 1 + 20


@pytest.mark.parametrize(
    ("first_step_s", "in_step_s", "stalled"),
    [
        (600.0, 61.0, False),
        (600.0, 600.0, False),
        (600.0, 601.0, True),
        (0.0, 1e6, False),
        (30.0, 50.0, False),  # no shorter than for any other step
        (30.0, 61.0, True),
    ],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_a_first_or_compiling_step_is_stalled_only_after_a_timeout_of_its_own(
    first_step_s: float, in_step_s: float, stalled: bool, compiles: bool
) -> None:
    progress = watch(first_step_s=first_step_s)
    if compiles:
        progress.compiles(7)
    progress.observe(7, 0.0, step_s=0.2, in_step_s=in_step_s, first_step=not compiles)
    assert progress.stalled is stalled


def test_a_floor_of_0_turns_the_watch_off_for_first_steps_too() -> None:
    progress = watch(floor_s=0.0)
    progress.observe(0, 0.0, in_step_s=1e6, first_step=True)
    assert not progress.stalled


def test_a_step_stays_excused_after_its_compilation_and_the_next_one_is_not() -> None:
    progress = watch(floor_s=5.0)
    progress.observe(7, 0.0, step_s=0.1, in_step_s=4.0)
    progress.compiles(7)
    progress.observe(7, 1.0, step_s=0.1, in_step_s=300.0)
    assert not progress.stalled
    progress.observe(8, 2.0, step_s=0.1, in_step_s=6.0)
    assert progress.stalled


def test_a_member_that_compiles_in_the_next_step_already_excuses_this_one() -> None:
    progress = watch(floor_s=5.0)
    progress.compiles(8)
    progress.observe(7, 0.0, step_s=0.1, in_step_s=300.0)  # sent before that step was committed
    assert not progress.stalled


def test_a_new_group_does_not_inherit_the_excuse_of_a_compilation() -> None:
    progress = watch(floor_s=5.0)
    progress.compiles(7)
    progress.regroup()
    progress.observe(7, 0.0, step_s=0.1, in_step_s=6.0)
    assert progress.stalled


def test_a_member_that_waits_for_one_that_compiles_is_not_stuck() -> None:
    progress = watch()
    progress.compiles(7)
    progress.probed(7, 50.0, step_s=0.1, in_step_s=60.0)
    assert not progress.stuck
    progress.probed(8, 50.0, step_s=0.1, in_step_s=60.0)
    assert progress.stuck


def answer(**said: Any) -> ProgressReported:
    base = {"generation": 1, "committed": 7, "step_s": 0.1, "in_step_s": 0.0, "probed": True}
    return ProgressReported(**(base | {"worker": "b"} | said))


def paused(pause_s: float = 20.0) -> ProgressWatch:
    """Rank 0 has been between two steps since 10 s."""
    progress = watch(pause_s=pause_s)
    progress.observe(7, 10.0, step_s=0.1)
    progress.observe(7, 30.5, step_s=0.1)
    return progress


def test_the_others_are_asked_when_rank_0_has_been_between_steps_for_too_long() -> None:
    progress = watch(pause_s=20.0)
    progress.observe(6, 5.0, step_s=0.1, in_step_s=0.1)
    assert not progress.should_probe(100.0)
    progress.observe(7, 10.0, step_s=0.1)
    progress.observe(7, 20.0, step_s=0.1)
    assert [progress.should_probe(at) for at in (30.0, 30.1)] == [False, True]
    progress.observe(7, 31.0, step_s=0.1, waiting_s=0.5)
    assert not progress.should_probe(100.0)
    progress.observe(7, 40.0, step_s=0.1)
    progress.observe(8, 59.0, step_s=0.1)
    assert [progress.should_probe(at) for at in (79.0, 79.1)] == [False, True]
    assert not paused(pause_s=0.0).should_probe(1e6)


@pytest.mark.parametrize("waits", ["in_step_s", "waiting_s"])
def test_a_member_that_has_waited_too_long_for_rank_0_shows_that_rank_0_hangs(waits: str) -> None:
    progress = paused()
    progress.answered(answer(**{waits: 20.0}), 30.6)
    assert not progress.stalled
    progress.answered(answer(**{waits: 20.1}), 30.7)
    assert progress.stalled
    assert progress.quiet_since(31.0) == 10.0
    progress.regroup()
    assert not progress.stalled
    assert not progress.should_probe(100.0)


def test_rank_0_does_not_hang_while_all_members_are_between_steps() -> None:
    progress = paused()
    progress.answered(answer(), 30.6)
    assert not progress.stalled
    assert progress.quiet_since(1000.0) is None


def test_a_member_that_waits_while_another_compiles_shows_no_hang() -> None:
    progress = paused()
    progress.compiles(7)
    progress.answered(answer(in_step_s=100.0), 110.0)
    assert not progress.stalled


@pytest.mark.parametrize(
    ("quiet_s", "behind", "hangs"),
    [(20.1, 1, True), (19.9, 1, False), (20.1, 0, False)],
)
def test_a_call_hangs_when_all_members_ahead_have_waited_too_long_for_those_behind(
    quiet_s: float, behind: int, hangs: bool
) -> None:
    progress = paused()
    progress.answered(answer(worker="a", collectives=40 - behind, quiet_s=0.1), 31.0)
    progress.answered(answer(worker="b", collectives=40, quiet_s=quiet_s), 31.1)
    assert progress.stalled is hangs
    progress = paused()
    progress.answered(answer(worker="a", collectives=40 - behind, quiet_s=0.1), 31.0)
    progress.answered(answer(worker="b", collectives=40, quiet_s=quiet_s), 36.0)
    assert not progress.stalled, "the first answer is past"


def test_rank_0_that_waits_too_long_for_others_to_come_to_a_call_shows_a_hang() -> None:
    progress = watch(pause_s=20.0)
    progress.observe(7, 30.0, step_s=0.1, waiting_s=20.0)
    assert not progress.stalled
    progress.observe(7, 31.0, step_s=0.1, waiting_s=21.0)
    assert progress.stalled
    assert progress.quiet_since(31.5) == 10.0


def test_quiet_since_tells_since_when_the_group_stands_still() -> None:
    progress = watch()
    progress.observe(7, 10.0, step_s=0.1, in_step_s=0.3)
    assert progress.quiet_since(10.1) is None, "an ordinary step"
    assert progress.quiet_since(11.0) == 9.7
    progress.probed(7, 12.0, step_s=0.1, in_step_s=2.5)
    assert progress.quiet_since(12.0) == 9.5
    progress.observe(8, 13.0, step_s=0.1)
    progress.probed(8, 13.0, step_s=0.1, in_step_s=0.0)
    assert progress.quiet_since(100.0) is None, "between steps a script may take its time"


def test_a_slow_step_is_reported_with_its_duration_once_it_is_over() -> None:
    progress = watch()
    assert progress.observe(6, 9.0, step_s=0.1, in_step_s=0.1) == 0.0
    assert progress.observe(7, 10.0, step_s=0.1, in_step_s=0.2) == 0.0
    assert progress.observe(7, 14.0, step_s=0.1, in_step_s=4.2) == 0.0
    assert progress.observe(8, 15.0, step_s=0.2, in_step_s=0.3) == pytest.approx(4.9)
    assert progress.observe(9, 16.0, step_s=0.2) == 0.0
    second = watch()
    second.observe(1, 10.0, in_step_s=1.4)  # the usual duration is known after this step
    assert second.observe(2, 11.0, step_s=1.5) == 0.0
    assert second.observe(2, 11.2, step_s=1.5, in_step_s=0.1) == 0.0
    first = watch()
    first.observe(7, 10.0, step_s=0.1, in_step_s=5.0, first_step=True)
    assert first.observe(8, 11.0, step_s=0.1) == 0.0, "the first of its group"


@pytest.mark.parametrize(
    ("committed", "lasted_s"),
    [
        (8, 10.2),
        (10, 10.0),  # two more steps took the usual time
        (80, 0.0),  # rank 0's agent was away: most steps took longer than usual
        (107, 0.0),
    ],
)
def test_unreported_steps_do_not_lengthen_a_slow_step(committed: int, lasted_s: float) -> None:
    progress = watch()
    progress.observe(7, 10.0, step_s=0.1, in_step_s=0.2)
    assert progress.under_way == 7
    assert progress.observe(committed, 20.0, step_s=0.1) == pytest.approx(lasted_s)


@pytest.mark.parametrize(
    ("total_s", "lasted_s"), [(50.15, 0.0), (59.9, 9.8), (60.1, 10.0), (0.0, 10.0)]
)
def test_a_pause_of_the_coordinator_does_not_lengthen_a_step(
    total_s: float, lasted_s: float
) -> None:
    progress = watch()
    progress.observe(7, 10.0, step_s=0.1, in_step_s=0.1, steps_total_s=50.0)
    told = progress.observe(9, 20.0, step_s=0.1, steps_total_s=total_s)
    assert told == pytest.approx(lasted_s)


def test_the_last_commit_is_dated_by_the_begin_of_the_step_under_way_or_by_its_report() -> None:
    progress = ProgressWatch(StallPolicy())
    assert progress.last_commit_at(3.0) == 3.0, "nothing is known"
    progress.observe(5, 10.0, step_s=0.1)
    assert progress.last_commit_at(30.0) == 10.0
    progress.observe(6, 20.0, step_s=0.1, in_step_s=0.25)
    assert progress.last_commit_at(30.0) == 19.75
    progress.advance(7, 20.5)
    assert progress.last_commit_at(30.0) == 20.5


@pytest.mark.parametrize(
    ("step_s", "in_step_s", "lags"),
    [
        (0.1, 1.0, False),  # shorter delays are scheduler noise
        (0.1, 1.1, True),
        (1.0, 3.0, False),
        (1.0, 3.1, True),
        (0.0, 9.0, False),  # the usual step is unknown
        (1.0, 61.0, False),  # a hang: members are asked about it separately
    ],
)
def test_members_are_asked_about_a_step_longer_than_three_usual_ones(
    step_s: float, in_step_s: float, lags: bool
) -> None:
    progress = watch()
    progress.observe(4, 100.0, step_s=step_s, in_step_s=in_step_s)
    assert progress.lags_s(100.0) == (in_step_s if lags else 0.0)


@pytest.mark.parametrize("excuse", ["first step", "compiles", "between steps"])
def test_members_are_not_asked_about_a_slow_step_that_is_excused(excuse: str) -> None:
    progress = watch()
    if excuse == "compiles":
        progress.compiles(4)
    in_step_s = 0.0 if excuse == "between steps" else 5.0
    progress.observe(4, 100.0, step_s=0.1, in_step_s=in_step_s, first_step=excuse == "first step")
    assert progress.lags_s(100.0) == 0.0


def test_members_are_asked_about_each_slow_step_once_and_at_most_every_30_s() -> None:
    progress = watch()
    asked = []
    for now, step in [(0.0, 4), (1.0, 4), (2.0, 5), (29.0, 6), (31.0, 6), (32.0, 6), (62.0, 7)]:
        progress.observe(step, now, step_s=0.1, in_step_s=2.0)
        if progress.lags_s(now):
            asked.append(now)
    assert asked == [0.0, 31.0, 62.0]
