"""What a leader writes to the store and finds there."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.coordinator.leadership import (
    Command,
    Loss,
    Stored,
    lead,
    load_generation,
    save_generation,
)
from elastic.core.membership import ChangeReason, Generation, Member, Purpose
from elastic.errors import ConfigurationError, TransientError
from elastic.store.interface import GuardFailed
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from elastic.v1 import job_pb2 as pb
from tests.fuzzed_documents import may_be_refused, spliced, thoroughly
from tests.fuzzed_messages import messages
from tests.unit.store.failing_store import Clock, FailingStore

KEYS = JobKeys("job")
GENERATION = Generation(
    number=7,
    incarnation="first",
    members=(
        Member(worker="a", node="n1", slot=0, endpoint="n1:1"),
        Member(worker="b", node="n2", slot=3, endpoint="n2:1"),
    ),
    reason=ChangeReason.MEMBER_JOINED,
    leave_after=12,
    purpose=Purpose.SAVE_AND_LEAVE,
    save_first=True,
)


async def test_the_first_leader_makes_the_incarnation_and_later_ones_keep_it() -> None:
    store = MemoryStore()
    first = await lead(store, job="job", candidate="first")
    assert (first.incarnation, first.last, first.last_number) == ("first", None, 0)
    with pytest.raises(TransientError, match="another coordinator leads the job 'job'"):
        await lead(store, job="job", candidate="second")
    await save_generation(store, first, GENERATION)
    await store.delete(KEYS.leader)
    second = await lead(store, job="job", candidate="second")
    assert second.incarnation == "first"
    assert second.last_generation == GENERATION
    assert second.last_number == 7
    other = await lead(store, job="other", candidate="third")
    assert (other.incarnation, other.last) == ("third", None)


async def test_a_generation_is_stored_with_all_of_its_fields() -> None:
    store = MemoryStore()
    leadership = await lead(store, job="job", candidate="c")
    assert await load_generation(store, "job") is None
    before = (replace(GENERATION, number=5), replace(GENERATION, number=6))
    command = Command(text="train.py --lr 1", digest="d")
    loss = Loss(reason="member_lost", workers=("w3", "w4"), incident=b'{"number": 7}')
    await save_generation(store, leadership, GENERATION, before, command, loss)
    entry = await store.get(KEYS.generation)
    assert entry is not None
    assert await load_generation(store, "job") == Stored(
        generation=GENERATION,
        may_train=before,
        revision=entry.modified,
        command=command,
        loss=loss,
    )


async def test_a_deposed_leader_writes_nothing() -> None:
    store = MemoryStore()
    deposed = await lead(store, job="job", candidate="first")
    await store.delete(KEYS.leader)
    with pytest.raises(GuardFailed):
        await save_generation(store, deposed, GENERATION)
    await lead(store, job="job", candidate="second")
    with pytest.raises(GuardFailed):
        await save_generation(store, deposed, GENERATION)
    assert await load_generation(store, "job") is None


@pytest.mark.parametrize("way", ["refuses", "loses"])
async def test_a_save_waits_out_an_outage(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        store = FailingStore(Clock())
        leadership = await lead(store, job="job", candidate="c")
        getattr(store, way)["put"] = 3
        await save_generation(store, leadership, GENERATION)
        stored = await load_generation(store, "job")
        assert stored is not None
        assert stored.generation == GENERATION
        assert getattr(store, way)["put"] == 0
    assert caplog.messages == ["save generation 7: trying again: etcd did not answer"] * 3


async def test_a_save_under_way_can_be_cancelled() -> None:
    store = FailingStore(Clock())
    leadership = await lead(store, job="job", candidate="c")
    store.refuses["put"] = 10**9
    saving = asyncio.create_task(save_generation(store, leadership, GENERATION))
    while store.refuses["put"] == 10**9:
        await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving


async def test_a_new_leader_waits_out_an_outage_and_finds_the_generation() -> None:
    store = FailingStore(Clock())
    leadership = await lead(store, job="job", candidate="first")
    await save_generation(store, leadership, GENERATION)
    await store.delete(KEYS.leader)
    store.refuses["get"] = 3
    later = await lead(store, job="job", candidate="second")
    assert (later.incarnation, later.last_generation) == ("first", GENERATION)


@pytest.mark.parametrize("value", [b"12", b"\x20\x63"], ids=["no message", "a reason unknown"])
async def test_an_illegible_generation_is_a_configuration_error(value: bytes) -> None:
    store = MemoryStore()
    await store.put(KEYS.generation, value)
    with pytest.raises(
        ConfigurationError,
        match="cannot read the generation in the store's key 'elastic/job/generation'",
    ):
        await lead(store, job="job", candidate="c")


_STORED = messages(pb.StoredGeneration).map(lambda document: document.SerializeToString())


@thoroughly
@given(value=st.binary(max_size=40) | _STORED | _STORED.flatmap(spliced))
async def test_any_stored_bytes_are_a_generation_or_are_refused(value: bytes) -> None:
    store = MemoryStore()
    await store.put(KEYS.generation, value)
    with may_be_refused(ConfigurationError, naming=KEYS.generation):
        stored = await load_generation(store, "job")
        assert stored is not None
        leadership = await lead(store, job="job", candidate="c")
        await save_generation(store, leadership, stored.generation, stored.may_train)
