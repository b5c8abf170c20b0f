"""An agent's message reaches the machine in a few calls, so that a reader can follow them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import elastic
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.rpc.codec import failure_to_pb
from elastic.rpc.control import _Servicer
from elastic.v1 import control_pb2 as pb
from tests.unit.coordinator.agents import view, worker
from tests.unit.coordinator.test_agent_messages import (
    KILLED,
    PROGRESS,
    Machine,
    Place,
    WorkerPhase,
    place,
    told_before,
)
from tests.unit.rpc.conversation import Recorder, Reports

__all__ = ["place", "told_before"]
MOST_CALLS = 4


@pytest.mark.parametrize(
    "message",
    [
        pb.AgentMessage(failure=failure_to_pb(KILLED)),
        pb.AgentMessage(progress=PROGRESS),
        view(worker("w", WorkerPhase.TRAINING, 3)),
        pb.AgentMessage(stop=pb.StopRequest(reason="Ctrl-C", exit_code=130)),
    ],
    ids=lambda message: message.WhichOneof("kind"),
)
async def test_a_message_reaches_the_machine_in_few_calls(
    place: Place, monkeypatch: pytest.MonkeyPatch, message: pb.AgentMessage
) -> None:
    package, paths = Path(elastic.__file__).parent, []

    def handle(_machine: Machine, _event: ev.Event, _now: float) -> list[fx.Effect]:
        own = [f.function for f in inspect.stack()[1:] if package in Path(f.filename).parents]
        paths.append([*reversed(own[: own.index("_read")]), "handle"])
        return []

    async def messages() -> AsyncIterator[pb.AgentMessage]:
        yield message

    monkeypatch.setattr(Machine, "handle", handle)
    servicer = _Servicer(Recorder(), Reports())
    assert await servicer._read(place.daemon, place.stream, messages()) is None
    (path,) = paths
    assert len(path) <= MOST_CALLS, path
    assert path[0] == "agent_said"
