"""An agent passes orders on to the next leader, and reports what is not saved if it ends while
nobody leads."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import open_directory
from elastic.checkpoint.layout import path_in_step
from elastic.core.agent import effects as fx
from elastic.errors import TransientError
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2
from tests.unit.agent.unstarted import unstarted
from tests.unit.checkpoint.manifests import make_manifest

DEADLINE_S = 30.0


async def test_an_order_to_stop_is_told_to_the_next_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = pb.StopRequest(reason="maintenance", exit_code=82)

    daemon, _ = unstarted(tmp_path)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(daemon._link, "send", lambda **kind: sent.append(kind))
    daemon._report_again()
    assert [kind for message in sent for kind in message] == ["view"]
    daemon._coordinator_said(pb.CoordinatorMessage(stop=order))
    sent.clear()
    daemon._report_again()
    assert {"stop": order} in sent


def committed_checkpoint(path: Path, step: int) -> None:
    directory = open_directory(str(path))
    file = directory.write(path_in_step(step, "structure.json"), b"{}")
    catalog.commit(directory, make_manifest(step, 1, [file]))


Outcome = tuple[int, list[tuple[int, int]]]


async def leave(
    directory: Path, *, committed: int, late: bool = True, in_contact: bool = False, url: str = ""
) -> Outcome:
    """Let an agent leave. Return its exit code and what it reports as not saved: the steps that
    its workers have committed, and the step of the newest checkpoint."""
    daemon, entries = unstarted(directory, url)
    daemon._link.connected = in_contact
    daemon._pids["w"] = os.getpid()
    for generation, steps in ((3, 500), (4, committed), (4, 7), (0, 0)):
        progress = job_pb2.Progress(generation=generation, committed=steps)
        daemon._worker_said("w", local_pb2.WorkerMessage(progress=progress))
    if late:
        daemon._execute(fx.TellLeaveTimedOut(waited_s=15.0))
    daemon._execute(fx.ExitAgent(exit_code=143))
    code = await asyncio.wait_for(daemon.ended, DEADLINE_S)
    told = [e.fields for e in entries if e.name == "not_saved"]
    return code, [(f["committed"], f["checkpoint"]) for f in told]


async def test_an_agent_that_ends_without_a_leader_reports_what_is_unsaved(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    url = str(checkpoints)
    assert await leave(tmp_path, committed=120, url=url) == (84, [(120, 0)])
    committed_checkpoint(checkpoints, 100)
    assert await leave(tmp_path, committed=120, url=url) == (84, [(120, 100)])
    assert await leave(tmp_path, committed=100, url=url) == (143, [])


async def test_an_agent_whose_job_goes_on_or_saves_nothing_reports_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    assert await leave(tmp_path, committed=120, url=url, in_contact=True) == (143, [])
    assert await leave(tmp_path, committed=120, url=url, late=False) == (143, [])
    assert await leave(tmp_path, committed=120) == (143, [])


async def test_commits_that_an_agent_has_heard_of_count_if_the_directory_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_directory: object) -> None:
        raise TransientError("not now")

    monkeypatch.setattr("elastic.agent.daemon.newest_step", refuse)
    daemon, entries = unstarted(tmp_path, str(tmp_path))
    for step, abandoned in ((80, False), (110, True)):
        news = local_pb2.CheckpointCommitted(step=step, abandoned=abandoned)
        daemon._coordinator_said(pb.CoordinatorMessage(checkpoint=news))
    daemon._committed = (4, 120)
    daemon._execute(fx.TellLeaveTimedOut(waited_s=15.0))
    daemon._execute(fx.ExitAgent(exit_code=143))
    assert await asyncio.wait_for(daemon.ended, DEADLINE_S) == 84
    assert [e.fields["checkpoint"] for e in entries if e.name == "not_saved"] == [80]
