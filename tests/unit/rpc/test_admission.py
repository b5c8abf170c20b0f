"""Every kind of gRPC method works behind the admission checks as it would without them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from elastic.rpc import admission
from elastic.rpc.admission import Admission
from elastic.rpc.security import PLAINTEXT
from tests.unit.rpc.conversation import Reports


class Methods:
    """One method of each kind; `ended` is set when the client has left `forever`."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def ask(self, request: bytes, _: object) -> bytes:
        return request * 2

    async def yields(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        for _count in range(3):
            yield request

    async def writes(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        for _count in range(3):
            await context.write(request)

    async def forever(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        try:
            while True:
                yield request
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def echo(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    def handler(self) -> grpc.GenericRpcHandler:
        handlers = {
            "ask": grpc.unary_unary_rpc_method_handler(self.ask),
            "yields": grpc.unary_stream_rpc_method_handler(self.yields),
            "writes": grpc.unary_stream_rpc_method_handler(self.writes),
            "forever": grpc.unary_stream_rpc_method_handler(self.forever),
            "echo": grpc.stream_stream_rpc_method_handler(self.echo),
        }
        return grpc.method_handlers_generic_handler("t", handlers)


@pytest.fixture
async def methods() -> Methods:
    return Methods()


@pytest.fixture
async def reports() -> Reports:
    return Reports()


@pytest.fixture
async def channel(methods: Methods, reports: Reports) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[Admission(PLAINTEXT, reports)])
    server.add_generic_rpc_handlers((methods.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_each_kind_of_method_works(channel: grpc.aio.Channel, reports: Reports) -> None:
    assert await channel.unary_unary("/t/ask")(b"a") == b"aa"
    for name in ("yields", "writes"):
        assert [r async for r in channel.unary_stream(f"/t/{name}")(b"a")] == [b"a"] * 3
    echo = channel.stream_stream("/t/echo")(iter([b"a", b"b"]))
    assert [r async for r in echo] == [b"a", b"b"]
    assert reports.all == []


async def test_a_stream_that_the_client_leaves_is_ended(
    methods: Methods, channel: grpc.aio.Channel
) -> None:
    call = channel.unary_stream("/t/forever")(b"a")
    assert await call.read() == b"a"
    call.cancel()
    await methods.ended.wait()


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("/elastic.v1.Control/Attend", 8 * 2**20),
        ("/elastic.v1.Control/Stop", 64 * 2**10),
        ("/etcdserverpb.KV/Txn", 2 * 2**20),
        ("/etcdserverpb.Lease/LeaseGrant", 64 * 2**10),
    ],
)
async def test_each_method_has_a_limit_of_its_own(method: str, most: int) -> None:
    async def of(size: int) -> AsyncIterator[bytes]:
        yield bytes(size)

    limit = admission._most_bytes(method)
    assert [len(m) async for m in admission._parsed(of(most), None, limit)] == [most]
    with pytest.raises(admission.MessageRefused):
        await anext(admission._parsed(of(most + 1), None, limit))


async def test_a_request_too_large_reaches_no_method(
    channel: grpc.aio.Channel, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_MOST_BYTES_ASKED", 10)
    with pytest.raises(grpc.aio.AioRpcError, match="11 bytes; at most 10"):
        await channel.unary_unary("/t/ask")(b"a" * 11)
    for name in ("yields", "writes"):
        with pytest.raises(grpc.aio.AioRpcError, match="11 bytes; at most 10") as error:
            await channel.unary_stream(f"/t/{name}")(b"a" * 11).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(reports.named("message_refused")) == 3
