"""`elastic coordinator` when a run ends, a signal comes, or nobody can reach it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import cast

import pytest

from elastic.cli import coordinator
from elastic.cli.coordinator import _until_signalled, _while_reachable, _work
from elastic.coordinator.candidate import Candidate
from elastic.errors import TransientError
from elastic.rpc.control import ControlServer
from elastic.runtime.journal import Journal
from elastic.runtime.leave_signals import HANGUP_IGNORED, RESTART_SIGNAL
from elastic.runtime.service_notice import ServiceNotice
from elastic.settings.shared import AfterEnd
from tests.unit.coordinator.agents import Diary


class Ends:
    """A candidate whose runs end with these codes, in this order; a further run never ends."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    async def run(self) -> int:
        return self.codes.pop(0) if self.codes else await asyncio.Future()


class Server:
    """A server that can be reached until `unreachable` is set."""

    def __init__(self) -> None:
        self.unreachable = asyncio.Event()

    async def until_unreachable(self) -> None:
        await self.unreachable.wait()


def coordinate(
    candidate: Ends,
    after_end: AfterEnd,
    *,
    signalled: bool,
    numbers: Sequence[int] = (signal.SIGTERM,),
) -> tuple[int, Diary]:
    diary = Diary()

    async def main() -> int:
        journal = Journal(diary.entries.append)
        notice = ServiceNotice({})
        ends: list[int] = []
        work = _work(cast(Candidate, candidate), journal, after_end, ends)
        served = asyncio.ensure_future(
            _while_reachable(work, cast(ControlServer, Server()), "here")
        )
        working = asyncio.ensure_future(_until_signalled(served, ends, journal, notice))
        while signalled and candidate.codes:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        if signalled:
            for number in numbers:
                assert not working.done()
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
        return await working

    return asyncio.run(main()), diary


@pytest.mark.parametrize("code", [0, 1, 82, 143])
def test_the_coordinator_exits_with_the_code_of_the_run(code: int) -> None:
    exit_code, diary = coordinate(Ends(code), AfterEnd.EXIT, signalled=False)
    assert (exit_code, diary.names()) == (code, [])


@pytest.mark.parametrize("code", [0, 1, 78, 82, 84])
def test_with_serve_a_signal_ends_the_coordinator_with_the_code_of_the_run(code: int) -> None:
    exit_code, diary = coordinate(Ends(code), AfterEnd.SERVE, signalled=True)
    assert exit_code == code
    assert diary.of("serving_after_end") == [{"exit_code": code}]
    assert diary.names() == ["serving_after_end", "leaving"]


@pytest.mark.parametrize("left", [130, 143])
def test_with_serve_a_run_that_was_left_is_coordinated_again(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_CAMPAIGN_AGAIN_S", 0.0)
    candidate = Ends(left, left, 0)
    exit_code, diary = coordinate(candidate, AfterEnd.SERVE, signalled=True)
    assert (exit_code, candidate.codes) == (0, [])
    exit_code, diary = coordinate(Ends(left), AfterEnd.SERVE, signalled=True)
    assert (exit_code, diary.names()) == (143, ["leaving"])


async def test_an_unreachable_coordinator_steps_down_before_it_raises() -> None:
    made_way = False

    async def work() -> int:
        nonlocal made_way
        try:
            return await asyncio.Future()
        finally:
            made_way = True

    server = Server()
    served = asyncio.ensure_future(
        _while_reachable(work(), cast(ControlServer, server), "10.0.0.1:4400")
    )
    await asyncio.sleep(0)
    server.unreachable.set()
    with pytest.raises(TransientError, match=r"10\.0\.0\.1:4400.*no file descriptors left"):
        await served
    assert made_way


def test_sighup_changes_nothing_and_says_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    numbers = (signal.SIGHUP, signal.SIGTERM)
    try:
        exit_code, diary = coordinate(Ends(), AfterEnd.EXIT, signalled=True, numbers=numbers)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert diary.of("warning") == [{"source": "signals", "message": HANGUP_IGNORED}]
    assert (exit_code, diary.of("leaving")) == (143, [{"reason": "SIGTERM"}])


def test_the_signal_that_restarts_agents_ends_the_coordinator_as_sigterm_does() -> None:
    exit_code, diary = coordinate(Ends(), AfterEnd.EXIT, signalled=True, numbers=(RESTART_SIGNAL,))
    assert (exit_code, diary.of("leaving")) == (143, [{"reason": "SIGRTMIN+1"}])
