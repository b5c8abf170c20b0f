"""The cost of a kill is computed from the workers' marks, which are hand-written here."""

from __future__ import annotations

import pytest

from benchmarks.kill_figures import kill_figures
from benchmarks.scripts.step_log import BEGIN, COMMIT, Mark


def marks_of(
    pid: int, generation: int, world_size: int, *, steps: range, at_s: float, step_s: float = 0.1
) -> list[Mark]:
    """`pid` trains from `at_s` on; the last step of the range is begun and not committed."""
    group = {"generation": generation, "world_size": world_size, "rank": pid, "pid": pid}
    marks = []
    for number, step in enumerate(steps):
        began_s = at_s + number * step_s
        marks.append(Mark(at_s=began_s, what=BEGIN, step=step, **group))
        if step != steps[-1]:
            marks.append(Mark(at_s=began_s + step_s, what=COMMIT, step=step, **group))
    return marks


def in_time(*workers: list[Mark]) -> list[Mark]:
    return sorted((m for marks in workers for m in marks), key=lambda m: m.at_s)


def test_a_kill_with_survivors_loses_no_step_and_stalls_for_the_replacement() -> None:
    marks = in_time(
        marks_of(1, 1, 3, steps=range(11), at_s=0.0),
        marks_of(2, 1, 3, steps=range(11), at_s=0.0),
        marks_of(3, 1, 3, steps=range(11), at_s=0.0),
        marks_of(1, 2, 2, steps=range(10, 16), at_s=1.2),
        marks_of(2, 2, 2, steps=range(10, 16), at_s=1.2),
        marks_of(1, 3, 3, steps=range(15, 20), at_s=1.9),
        marks_of(2, 3, 3, steps=range(15, 20), at_s=1.9),
        marks_of(4, 3, 3, steps=range(15, 20), at_s=1.9),
    )
    figures = kill_figures(marks, killed_at_s=1.05, workers=3)
    assert figures.usual_step_s == pytest.approx(0.1)
    assert figures.any_step_s == pytest.approx(0.25)
    assert figures.new_step_s == pytest.approx(0.25)
    assert figures.whole_s == pytest.approx(0.95)
    assert figures.rejoin_stall_s == pytest.approx(0.2)
    assert figures.steps_lost == 0
    assert figures.steps_again == 2  # once after the kill, once as the replacement came in


def test_a_kill_with_a_restart_from_a_checkpoint_loses_the_steps_since_it() -> None:
    marks = in_time(
        marks_of(1, 0, 2, steps=range(31), at_s=0.0),
        marks_of(2, 0, 2, steps=range(31), at_s=0.0),
        marks_of(3, 1, 2, steps=range(20, 41), at_s=7.0),
        marks_of(4, 1, 2, steps=range(20, 41), at_s=7.0),
    )
    figures = kill_figures(marks, killed_at_s=3.05, workers=2)
    assert figures.any_step_s == pytest.approx(4.05)
    assert figures.new_step_s == pytest.approx(5.05)
    assert figures.rejoin_stall_s is None
    assert figures.steps_lost == 10
    assert figures.steps_again == 11
