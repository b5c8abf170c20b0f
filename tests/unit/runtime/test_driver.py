"""The driver handles one event at a time, executes effects in order, and has one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from elastic.runtime.driver import Driver
from elastic.timeouts import timeout

TIMER = "timer"


class Scripted:
    """A machine that answers each event with the effects written down for it."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self._answers = answers
        self.handled: list[tuple[str, float]] = []

    def handle(self, event: str, now: float) -> Sequence[str]:
        self.handled.append((event, now))
        return self._answers.get(event, [])


def make(machine: Scripted, executed: list[str], errors: list[BaseException]) -> Driver[str, str]:
    """A driver that posts back what an effect names after "post ", and fails on "fail"."""

    def execute(effect: str) -> None:
        executed.append(effect)
        if effect.startswith("post "):
            driver.post(effect.removeprefix("post "))
            executed.append(f"after {effect}")
        if effect == "fail":
            raise RuntimeError(effect)

    driver: Driver[str, str] = Driver(machine, execute, TIMER, on_error=errors.append)
    return driver


def test_events_posted_during_execution_wait_their_turn() -> None:
    executed: list[str] = []
    machine = Scripted({"a": ["1", "post b", "post c", "2"], "b": ["3"], "c": ["4"]})
    make(machine, executed, []).post("a")
    assert [event for event, _ in machine.handled] == ["a", "b", "c"]
    assert [e for e in executed if "post" not in e] == ["1", "2", "3", "4"]
    assert executed.index("after post b") < executed.index("3")


def test_waiting_events_are_handled_before_a_posted_one_and_all_are_observed() -> None:
    machine, waiting = Scripted({"a": ["1"]}), ["w"]
    happened: list[object] = []

    def taken() -> list[str]:
        found, waiting[:] = list(waiting), []
        return found

    driver: Driver[str, str] = Driver(
        machine,
        happened.append,
        TIMER,
        on_error=happened.append,
        before=taken,
        observe=lambda event, effects, _now: happened.append((event, effects)),
    )
    driver.post("a")
    driver.post("b")
    assert [event for event, _ in machine.handled] == ["w", "a", "b"]
    assert happened == [("w", []), ("a", ["1"]), "1", ("b", [])]


def test_an_error_is_reported_and_does_not_wedge_the_driver() -> None:
    errors: list[BaseException] = []
    machine = Scripted({"a": ["fail"]})
    driver = make(machine, [], errors)
    with pytest.raises(RuntimeError, match="fail"):
        driver.post("a")
    assert [str(e) for e in errors] == ["fail"]
    driver.post("b")
    assert [event for event, _ in machine.handled] == ["a", "b"]


def test_the_machine_gets_the_time_of_the_clock() -> None:
    machine = Scripted({})
    driver: Driver[str, str] = Driver(
        machine, print, TIMER, on_error=print, clock=iter([5.0, 7.5]).__next__
    )
    driver.post("a")
    driver.post("b")
    assert machine.handled == [("a", 5.0), ("b", 7.5)]


async def test_a_new_timer_replaces_the_old_one() -> None:
    loop = asyncio.get_running_loop()
    machine = Scripted({})
    driver: Driver[str, str] = Driver(machine, print, TIMER, on_error=print, clock=loop.time)
    now = loop.time()
    driver.set_timer(now + 0.01)
    driver.set_timer(now + 0.03)
    async with timeout(10.0):
        while not machine.handled:
            await asyncio.sleep(0.001)
    assert machine.handled[0][1] >= now + 0.03  # and not the first one's
    assert [event for event, _ in machine.handled] == [TIMER]


@pytest.mark.parametrize("closed", [False, True])
async def test_a_cancelled_timer_does_not_fire(closed: bool) -> None:
    machine = Scripted({})
    driver = make(machine, [], [])
    driver.set_timer(0.0)
    if closed:
        driver.close()
    else:
        driver.set_timer(None)
    await asyncio.sleep(0.01)
    assert machine.handled == []


async def test_a_timer_of_the_past_fires_soon_but_not_at_once() -> None:
    machine = Scripted({})
    make(machine, [], []).set_timer(0.0)
    assert machine.handled == []
    await asyncio.sleep(0.01)
    assert [event for event, _ in machine.handled] == [TIMER]
