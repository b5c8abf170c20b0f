"""`StepsClock` measures how long steps take, from commit to commit."""

from __future__ import annotations

import pytest

from elastic.worker import steps_clock
from elastic.worker.compilation import Compilations
from elastic.worker.steps_clock import StepsClock


class Time:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(steps_clock, "time", time)
    return time


def run(clock: StepsClock, time: Time, *durations_s: float, samples: int = 10) -> None:
    for duration_s in durations_s:
        clock.begin()
        time.now += duration_s
        clock.commit(samples)


def test_the_duration_of_steps_is_unknown_before_the_second_commit(time: Time) -> None:
    clock = StepsClock()
    run(clock, time, 5.0)
    assert (clock.step_s, clock.samples_per_s) == (0.0, 0.0)
    run(clock, time, 2.0)
    assert (clock.step_s, clock.samples_per_s) == (2.0, 5.0)


def test_the_usual_duration_follows_changes_slowly(time: Time) -> None:
    clock = StepsClock()
    run(clock, time, 1.0, 1.0, 2.0)
    assert clock.step_s == pytest.approx(1.1)
    assert clock.samples_per_s == pytest.approx(10 - 0.1 * 5)
    run(clock, time, *[2.0] * 100)
    assert clock.step_s == pytest.approx(2.0, rel=1e-3)


def test_the_longest_recent_duration_fades_to_the_usual_one(time: Time) -> None:
    clock = StepsClock()
    assert clock.longest_s == 0.0
    run(clock, time, 1.0, 1.0, 5.0)
    assert clock.longest_s == 5.0
    run(clock, time, 2.0)
    assert 4.9 < clock.longest_s < 5.0
    run(clock, time, *[1.0] * 1000)
    assert clock.longest_s == pytest.approx(1.0, abs=0.01)


def test_a_change_of_group_does_not_count_as_a_usual_step(time: Time) -> None:
    clock = StepsClock()
    run(clock, time, 1.0, 1.0)
    clock.begin()
    clock.interrupt()
    assert clock.in_step_s() == 0.0
    time.now += 1000.0
    run(clock, time, 1.0, 1.0)
    assert clock.step_s == pytest.approx(1.0)


def test_in_step_s_is_the_age_of_the_step_under_way(time: Time) -> None:
    clock = StepsClock()
    assert clock.in_step_s() == 0.0
    clock.begin()
    time.now += 3.0
    assert clock.in_step_s() == 3.0
    clock.commit(1)
    time.now += 3.0
    assert clock.in_step_s() == 0.0


def test_steps_of_zero_duration_do_not_divide_by_zero(time: Time) -> None:
    clock = StepsClock()
    run(clock, time, 0.0, 0.0)
    assert clock.samples_per_s > 0.0


def test_a_step_that_compiles_does_not_count_as_a_usual_step(time: Time) -> None:
    compilations = Compilations()
    clock = StepsClock(compilations)
    run(clock, time, 1.0, 1.0)
    compilations.count += 1
    run(clock, time, 300.0)
    assert (clock.step_s, clock.samples_per_s) == (1.0, 10.0)
    run(clock, time, 2.0)
    assert clock.step_s == pytest.approx(1.1)


def test_a_slow_step_counts_as_at_most_ten_usual_ones(time: Time) -> None:
    clock = StepsClock()
    run(clock, time, 1.0, 1.0, 300.0)
    assert clock.step_s == pytest.approx(1.9)


def test_the_first_step_lasts_until_the_first_commit_in_each_group(time: Time) -> None:
    clock = StepsClock()
    assert clock.first_step
    clock.begin()
    assert clock.first_step
    run(clock, time, 1.0)
    assert not clock.first_step
    clock.interrupt()
    assert clock.first_step


def test_setting_up_a_group_is_timed_like_a_step(time: Time) -> None:
    clock = StepsClock()
    clock.setup_began()
    time.now += 5.0
    assert (clock.under_way_s(), clock.in_step_s(), clock.first_step) == (5.0, 0.0, True)
    clock.setup_ended()
    assert clock.under_way_s() == 0.0  # the script may evaluate for as long as it likes
    clock.begin()
    time.now += 2.0
    assert clock.under_way_s() == clock.in_step_s() == 2.0
    clock.interrupt()
    clock.setup_began()
    time.now += 3.0
    clock.interrupt()
    assert clock.under_way_s() == 0.0


def test_all_samples_and_all_durations_except_of_first_steps_are_counted(time: Time) -> None:
    clock = StepsClock()
    run(clock, time, 5.0, 0.2, 0.2, 40.0)
    clock.begin()
    clock.interrupt()
    clock.given_up += 1
    time.now += 1000.0
    run(clock, time, 1.0, 0.2)
    assert sum(clock.durations.counts) == 4
    assert clock.durations.total == pytest.approx(40.6)
    assert (clock.samples, clock.given_up) == (60, 1)


@pytest.mark.parametrize("beats_since", [False, True])
def test_the_time_of_a_stopped_process_does_not_count_as_step_time(
    time: Time, beats_since: bool
) -> None:
    clock = StepsClock()
    clock.alive()
    clock.begin()
    with clock.waiting():
        time.now += 0.5
        clock.alive()
        time.now += 60.0  # stopped
        if beats_since:
            clock.alive()
            time.now += 0.25
        assert clock.in_step_s() == clock.waiting_s() == (0.75 if beats_since else 0.5)


def test_the_time_of_a_process_that_was_stopped_twice_does_not_count_as_step_time(
    time: Time,
) -> None:
    clock = StepsClock()
    clock.alive()
    clock.begin()
    for stopped_s in (40.0, 0.0, 30.0, 20.0):
        time.now += 0.5
        clock.alive()
        time.now += stopped_s
        clock.alive()
    assert clock.in_step_s() == 2.0


def test_a_long_step_counts_whole_while_the_process_beats(time: Time) -> None:
    clock = StepsClock()
    clock.begin()
    for _ in range(100):
        clock.alive()
        time.now += 0.5
    assert clock.in_step_s() == 50.0


def test_a_step_that_begins_after_a_standstill_counts_whole(time: Time) -> None:
    clock = StepsClock()
    clock.alive()
    time.now += 60.0
    clock.alive()
    clock.begin()
    time.now += 1.0
    assert clock.in_step_s() == 1.0
