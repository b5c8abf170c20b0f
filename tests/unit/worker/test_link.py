"""A worker's link to its agent, and to the agent that follows."""

from __future__ import annotations

import errno
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.rpc.framing import FrameDecoder, encode
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb
from elastic.worker import link as link_module
from elastic.worker.link import Link

DEADLINE_S = 30.0


class Agent:
    """An agent that listens at `path` for one worker."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self._peer: socket.socket | None = None
        self._decoder = FrameDecoder(pb.WorkerMessage)
        self._heard: list[pb.WorkerMessage] = []

    def accept(self) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer, _ = self._listener.accept()
        self._peer.settimeout(DEADLINE_S)

    def hear(self) -> pb.WorkerMessage:
        while not self._heard:
            assert self._peer is not None
            self._heard += self._decoder.feed(self._peer.recv(4096))  # type: ignore[arg-type]
        return self._heard.pop(0)

    def say(self, data: bytes) -> None:
        assert self._peer is not None
        self._peer.sendall(data)

    def end(self) -> None:
        for end in (self._peer, self._listener):
            if end is not None:
                end.close()


class Place:
    """A worker with a link, and what the link's callbacks get once it is started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.agents: list[Agent] = []
        first = self.agent()
        self.link = Link("w", str(path))
        first.accept()
        self.commands: queue.Queue[str | None] = queue.Queue()
        self.new_agents: queue.Queue[int] = queue.Queue()
        self.errors: queue.Queue[Exception] = queue.Queue()

    def start(self) -> Agent:
        self.link.start(
            lambda command: self.commands.put(command.WhichOneof("kind")),
            lambda: self.new_agents.put(1),
            self.errors.put,
        )
        return self.agents[0]

    def obeys(self, agent: Agent) -> None:
        """Assert that a command of this agent arrives."""
        agent.say(DISMISS)
        assert self.commands.get(timeout=DEADLINE_S) == "dismiss"

    def agent(self) -> Agent:
        self.agents.append(Agent(self.path))
        return self.agents[-1]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(link_module, "_RETRY_S", 0.01)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        made = Place(Path(directory) / "agent.sock")
        yield made
        in_vain = threading.Event()

        def connect() -> socket.socket:
            in_vain.set()
            threading.Event().wait()  # the link's thread ends with this process
            raise AssertionError

        made.link._connect = connect  # type: ignore[method-assign]
        for agent in made.agents:
            agent.end()
        assert in_vain.wait(DEADLINE_S)
        made.link._socket.close()


DISMISS = encode(pb.WorkerCommand(dismiss=pb.Dismiss()))
PROBE = encode(pb.WorkerCommand(probe=pb.ProbeProgress()))


def test_messages_and_commands_arrive_in_both_directions(place: Place) -> None:
    agent = place.start()
    place.link.hello()
    place.link.send(status=job_pb2.WorkerStatus(worker="w"))
    assert agent.hear().hello == pb.Hello(worker="w", pid=os.getpid())
    assert agent.hear().HasField("status")
    agent.say(DISMISS + PROBE[:3])
    agent.say(PROBE[3:])
    assert [place.commands.get(timeout=DEADLINE_S) for _ in range(2)] == ["dismiss", "probe"]
    assert place.new_agents.empty()


def test_the_next_agent_gets_a_hello_and_the_worker_learns_of_it(place: Place) -> None:
    agent = place.start()
    agent.end()
    time.sleep(0.05)  # no agent listens for a while
    place.link.send(status=job_pb2.WorkerStatus(worker="lost"))
    second = place.agent()
    second.accept()
    assert second.hear().hello == pb.Hello(worker="w", pid=os.getpid())
    place.new_agents.get(timeout=DEADLINE_S)
    place.link.send(status=job_pb2.WorkerStatus(worker="again"))
    assert second.hear().status.worker == "again"
    place.obeys(second)


def test_the_scripts_default_timeout_does_not_apply_to_the_next_agents_socket(place: Place) -> None:
    first = place.start()
    second = place.agent()
    socket.setdefaulttimeout(0.05)
    try:
        first.end()
        second.accept()
        assert second.hear().HasField("hello")
        place.new_agents.get(timeout=DEADLINE_S)
        time.sleep(0.2)  # silence for longer than the default timeout
    finally:
        socket.setdefaulttimeout(None)
    place.obeys(second)
    assert place.new_agents.empty()


def test_the_link_connects_again_after_the_script_has_closed_its_descriptor(place: Place) -> None:
    os.close(place.link.fileno())
    agent = place.start()
    agent.accept()
    assert agent.hear().HasField("hello")
    place.new_agents.get(timeout=DEADLINE_S)
    place.link.send(status=job_pb2.WorkerStatus(worker="w"))
    assert agent.hear().HasField("status")
    place.obeys(agent)


def test_half_a_command_of_the_previous_agent_is_dropped(place: Place) -> None:
    agent = place.start()
    agent.say(PROBE[:3])
    agent.end()
    second = place.agent()
    second.accept()
    place.obeys(second)
    assert place.commands.empty()


def test_the_link_connects_to_several_agents_in_turn(place: Place) -> None:
    agent = place.start()
    for _ in range(3):
        agent.end()
        agent = place.agent()
        agent.accept()
        assert agent.hear().HasField("hello")
        place.new_agents.get(timeout=DEADLINE_S)


class _OutOfBuffers(socket.socket):
    def sendall(self, *_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")


def test_the_link_connects_again_after_a_failed_send(place: Place) -> None:
    """Otherwise the agent would wait forever for the message that it missed."""
    whole = place.link._socket
    with whole:
        place.link._socket = _OutOfBuffers(fileno=os.dup(whole.fileno()))
    agent = place.start()
    place.link.send(status=job_pb2.WorkerStatus(worker="lost"))
    agent.accept()
    assert agent.hear().hello.worker == "w"
    place.new_agents.get(timeout=DEADLINE_S)


def test_an_unreadable_frame_ends_only_the_connection(place: Place) -> None:
    agent = place.start()
    agent.say(b"\xff\xff\xff\xff garbage")
    agent.accept()
    assert agent.hear().HasField("hello")
    agent.say(PROBE)
    assert place.commands.get(timeout=DEADLINE_S) == "probe"
    assert place.errors.empty()


def test_an_error_in_a_callback_reaches_the_error_handler() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        agent = Agent(Path(directory) / "agent.sock")
        link, errors, bug = (
            Link("w", str(Path(directory) / "agent.sock")),
            queue.Queue(),
            KeyError(),
        )

        def fail(_command: pb.WorkerCommand) -> None:
            raise bug

        link.start(fail, lambda: None, errors.put)
        agent.accept()
        agent.say(PROBE)
        assert errors.get(timeout=DEADLINE_S) is bug
        agent.end()
        link._socket.close()


def test_a_link_waits_for_an_agent_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may have ended while this worker was forked."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory) / "agent.sock"
        agents: list[Agent] = []
        clock = SimpleNamespace(sleep=lambda _s: agents.append(Agent(path)))
        monkeypatch.setattr(link_module, "time", clock)
        link = Link("w", str(path))
        (agent,) = agents
        agent.accept()
        link.hello()
        assert agent.hear().hello.worker == "w"
        agent.end()
        link._socket.close()
