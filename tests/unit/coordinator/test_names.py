"""The store says which agent has a node's name and which command the job runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.leadership import Command, lead, save_generation
from elastic.coordinator.node_registry import NodeRegistry
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.documents import to_json
from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase
from elastic.errors import ConfigurationError
from elastic.rpc.control import AgentStream
from elastic.rpc.identity import start_token_of
from elastic.store.job_documents import NodeDocument
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from tests.unit.coordinator.agents import (
    Diary,
    agent,
    closed,
    kinds,
    options,
    refused,
    view,
    worker,
)

ONE, OTHER = "0123", "4567"
OTHER_COMMAND = {"command": "other.py", "command_digest": "x"}
RUNNING = Generation(
    number=3,
    incarnation="c",
    members=(Member(worker="n1-1", node=f"n1@{ONE}", slot=0, endpoint="h:1"),),
    reason=ChangeReason.STARTED,
)


class Place:
    """A leader that follows the registrations."""

    def __init__(self, store: MemoryStore, daemon: CoordinatorDaemon, diary: Diary) -> None:
        self.store, self.daemon, self.diary = store, daemon, diary
        self.registry = NodeRegistry(store, daemon, job="job", isolation_timeout_s=60.0)
        daemon.registry = self.registry

    def connect(self, node: str, token: str, **hello: Any) -> AgentStream:
        """Connect an agent, with the fields of its hello."""
        stream = agent(node, token, **hello)
        self.daemon.agent_connected(stream)
        return stream

    async def registered(self, token: str) -> None:
        document = NodeDocument(
            start_token=token,
            host="h",
            slots=2,
            version="",
            command_digest="d",
            started_unix_s=0.0,
        )
        await self.store.put(JobKeys("job").node("n1"), to_json(document))
        while self.registry.holder("n1") != token:
            await asyncio.sleep(0.001)


@pytest.fixture
def before() -> Command | None:
    """The command of the group that an earlier leader has left; None: there was no leader."""
    return None


runs_already = pytest.mark.parametrize(
    "before", [Command(text="train.py", digest="d")], ids=["train.py"]
)


@pytest.fixture
async def place(before: Command | None) -> AsyncIterator[Place]:
    store, diary = MemoryStore(), Diary()
    leadership = await lead(store, job="job", candidate="c")
    if before is not None:
        await save_generation(store, leadership, RUNNING, command=before)
        await store.delete(JobKeys("job").leader)
        leadership = await lead(store, job="job", candidate="d")
    place = Place(store, CoordinatorDaemon(options(), store, leadership, diary.journal), diary)
    following = asyncio.ensure_future(place.registry.run())
    yield place
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await place.daemon.close()


async def test_an_agent_of_the_same_name_does_not_replace_the_registered_one(place: Place) -> None:
    await place.registered(ONE)
    first = place.connect("n1", ONE)
    for _ in range(3):
        second = place.connect("n1", OTHER)
        assert closed(second)
        place.daemon.agent_lost(second)
    assert None not in kinds(first)
    (told,) = place.diary.of("node_refused")
    assert "--node-name" in told["reason"]
    assert not place.diary.of("node_lost")


async def test_an_agent_that_has_lost_its_name_is_disconnected(place: Place) -> None:
    await place.registered(ONE)
    first = place.connect("n1", ONE)
    await place.registered(OTHER)
    assert closed(first)
    place.daemon.agent_lost(first)
    second = place.connect("n1", OTHER)
    assert None not in kinds(second)


async def test_an_agent_that_connects_again_replaces_its_own_stream(place: Place) -> None:
    await place.registered(ONE)
    first, again = place.connect("n1", ONE), place.connect("n1", ONE)
    assert closed(first)
    assert None not in kinds(again)


async def test_who_read_a_start_token_in_the_store_cannot_take_the_nodes_place(
    place: Place,
) -> None:
    token = start_token_of("secret")
    await place.registered(token)
    first = place.connect("n1", token, start_secret="secret")
    for secret in ("", token, "guess"):
        stranger = place.connect("n1", token, start_secret=secret)
        assert not refused(stranger).for_now
        place.daemon.agent_lost(stranger)
    assert None not in kinds(first)
    assert not place.diary.of("node_lost")
    again = place.connect("n1", token, start_secret="secret")
    assert closed(first)
    assert None not in kinds(again)


async def test_the_machine_is_told_when_a_node_opens_another_stream(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[ev.Event] = []
    monkeypatch.setattr(Coordinator, "handle", lambda _self, event, _now: heard.append(event) or [])
    place.connect("n1", ONE)
    assert heard == []
    place.connect("n1", ONE)
    assert heard == [ev.NodeReconnected(node=f"n1@{ONE}")]


async def test_the_newer_agent_is_admitted_while_its_registration_is_unknown(place: Place) -> None:
    """The name is registered for nobody yet, or for an agent that is not connected."""
    early = place.connect("n1", ONE)
    assert None not in kinds(early)
    later = place.connect("n1", OTHER)
    assert closed(early)
    assert None not in kinds(later)
    await place.registered(OTHER)
    assert None not in kinds(later)


# ---- the command


@runs_already
async def test_a_training_group_decides_the_jobs_command_under_a_new_leader(place: Place) -> None:
    """The agent that comes first does not decide it."""
    stranger = place.connect("n2", OTHER, **OTHER_COMMAND)
    assert kinds(stranger) == []  # it has not told yet what it has found on its node
    place.daemon.agent_said(stranger, view())
    assert refused(stranger).for_now
    (told,) = place.diary.of("node_refused")
    assert "'other.py', not 'train.py'" in told["reason"]
    assert "may still run on 'n1'" in told["reason"]
    member = place.connect("n1", ONE)
    assert None not in kinds(member)
    again = place.connect("n2", OTHER, **OTHER_COMMAND)
    assert not refused(again).for_now


@runs_already
async def test_a_job_may_run_another_command_once_no_member_can_train(place: Place) -> None:
    place.daemon.node_gone("n1", ONE)
    newcomer = place.connect("n2", OTHER, **OTHER_COMMAND)
    assert None not in kinds(newcomer)


@runs_already
async def test_all_nodes_may_come_back_with_another_command(place: Place) -> None:
    """The last node that was out of contact reports that nothing of the group is left."""
    waiting = place.connect("n2", OTHER, **OTHER_COMMAND)
    place.daemon.agent_said(waiting, view())
    assert refused(waiting).for_now
    member = place.connect("n1", ONE, **OTHER_COMMAND)
    place.daemon.agent_said(member, view(worker("n1-2", WorkerPhase.SPARE)))
    assert None not in kinds(member)
    again = place.connect("n2", OTHER, **OTHER_COMMAND)
    assert None not in kinds(again)


@runs_already
async def test_a_node_with_workers_of_the_group_may_not_run_another_command(place: Place) -> None:
    member = place.connect("n1", ONE, **OTHER_COMMAND)
    place.daemon.agent_said(member, view(worker("n1-1", WorkerPhase.TRAINING, 3)))
    assert "from the workers that it found" in (turned_away := refused(member)).message
    assert not turned_away.for_now
    assert place.daemon.machine.members_that_may_train()


@runs_already
async def test_a_coordinator_without_a_directory_ends_if_its_group_saves(place: Place) -> None:
    """It could complete no checkpoint, and could not end the job without losing steps."""
    place.connect("n1", ONE, saves=True)
    error = place.daemon.ended.exception()
    assert isinstance(error, ConfigurationError)
    assert "--checkpoint-dir, but this coordinator does not" in str(error)


@runs_already
async def test_a_member_whose_node_has_registered_may_still_train(place: Place) -> None:
    """The node's agent renews its lease, so its workers may train on."""
    await place.registered(ONE)
    place.daemon.node_gone("n1", None)
    stranger = place.connect("n2", OTHER, **OTHER_COMMAND)
    place.daemon.agent_said(stranger, view())
    assert refused(stranger).for_now
    await place.registered(OTHER)  # another machine takes the name
    place.daemon.node_gone("n1", None)
    newcomer = place.connect("n2", OTHER, **OTHER_COMMAND)
    assert None not in kinds(newcomer)


@pytest.mark.parametrize("before", [Command()])
async def test_an_agent_is_admitted_if_an_older_version_stored_no_command(place: Place) -> None:
    first = place.connect("n1", ONE)
    assert None not in kinds(first)


async def test_the_number_of_refused_names_that_are_remembered_is_bounded(place: Place) -> None:
    for number in range(1100):
        place.connect(f"n{number}", ONE, version="0.0.1")
    assert len(place.diary.of("node_refused")) == 1100
    assert len(place.daemon._refused) == 1000
