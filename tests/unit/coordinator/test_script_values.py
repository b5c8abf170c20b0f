"""What is no number is told of when it begins to be none."""

from __future__ import annotations

import math

from elastic.coordinator.script_values import ScriptValues
from tests.unit.coordinator.agents import Diary


def test_it_is_told_once_and_again_after_it_was_a_number() -> None:
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


def test_ten_thousand_of_them_are_a_hundred_events() -> None:
    diary = Diary()
    values = ScriptValues(diary.journal)
    for step in range(3):
        values.heard({f"v{n:05}": math.nan for n in range(10_000)}, step)
    assert len(values.not_finite) == 100
    assert len(diary.entries) == 100
