"""Values that wait for a device hold up neither reports nor each other for good."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from elastic.worker import readings
from elastic.worker.group.process_group import Group
from elastic.worker.readings import Reader, Wanted
from tests.unit.worker.test_curve import Member
from tests.unit.worker.test_reporter import Script
from tests.waiting import eventually

PROMPT_S = 5.0


class OnDevice:
    """A value that can be read once the queue of its device has come to it."""

    def __init__(self, number: float = 1.0) -> None:
        self.ready = threading.Event()
        self.number = number

    def __float__(self) -> float:
        self.ready.wait()
        return self.number


def reported(script: Script) -> dict[str, float]:
    script.reporter.flush(whole=False)
    (progress,) = script.wire.taken("progress")
    return dict(progress.reported)


def test_reports_go_on_while_a_value_waits_for_its_device(alone: Group) -> None:
    """As with a loss behind an all-reduce that hangs: the agent would end a silent worker."""
    script, loss = Script(alone), OnDevice(0.5)
    script.reporter.report({"loss": loss, "epoch": 3}, committed=False)
    began = time.monotonic()
    for _ in range(3):
        assert reported(script) == {"epoch": 3.0}
    assert time.monotonic() - began < PROMPT_S
    loss.ready.set()
    eventually(lambda: reported(script) == {"epoch": 3.0, "loss": 0.5}, deadline_s=PROMPT_S)


def test_the_newest_number_is_shown_until_the_next_value_is_ready(alone: Group) -> None:
    script, first, second = Script(alone), OnDevice(0.5), OnDevice(0.25)
    first.ready.set()
    script.reporter.report({"loss": first}, committed=False)
    eventually(lambda: reported(script) == {"loss": 0.5}, deadline_s=PROMPT_S)
    script.reporter.report({"loss": second}, committed=False)
    assert reported(script) == {"loss": 0.5}
    second.ready.set()
    eventually(lambda: reported(script) == {"loss": 0.25}, deadline_s=PROMPT_S)


def test_a_learning_rate_on_a_device_is_read_when_it_is_ready(
    alone: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, rate = Script(alone), OnDevice(0.1)
    monkeypatch.setattr(script.state, "learning_rates", lambda: {"optimizer": rate})

    def rates() -> dict[str, float]:
        script.reporter.flush(whole=False)
        return dict(script.wire.taken("progress")[-1].learning_rates)

    assert rates() == {}
    rate.ready.set()
    eventually(lambda: rates() == {"optimizer": pytest.approx(0.1)}, deadline_s=PROMPT_S)


def test_a_value_that_never_becomes_readable_is_left_out_and_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readings, "_PATIENCE_S", 0.05)
    reader, never, other = Reader(), OnDevice(), OnDevice(2.0)
    other.ready.set()
    found: dict[str, Any] = {}
    wanted = [Wanted(found, "never", never), Wanted(found, "other", other)]

    def read() -> dict[str, Any]:
        reader.read(wanted, 0.01)
        return found

    eventually(lambda: read() == {"other": 2.0}, deadline_s=PROMPT_S)
    assert reader.gives_up(never)
    never.ready.set()
    eventually(lambda: read() == {"other": 2.0, "never": 1.0}, deadline_s=PROMPT_S)


def test_threads_that_wait_in_vain_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_PATIENCE_S", 0.0)
    before, reader = threading.active_count(), Reader()
    values = [OnDevice() for _ in range(20)]
    for value in values:
        reader.read([Wanted({}, "loss", value)], 0.001)
    assert threading.active_count() - before <= readings._MOST_WAITING + 1
    for value in values:
        value.ready.set()


def test_points_of_the_curve_wait_for_their_values_and_keep_their_order() -> None:
    member, loss = Member(), OnDevice(0.5)
    member.step(loss=1.0)
    member.step()
    newest = member.reporter.curve.backlog.since(1)[0]
    newest.values["loss"] = loss  # as a tensor that its device has not computed yet
    member.step(loss=3.0)
    assert member.told(whole=True) == [(False, {0: {"loss": 1.0}})]
    loss.ready.set()

    def rest() -> dict[int, dict[str, float]]:
        return {step: v for _, points in member.told(whole=True) for step, v in points.items()}

    found: dict[int, dict[str, float]] = {}
    eventually(lambda: found.update(rest()) or len(found) == 2, deadline_s=PROMPT_S)
    assert found == {1: {"loss": 0.5}, 2: {"loss": 3.0}}
