"""Calls of session.run are kept until a commit says that nobody needs them again."""

from __future__ import annotations

import pytest

from elastic.errors import GroupLost
from elastic.worker.runs import Runs


def completed(runs: Runs, calls: list[str], *names: str) -> None:
    for name in names:
        runs.completed(lambda name=name: calls.append(name))


def test_calls_are_repeated_from_the_first_that_is_missing() -> None:
    runs, calls = Runs(), []
    completed(runs, calls, "a", "b", "c")
    assert runs.done == 3
    runs.repeat(1)
    assert calls == ["b", "c"]
    runs.repeat(3)
    assert calls == ["b", "c"]
    assert runs.done == 3


def test_a_commit_forgets_them() -> None:
    runs, calls = Runs(), []
    completed(runs, calls, "a")
    runs.forget()
    assert runs.done == 0
    completed(runs, calls, "b")
    runs.repeat(0)
    assert calls == ["b"]


def test_a_newcomer_counts_the_calls_of_others_but_can_not_repeat_them() -> None:
    runs, calls = Runs(), []
    completed(runs, calls, "stale")
    runs.adopt(2)
    assert runs.done == 2
    completed(runs, calls, "c")
    assert runs.done == 3
    runs.repeat(2)
    assert calls == ["c"]
    with pytest.raises(GroupLost):
        runs.repeat(1)
    assert calls == ["c"]
    runs.forget()
    assert runs.done == 0
