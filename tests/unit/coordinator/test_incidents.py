"""A coordinator stores its incidents for later leaders, records and explains them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given

from elastic.coordinator.incidents import IncidentRecords, noticed_by, summary
from elastic.coordinator.leadership import UNKNOWN_COMMAND, Leadership, Loss, Stored, lead
from elastic.core.accounting import MOST_INCIDENTS, Kind
from elastic.core.coordinator.incidents import Record
from elastic.core.coordinator.slot_accounts import SlotAccounts
from elastic.core.membership import ChangeReason, Generation
from elastic.errors import ConfigurationError
from elastic.store.job_incidents import load_incidents
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from tests.fuzzed_documents import documents, thoroughly
from tests.unit.coordinator.agents import Diary

KEYS = JobKeys("job")
STORED = {"number": 3, "unix_s": 1.75e9, "outcome": "under_way", "summary": "x"}


OPEN = {
    **STORED,
    **{"cause": "worker_failed", "generation": 6, "world_size": 3, "committed": 12},
    **{"noticed": [], "processes": [], "further_processes": 0, "hang": None, "saves_lost": []},
    **{"nodes": ["b"], "workers": ["wb"]},
}
RECOVERY = {"generation": 7, "lost": ["wb"], "committed": 10, "total_s": 1.5}


def stored(incident: bytes) -> Stored:
    group = Generation(number=7, incarnation="x", members=(), reason=ChangeReason.MEMBER_LOST)
    loss = Loss(reason="member_lost", workers=("wb",), incident=incident)
    return Stored(generation=group, may_train=(), revision=1, command=UNKNOWN_COMMAND, loss=loss)


class Leader:
    """The incidents of one leader's term."""

    def __init__(self, store: MemoryStore, leadership: Leadership) -> None:
        self.diary, self.store, self._leadership = Diary(), store, leadership
        self.tasks: list[asyncio.Task[None]] = []
        self.accounts = SlotAccounts(2)
        self.incidents = IncidentRecords(
            self.accounts,
            store,
            self.diary.journal,
            job="job",
            run_id="default",
            guard=leadership.guard,
            start=self._start,
        )

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        del name
        self.tasks.append(asyncio.ensure_future(work))

    def next(self) -> Leader:
        """The leader of another term, which has only what is in the store."""
        return Leader(self.store, self._leadership)

    async def kept(self) -> dict[int, dict[str, Any]]:
        await asyncio.gather(*self.tasks)
        return await load_incidents(self.store, "job", "default")


async def term() -> tuple[MemoryStore, Leadership]:
    store = MemoryStore()
    return store, await lead(store, job="job", candidate="c")


async def with_a_failed_save() -> Leader:
    leader = Leader(*await term())
    leader.incidents.save_failed(10, 1, "the disk is full")
    return leader


async def test_an_incident_is_stored_recorded_and_explained() -> None:
    leader = await with_a_failed_save()
    (entry,) = leader.diary.of("incident")
    assert entry["explain"] == "elastic explain 1"
    assert entry["summary"] == "the checkpoint of step 10 was not saved: the disk is full"
    assert list(await leader.kept()) == [1]
    (brief,) = leader.incidents.brief()
    assert (brief["number"], brief["cause"]) == (1, "save_failed")
    assert leader.incidents.document(1) == leader.incidents.document(0)
    with pytest.raises(ConfigurationError, match=r"no incident 7; known incidents: 1"):
        leader.incidents.document(7)


async def test_the_next_leader_has_the_incidents_and_continues_their_numbers() -> None:
    first = await with_a_failed_save()
    await first.kept()
    await first.store.put(KEYS.incident("default", 3), json.dumps(STORED).encode())
    second = first.next()
    await second.incidents.load(None, ())
    second.incidents.save_failed(20, 2, "the network is down")
    found = await second.kept()
    assert list(found) == [1, 3, 4]
    assert [b["outcome"] for b in second.incidents.brief()] == [
        "trains_on",
        "unknown",
        "trains_on",
    ]


async def test_an_incident_open_at_a_change_of_leader_ends_with_the_recovery() -> None:
    store, leadership = await term()
    await store.put(KEYS.incident("default", 3), json.dumps(OPEN).encode())
    decided = json.dumps({**OPEN, "number": 4, "outcome": "waiting"}).encode()
    leader = Leader(store, leadership)
    await leader.incidents.load(stored(decided), ())
    assert leader.accounts.under_way is leader.accounts.costs()[4]
    assert leader.accounts.costs()[4].generation == 7
    assert json.loads(leader.incidents.newest_open())["number"] == 4
    leader.incidents.recovered(RECOVERY)
    leader.incidents.recovered({**RECOVERY, "generation": 8})
    first, second = (await leader.kept()).values()
    assert (first["outcome"], second["outcome"]) == ("struck_again", "recovered")
    assert second["followed_by"] == 7
    assert second["recovery"] == {"generation": 7, "committed": 10, "total_s": 1.5}
    assert second["steps_lost"] == 2
    assert second["lasted_s"] > 0.0
    assert leader.incidents.newest_open() == b""
    assert [e["number"] for e in leader.diary.of("incident")] == [3], "4 was told as it waited"


async def test_an_incident_that_was_over_before_a_change_of_leader_ends_at_once() -> None:
    store, leadership = await term()
    await store.put(KEYS.incident("default", 3), json.dumps(OPEN).encode())
    leader = Leader(store, leadership)
    malformed: list[dict[str, Any]] = [{"generation": "8"}, {"generation": 8, "total_s": None}, {}]
    recoveries = [*malformed, {**RECOVERY, "generation": 6}, RECOVERY]
    await leader.incidents.load(stored(b""), recoveries)
    (document,) = (await leader.kept()).values()
    assert (document["outcome"], document["followed_by"]) == ("recovered", 7)
    assert document["lasted_s"] == pytest.approx(1.5, abs=0.01), "not the time without a leader"
    assert leader.accounts.under_way is None
    assert not leader.diary.of("warning")


async def test_later_costs_of_an_incident_are_known_to_later_leaders() -> None:
    first = await with_a_failed_save()
    assert (await first.kept())[1]["lost_s"] == 0.0
    first.accounts.costs()[1].seconds[Kind.SLOT_EMPTY] += 30.0
    second = first.next()
    second.accounts.adopt(first.accounts.to_document(5.0, 0.0), 5.0, 0.0)
    await second.incidents.load(None, ())
    second.accounts.costs()[1].seconds[Kind.SLOT_EMPTY] += 2.5
    for document in (second.incidents.document(1), *second.incidents.brief()):
        assert document["lost_s"] == 32.5
    assert second.incidents.document(1)["seconds"] == {"slot_empty": 32.5}
    second.incidents.ended("an operator has stopped it")
    assert (await second.kept())[1]["lost_s"] == 32.5


async def test_accounts_older_than_an_incidents_record_do_not_lower_its_cost() -> None:
    first = await with_a_failed_save()
    accounts = first.accounts.to_document(5.0, 0.0)
    first.accounts.costs()[1].seconds[Kind.SLOT_EMPTY] += 30.0
    first.incidents.saved()
    await first.kept()
    second = first.next()
    second.accounts.adopt(accounts, 5.0, 0.0)
    await second.incidents.load(None, ())
    assert second.incidents.document(1)["lost_s"] == 30.0


async def test_a_save_under_the_next_leader_makes_up_for_one_that_failed_before() -> None:
    first = await with_a_failed_save()
    await first.kept()
    second = first.next()
    await second.incidents.load(None, ())
    second.incidents.saved()
    found = await second.kept()
    assert found[1]["outcome"] == "saved_since"
    assert [b["outcome"] for b in second.incidents.brief()] == ["saved_since"]


async def test_the_oldest_incidents_are_removed_from_the_store() -> None:
    leader = Leader(*await term())
    for step in range(MOST_INCIDENTS + 5):
        leader.incidents.save_failed(step, 1, f"for another reason: {'x' * step}")
        await leader.kept()
    assert list(await leader.kept()) == list(range(6, MOST_INCIDENTS + 6))


async def test_a_deposed_leader_stores_no_incident() -> None:
    store, leadership = await term()
    await store.delete(KEYS.leader)
    leader = Leader(store, leadership)
    leader.incidents.save_failed(10, 1, "the disk is full")
    assert await leader.kept() == {}


async def test_an_error_in_the_accounts_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    async def lead_again(store: MemoryStore) -> Leadership:
        await store.delete(KEYS.leader)
        return await lead(store, job="job", candidate="d")

    leader = Leader(*await term())
    monkeypatch.setattr(SlotAccounts, "open_incident", fail)
    leader.incidents = Leader(leader.store, await lead_again(leader.store)).incidents
    leader.incidents.save_failed(10, 1, "x")
    leader.incidents.save_failed(20, 1, "x")
    assert leader.incidents.brief() == []


async def test_an_error_as_a_record_is_stored_ends_the_records_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    leader = await with_a_failed_save()
    monkeypatch.setattr(Record, "to_document", fail)
    assert await leader.kept() == {}
    (warning,) = leader.diary.of("warning")
    assert "incidents are no longer recorded: ZeroDivisionError" in warning["message"]


@thoroughly
@given(value=documents(json.dumps(STORED).encode()))
async def test_a_leader_can_begin_with_any_stored_incident(value: bytes) -> None:
    store, leadership = await term()
    await store.put(KEYS.incident("default", 3), value)
    leader = Leader(store, leadership)
    await leader.incidents.load(None, ())
    leader.incidents.save_failed(10, 1, "x")
    for brief in leader.incidents.brief():
        json.dumps(leader.incidents.document(brief["number"]), allow_nan=False)


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
