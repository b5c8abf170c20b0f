"""Changes by a `session.run` call outside of blocks are undone when its group is lost."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from elastic.worker.state.cells import TorchGenerator
from tests.unit.worker.state.undoing import Action, Script, add, layer, nothing
from tests.unit.worker.trees import same


class Calls:
    """A job that swaps averaged weights in to evaluate between two steps."""

    def __init__(self) -> None:
        self.model, self.average = layer(), layer()
        self.job = Script(model=self.model, average=self.average)
        self.job.learn()
        self.values = self.job.state.values

    def call(self, change: Action, *, lost: bool, place: str = "train.py:9") -> bool:
        """Make a call that runs `change`. Returns whether the call was undone."""
        undo, before = self.job.undo, self.job.everything()
        undo.begin_call(place)
        with undo.watch_call(place):
            change()
        if not lost:
            undo.end_call(place)
            return False
        undone = undo.put_back_call()
        if undone:
            assert same(self.job.everything(), before)
        return undone

    def swap_in(self) -> None:
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), self.average.parameters(), strict=True):
                mine.copy_(other)

    def swap_in_data(self) -> None:
        """Many hand-written averages do so; version counters do not show it."""
        for mine, other in zip(self.model.parameters(), self.average.parameters(), strict=True):
            mine.data.copy_(other.data)

    def count(self) -> None:
        self.values["evaluations"] = self.values.get("evaluations", 0) + 1

    def register(self) -> None:
        self.model.register_buffer("evaluated", torch.ones(2))


@pytest.mark.parametrize("change", ["swap_in", "swap_in_data", "count", "register"])
@pytest.mark.parametrize("earlier", [0, 3])
def test_changes_of_a_lost_call_are_undone(change: str, earlier: int) -> None:
    calls = Calls()
    for _ in range(earlier):
        calls.call(nothing, lost=False)
        calls.job.undo._calls["train.py:9"].at_s -= 100.0  # as if the calls were rare
    assert calls.call(getattr(calls, change), lost=True)
    assert calls.job.undo.holds_commit, "the signs are those of the commit again"


def test_a_frequent_call_copies_only_what_it_changes() -> None:
    calls = Calls()
    undo = calls.job.undo
    for _ in range(3):
        calls.call(calls.swap_in, lost=False)
    undo._calls["train.py:9"].copy_s = 1000.0
    undo.begin_call("train.py:9")
    assert undo._call is not None
    assert [undo._large[i].name for i in undo._call.large] == ["model"]
    calls.swap_in()
    assert undo.put_back_call()


def test_an_unexpected_change_in_a_frequent_call_is_reported_as_not_undone() -> None:
    calls = Calls()
    for _ in range(2):
        calls.call(nothing, lost=False)
    calls.job.undo._calls["train.py:9"].copy_s = 1000.0
    assert not calls.call(calls.swap_in, lost=True)


def test_weights_that_frequent_calls_swap_unseen_and_swap_back_are_put_back() -> None:
    calls = Calls()

    def evaluate() -> None:
        kept = [p.detach().clone() for p in calls.model.parameters()]
        calls.swap_in_data()
        for mine, before in zip(calls.model.parameters(), kept, strict=True):
            mine.data.copy_(before)

    for _ in range(3):
        calls.call(evaluate, lost=False)
    undo = calls.job.undo
    undo._calls["train.py:9"].copy_s = 1000.0
    assert calls.call(calls.swap_in_data, lost=True)
    undo.begin_call("train.py:9")
    assert undo._call is not None
    assert [undo._large[i].name for i in undo._call.large] == ["model"]


def test_an_error_in_a_watched_call_ends_the_watch() -> None:
    calls = Calls()
    calls.call(nothing, lost=False)

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        calls.call(fails, lost=False)
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("again", ["lost", "for others"])
def test_a_repeated_call_above_a_block_does_not_count_as_a_change_in_the_block(again: str) -> None:
    net = layer()
    script = Script(net=net)
    script.learn()
    script.undo.begin()
    script.undo.begin_call("here")
    if again == "lost":
        add(net)()
        assert script.undo.put_back_call()
        script.undo.begin_call("here")
    script.undo.end_call("here")
    if again == "for others":
        with script.undo.as_of_call():
            pass
    script.reduce()
    assert script.undo.put_back()
    script.block()
    assert not script.told


class Generators:
    """Tracks its generator at the first use, as `session.generator` does."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generator = torch.Generator().manual_seed(0)

    def track(self) -> None:
        self.script.state.track_own("session.generator.new", TorchGenerator(self.generator))

    def draw(self) -> int:
        return int(torch.randint(10**6, (), generator=self.generator))


@pytest.mark.parametrize("again", ["", "lost", "for others"])
@pytest.mark.parametrize("place", ["above", "below"])
def test_an_object_first_tracked_for_a_call_disturbs_no_block(place: str, again: str) -> None:
    net = layer()
    script = Script(net=net)
    new = Generators(script)
    if place == "above":
        script.undo.begin()
        before = script.everything()[0]["net"]
    else:
        script.learn(nothing, add(net))
        assert script.lost()
        script.undo.keep_for_retry()
        before = script.everything()[0]["net"]
        add(net)()
    new.track()
    script.undo.begin_call("here")
    first = new.draw()
    if again == "lost":
        assert script.undo.put_back_call()
        script.undo.begin_call("here")
        assert new.draw() == first
    script.undo.end_call("here")
    if again == "for others":
        with script.undo.as_of_call():
            assert new.draw() == first
    if place == "above":
        script.reduce()
        add(net)()
        assert script.undo.put_back()
    else:
        script.undo.put_back_for_retry()
    assert same(script.everything()[0]["net"], before)
    assert new.draw() == first
    script.learn()


def test_a_call_repeated_only_for_other_members_leaves_no_trace() -> None:
    calls = Calls()
    first = calls.job.everything()
    calls.call(calls.count, lost=False)
    calls.swap_in()  # below the call
    now = calls.job.everything()
    with calls.job.undo.as_of_call():
        assert same(calls.job.everything(), first)
        calls.count()
    assert same(calls.job.everything(), now)
    calls.job.undo.forget_call()
    assert calls.job.undo._call is None
