"""Curves keep a whole run, and its dips, in rings of fixed size."""

from __future__ import annotations

import itertools
import math

import pytest

from elastic.core.curves import MOST_VALUES, RUN, Curves, Sample


def sample(step: int = 0, **fields: object) -> Sample:
    base = {"world_size": 3, "wanted": 3, "samples_per_s": 100.0}
    return Sample(step=step, **(base | fields))  # type: ignore[arg-type]


def test_samples_of_one_interval_make_one_point_that_shows_the_dip() -> None:
    curves = Curves()
    curves.add(100.0, sample(1, step_s=0.1, samples_per_s=100.0, values={"loss": 2.0}))
    curves.add(100.5, sample(1, world_size=1, samples_per_s=400.0))
    curves.add(101.9, sample(7, step_s=0.3, samples_per_s=100.0, values={"loss": 1.0}))
    curves.add(102.0, sample(9))
    curve = curves.curve("15m", ahead_s=1000.0)
    assert curve.names == ("loss",)
    assert curve.rows[0] == (1100.0, 7, pytest.approx(0.2), 1, 3, 3, 200.0, 1.0)
    assert curve.rows[1] == (1102.0, 9, None, 3, 3, 3, 100.0, None)
    assert [len(curves.curve(name).rows) for name in curves.ranges] == [2, 1, 1]


def test_a_run_of_three_days_is_kept_whole_in_rings_of_fixed_size() -> None:
    curves, ends_at = Curves(), 3 * 24 * 3600
    for second in range(0, ends_at, 10):
        dips = second == 4000
        curves.add(float(second), sample(second, world_size=1 if dips else 3, step_s=0.1))
    for name in curves.ranges:
        assert 300 < len(curves.curve(name).rows) <= 720, name
    recent, hours, run = (curves.curve(name) for name in curves.ranges)
    assert recent.rows[-1][0] - recent.rows[0][0] >= 14 * 60
    assert hours.rows[-1][0] - hours.rows[0][0] >= 5.9 * 3600
    assert run.rows[0][0] == 0.0
    assert run.rows[-1][0] > ends_at - 2 * run.width_s
    assert min(row[3] or 0 for row in run.rows) == 1, "the dip of the first hour is seen"
    times = [row[0] or 0.0 for row in run.rows]
    assert all(later - earlier == run.width_s for earlier, later in itertools.pairwise(times))


def test_only_finite_values_with_short_names_are_kept_up_to_a_limit() -> None:
    curves = Curves()
    many = {f"value-{n}": float(n) for n in range(10_000)}
    curves.add(1.0, sample(values={"bad": math.nan, "worse": math.inf, "x" * 1000: 1.0, **many}))
    curves.add(3.0, sample(values={"late": 1.0, "value-1": 5.0}))
    curve = curves.curve(RUN)
    assert curve.names == tuple(f"value-{n}" for n in range(MOST_VALUES))
    assert curve.rows[-1][8] == 5.0
    assert len(curve.rows[-1]) == 7 + MOST_VALUES


def test_a_sample_is_added_to_the_newest_point_when_the_clock_goes_back_a_little() -> None:
    curves = Curves()
    curves.add(10.0, sample(5))
    curves.add(7.0, sample(6))
    assert [row[1] for row in curves.curve("15m").rows] == [6]
