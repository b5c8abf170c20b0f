"""A coordinator stores its incidents for later leaders, records and explains them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from elastic.coordinator.leadership import UNKNOWN_COMMAND, Leadership, Loss, Stored, lead
from elastic.coordinator.records import Records, RecordWriter, load_records
from elastic.coordinator.watch import Watch
from elastic.coordinator.wording import noticed_by, summary
from elastic.core.book.accounting import Kind
from elastic.core.book.book import Book
from elastic.core.book.incidents import MOST_INCIDENTS, Incident, Outcome
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import ChangeReason, Generation
from elastic.errors import ConfigurationError
from elastic.store.interface import GuardFailed
from elastic.store.job_incidents import load_incidents
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from elastic.v1 import job_pb2 as pb
from tests.fuzzed_documents import documents, thoroughly
from tests.unit.coordinator.agents import Diary

KEYS = JobKeys("job")
OPEN = {
    **{"number": 3, "unix_s": 1.75e9, "outcome": "under_way", "summary": "x"},
    **{"cause": "worker_failed", "generation": 6, "world_size": 3, "committed": 12},
    **{"noticed": [], "processes": [], "further_processes": 0, "hang": None, "saves_lost": []},
    **{"nodes": ["b"], "workers": ["wb"]},
}


def stored(incident: bytes) -> Stored:
    group = Generation(number=7, incarnation="x", members=(), reason=ChangeReason.MEMBER_LOST)
    loss = Loss(reason="member_lost", workers=("wb",), incident=incident)
    return Stored(generation=group, may_train=(), revision=1, command=UNKNOWN_COMMAND, loss=loss)


class Leader:
    """What one leader watches in its term."""

    def __init__(self, store: MemoryStore, leadership: Leadership) -> None:
        self.diary, self.store, self.leadership = Diary(), store, leadership
        self.writer = RecordWriter(
            store, job="job", guard=leadership.guard, stored=leadership.records.entries
        )
        self.watch = Watch(
            leadership,
            Coordinator(CoordinatorSettings(incarnation="x"), now=0.0),
            self.diary.journal,
            most=2,
        )

    @classmethod
    async def of(cls, store: MemoryStore, leadership: Leadership, **more: Any) -> Leader:
        """The leader of a term that begins with what is in the store."""
        records = await load_records(store, "job")
        return cls(store, replace(leadership, records=replace(records, **more)))

    @property
    def costs(self) -> dict[int, Incident]:
        return self.watch._book.slots.books.incidents

    async def next(self, **more: Any) -> Leader:
        return await Leader.of(self.store, self.leadership, **more)

    async def kept(self) -> dict[int, dict[str, Any]]:
        records = Records(
            accounts=self.watch.accounts_to_store(), incidents=self.watch.incidents_to_store()
        )
        with suppress(GuardFailed):
            await self.writer.save(records)
        return await load_incidents(self.store, "job", "default")


async def term() -> tuple[MemoryStore, Leadership]:
    store = MemoryStore()
    return store, await lead(store, job="job", candidate="c")


async def with_a_failed_save() -> Leader:
    leader = Leader(*await term())
    leader.watch.save_failed(10, 1, "the disk is full")
    return leader


async def test_an_incident_is_stored_recorded_and_explained() -> None:
    leader = await with_a_failed_save()
    (entry,) = leader.diary.of("incident")
    assert entry["explain"] == "elastic explain 1"
    assert entry["summary"] == "the checkpoint of step 10 was not saved: the disk is full"
    assert list(await leader.kept()) == [1]
    (brief,) = leader.watch.incidents()
    assert (brief["number"], brief["cause"]) == (1, "save_failed")
    assert leader.watch.incident(1) == leader.watch.incident(0)
    with pytest.raises(ConfigurationError, match=r"no incident 7; known incidents: 1"):
        leader.watch.incident(7)


async def test_the_next_leader_has_the_incidents_and_continues_their_numbers() -> None:
    first = await with_a_failed_save()
    await first.kept()
    illegible = {"number": 4, "unix_s": 1.75e9, "outcome": "recovered"}
    for document in (OPEN, illegible):
        key = KEYS.incident("default", document["number"])  # type: ignore[arg-type]
        await first.store.put(key, json.dumps(document).encode())
    second = await first.next()
    second.watch.save_failed(20, 2, "the network is down")
    assert list(await second.kept()) == [1, 3, 4, 5]
    assert [(b["number"], b["outcome"]) for b in second.watch.incidents()] == [
        (1, "trains_on"),
        (3, "under_way"),
        (5, "trains_on"),
    ]


async def test_an_incident_open_at_a_change_of_leader_ends_with_the_recovery() -> None:
    store, leadership = await term()
    await store.put(KEYS.incident("default", 3), json.dumps(OPEN).encode())
    decided = json.dumps({**OPEN, "number": 4, "outcome": "waiting"}).encode()
    leader = await Leader.of(store, replace(leadership, last=stored(decided)))
    loss = leader.watch.loss()
    assert loss is not None
    assert (loss.workers, json.loads(loss.incident)["number"]) == (("wb",), 4)
    report = pb.Reformed(worker="wa", generation=7, committed=10, out_s=1.5)
    leader.watch.reformed(report, 0.0)
    leader.watch.reformed(report, 0.0)
    first, second = (await leader.kept()).values()
    assert (first["outcome"], second["outcome"]) == ("unknown", "recovered")
    assert (second["followed_by"], second["lasted_s"]) == (7, 1.5)
    (told,) = leader.diary.of("recovered")
    assert {**second["recovery"], "lost": ["wb"]} == told
    assert told["reason"] == "member_lost", "which an earlier version stored with the generation"
    assert (second["recovery"]["committed"], second["steps_lost"]) == (10, 2)
    assert leader.watch.loss() is None
    assert leader.watch.recovering_since is None
    assert leader.diary.of("incident") == [], "4 was told as it waited"


async def test_a_loss_that_is_over_stays_over_although_the_generations_copy_is_longer() -> None:
    """A record that would be too large is stored without its texts."""
    store, leadership = await term()
    over = {**OPEN, "outcome": "recovered", "followed_by": 7, "lasted_s": 1.0}
    await store.put(KEYS.incident("default", 3), json.dumps(over).encode())
    decided = json.dumps({**OPEN, "verdict": "x" * 1000}).encode()
    leader = await Leader.of(store, replace(leadership, last=stored(decided)))
    assert leader.watch.recovering_since is None
    assert [(b["number"], b["outcome"]) for b in leader.watch.incidents()] == [(3, "recovered")]


async def test_the_reason_of_an_earlier_versions_incident_is_that_of_its_recovery() -> None:
    store, leadership = await term()
    recovery = {"generation": 7, "reason": "stalled", "committed": 12, "total_s": 1.0}
    over = {**OPEN, "outcome": "recovered", "lasted_s": 1.0, "recovery": recovery}
    await store.put(KEYS.incident("default", 3), json.dumps(over).encode())
    leader = await Leader.of(store, leadership)
    assert leader.watch.incident(3)["reason"] == "stalled"


async def test_a_loss_ends_although_the_book_has_begun_again_since_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Leader(*await term())
    book = leader.watch._book
    loss = book.slots.under_way = book.slots.books.open_incident(
        leader.watch._clock(), "member_lost", Outcome.UNDER_WAY
    )
    leader.watch.incidents_to_store()
    loss.followed_by = 2
    leader.watch.observe(ev.TimerFired(), (), leader.watch._clock())
    with monkeypatch.context() as broken:
        broken.setattr(Book, "explained", lambda *_: 1 / 0)
        leader.watch.explained(1, Diagnosis(text=""), ())
    leader.watch.reformed(pb.Reformed(worker="wa", generation=2, committed=1, out_s=1.0), 0.0)
    assert [b["outcome"] for b in leader.watch.incidents()] == ["recovered"]


async def test_later_costs_of_an_incident_are_known_to_later_leaders() -> None:
    first = await with_a_failed_save()
    assert (await first.kept())[1]["lost_s"] == 0.0
    first.costs[1].seconds[Kind.SLOT_EMPTY] += 30.0
    await first.kept()
    second = await first.next()
    second.costs[1].seconds[Kind.SLOT_EMPTY] += 2.5
    for document in (second.watch.incident(1), *second.watch.incidents()):
        assert document["lost_s"] == 32.5
    assert second.watch.incident(1)["seconds"] == {"slot_empty": 32.5}
    second.watch.ended("an operator has stopped it")
    assert (await second.kept())[1]["lost_s"] == 32.5


async def test_accounts_older_than_an_incidents_record_do_not_lower_its_cost() -> None:
    first = await with_a_failed_save()
    accounts = first.watch.accounts_to_store()
    first.costs[1].seconds[Kind.SLOT_EMPTY] += 30.0
    first.watch.saved()
    await first.kept()
    second = await first.next(accounts=accounts)
    assert second.watch.incident(1)["lost_s"] == 30.0


async def test_a_save_under_the_next_leader_makes_up_for_one_that_failed_before() -> None:
    first = await with_a_failed_save()
    await first.kept()
    second = await first.next()
    second.watch.saved()
    found = await second.kept()
    assert found[1]["outcome"] == "saved_since"
    assert [b["outcome"] for b in second.watch.incidents()] == ["saved_since"]


async def test_the_oldest_incidents_are_removed_from_the_store() -> None:
    leader = Leader(*await term())
    for step in range(MOST_INCIDENTS + 5):
        leader.watch.save_failed(step, 1, f"for another reason: {'x' * step}")
        await leader.kept()
    assert list(await leader.kept()) == list(range(6, MOST_INCIDENTS + 6))


async def test_a_deposed_leader_stores_no_incident() -> None:
    store, leadership = await term()
    await store.delete(KEYS.leader)
    leader = Leader(store, leadership)
    leader.watch.save_failed(10, 1, "the disk is full")
    assert await leader.kept() == {}


async def test_an_error_as_a_record_is_made_ends_the_records_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    leader = await with_a_failed_save()
    monkeypatch.setattr(Incident, "to_document", fail)
    for _ in range(9):
        leader.watch.save_failed(20, 1, "x")
        assert await leader.kept() == {}
    assert leader.watch.incidents() == []
    assert len(leader.diary.of("warning")) == 3


@thoroughly
@given(value=documents(json.dumps(OPEN).encode()))
async def test_a_leader_can_begin_with_any_stored_incident(value: bytes) -> None:
    store, leadership = await term()
    await store.put(KEYS.incident("default", 3), value)
    leader = await Leader.of(store, leadership)
    leader.watch.save_failed(10, 1, "x")
    for brief in leader.watch.incidents():
        json.dumps(leader.watch.incident(brief["number"]), allow_nan=False)


def sign(name: str, node: str = "b", rank: int | None = 1) -> dict[str, Any]:
    return {"sign": name, "node": node, "worker": "wb", "rank": rank, "detail": "reset"}


BASE: dict[str, Any] = {
    "noticed": [],
    "processes": [],
    "further_processes": 0,
    "hang": None,
    "saves": None,
    "workers": ["wb"],
}
PROCESS = {
    "node": "b",
    "rank": 1,
    "worker": "wb",
    "kind": "signal",
    "code": 9,
    "after_s": 0.0,
    "message": "was ended by SIGKILL (signal 9)",
}
RESET = PROCESS | {
    "node": "a",
    "rank": 0,
    "worker": "wa",
    "kind": "exception",
    "code": 1,
    "message": "RuntimeError: reset by peer",
}
HANG = {"step": 7, "standing_s": 20.0, "verdict": "rank 1 waits"}


@pytest.mark.parametrize(
    ("document", "what", "who"),
    [
        (
            {"cause": "worker_failed", "processes": [PROCESS], "noticed": [sign("worker_ended")]},
            "rank 1 (node b, worker wb) was ended by SIGKILL (signal 9)",
            "the agent of node b: the process ended",
        ),
        (
            {
                "cause": "worker_left_out",
                "processes": [
                    PROCESS | {"kind": "left_out", "message": "did not respond for 1.7 s"}
                ],
                "noticed": [sign("worker_ended")],
            },
            "rank 1 (node b, worker wb) did not respond for 1.7 s",
            "the agent of node b: it declared the process lost",
        ),
        (
            {"cause": "worker_failed", "processes": [PROCESS], "further_processes": 1},
            "rank 1 (node b, worker wb) was ended by SIGKILL (signal 9); 1 more process ended",
            "",
        ),
        (
            {
                "cause": "worker_failed",
                "processes": [PROCESS | {"kind": "exception", "message": "KeyError: 'x'"}],
            },
            "rank 1 (node b, worker wb) raised KeyError: 'x'",
            "",
        ),
        (
            {
                "cause": "worker_failed",
                "processes": [RESET, PROCESS | {"after_s": 3.0}],
            },
            "rank 1 (node b, worker wb) was ended by SIGKILL (signal 9); 1 more process ended",
            "",
        ),
        (
            {
                "cause": "worker_failed",
                "processes": [RESET, PROCESS | {"code": 6, "after_s": 3.0}],
            },
            "rank 0 (node a, worker wa) raised RuntimeError: reset by peer; 1 more process ended",
            "",
        ),
        (
            {
                "cause": "worker_failed",
                "processes": [RESET, PROCESS | {"after_s": 60.0}],
            },
            "rank 0 (node a, worker wa) raised RuntimeError: reset by peer; 1 more process ended",
            "",
        ),
        (
            {"cause": "node_lost", "noticed": [sign("node_lost", "c"), sign("node_lost", "d")]},
            "nodes c, d were lost",
            "the coordinator: its connection to the agent of node c broke",
        ),
        (
            {
                "cause": "node_lost",
                "noticed": [
                    sign("coordinator_stopped", "") | {"detail": "it did not run for 18.2 s"},
                    sign("node_lost", "c"),
                ],
            },
            "node c was lost",
            "the coordinator: its connection to the agent of node c broke; the coordinator was "
            "late: it did not run for 18.2 s",
        ),
        (
            {"cause": "hang", "hang": HANG, "noticed": [sign("overdue", "")]},
            "the group stood still at step 7 for 20.0 s: rank 1 waits",
            "the coordinator: no step was committed for 20.0 s",
        ),
        (
            {"cause": "group_broken", "noticed": [sign("group_broken")]},
            "connections between members broke, as rank 1 (node b, worker wb) noticed: reset",
            "rank 1 (node b, worker wb): its collective failed (reset)",
        ),
        (
            {"cause": "leave_timed_out", "noticed": [sign("leave_timed_out")]},
            "node b was told to leave, but its workers did not reach a step boundary in time",
            "the agent of node b: its time to leave ran out",
        ),
        (
            {
                "cause": "save_failed",
                "saves": {"count": 2, "first_step": 10, "last_step": 20, "message": "full"},
                "noticed": [sign("save_refused", "")],
            },
            "2 checkpoints, of steps 10 to 20, were not saved: full",
            "the coordinator: it could not complete the checkpoint",
        ),
        ({"cause": "unknown"}, "the group lost wb", ""),
    ],
)
def test_an_incident_is_put_into_words(document: dict[str, Any], what: str, who: str) -> None:
    assert summary(BASE | document) == what
    assert noticed_by(BASE | document) == who
