"""A job has one run at a time, and the store keeps the end of a run until it is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from elastic.coordinator.leadership import Leadership, lead, save_generation
from elastic.core.documents import to_json
from elastic.core.membership import ChangeReason, Generation
from elastic.errors import ConfigurationError
from elastic.store.interface import GuardFailed, Store
from elastic.store.job_documents import NodeDocument
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import (
    AlreadyEnded,
    RunEnd,
    RunEnds,
    announce_end,
    forget_run,
    list_runs,
)
from tests.contract.conftest import Adapter

KEYS = JobKeys("job")
INCIDENT = "incidents/default/000000001"
NODE = NodeDocument(
    start_token="t", host="h", slots=1, version="1", command_digest="d", started_unix_s=1.0
)


def end(exit_code: int = 0, run_id: str = "default", *, left: bool = False) -> RunEnd:
    return RunEnd(
        run_id=run_id,
        exit_code=exit_code,
        message="why",
        committed=12,
        ended_unix_s=1.5,
        left=left,
    )


async def ended(store: Store, leadership: Leadership, ending: RunEnd) -> None:
    """Announce the end of a run, then remove its leader."""
    await announce_end(store, job="job", guard=leadership.guard, end=ending)
    await store.delete(KEYS.leader)


async def listener(store: Store, run_id: str = "default") -> RunEnds:
    ends = RunEnds(store, job="job", run_id=run_id)
    await ends.start()
    return ends


async def train(store: Store, run_id: str = "default", number: int = 7) -> Leadership:
    """Lead a run with a generation, a drained and a quarantined node, a stop order, an incident."""
    leadership = await lead(store, job="job", candidate=f"of {run_id}", run_id=run_id)
    generation = Generation(
        number=number,
        incarnation=leadership.incarnation,
        members=(),
        reason=ChangeReason.STARTED,
    )
    await save_generation(store, leadership, generation)
    await store.put(KEYS.drain("n"), b"{}", guard=leadership.guard)
    await store.put(KEYS.quarantine("m"), b"{}", guard=leadership.guard)
    await store.put(KEYS.stop, b"{}", guard=leadership.guard)
    await store.put(KEYS.incident(run_id, 1), b"{}", guard=leadership.guard)
    return leadership


async def keys(store: Store) -> list[str]:
    return [entry.key.removeprefix(KEYS.folder) for entry in await store.list(KEYS.folder)]


@pytest.fixture
async def store(adapter: Adapter) -> Store:
    return adapter.make()


@pytest.mark.parametrize("ending", [end(0), end(82), end(143, left=True)])
async def test_all_listeners_receive_the_end_of_a_run(store: Store, ending: RunEnd) -> None:
    leadership = await train(store)
    waiting = [asyncio.create_task((await listener(store)).next_end()) for _ in range(2)]
    await ended(store, leadership, ending)
    assert await asyncio.gather(*waiting) == [ending, ending]


@pytest.mark.parametrize("exit_code", [0, 1, 82])
async def test_a_run_that_has_ended_cannot_be_started_again(store: Store, exit_code: int) -> None:
    await ended(store, await train(store), end(exit_code))
    for _ in range(2):
        with pytest.raises(AlreadyEnded, match="after 12 steps with exit code") as one:
            await listener(store)
        assert one.value.end == end(exit_code)
        with pytest.raises(AlreadyEnded):
            await lead(store, job="job", candidate="again")
        await store.delete(KEYS.leader)
    assert await keys(store) == ["ended/default", INCIDENT]


async def test_a_run_that_all_nodes_have_left_goes_on_when_they_return(store: Store) -> None:
    await ended(store, await train(store), end(143, left=True))
    assert await keys(store) == ["drain/n", "ended/default", INCIDENT, "quarantine/m"]
    waiting = asyncio.create_task((await listener(store)).next_end())
    again = await lead(store, job="job", candidate="again")
    assert (again.incarnation, again.last) == ("again", None)
    assert "ended/default" not in await keys(store)
    assert INCIDENT in await keys(store), "it is the same run"
    assert not waiting.done()
    await ended(store, again, end(0))
    assert await waiting == end(0)


async def test_the_next_run_has_a_new_incarnation_and_no_generation(store: Store) -> None:
    await ended(store, await train(store), end(0))
    again = await lead(store, job="job", candidate="second", run_id="2")
    assert (again.incarnation, again.last) == ("second", None)
    assert await keys(store) == ["ended/default", "incarnation", "leader", "run"]


async def test_another_run_is_refused_while_one_is_under_way(store: Store) -> None:
    await train(store)
    await store.delete(KEYS.leader)
    with pytest.raises(
        ConfigurationError, match=r"run 'default' .* has not ended, so run '2' cannot start; give"
    ):
        await lead(store, job="job", candidate="second", run_id="2")
    await store.delete(KEYS.leader)
    assert (await lead(store, job="job", candidate="second")).last_number == 7


async def test_the_next_leader_removes_what_a_killed_one_left_of_an_ended_run(store: Store) -> None:
    await train(store)
    await store.put(KEYS.end("default"), b"what a newer version writes")
    await store.delete(KEYS.leader)
    again = await lead(store, job="job", candidate="second", run_id="2")
    assert (again.incarnation, again.last) == ("second", None)
    assert "drain/n" not in await keys(store)


async def test_a_deposed_leader_cannot_end_a_run(store: Store) -> None:
    deposed = await train(store)
    await store.delete(KEYS.leader)
    before = await keys(store)
    await lead(store, job="job", candidate="second")
    with pytest.raises(GuardFailed):
        await announce_end(store, job="job", guard=deposed.guard, end=end(1))
    assert await keys(store) == sorted([*before, "leader"])


async def test_only_the_runs_own_end_is_received_even_if_it_is_unreadable(store: Store) -> None:
    waiting = asyncio.create_task((await listener(store)).next_end())
    await store.put(KEYS.end("default2"), b"{}")
    await store.put(JobKeys("job2").end("default"), b"{}")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await store.put(KEYS.end("default"), b"no document")
    assert await waiting == RunEnd(run_id="default", exit_code=1)


async def test_all_runs_are_listed(store: Store) -> None:
    assert await list_runs(store) == []
    await ended(store, await train(store), end(0))
    await train(store, run_id="2")
    await store.put(KEYS.node("n"), to_json(NODE))
    await store.put(JobKeys("a").node("n"), to_json(NODE))
    assert [(r.job, r.run_id, r.nodes, r.end) for r in await list_runs(store)] == [
        ("a", "default", 1, None),
        ("job", "default", 0, end(0)),
        ("job", "2", 1, None),
    ]


async def test_forget_removes_everything_of_a_run(store: Store) -> None:
    await ended(store, await train(store), end(0))
    assert await forget_run(store, job="job", run_id="default")
    assert await keys(store) == []
    assert not await forget_run(store, job="job", run_id="default")
    await train(store)
    await store.delete(KEYS.leader)  # all were killed
    assert await forget_run(store, job="job", run_id="default")
    assert await keys(store) == []
    assert (await lead(store, job="job", candidate="new")).incarnation == "new"


async def test_forget_refuses_a_run_that_has_agents(store: Store) -> None:
    await ended(store, await train(store, run_id="1"), end(0, "1"))
    await train(store, run_id="2")
    await store.delete(KEYS.leader)
    await store.put(KEYS.node("n"), to_json(NODE))
    with pytest.raises(ConfigurationError, match=r"'2' of job 'job' is under way \(1 agents\)"):
        await forget_run(store, job="job", run_id="2")
    assert "generation" in await keys(store)
    assert await forget_run(store, job="job", run_id="1")
    assert "generation" in await keys(store)
    assert (await lead(store, job="job", candidate="next", run_id="2")).last_number == 7
    assert not await forget_run(store, job="job", run_id="1")
