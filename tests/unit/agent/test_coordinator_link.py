"""The agent keeps a stream to the newest leader open, and loses no message that matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import coordinator_link
from elastic.agent.coordinator_link import CoordinatorLink, FixedLeader, Leader, Outgoing
from elastic.errors import ConfigurationError
from elastic.rpc.control import AgentStream, ControlServer
from elastic.rpc.control_client import ControlClient
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2
from tests.unit.rpc.conversation import DEADLINE_S, Recorder
from tests.waiting import until

HELLO = pb.AgentHello(node="n1", host="h", slots=2)


class Coordinator(Recorder):
    """A coordinator that answers every hello and keeps what agents say."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.said: list[pb.AgentMessage] = []
        self.refuses, self.refuses_for_now = "", False
        self._server: ControlServer | None = None

    async def start(self) -> None:
        self._server = ControlServer(self, self.address)
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    def agent_connected(self, stream: AgentStream) -> None:
        super().agent_connected(stream)
        if self.refuses:
            for_now = self.refuses_for_now
            stream.send(refused=pb.Refused(message=self.refuses, exit_code=78, for_now=for_now))
            stream.close()
        else:
            stream.send(probe=pb.Probe())

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        super().agent_said(stream, message)
        self.said.append(message)

    def kinds(self) -> list[str | None]:
        return [m.WhichOneof("kind") for m in self.said]


class Found:
    """A leader, as the store names it."""

    def __init__(self, address: str) -> None:
        self.address = address


class Election:
    """A leader source whose leader the test elects."""

    def __init__(self, first: Leader | None = None) -> None:
        self._leader = first
        self._changed = asyncio.Event()

    def elect(self, address: str) -> None:
        self._leader = Found(address)
        self._changed.set()
        self._changed = asyncio.Event()

    async def newer(self, than: Any = None) -> Leader:
        while self._leader is None or self._leader is than:
            await self._changed.wait()
        return self._leader


class Agent:
    """An agent's link and what it has reported."""

    def __init__(self, leaders: Election | FixedLeader) -> None:
        self.messages: list[str | None] = []
        self.awaited: list[bool] = []
        self.not_yet: list[str] = []
        self.lost: list[str] = []
        self.found: list[str] = []
        self.refused: list[ConfigurationError] = []
        self.clients: list[str] = []
        self.error: ConfigurationError | None = None
        self.link = CoordinatorLink(
            leaders,
            self._connect,
            HELLO,
            on_connected=lambda: self.link.send(view=pb.NodeView()),
            on_message=lambda m: self.messages.append(m.WhichOneof("kind")),
            on_refused=self.refused.append,
            report=self._report,
        )
        self.running = asyncio.create_task(self.link.run())

    def _report(self, name: str, /, **fields: Any) -> None:
        told: dict[str, list[Any]] = {
            "coordinator_awaited": self.awaited,
            "admission_awaited": self.not_yet,
            "coordinator_lost": self.lost,
            "coordinator_found": self.found,
        }
        (value,) = fields.values() or [True]
        told[name].append(value)

    def _connect(self, address: str) -> ControlClient:
        self.clients.append(address)
        return _Client(address, self)

    async def close(self) -> None:
        self.link.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


class _Client(ControlClient):
    """A real client that fails, if the test says so, as with bad certificates."""

    def __init__(self, address: str, agent: Agent) -> None:
        super().__init__(address)
        self._agent = agent

    async def attend(self, outgoing: Any) -> Any:
        if self._agent.error is not None:
            raise self._agent.error
        async for message in super().attend(outgoing):
            yield message


class Place:
    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory, self._stack = directory, stack

    async def coordinator(self, name: str = "c") -> Coordinator:
        made = Coordinator(f"unix:{self._directory}/{name}.sock")
        self._stack.push_async_callback(made.stop)
        await made.start()
        return made

    def agent(self, leaders: Election | FixedLeader) -> Agent:
        made = Agent(leaders)
        self._stack.push_async_callback(made.close)
        return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.agent.coordinator_link._RETRY_S", 0.02)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(tmp_path, stack)


async def connected(place: Place) -> tuple[Coordinator, Agent]:
    coordinator = await place.coordinator()
    agent = place.agent(FixedLeader(coordinator.address))
    await until(lambda: agent.link.connected)
    return coordinator, agent


async def connected_to_one_of_two(
    place: Place,
) -> tuple[Coordinator, Coordinator, Election, Agent]:
    one, two = await place.coordinator("one"), await place.coordinator("two")
    election = Election(Found(one.address))
    agent = place.agent(election)
    await until(lambda: agent.link.connected)
    return one, two, election, agent


def failure(worker: str) -> job_pb2.Failure:
    return job_pb2.Failure(worker=worker)


async def test_a_stream_begins_with_the_hello_and_the_view(place: Place) -> None:
    coordinator, agent = await connected(place)
    agent.link.send(progress=job_pb2.Progress(committed=3))
    await until(lambda: coordinator.kinds() == ["view", "progress"])
    assert coordinator.streams[0].hello == HELLO
    assert agent.messages == ["probe"]
    assert agent.lost == []


async def test_only_an_answered_pulse_shows_when_the_coordinator_was_there(place: Place) -> None:
    """What is read after a pause may have been sent long before."""
    coordinator, agent = await connected(place)
    agent.link.send(pulse=7.0)
    await until(lambda: coordinator.kinds() == ["view", "pulse"])
    assert agent.link.answered_at == 0.0
    for answered in (7.0, 5.0):
        coordinator.streams[0].send(pulse=answered)
    coordinator.streams[0].send(probe=pb.Probe())
    await until(lambda: agent.messages == ["probe", "pulse", "pulse", "probe"])
    assert agent.link.answered_at == 7.0


async def test_a_stream_that_breaks_is_opened_again_and_repeats_the_view(place: Place) -> None:
    coordinator, agent = await connected(place)
    await until(lambda: coordinator.kinds() == ["view"])
    coordinator.streams[0].close()
    await until(lambda: coordinator.kinds() == ["view", "view"])
    await until(lambda: agent.link.connected)
    assert len(agent.lost) == 1
    assert agent.clients == [coordinator.address]


async def test_contact_after_a_loss_is_reported_and_the_first_contact_is_not(place: Place) -> None:
    coordinator, agent = await connected(place)
    await coordinator.stop()
    await until(lambda: not agent.link.connected and bool(agent.lost))
    assert agent.found == []
    await coordinator.start()
    await until(lambda: agent.link.connected)
    assert agent.found == [coordinator.address]


async def test_messages_that_are_sent_at_every_try_are_kept_once_while_nobody_answers(
    place: Place, tmp_path: Path
) -> None:
    agent = place.agent(FixedLeader(f"unix:{tmp_path}/nobody.sock"))
    tries = 0

    def say_anew() -> None:
        nonlocal tries
        tries += 1
        for why in ("SIGTERM", "drained"):
            agent.link.send(leave=pb.LeaveRequest(reason=why))
        agent.link.send(stop=pb.StopRequest(reason="maintenance"))

    agent.link._on_connected = say_anew
    await until(lambda: tries > 3)
    await agent.close()
    kinds = [m.WhichOneof("kind") for m in agent.link._kept]
    assert kinds == ["leave", "leave", "stop"]


async def test_only_messages_that_matter_are_kept_while_nobody_answers(place: Place) -> None:
    coordinator, agent = await connected(place)
    await coordinator.stop()
    await until(lambda: not agent.link.connected and bool(agent.lost))
    agent.link.send(failure=failure("w1"))
    agent.link.send(progress=job_pb2.Progress(committed=3))
    agent.link.send(view=pb.NodeView())
    agent.link.send(reformed=job_pb2.Reformed())
    agent.link.send(shard_saved=job_pb2.ShardSaved())
    agent.link.send(ledger=local_pb2.LedgerEntries())
    agent.link.send(notice=local_pb2.Notice(name="checkpoint_damaged"))
    agent.link.send(leave=pb.LeaveRequest(reason="SIGTERM"))
    agent.link.send(stop=pb.StopRequest(reason="Ctrl-C"))
    agent.link.send(failure=failure("w2"))
    coordinator.said.clear()
    await coordinator.start()
    await until(lambda: len(coordinator.said) >= 7)
    kinds = ["view", "failure", "reformed", "notice", "failure", "leave", "stop"]
    assert coordinator.kinds() == kinds
    assert [m.failure.worker for m in coordinator.said if m.HasField("failure")] == ["w1", "w2"]
    coordinator.streams[0].send(once_stored=coordinator.said[4].once.number)
    await until(lambda: "once_stored" in agent.messages)
    await coordinator.stop()
    coordinator.said.clear()
    await coordinator.start()
    await until(lambda: len(coordinator.said) >= 1 and agent.link.connected)
    assert coordinator.kinds() == ["view"]  # what was sent or acknowledged is not sent again


async def test_a_failure_is_told_to_each_leader_until_one_has_stored_it(place: Place) -> None:
    """The first leader may have died before it read what was sent to it."""
    one, two, election, agent = await connected_to_one_of_two(place)
    for worker in ("w1", "w2"):
        agent.link.send(failure=failure(worker))
    await until(lambda: one.kinds() == ["view", "failure", "failure"])
    first, second = (message.once for message in one.said[1:])
    assert (first.number, second.number, first.age_s) == (1, 2, 0.0)
    one.streams[0].send(once_stored=first.number)
    await until(lambda: "once_stored" in agent.messages)
    election.elect(two.address)
    await until(lambda: two.kinds() == ["view", "failure"])
    assert two.said[1].failure.worker == "w2"
    again = two.said[1].once
    assert (again.source, again.number) == (second.source, second.number)
    assert 0.0 < again.age_s < DEADLINE_S


async def test_only_the_newest_failures_are_kept_while_no_leader_stores_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_link, "_MOST_KEPT", 2)
    election = Election()
    agent = place.agent(election)
    for worker in ("w1", "w2", "w3"):
        agent.link.send(failure=failure(worker))
    coordinator = await place.coordinator()
    election.elect(coordinator.address)
    await until(lambda: coordinator.kinds() == ["view", "failure", "failure"])
    assert [m.failure.worker for m in coordinator.said[1:]] == ["w2", "w3"]


async def test_messages_sent_before_there_is_a_leader_are_kept(place: Place) -> None:
    election = Election()
    agent = place.agent(election)
    agent.link.send(failure=failure("w1"))
    coordinator = await place.coordinator()
    election.elect(coordinator.address)
    await until(lambda: coordinator.kinds() == ["view", "failure"])


async def test_the_lack_of_a_leader_is_reported_once_and_then_the_leader(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_link, "_AWAITED_S", 0.01)
    election = Election()
    agent = place.agent(election)
    await until(lambda: agent.awaited == [True])
    coordinator = await place.coordinator()
    election.elect(coordinator.address)
    await until(lambda: agent.found == [coordinator.address])
    assert (agent.awaited, agent.lost) == ([True], [])


async def test_the_link_changes_to_a_new_leader_though_the_old_one_answers(place: Place) -> None:
    one, two, election, agent = await connected_to_one_of_two(place)
    election.elect(two.address)
    await until(lambda: two.kinds() == ["view"])
    await until(lambda: agent.link.connected and not one.streams)
    agent.link.send(failure=failure("w1"))
    await until(lambda: two.kinds() == ["view", "failure"])
    assert one.kinds() == ["view"]
    assert agent.clients == [one.address, two.address]
    assert agent.lost == []  # a change of leader is not a loss


async def test_the_same_address_in_a_new_term_is_a_new_leader(place: Place) -> None:
    coordinator = await place.coordinator()
    election = Election(Found(coordinator.address))
    agent = place.agent(election)
    await until(lambda: agent.link.connected)
    election.elect(coordinator.address)
    await until(lambda: coordinator.kinds() == ["view", "view"])


async def test_the_link_finds_the_new_leader_after_the_old_one_is_gone(place: Place) -> None:
    one, two, election, agent = await connected_to_one_of_two(place)
    await one.stop()
    await until(lambda: bool(agent.lost))
    agent.link.send(failure=failure("w1"))
    election.elect(two.address)
    await until(lambda: two.kinds() == ["view", "failure"])


async def test_each_outage_is_reported_once(place: Place) -> None:
    coordinator, agent = await connected(place)
    told = 0
    for _ in range(2):
        await coordinator.stop()
        await until(lambda: len(agent.lost) > told)  # noqa: B023
        reasons = agent.lost[told:]
        await asyncio.sleep(0.3)  # many tries
        new = agent.lost[told:]
        assert new[: len(reasons)] == reasons
        assert len(new) == len(set(new)) <= 2  # at most: how it broke, and that nobody answers
        await coordinator.start()
        await until(lambda: agent.link.connected)
        told = len(agent.lost)


async def test_a_configuration_error_at_the_first_contact_ends_the_link(place: Place) -> None:
    coordinator = await place.coordinator()
    agent = place.agent(FixedLeader(coordinator.address))
    agent.error = ConfigurationError("the certificate is of another job")
    await agent.running
    assert [str(e) for e in agent.refused] == ["the certificate is of another job"]
    assert agent.lost == []


async def test_a_configuration_error_after_the_first_contact_is_an_outage(place: Place) -> None:
    coordinator, agent = await connected(place)
    agent.error = ConfigurationError("the certificate has expired")
    coordinator.streams[0].close()
    await until(lambda: "the certificate has expired" in agent.lost)
    agent.error = None
    await until(lambda: agent.link.connected)
    assert agent.refused == []
    assert agent.lost.count("the certificate has expired") == 1


async def test_a_refusal_by_the_first_leader_ends_the_link(place: Place) -> None:
    coordinator = await place.coordinator()
    coordinator.refuses = "another command"
    agent = place.agent(FixedLeader(coordinator.address))
    await agent.running
    assert [str(e) for e in agent.refused] == ["another command"]
    assert agent.messages == []


async def test_an_agent_that_is_refused_for_now_tries_again(place: Place) -> None:
    coordinator = await place.coordinator()
    coordinator.refuses, coordinator.refuses_for_now = "another command", True
    agent = place.agent(FixedLeader(coordinator.address))
    await until(lambda: bool(agent.not_yet))
    coordinator.refuses = ""
    await until(lambda: agent.link.connected)
    assert agent.not_yet == ["another command"]
    assert (agent.lost, agent.refused) == ([], [])
    assert agent.found == [coordinator.address]


async def test_a_refusal_by_a_later_leader_does_not_end_the_link(place: Place) -> None:
    first, second, third = [await place.coordinator(name) for name in "abc"]
    second.refuses = "another version"
    election = Election(first)
    agent = place.agent(election)
    await until(lambda: agent.link.connected)
    election.elect(second.address)
    await until(lambda: "another version" in agent.lost)
    election.elect(third.address)
    await until(lambda: agent.link.connected)
    assert agent.refused == []


async def test_a_closed_link_reports_nothing(place: Place) -> None:
    coordinator, agent = await connected(place)
    agent.link.close()
    await coordinator.stop()
    await agent.running
    assert agent.lost == []


async def test_a_fixed_leader_is_never_followed_by_a_newer_one(place: Place) -> None:
    del place
    leader = FixedLeader("unix:/c")
    assert await leader.newer() is leader
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(leader.newer(leader), 0.05)


# ---- a coordinator that does not read


def progress(committed: int, **fields: Any) -> pb.AgentMessage:
    return pb.AgentMessage(progress=job_pb2.Progress(committed=committed, **fields))


async def read(outgoing: Outgoing) -> list[str | None]:
    kinds = []
    while len(outgoing) and outgoing.takes:
        kinds.append((await anext(outgoing)).WhichOneof("kind"))
    return kinds


async def test_only_the_newest_of_messages_that_replace_each_other_waits() -> None:
    outgoing = Outgoing()
    failure = pb.AgentMessage(failure=job_pb2.Failure(worker="w"))
    outgoing.put(failure)
    for committed in range(1000):
        outgoing.put(pb.AgentMessage(view=pb.NodeView()))
        outgoing.put(progress(committed))
    outgoing.put(progress(3, probed=True))
    outgoing.put(progress(1001))
    assert await read(outgoing) == ["failure", "view", "progress", "progress"]


async def test_too_many_unsent_messages_end_the_stream_and_those_that_matter_are_kept() -> None:
    outgoing = Outgoing(most=100)
    outgoing.put(pb.AgentMessage(stop=pb.StopRequest(reason="Ctrl-C")))
    for step in range(100):
        assert outgoing.takes
        entries = [job_pb2.LedgerEntry(step=step)]
        outgoing.put(pb.AgentMessage(ledger=local_pb2.LedgerEntries(entries=entries)))
    assert not outgoing.takes
    with pytest.raises(StopAsyncIteration):
        await anext(outgoing)
    assert [m.WhichOneof("kind") for m in outgoing.end()] == ["stop"]
