"""An agent that is told to leave, or to end, before an earlier agent's zygote lists its workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import pytest

from elastic.agent.zygote_process import ZygoteProcess
from elastic.rpc.framing import encode
from elastic.runtime.training_lease import TrainingLease
from elastic.timeouts import timeout
from elastic.v1 import local_pb2 as pb
from tests.unit.agent.unstarted import unstarted

DEADLINE_S = 30.0
AWHILE_S = 0.1


class EarlierZygote:
    """Listens as an earlier agent's zygote, and answers when the test wants it. `process` stands
    for its keeper and for its only worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self._caller: asyncio.Future[asyncio.StreamWriter] = asyncio.Future()

    async def __aenter__(self) -> EarlierZygote:
        path = self.directory / "zygote.sock"
        self._server = await asyncio.start_unix_server(self._accept, path)
        return self

    def _accept(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._caller.set_result(writer)

    async def answer(self) -> None:
        worker = pb.Spawned(worker="n1-1", pid=self.process.pid, log_path="/dev/null")
        ready = pb.ZygoteReady(workers=[worker], keeper=self.process.pid)
        (await self._caller).write(encode(pb.ZygoteEvent(ready=ready)))

    async def __aexit__(
        self, _1: type[BaseException] | None, _2: BaseException | None, _3: TracebackType | None
    ) -> None:
        self._server.close()
        if self._caller.done():
            self._caller.result().close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)


@pytest.fixture
async def earlier(tmp_path: Path) -> AsyncIterator[EarlierZygote]:
    async with EarlierZygote(tmp_path) as found:
        yield found


@pytest.mark.parametrize("during_start", [False, True])
async def test_a_signal_that_comes_before_workers_are_known_ends_none_of_them(
    earlier: EarlierZygote, *, during_start: bool
) -> None:
    daemon, entries = unstarted(earlier.directory)
    if during_start:  # as one that came while the process executed its command again
        asyncio.get_running_loop().call_soon(daemon.leave, 143, "SIGTERM")
        await daemon.start()
    else:
        await daemon.start()
        daemon.leave(143, "SIGTERM")
    await asyncio.sleep(AWHILE_S)
    assert daemon.adopts
    assert not daemon.ended.done()
    assert not daemon._link._kept
    await earlier.answer()
    async with timeout(DEADLINE_S):
        while not daemon._link._kept:
            await asyncio.sleep(0.01)
    (message,) = daemon._link._kept
    assert (message.stop.exit_code, message.stop.reason) == (143, "SIGTERM")
    assert [e.fields["worker"] for e in entries if e.name == "worker_adopted"] == ["n1-1"]
    assert not daemon.ended.done()
    await daemon.close(let_go=True)
    assert earlier.process.poll() is None


async def test_an_agent_that_ends_before_a_found_zygote_answers_waits_for_its_end(
    earlier: EarlierZygote,
) -> None:
    """Else the workers might outlive the node's registration."""
    zygote = ZygoteProcess(
        run_directory=earlier.directory,
        log=earlier.directory / "zygote.log",
        environment={},
        on_event=lambda _: None,
        on_lost=lambda: None,
        lease=TrainingLease.unlimited(),
    )
    assert await zygote.open()
    running = asyncio.ensure_future(zygote.run())
    closing = asyncio.ensure_future(zygote.close())
    await asyncio.sleep(AWHILE_S)
    assert not closing.done()
    await earlier.answer()
    await asyncio.sleep(AWHILE_S)
    assert not closing.done()
    earlier.process.kill()
    await asyncio.to_thread(earlier.process.wait)
    await asyncio.wait_for(closing, DEADLINE_S)
    running.cancel()
