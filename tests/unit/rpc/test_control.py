"""Agent and coordinator speak gRPC over a real Unix socket; the handler only records messages."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.control import AgentStream, ControlServer
from elastic.rpc.control_client import ControlClient, CoordinatorLost
from elastic.rpc.security import Plaintext
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc
from tests.unit.rpc.conversation import HELLO, Conversation, Recorder, Reports


@pytest.fixture
async def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def server(recorder: Recorder, tmp_path: Path) -> ControlServer:
    return ControlServer(recorder, f"unix:{tmp_path}/c.sock")


@pytest.fixture
async def client(server: ControlServer) -> AsyncIterator[ControlClient]:
    client = ControlClient(await server.start())
    yield client
    await client.close()
    await server.stop(0)


async def test_a_stream_carries_both_directions(recorder: Recorder, client: ControlClient) -> None:
    agent = Conversation(client, HELLO, pb.AgentMessage(view=pb.NodeView()))
    assert await recorder.heard.get() == ("connected", ("n1", "10.0.0.1", 2))
    assert await recorder.heard.get() == ("said", "view")
    recorder.streams[0].send(job_ended=pb.JobEnded(exit_code=4))
    assert (await agent.received.get()).job_ended.exit_code == 4
    agent.send(None)
    assert await recorder.heard.get() == ("lost", "n1")
    with pytest.raises(CoordinatorLost):
        await agent.ended


class RefusesLate(pb_grpc.ControlServicer):
    """A server that refuses a stream only after it has begun its answer."""

    async def Attend(  # noqa: N802 - named by the protocol
        self, request_iterator: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        del request_iterator
        await context.send_initial_metadata(())
        await asyncio.sleep(0.1)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not for you")


async def test_a_late_refusal_is_a_configuration_error() -> None:
    server = grpc.aio.server()
    pb_grpc.add_ControlServicer_to_server(RefusesLate(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = ControlClient(address)
    try:
        with pytest.raises(ConfigurationError, match="not for you"):
            await Conversation(client, HELLO).ended
    finally:
        await client.close()
        await server.stop(0)


async def test_an_agent_is_turned_away_by_a_coordinator_that_does_not_lead(
    recorder: Recorder, client: ControlClient
) -> None:
    recorder.leads = False
    agent = Conversation(client, HELLO, pb.AgentMessage(view=pb.NodeView()))
    with pytest.raises(CoordinatorLost):
        await agent.ended
    assert recorder.heard.empty()


async def test_a_broken_stream_is_a_lost_agent(recorder: Recorder, client: ControlClient) -> None:
    agent = Conversation(client, HELLO)
    await recorder.heard.get()
    agent.ended.cancel()
    assert await recorder.heard.get() == ("lost", "n1")


@pytest.mark.parametrize("first", [[pb.AgentMessage(view=pb.NodeView())], [pb.AgentMessage()], []])
async def test_a_stream_that_does_not_begin_with_hello_is_refused(
    recorder: Recorder, client: ControlClient, first: list[pb.AgentMessage]
) -> None:
    agent = Conversation(client, *first)
    agent.send(None)
    with pytest.raises(CoordinatorLost, match="hello"):
        await agent.ended
    assert recorder.heard.empty()


async def test_a_closed_stream_delivers_what_was_sent_before(
    recorder: Recorder, client: ControlClient
) -> None:
    agent = Conversation(client, HELLO)
    await recorder.heard.get()
    stream = recorder.streams[0]
    for code in range(3):
        stream.send(job_ended=pb.JobEnded(exit_code=code))
    stream.close()
    with pytest.raises(CoordinatorLost, match="closed"):
        await agent.ended
    codes = [agent.received.get_nowait().job_ended.exit_code for _ in range(3)]
    assert codes == [0, 1, 2]
    assert await recorder.heard.get() == ("lost", "n1")


async def test_an_agent_notices_that_the_coordinator_is_gone(
    recorder: Recorder, client: ControlClient, server: ControlServer
) -> None:
    agent = Conversation(client, HELLO)
    await recorder.heard.get()
    await server.stop(0)
    with pytest.raises(CoordinatorLost):
        await agent.ended


async def test_a_client_gets_the_status(recorder: Recorder, client: ControlClient) -> None:
    del recorder
    assert await client.status(5.0) == pb.JobStatus(job="digits", restarts=3)


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines set these variables to get packages and data through a proxy."""
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    server = ControlServer(Recorder(), "127.0.0.1:0")
    client = ControlClient(await server.start())
    try:
        assert (await client.status(5.0)).job == "digits"
    finally:
        await client.close()
        await server.stop(0)


async def test_status_of_a_coordinator_that_is_gone_is_a_transient_error(tmp_path: Path) -> None:
    client = ControlClient(f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(TransientError, match=r"nobody\.sock"):
        await client.status(5.0)
    await client.close()


async def test_finding_out_why_a_coordinator_is_silent_takes_at_most_another_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = ControlClient(f"127.0.0.1:{listening.getsockname()[1]}")
        began_at = time.monotonic()
        with pytest.raises(TransientError, match="does not answer"):
            await client.status(timeout_s=1.5)
        took_s = time.monotonic() - began_at
        await client.close()
    assert took_s < 3.0


@pytest.mark.usefixtures("client")
async def test_stop_reaches_the_handler(recorder: Recorder, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/c.sock") as channel:
        stub = pb_grpc.ControlStub(channel)
        await stub.Stop(pb.StopRequest(reason="drain", exit_code=143))
    assert await recorder.heard.get() == ("stop", ("drain", 143))


async def test_operators_are_refused_by_a_coordinator_that_does_not_lead(
    recorder: Recorder, client: ControlClient
) -> None:
    recorder.leads = False
    for asked in (
        client.stop("why", 143, 30.0),
        client.drain("n1", "", 30.0),
        client.clear("n1", 30.0),
        client.stacks("", 30.0),
        client.timeline(0, 30.0),
    ):
        with pytest.raises(TransientError, match="it does not lead"):
            await asked
    assert recorder.heard.empty()


async def test_start_returns_the_port_that_was_chosen() -> None:
    server = ControlServer(Recorder(), "127.0.0.1:0")
    host, _, port = (await server.start()).rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    await server.stop(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"], ids=["in use", "not ours"])
async def test_an_address_that_cannot_be_bound_is_a_configuration_error(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        server = ControlServer(
            Recorder(), address, security=Plaintext(insecure=True), report=Reports()
        )
        with pytest.raises(ConfigurationError, match=f"{address}.*--listen"):
            await server.start()


async def test_the_stream_of_an_agent_that_does_not_read_is_bounded_and_ends() -> None:
    stream = AgentStream(HELLO.hello)
    message = pb.CoordinatorMessage(probe=pb.Probe()).SerializeToString()
    for _ in range(30_000):
        stream.send_serialized(message)
    stream.send(probe=pb.Probe())
    assert stream._outgoing.qsize() <= 10_000
    assert [m async for m in stream.outgoing()] == []


async def test_a_socket_path_that_cannot_be_bound_is_a_transient_error(
    tmp_path: Path,
) -> None:
    server = ControlServer(Recorder(), f"unix:{tmp_path}/gone/c.sock")
    with pytest.raises(TransientError, match=r"cannot listen at unix:.*gone.*try again"):
        await server.start()
