"""A zygote that can not be reached as it starts is told in words, and is ended with its keeper."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.zygote_process import ZygoteProcess
from elastic.errors import TransientError
from tests.job_process import is_alive


def test_one_that_can_not_be_reached_is_ended(
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
