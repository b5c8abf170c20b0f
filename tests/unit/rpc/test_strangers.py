"""Nothing that strangers send to the gRPC port disturbs agents; bad messages are reported."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from elastic.errors import TransientError
from elastic.rpc import admission, control, control_client
from elastic.rpc.control_client import CoordinatorLost
from elastic.rpc.security import PLAINTEXT, Security, Tls
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc
from tests.certificates import make_certificates, sign_for_job
from tests.unit.rpc.conversation import HELLO, Conversation, Place, place_at

VIEW = pb.AgentMessage(view=pb.NodeView())
NOISE = {
    "bytes": random.Random(1).randbytes(4096),
    "http/1": b"GET / HTTP/1.1\r\nHost: elastic\r\n\r\n",
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "http/2 and then bytes": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.Random(2).randbytes(4096),
    "zeros": bytes(100_000),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
}


@pytest.fixture(scope="module")
def security(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Security:
    if getattr(request, "param", "plain text") == "plain text":
        return PLAINTEXT
    made = make_certificates(tmp_path_factory.mktemp("tls") / "made")
    return Tls(job="digits", files=sign_for_job(made, "digits"))


each_security = pytest.mark.parametrize("security", ["plain text", "tls"], indirect=True)


@pytest.fixture
async def place(security: Security) -> AsyncIterator[Place]:
    async with place_at("127.0.0.1:0", security) as place:
        yield place


@asynccontextmanager
async def connection(place: Place):
    host, _, port = place.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("noise", NOISE)
@each_security
async def test_noise_does_not_disturb_agents(place: Place, noise: str) -> None:
    agent = await place.agent()
    async with connection(place) as (_, writer):
        writer.write(NOISE[noise])
        await place.still_works(agent)
        await place.agent(node="later")


@each_security
async def test_many_silent_connections_do_not_disturb_agents(place: Place) -> None:
    agent = await place.agent()
    async with AsyncExitStack() as stack:
        for _ in range(200):
            await stack.enter_async_context(connection(place))
        await place.still_works(agent)
        await place.agent(node="later")


@each_security
async def test_a_silent_connection_is_closed_after_the_handshake_timeout(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "grpc.server_handshake_timeout_ms"
    shorter = [option for option in control_client.OPTIONS if option[0] != name]
    assert len(shorter) < len(control_client.OPTIONS)
    monkeypatch.setattr(control, "OPTIONS", [*shorter, (name, 50)])
    async with connection(place) as (reader, _):
        await reader.read()


async def test_connections_beyond_the_limit_are_closed_and_others_keep_working(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "_most_connections", lambda: 10)
    async with place_at("127.0.0.1:0", PLAINTEXT) as place:
        agent = await place.agent()
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(connection(place)) for _ in range(30)]
            closed = asyncio.gather(*(reader.read() for reader, _ in opened[10:]))
            assert await closed == [b""] * 20
            await place.still_works(agent)
        later = None
        while later is None:  # gRPC counts a connection until it has seen its end
            with suppress(CoordinatorLost):
                later = await place.agent(node="later")


def test_some_descriptors_are_left_for_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(soft: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
        return control._most_connections()

    assert most(65536) == 65536 - 512
    assert most(256) == 128
    assert most(resource.RLIM_INFINITY) > 10**9


# ---- messages


@each_security
async def test_a_message_too_large_costs_its_sender_the_stream(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_BYTES", 1000)
    other = await place.agent(node="other")
    agent = await place.agent()
    agent.send(pb.AgentMessage(stop=pb.StopRequest(reason="x" * 2000)))
    with pytest.raises(CoordinatorLost, match=r"a message of 20\d\d bytes; at most 1000"):
        await agent.ended
    (report,) = place.reports.named("message_refused")
    assert report["source"] == "n1"
    assert "at most 1000 are accepted" in str(report["reason"])
    assert await place.recorder.heard.get() == ("lost", "n1")
    await place.still_works(other)
    await place.agent()


async def test_a_request_too_large_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_MOST_BYTES_ASKED", 1000)
    async with grpc.aio.insecure_channel(place.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1000") as error:
            await pb_grpc.ControlStub(channel).Stop(pb.StopRequest(reason="x" * 2000))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert place.reports.named("message_refused")
    assert place.recorder.heard.empty()


@each_security
async def test_a_message_above_grpcs_own_limit_ends_the_stream(
    security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC does not read the message into memory; the coordinator sees only the stream's end."""
    name = "grpc.max_receive_message_length"
    others = [option for option in control_client.OPTIONS if option[0] != name]
    monkeypatch.setattr(control, "OPTIONS", [*others, (name, 1000)])
    async with place_at("127.0.0.1:0", security) as place:
        other = await place.agent(node="other")
        agent = await place.agent()
        agent.send(pb.AgentMessage(stop=pb.StopRequest(reason="x" * 2000)))
        with pytest.raises(CoordinatorLost, match=r"Received message larger than max \(20\d\d vs"):
            await agent.ended
        assert await place.recorder.heard.get() == ("lost", "n1")
        await place.still_works(other)


def test_grpcs_limit_is_above_the_coordinators() -> None:
    limits = dict(control_client.OPTIONS)
    assert limits["grpc.max_receive_message_length"] > admission.MOST_BYTES


async def test_an_agent_drops_its_own_too_large_message_and_keeps_the_stream(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "MOST_BYTES", 1000)
    agent = await place.agent()
    agent.send(pb.AgentMessage(stop=pb.StopRequest(reason="x" * 2000)))
    await place.still_works(agent)
    (report,) = place.reports.named("message_dropped")
    assert str(report["reason"]).startswith("stop of 20")


async def test_bytes_that_are_no_message_are_refused_and_reported(place: Place) -> None:
    other = await place.agent(node="other")
    for first in ([], [HELLO.SerializeToString()]):
        async with grpc.aio.insecure_channel(place.address) as channel:
            attend = channel.stream_stream("/elastic.v1.Control/Attend")
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as error:
                async for _ in attend(iter([*first, b"\xff\xff\xff"])):
                    pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(place.reports.named("message_refused")) == 2
    await place.still_works(other)


async def test_a_stream_without_a_hello_is_ended_after_the_timeout(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HELLO_TIMEOUT_S", 0.05)
    other = await place.agent(node="other")
    with pytest.raises(CoordinatorLost, match="must be its hello"):
        await Conversation(place.client()).ended
    assert str(place.reports.named("message_refused")[0]["source"]).startswith("ipv4:")
    await place.still_works(other)


async def test_a_method_that_does_not_exist_is_unimplemented(place: Place) -> None:
    async with grpc.aio.insecure_channel(place.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/elastic.v1.Control/Shutdown")(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---- errors of the coordinator itself


@pytest.mark.parametrize("method", ["agent_connected", "agent_said", "agent_lost"])
async def test_an_exception_of_the_handler_on_a_stream_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    bug = KeyError("a bug")
    other = await place.agent(node="other")

    def fail(*_: object) -> None:
        raise bug

    with monkeypatch.context() as patch:
        patch.setattr(place.recorder, method, fail)
        # gRPC gives no reason for the end of a stream on which it could no longer send.
        said = [HELLO] if method == "agent_connected" else [HELLO, VIEW]
        agent = Conversation(place.client(), *said)
        if method == "agent_lost":
            agent.send(None)
        with pytest.raises(CoordinatorLost) as lost:
            await agent.ended
        assert ("KeyError: 'a bug'" in str(lost.value)) == (method != "agent_lost")
    told = await place.reports.wait("message_refused")
    assert told["source"] == "n1"
    assert "KeyError: 'a bug'" in str(told["reason"])
    await place.still_works(other)


async def test_an_exception_of_the_handler_on_a_request_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = KeyError("a bug")

    def fail(*_: object) -> pb.JobStatus:
        raise bug

    monkeypatch.setattr(place.recorder, "status", fail)
    with pytest.raises(TransientError, match="KeyError: 'a bug'"):
        await place.client().status(30.0)
    assert place.reports.named("message_refused")[0]["source"] == "GetStatus"


# ---- the socket file


@each_security
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_only_this_user_can_connect_to_the_unix_socket(
    security: Security, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        async with place_at(f"unix:{tmp_path}/c.sock", security) as place:
            mode = Path(place.address.removeprefix("unix:")).stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            await place.still_works(await place.agent())
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
