"""A machine's preemption is noticed by a file that appears or a command that succeeds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elastic.agent import registration
from elastic.agent.registration import until_preempted
from tests.job_process import is_alive
from tests.waiting import until


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def looking(
    file: Path | None = None,
    command: Sequence[str] | None = None,
    told: list[str] | None = None,
) -> asyncio.Task[str]:
    on_problem = told.append if told is not None else pytest.fail
    looks = until_preempted(file=file, command=command, interval_s=0.01, on_problem=on_problem)
    return asyncio.create_task(looks)


async def test_a_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    task = looking(file=notice)
    await asyncio.sleep(0.1)
    assert not task.done()
    notice.touch()
    assert await task == f"preemption: {notice} exists"


@pytest.mark.parametrize(
    "error", [PermissionError("x"), OSError("stale"), RuntimeError("can't start new thread")]
)
async def test_a_file_that_cannot_be_looked_at_is_looked_at_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = [error, error]

    async def refuse(look: Callable[[], bool]) -> bool:
        if refusing:
            raise refusing.pop()
        return look()

    notice = tmp_path / "notice"
    notice.touch()
    monkeypatch.setattr(registration, "off_loop", refuse)
    assert "exists" in await looking(file=notice)
    assert not refusing


async def test_a_command_is_repeated_until_it_succeeds(tmp_path: Path) -> None:
    """The command's output is discarded."""
    asked, notice = tmp_path / "asked", tmp_path / "notice"
    code = (
        f"import os, sys; open({str(asked)!r}, 'a').write('x'); print('no'); "
        f"sys.exit(0 if os.path.exists({str(notice)!r}) else 3)"
    )
    task = looking(command=python(code))
    await until(lambda: asked.exists() and len(asked.read_text()) >= 2)
    assert not task.done()
    notice.touch()
    assert (await task).startswith(f"preemption: {sys.executable}")
    assert "exit" not in (await task).replace("exited with 0", ""), "it may hold a secret"


@pytest.mark.parametrize("shell", [False, True])
async def test_a_command_that_cannot_be_run_is_told_once_and_is_no_notice(
    tmp_path: Path, shell: bool
) -> None:
    notice, missing, asked = tmp_path / "notice", str(tmp_path / "missing"), tmp_path / "asked"
    told: list[str] = []
    command = ["sh", "-c", f"echo >> {asked}; {missing}"] if shell else [missing]
    task = looking(file=notice, command=command, told=told)
    await until(lambda: bool(told))
    await until(lambda: not shell or asked.read_text().count("\n") > 2)
    notice.touch()
    assert "exists" in await task
    (problem,) = told
    assert missing in problem


async def test_a_command_under_way_is_ended_with_the_watch(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    shell = f"sh -c 'echo $$ > {pid}; exec sleep 600'; true"  # a child of the command
    code = f"import subprocess; subprocess.run(['sh', '-c', {shell!r}])"
    task = looking(command=python(code))
    await until(lambda: pid.exists() and pid.read_text().strip())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not is_alive(int(pid.read_text())))


async def test_a_command_that_takes_too_long_is_no_notice_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_COMMAND_TIMEOUT_S", 0.2)
    asked, notice = tmp_path / "asked", tmp_path / "notice"
    code = f"import time; open({str(asked)!r}, 'a').write('x'); time.sleep(600)"
    told: list[str] = []
    task = looking(file=notice, command=python(code), told=told)
    await until(lambda: task.done() or (asked.exists() and len(asked.read_text()) >= 3))
    notice.touch()
    assert "exists" in await task
    (problem,) = told
    assert "0.2 s" in problem
