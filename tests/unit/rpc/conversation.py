"""Both sides of the gRPC connection for tests: a handler that records messages, and an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from elastic.errors import TransientError
from elastic.rpc.control import AgentStream, ControlServer
from elastic.rpc.control_client import ControlClient
from elastic.rpc.security import Security
from elastic.v1 import control_pb2 as pb
from elastic.v1 import stacks_pb2, timeline_pb2

DEADLINE_S = 60.0
HELLO = pb.AgentMessage(hello=pb.AgentHello(node="n1", host="10.0.0.1", slots=2))


class Recorder:
    """A handler that leads if `leads`. `heard` holds what it was told, and `streams` the connected
    agents."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.streams: list[AgentStream] = []
        self.leads = True

    def operators(self) -> Recorder:
        if not self.leads:
            raise TransientError("it does not lead")
        return self

    def agents(self) -> Recorder | None:
        return self if self.leads else None

    def agent_connected(self, stream: AgentStream) -> None:
        self.streams.append(stream)
        self.heard.put_nowait(("connected", (stream.node, stream.host, stream.slots)))

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        assert stream in self.streams
        self.heard.put_nowait(("said", message.WhichOneof("kind")))

    def agent_lost(self, stream: AgentStream) -> None:
        self.streams.remove(stream)
        self.heard.put_nowait(("lost", stream.node))

    def status(self) -> pb.JobStatus:
        return pb.JobStatus(job="digits", restarts=3)

    def stop(self, reason: str, exit_code: int) -> None:
        self.heard.put_nowait(("stop", (reason, exit_code)))

    async def drain(self, name: str, reason: str, *, future: bool) -> str:
        del future
        return f"{name} is drained: {reason}"

    async def clear(self, name: str) -> str:
        return f"{name} is cleared"

    async def stacks(self, of: str) -> stacks_pb2.JobStacks:
        return stacks_pb2.JobStacks(verdict=f"rank {of} hangs")

    def incidents(self, number: int | None) -> list[str]:
        return [f'{{"number": {number}}}'] if number is not None else []

    async def timeline(self, steps: int) -> timeline_pb2.JobTimeline:
        return timeline_pb2.JobTimeline(silent=steps)

    async def follow_events(self, *, follow: bool) -> AsyncIterator[str]:
        assert not follow
        yield "{}"


class Conversation:
    """An agent's side of a stream: sends messages, and holds those that it has received."""

    def __init__(self, client: ControlClient, *first: pb.AgentMessage) -> None:
        self._sent: asyncio.Queue[pb.AgentMessage | None] = asyncio.Queue()
        for message in first:
            self.send(message)
        self.received: asyncio.Queue[pb.CoordinatorMessage] = asyncio.Queue()
        self.ended = asyncio.ensure_future(self._attend(client))

    def send(self, message: pb.AgentMessage | None) -> None:
        self._sent.put_nowait(message)

    async def _attend(self, client: ControlClient) -> None:
        async for message in client.attend(self._outgoing()):
            self.received.put_nowait(message)

    async def _outgoing(self) -> AsyncIterator[pb.AgentMessage]:
        while (message := await self._sent.get()) is not None:
            yield message


class Reports:
    """Collects what a journal would record."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, object]]] = []
        self._more = asyncio.Event()

    def __call__(self, name: str, /, **fields: object) -> None:
        self.all.append((name, fields))
        self._more.set()

    def named(self, name: str) -> list[dict[str, object]]:
        return [fields for found, fields in self.all if found == name]

    async def wait(self, name: str, count: int = 1) -> dict[str, object]:
        while len(self.named(name)) < count:
            self._more.clear()
            await self._more.wait()
        return self.named(name)[count - 1]


class Place:
    """A server, its handler, and what server and clients have reported."""

    def __init__(self, security: Security) -> None:
        self.recorder = Recorder()
        self.reports = Reports()
        self.security = security
        self.address = ""
        self._clients: list[ControlClient] = []

    def client(self, security: Security | None = None) -> ControlClient:
        chosen = self.security if security is None else security
        client = ControlClient(self.address, security=chosen, report=self.reports)
        self._clients.append(client)
        return client

    async def agent(self, security: Security | None = None, node: str = "n1") -> Conversation:
        """An agent that the server has accepted; raises the refusal otherwise."""
        hello = pb.AgentMessage(hello=pb.AgentHello(node=node, host="10.0.0.1", slots=2))
        conversation = Conversation(self.client(security), hello)
        heard = asyncio.ensure_future(self.recorder.heard.get())
        await asyncio.wait({heard, conversation.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not heard.done():
            heard.cancel()
            await conversation.ended
        assert heard.result()[0] == "connected"
        return conversation

    async def still_works(self, agent: Conversation) -> None:
        """Check that messages pass in both directions."""
        agent.send(pb.AgentMessage(view=pb.NodeView()))
        while await self.recorder.heard.get() != ("said", "view"):
            pass
        self.recorder.streams[0].send(job_ended=pb.JobEnded(exit_code=7))
        assert (await agent.received.get()).job_ended.exit_code == 7

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def place_at(
    address: str, security: Security, *, beside: Sequence[grpc.GenericRpcHandler] = ()
) -> AsyncIterator[Place]:
    place = Place(security)
    server = ControlServer(
        place.recorder, address, security=security, report=place.reports, beside=beside
    )
    place.address = await server.start()
    try:
        yield place
    finally:
        await place.close()
        await server.stop(0)
