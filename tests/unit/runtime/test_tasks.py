"""No background task fails unnoticed."""

from __future__ import annotations

import asyncio

from elastic.runtime.tasks import TaskSupervisor


async def fail() -> None:
    raise OSError("no disk")


async def test_an_error_of_a_task_reaches_on_error() -> None:
    errors: list[BaseException] = []
    tasks = TaskSupervisor(errors.append)
    tasks.start(fail(), "fail")
    tasks.start(asyncio.sleep(0), "well")
    await asyncio.sleep(0.01)
    assert [type(e) for e in errors] == [OSError]
    await tasks.close()


async def test_close_cancels_running_tasks_and_waits_for_them() -> None:
    errors: list[BaseException] = []
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned_up = True

    tasks = TaskSupervisor(errors.append)
    task = tasks.start(work(), "work")
    assert task.get_name() == "work"
    await asyncio.sleep(0)
    await tasks.close()
    assert cleaned_up
    assert errors == []
