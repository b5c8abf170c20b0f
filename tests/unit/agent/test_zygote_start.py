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
from tests.job_process import is_alive


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
        )
        with pytest.raises(ConfigurationError, match=re.escape(f"{path!r} cannot be run: ")):
            await zygote.open()
        await zygote.close()

    with tempfile.TemporaryDirectory(prefix="el-", dir="/tmp") as directory:
        asyncio.run(main(Path(directory)))
