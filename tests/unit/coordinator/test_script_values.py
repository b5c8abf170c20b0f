"""A script's value that stops being a finite number is recorded."""

from __future__ import annotations

import math

from elastic.coordinator.watch import ScriptValues
from tests.unit.coordinator.agents import Diary


def test_a_value_that_is_not_finite_is_recorded_once_until_it_is_finite_again() -> None:
    diary = Diary()
    values = ScriptValues(diary.journal)
    for step, loss in enumerate((1.0, math.nan, math.nan, math.inf, 2.0, -math.inf)):
        values.heard({"loss": loss, "accuracy": 0.5}, step)
    assert diary.of("loss_not_finite") == [
        {"name": "loss", "value": "nan", "step": 1},
        {"name": "loss", "value": "-inf", "step": 5},
    ]
    assert values.not_finite == ["loss"]
    values.heard({}, 6)
    assert not values.not_finite


def test_ten_thousand_values_that_are_not_finite_are_a_hundred_events() -> None:
    diary = Diary()
    values = ScriptValues(diary.journal)
    for step in range(3):
        values.heard({f"v{n:05}": math.nan for n in range(10_000)}, step)
    assert len(values.not_finite) == 100
    assert len(diary.entries) == 100
