"""A zygote that cannot be started or reached is a clear error, and is ended with its keeper."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.zygote_process import ZygoteProcess
from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.framing import encode
from elastic.runtime.training_lease import TrainingLease
from elastic.v1 import local_pb2 as pb
from tests.job_process import is_alive
from tests.unit.agent.unstarted import unstarted


def test_a_zygote_that_cannot_be_reached_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    async def main(directory: Path) -> int:
        log = tmp_path / "zygote.log"
        zygote = ZygoteProcess(
            run_directory=directory,
            log=log,
            environment=os.environ,
            on_event=lambda _: None,
            on_lost=lambda: None,
            lease=TrainingLease.unlimited(),
        )
        monkeypatch.setattr(asyncio, "open_unix_connection", refuse)
        with pytest.raises(TransientError, match=f"Connection refused; its log: {log}"):
            await zygote.open()
        assert zygote._keeper is not None
        await zygote.close()
        return zygote._keeper.pid

    with tempfile.TemporaryDirectory(prefix="el-", dir="/tmp") as directory:
        keeper = asyncio.run(main(Path(directory)))
    assert not is_alive(keeper)


@pytest.mark.parametrize("kind", ["no program", "not there", "not allowed", "below a file", ""])
def test_an_interpreter_that_cannot_be_run_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    interpreter = tmp_path / "python"
    if kind in ("no program", "not allowed", "below a file"):
        interpreter.write_bytes(b"\x7fnothing")
        interpreter.chmod(0o755 if kind == "no program" else 0o644)
    if kind == "below a file":
        interpreter = interpreter / "python"
    path = str(interpreter) if kind else ""
    monkeypatch.setattr(sys, "executable", path)

    async def main(directory: Path) -> None:
        zygote = ZygoteProcess(
            run_directory=directory,
            log=tmp_path / "zygote.log",
            environment=os.environ,
            on_event=lambda _: None,
            on_lost=lambda: None,
            lease=TrainingLease.unlimited(),
        )
        with pytest.raises(ConfigurationError, match=re.escape(f"{path!r} cannot be run: ")):
            await zygote.open()
        await zygote.close()

    with tempfile.TemporaryDirectory(prefix="el-", dir="/tmp") as directory:
        asyncio.run(main(Path(directory)))


async def test_an_error_of_the_agent_in_an_event_is_not_taken_for_a_broken_connection() -> None:
    """The zygote says only once that it is ready: an agent that missed it would wait for ever."""
    left = asyncio.Event()

    async def say_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = pb.ZygoteReady(keeper=os.getpid())
        writer.write(encode(pb.ZygoteEvent(ready=ready)))
        await reader.read()  # until the agent is gone
        writer.close()
        await writer.wait_closed()
        left.set()

    def fail(_event: pb.ZygoteEvent) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with tempfile.TemporaryDirectory(prefix="el-", dir="/tmp") as name:
        directory = Path(name)
        async with await asyncio.start_unix_server(say_ready, str(directory / "zygote.sock")):
            zygote = ZygoteProcess(
                run_directory=directory,
                log=directory / "zygote.log",
                environment=os.environ,
                on_event=fail,
                on_lost=lambda: None,
                lease=TrainingLease.unlimited(),
            )
            assert await zygote.open(), "it is found, not started"
            with pytest.raises(OSError, match="Input/output error"):
                await asyncio.wait_for(zygote.run(), 30.0)
            zygote.let_go()
            await asyncio.wait_for(left.wait(), 30.0)


async def test_workers_are_adopted_though_no_descriptor_is_left_to_watch_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    daemon, entries = unstarted(tmp_path)
    found = pb.Spawned(worker="w1", pid=os.getpid(), log_path=str(tmp_path / "w1.log"))
    daemon._zygote_said(pb.ZygoteEvent(ready=pb.ZygoteReady(workers=[found])))
    assert daemon._known.is_set()
    assert [e.fields["worker"] for e in entries if e.name == "worker_adopted"] == ["w1"]
