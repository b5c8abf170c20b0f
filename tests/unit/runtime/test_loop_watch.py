"""The loop watch notices what holds up an event loop, and names the place."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.runtime import loop_watch
from elastic.runtime.journal import Entry, Journal
from elastic.runtime.loop_watch import LoopWatch, watched_loop


class Told:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.journal = Journal(self.entries.append)

    @property
    def events(self) -> list[dict[str, Any]]:
        assert {e.name for e in self.entries} <= {"loop_paused", "process_stopped"}
        return [dict(e.fields) for e in self.entries if e.name == "loop_paused"]


def hold_up(seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        time.sleep(0.001)


async def beats(watch: LoopWatch, count: int = 3) -> None:
    for _ in range(count):
        before = watch._busy_since
        while watch._busy_since == before:
            await asyncio.sleep(0.005)


async def test_a_long_pause_is_recorded_with_its_place() -> None:
    told = Told()
    with watched_loop(told.journal) as watch:
        await beats(watch)
        hold_up(0.3)
        await beats(watch)
    (event,) = told.events
    assert 0.2 < event["pause_s"] < 10.0
    assert "in hold_up" in event["where"]
    assert watch.pauses.longest_s >= event["pause_s"] - 0.001


async def test_frequent_pauses_are_recorded_at_intervals_with_a_count_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_watch, "_TOLD_EVERY_S", 1.0)
    told = Told()
    with watched_loop(told.journal) as watch:
        for _ in range(3):
            hold_up(0.2)
            await beats(watch)
        assert len(told.events) == 1
        await asyncio.sleep(1.0)
        hold_up(0.2)
        await beats(watch)
    assert [e["others"] for e in told.events] == [0, 2]


async def test_a_stop_of_the_whole_process_is_no_pause_of_the_loop() -> None:
    told = Told()
    with watched_loop(told.journal) as watch:
        await beats(watch)
        began = watch._busy_since = time.monotonic() - 5.0
        watch._seen = loop_watch._Seen(began, "somewhere", 4.97)
        await beats(watch)
    assert told.events == []
    assert watch.pauses.longest_s == 0.0
    ((stopped, fields),) = [(e.name, e.fields) for e in told.entries]
    assert (stopped, fields["stopped_s"]) == ("process_stopped", 4.97)


_WATCHED = """
import asyncio, sys
from elastic.runtime import loop_watch
from elastic.runtime.journal import Journal

loop_watch._STOPPED_S, loop_watch._LONGEST_WAIT_S = 0.3, 0.05

async def wait() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, ended.set)
    with loop_watch.watched_loop(Journal(lambda entry: print(entry.to_json(), flush=True))):
        print("waits", flush=True)
        await ended.wait()

asyncio.run(wait())
"""


def test_a_process_that_was_stopped_while_it_waited_says_so_when_it_runs_again() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WATCHED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "waits\n"
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            child.send_signal(signal.SIGCONT)
            told = json.loads(child.stdout.readline())
            child.communicate("")
        finally:
            child.kill()
    assert told["event"] == "process_stopped"
    assert 0.3 < told["stopped_s"] < 10.0


async def test_waiting_is_no_pause() -> None:
    with watched_loop(Told().journal) as watch:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(hold_up, 0.3)
    assert watch.pauses.longest_s < 0.2  # a busy machine may hold up the loop itself


async def test_the_start_of_the_watch_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        hold_up(0.2)

    told = Told()
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with watched_loop(told.journal) as watch:
        await beats(watch)
    assert told.events == []


async def test_the_watch_thread_sleeps_while_no_round_lasts_long() -> None:
    with watched_loop(Told().journal) as watch:
        before = switches(watch._thread)
        for _ in range(100):
            await asyncio.sleep(0.003)
        assert switches(watch._thread) - before < 20  # on a busy machine some rounds do last long


def switches(thread: threading.Thread) -> int:
    """How often the thread has waited for something (voluntary context switches)."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


async def test_the_watch_can_be_closed_in_the_middle_of_a_long_round() -> None:
    watch = LoopWatch(Told().journal)
    while not watch._seen.where:
        hold_up(0.01)
    watch.close()
    assert not watch._thread.is_alive()


class Cycle:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self, ended: list[str]) -> None:
        self.own = self
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append("ended")


async def test_objects_in_use_are_frozen_and_new_garbage_is_still_collected() -> None:
    with watched_loop(Told().journal):
        gc.collect()
        assert gc.get_freeze_count() > 10_000
        kept = Cycle(ended := [])
        gc.collect()
        assert all(one is not kept for one in gc.get_objects())
        Cycle(ended)
        gc.collect()
        assert ended == ["ended"], "what is new is looked at"
    assert gc.get_freeze_count() == 0


async def test_garbage_among_frozen_objects_is_found_when_objects_have_doubled() -> None:
    with watched_loop(Told().journal):
        gc.collect()
        in_use = gc.get_freeze_count()
        kept: Cycle | None = Cycle(ended := [])
        gc.collect()
        kept = None
        gc.collect()
        assert ended == []
        grown = [[n] for n in range(2 * in_use)]
        gc.collect()  # the new ones are in use
        gc.collect()
        assert ended == ["ended"]
    del kept, grown


async def test_many_new_objects_are_examined_in_portions() -> None:
    looked_at: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append(len(gc.get_objects()))

    with watched_loop(Told().journal):
        for _ in range(2):  # Python waits for new objects to be a quarter of what it saw last
            gc.collect()
        gc.callbacks.append(note)
        try:
            kept = [[n] for n in range(45_000)]  # fewer than there were before
        finally:
            gc.callbacks.remove(note)
    assert len(looked_at) == len(kept) // 20_000
    assert max(looked_at) < 30_000, "one of a hundred thousand takes 30 ms"
