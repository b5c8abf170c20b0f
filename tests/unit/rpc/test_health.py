"""grpc.health.v1 works on a real server, beside the coordinator's own service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from elastic.rpc import health
from elastic.rpc.control import CONTROL_SERVICE
from elastic.rpc.health import Health
from elastic.rpc.identity import JobRole, roles_allowed
from elastic.rpc.security import PLAINTEXT
from tests.unit.rpc.conversation import DEADLINE_S, place_at
from tests.waiting import until

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class Daemon:
    """A daemon that is ready unless `reason` is set; it answers while `answers` is set."""

    def __init__(self) -> None:
        self.reason = ""
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def why_not_ready(self) -> str:
        self.asked += 1
        await self.answers.wait()
        return self.reason


@pytest.fixture
async def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
async def stub(daemon: Daemon, tmp_path: Path) -> AsyncIterator[pb_grpc.HealthStub]:
    served = Health(daemon.why_not_ready, CONTROL_SERVICE)
    address = f"unix:{tmp_path}/c.sock"
    async with (
        place_at(address, PLAINTEXT, beside=[served.handler()]),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield pb_grpc.HealthStub(channel)


async def status(stub: pb_grpc.HealthStub, service: str = "") -> int:
    answer = await stub.Check(pb.HealthCheckRequest(service=service), timeout=DEADLINE_S)
    return int(answer.status)


@pytest.mark.parametrize("service", ["", "elastic.v1.Control"])
async def test_health_is_serving_while_the_daemon_is_ready(
    daemon: Daemon, stub: pb_grpc.HealthStub, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FRESH_S", 0.0)
    assert await status(stub, service) == SERVING
    daemon.reason = "etcd does not answer"
    assert await status(stub, service) == NOT_SERVING
    daemon.reason = ""
    assert await status(stub, service) == SERVING


async def test_frequent_checks_ask_the_daemon_once(
    daemon: Daemon, stub: pb_grpc.HealthStub
) -> None:
    daemon.answers.clear()
    asking = [asyncio.ensure_future(status(stub)) for _ in range(20)]
    await until(lambda: daemon.asked)
    asking[0].cancel()
    daemon.answers.set()
    assert await asyncio.gather(*asking[1:]) == [SERVING] * 19
    assert await status(stub) == SERVING
    assert daemon.asked == 1


async def test_other_services_are_unknown(daemon: Daemon, stub: pb_grpc.HealthStub) -> None:
    del daemon
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await status(stub, "elastic.v2.Control")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(pb.HealthCheckRequest(service="elastic.v2.Control"))
    assert (await watch.read()).status == pb.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_each_of_several_watchers_gets_every_change(
    daemon: Daemon, stub: pb_grpc.HealthStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FRESH_S", 0.0)
    monkeypatch.setattr(health, "LOOK_EVERY_S", 0.01)
    watches = [stub.Watch(pb.HealthCheckRequest()) for _ in range(3)]

    async def told() -> list[int]:
        return [(await watch.read()).status for watch in watches]

    assert await told() == [SERVING] * 3
    watches.pop(0).cancel()
    daemon.reason = "it neither leads nor follows yet"
    assert await told() == [NOT_SERVING] * 2
    daemon.reason = ""
    assert await told() == [SERVING] * 2
    for watch in watches:
        watch.cancel()


async def test_a_daemon_whose_readiness_check_fails_is_not_serving(
    daemon: Daemon, stub: pb_grpc.HealthStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("what nobody expects")

    monkeypatch.setattr(daemon.answers, "wait", fails)
    assert await status(stub) == NOT_SERVING


def test_every_role_may_check_health() -> None:
    assert roles_allowed("Check") == roles_allowed("Watch") == frozenset(JobRole)
