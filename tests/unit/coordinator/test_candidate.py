"""Two coordinators of one job: one leads, the other refuses requests and waits to take over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from elastic.coordinator.candidate import OUT_OF_REACH_S, Candidate, NotLeading
from elastic.coordinator.daemon import CoordinatorDaemon, GroupFigures
from elastic.coordinator.leadership import lead, save_generation
from elastic.core.documents import to_json
from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase
from elastic.errors import ConfigurationError
from elastic.rpc.codec import generation_to_pb
from elastic.rpc.control import AgentStream
from elastic.runtime.journal import Journal, RecentEntries
from elastic.store.job_documents import NodeDocument
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import find_leader
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2
from tests.unit.coordinator.agents import Diary, agent, closed, kinds, options, sent, view, worker
from tests.unit.store.failing_store import Clock, FailingStore
from tests.waiting import until

KEYS = JobKeys("job")
DEADLINE_S = 30.0
TRAINING, READY, FINISHED = WorkerPhase.TRAINING, WorkerPhase.READY, WorkerPhase.FINISHED


class Contestant:
    """A candidate and its journal."""

    def __init__(
        self,
        store: FailingStore,
        address: str,
        run_id: str = "default",
        *,
        leader_ttl_s: float = 2.0,
        out_of_reach_s: float = OUT_OF_REACH_S,
    ) -> None:
        self.store = store
        self.diary, self.recent = Diary(), RecentEntries()
        self.candidate = Candidate(
            options(run_id=run_id, address=address),
            store,
            Journal(self.diary.entries.append, self.recent),
            self.recent,
            leader_ttl_s=leader_ttl_s,
            out_of_reach_s=out_of_reach_s,
        )
        self.running: asyncio.Task[int] | None = None
        self.leaders: dict[AgentStream, CoordinatorDaemon] = {}

    def start(self) -> None:
        self.running = asyncio.create_task(self.candidate.run())

    async def end(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)

    async def ended(self) -> int:
        """Wait until the candidate ends by itself, and return its exit code."""
        assert self.running is not None
        return await self.running

    def leads(self) -> bool:
        try:
            self.candidate.status()
        except NotLeading:
            return False
        return True

    def says(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        self.leaders[stream].agent_said(stream, message)

    def lost(self, stream: AgentStream) -> None:
        self.leaders[stream].agent_lost(stream)

    async def attended_by(self, stream: AgentStream, *said: pb.AgentMessage) -> None:
        leader = self.candidate.agents()
        assert leader is not None
        self.leaders[stream] = leader
        leader.agent_connected(stream)
        for message in said:
            self.says(stream, message)
        await asyncio.sleep(0)


class Contest:
    """Two candidates: the first leads, the second waits."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = FailingStore(self.clock)
        self.one, self.two = (Contestant(self.store, f"{n}:1") for n in ("one", "two"))

    async def start(self) -> None:
        self.one.start()
        await until(self.one.leads)
        self.two.start()
        await until(lambda: "campaigning" in self.two.diary.names())

    async def leader(self) -> str:
        found = await find_leader(self.store, job="job")
        return found.address if found is not None else ""


@pytest.fixture
async def contest() -> AsyncIterator[Contest]:
    contest = Contest()
    await contest.start()
    yield contest
    for contestant in (contest.one, contest.two):
        await contestant.end()


async def group_of_one(contestant: Contestant) -> tuple[AgentStream, int]:
    """Let an agent's only worker train; return the agent's stream and the generation's number."""
    stream = agent("n1", "0123", slots=1)
    await contestant.attended_by(stream, view(worker("w", READY)))
    await until(lambda: "generation_formed" in contestant.diary.names())
    number = contestant.diary.of("generation_formed")[-1]["generation"]
    contestant.says(stream, view(worker("w", TRAINING, number)))
    return stream, number


async def test_a_follower_refuses_agents_and_operators(contest: Contest) -> None:
    follower = contest.two.candidate
    assert follower.agents() is None
    for ask in (follower.status, follower.operators, lambda: follower.incidents(None)):
        with pytest.raises(NotLeading, match="the coordinator at two:1 does not lead"):
            ask()
    assert await contest.leader() == "one:1"
    assert "node_connected" not in contest.two.diary.names()


async def test_a_leader_names_itself_in_its_status_and_journal(contest: Contest) -> None:
    status = contest.one.candidate.status()
    assert (status.coordinator, status.leads, status.phase) == ("one:1", True, "gathering")
    assert contest.one.diary.of("elected") == [{"address": "one:1", "generation": 0, "members": []}]


@pytest.mark.parametrize(
    ("run_id", "waits_for"),
    [("default", "the end of that coordinator"), ("night", "the end of run 'default'")],
)
async def test_a_waiting_candidate_records_the_leader_and_what_it_waits_for(
    contest: Contest, run_id: str, waits_for: str
) -> None:
    third = Contestant(contest.store, "three:1", run_id)
    third.start()
    await until(lambda: "standing_by" in third.diary.names())
    assert third.diary.of("standing_by") == [
        {
            "address": "three:1",
            "leader": "one:1",
            "run_id": "default",
            "waits_for": waits_for,
        }
    ]
    await third.end()
    assert "standing_by" not in contest.one.diary.names()


async def test_both_candidates_stand_and_only_the_leader_has_a_group(contest: Contest) -> None:
    one, two = contest.one.candidate, contest.two.candidate
    assert (one.has_campaigned, two.has_campaigned) == (True, True)
    assert (one.group, two.group) == (GroupFigures(), None)
    stream, number = await group_of_one(contest.one)
    progress = job_pb2.Progress(worker="w", generation=number, committed=7)
    contest.one.says(stream, pb.AgentMessage(progress=progress))
    assert one.group == GroupFigures(generation=number, world_size=1, step=7)


async def test_a_leader_that_has_stepped_down_ignores_what_agents_say(contest: Contest) -> None:
    stream, number = await group_of_one(contest.one)
    await contest.one.end()
    recorded = len(contest.one.diary.entries)
    progress = job_pb2.Progress(worker="w", generation=number, committed=7)
    contest.one.says(stream, pb.AgentMessage(progress=progress))
    contest.one.lost(stream)
    assert len(contest.one.diary.entries) == recorded
    assert contest.one.candidate.agents() is None


async def test_leader_and_follower_each_serve_their_own_journal(contest: Contest) -> None:
    def of(contestant: Contestant) -> list[str]:
        return contestant.diary.names()

    for contestant in (contest.one, contest.two):
        lines = [line async for line in contestant.candidate.follow_events(follow=False)]
        assert len(lines) == len(of(contestant))
        followed = contestant.candidate.follow_events(follow=True)
        assert await anext(followed) == lines[0]
        await followed.aclose()  # type: ignore[attr-defined]


async def test_a_cancelled_leader_hands_over_and_the_group_trains_on(contest: Contest) -> None:
    stream, number = await group_of_one(contest.one)
    kinds(stream)
    assert contest.one.running is not None
    contest.one.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await contest.one.ended()
    assert closed(stream)
    assert not contest.one.leads()
    await until(contest.two.leads)
    assert await contest.leader() == "two:1"
    assert contest.two.diary.of("elected") == [
        {"address": "two:1", "generation": number, "members": ["w"]}
    ]
    again = agent("n1", "0123", slots=1)
    await contest.two.attended_by(again, view(worker("w", TRAINING, number, committed=9)))
    await until(lambda: "generation" in kinds(again))
    status = contest.two.candidate.status()
    assert (status.phase, status.generation.number) == ("running", number)
    assert status.progress.committed == 9, "as a member says: rank 0 has not reported yet"
    assert "generation_formed" not in contest.two.diary.names()


async def test_a_deposed_leader_steps_down_and_campaigns_again(contest: Contest) -> None:
    stream, _ = await group_of_one(contest.one)
    kinds(stream)
    await contest.store.delete(KEYS.leader)  # as the store does when the lease expires
    await until(contest.two.leads)
    await until(lambda: "deposed" in contest.one.diary.names())
    await until(lambda: contest.one.diary.names().count("campaigning") == 2)
    assert closed(stream)
    assert not contest.one.leads()
    assert await contest.leader() == "two:1"
    await contest.two.end()
    await until(contest.one.leads)
    assert len(contest.one.diary.of("elected")) == 2


async def register_node(store: FailingStore) -> None:
    document = NodeDocument(
        start_token="0123",
        host="n1.test",
        slots=1,
        version="1",
        command_digest="d",
        started_unix_s=1.0,
    )
    await store.put(KEYS.node("n1"), to_json(document))


async def test_a_leader_that_no_agent_reaches_makes_way_for_one_that_agents_reach() -> None:
    store = FailingStore(Clock())
    one, two, three = (
        Contestant(store, f"{name}:1", out_of_reach_s=0.1) for name in ("one", "two", "three")
    )
    one.start()
    await until(one.leads)
    await register_node(store)
    await until(lambda: not one.leads())
    two.start()
    await until(two.leads)
    (told,) = one.diary.of("deposed")
    assert told["reason"].startswith("no agent has reached one:1 for 0 s, though nodes are")
    await two.attended_by(agent("n1", "0123", slots=1))
    three.start()
    await asyncio.sleep(0.3)
    assert two.leads()
    for contestant in (one, two, three):
        await contestant.end()


async def test_a_leader_that_awaits_no_node_or_is_in_doubt_leads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Contestant(FailingStore(Clock()), "one:1", out_of_reach_s=0.05)
    one.start()
    await until(one.leads)
    await asyncio.sleep(0.15)
    assert one.leads(), "the job waits for nodes"
    monkeypatch.setattr(one.candidate._election, "held", lambda: False)
    await register_node(one.store)
    await asyncio.sleep(0.15)
    assert one.leads(), "the store may be out of reach as well"
    await one.end()


async def test_terms_of_a_leader_that_no_agent_reaches_become_longer() -> None:
    one = Contestant(FailingStore(Clock()), "one:1", leader_ttl_s=0.2, out_of_reach_s=0.05)
    await register_node(one.store)
    one.start()
    await until(lambda: len(one.diary.of("deposed")) == 2)
    assert one.candidate._patience_s == pytest.approx(0.2)
    await until(one.leads)
    await one.attended_by(agent("n1", "0123", slots=1))
    await until(lambda: one.candidate._patience_s == pytest.approx(0.05))
    await one.end()


def known(number: int, incarnation: str) -> pb.AgentMessage:
    """The message of an agent that knows this generation, whose only member is "w"."""
    newest = Generation(
        number=number,
        incarnation=incarnation,
        members=(Member(worker="w", node="n1@0123", slot=0, endpoint="w:1"),),
        reason=ChangeReason.MEMBER_LOST,
    )
    return pb.AgentMessage(known=job_pb2.Known(newest=generation_to_pb(newest)))


@pytest.mark.parametrize("own", [True, False], ids=["of the run", "of nothing known"])
@pytest.mark.parametrize("writes", [False, True])
async def test_a_generation_that_the_store_lost_is_written_again(own: bool, writes: bool) -> None:
    store = FailingStore(Clock())
    if own:
        leadership = await lead(store, job="job", candidate="earlier")
        stale = Generation(number=3, incarnation="earlier", members=(), reason=ChangeReason.STARTED)
        await save_generation(store, leadership, stale)
        await store.delete(KEYS.leader)
    one = Contestant(store, "one:1")
    one.start()
    await until(one.leads)
    if writes:  # the leader writes a generation that nobody knows yet
        store.hangs["put"] = asyncio.Event()
        await one.attended_by(agent("n2", "4567", slots=1), view(worker("x", READY)))
    first = agent("n1", "0123", slots=1)
    await one.attended_by(first, known(57, "earlier"), view(worker("w", TRAINING, 57)))
    if writes:
        store.hangs.pop("put").set()
    await until(lambda: "store_rolled_back" in one.diary.names())
    await until(one.leads)
    (told,) = one.diary.of("store_rolled_back")
    assert told == {"generation": 57, "stored": 3 if own else 0}
    assert closed(first)
    await until(lambda: one.leads() and one.candidate.status().generation.number == 57)
    entry = await store.get(KEYS.incarnation)
    assert entry is not None
    assert entry.value == b"earlier"
    again = agent("n1", "0123", slots=1)
    await one.attended_by(again, known(57, "earlier"), view(worker("w", TRAINING, 57)))
    await one.attended_by(agent("n2", "4567", slots=1), view(worker("x", READY)))
    await until(lambda: "generation_formed" in one.diary.names())
    assert one.diary.of("generation_formed")[0]["generation"] == 58
    assert one.diary.names().count("store_rolled_back") == 1
    await one.end()


async def test_a_generation_stored_or_of_another_run_is_not_written_again(contest: Contest) -> None:
    _, number = await group_of_one(contest.one)
    other = agent("n2", "4567", slots=1)
    incarnation = contest.one.candidate.status().generation.incarnation
    await contest.one.attended_by(
        other, known(number, incarnation), known(number - 1, incarnation), known(99, "other")
    )
    assert contest.one.leads()
    assert not closed(other)
    assert "store_rolled_back" not in contest.one.diary.names()


async def test_a_leader_whose_decisions_the_store_refuses_steps_down(contest: Contest) -> None:
    holding = contest.one.candidate._election._claim
    contest.store.hangs["put"] = asyncio.Event()
    stream = agent("n1", "0123", slots=1)
    await contest.one.attended_by(stream, view(worker("w", READY)))
    assert holding.entry is not None
    entry = contest.store._entries.pop(KEYS.leader)  # no watcher is told; only a write finds out
    contest.store.hangs.pop("put").set()
    await until(lambda: "deposed" in contest.one.diary.names())
    assert entry.key in contest.one.diary.of("deposed")[0]["reason"]
    await until(lambda: entry.lease not in contest.store._leases)  # the lease is revoked
    assert "generation_formed" not in contest.one.diary.names()


async def test_the_end_of_the_job_ends_the_leader_and_the_follower(contest: Contest) -> None:
    stream, number = await group_of_one(contest.one)
    kinds(stream)
    contest.one.says(stream, view(worker("w", FINISHED, number)))
    await until(lambda: "job_ended" in kinds(stream))
    candidate = contest.one.candidate
    with pytest.raises(ConfigurationError, match="the run has ended, so nothing was changed: run"):
        candidate.operators().stop("too late", 82)
    for said in (candidate.operators().drain("n1", ""), candidate.operators().clear("n1")):
        with pytest.raises(ConfigurationError, match="exit code 0"):
            await said
    contest.one.lost(stream)  # the agent has heard of the end and leaves
    assert await contest.one.ended() == 0
    assert await contest.two.ended() == 0
    assert "elected" not in contest.two.diary.names()
    assert await contest.store.get(KEYS.generation) is None
    assert await contest.store.get(KEYS.leader) is None


async def test_only_the_last_leader_answers_status_after_the_end(contest: Contest) -> None:
    stream, number = await group_of_one(contest.one)
    contest.one.says(stream, view(worker("w", FINISHED, number)))
    contest.one.lost(stream)
    assert [await contest.one.ended(), await contest.two.ended()] == [0, 0]
    assert contest.one.candidate.status().phase == "finished"
    figures = contest.one.candidate.figures()
    assert figures is not None
    assert figures.exit_code == 0
    for contestant in (contest.one, contest.two):
        assert contestant.candidate.why_not_ready() == ""
        assert contestant.candidate.exit_code == 0, "also known to the one that has not led"
    with pytest.raises(NotLeading):
        contest.two.candidate.status()
    with pytest.raises(NotLeading):
        contest.one.candidate.operators().stop("why", 82)


async def killed(contest: Contest) -> None:
    """Kill the job; both candidates end with its exit code."""
    stream, _ = await group_of_one(contest.one)
    for said in ("kill", "kill"):
        contest.one.candidate.operators().stop(said, 143)
    await until(lambda: "generation" in kinds(stream))
    number = contest.one.candidate.status().generation.number
    contest.one.says(stream, view(worker("w", FINISHED, number)))
    contest.one.lost(stream)
    assert [await contest.one.ended(), await contest.two.ended()] == [143, 143]
    figures = contest.one.candidate.figures()
    assert figures is not None
    assert (figures.exit_code, figures.phase) == (143, "finished")


async def test_a_killed_job_ends_both_candidates_with_its_exit_code(contest: Contest) -> None:
    await killed(contest)


async def test_a_killed_run_can_be_led_again_by_the_same_candidate(contest: Contest) -> None:
    await killed(contest)
    contest.one.start()
    await until(lambda: contest.one.diary.names().count("elected") == 2)
    await until(contest.one.leads)
    assert contest.one.candidate.status().phase == "gathering"
    assert contest.one.candidate.exit_code is None
    assert await contest.leader() == "one:1"


async def test_a_candidate_of_an_ended_run_ends_though_the_record_of_the_end_is_illegible() -> None:
    store = FailingStore(Clock())
    await store.put(KEYS.end("default"), b"not legible")
    contestant = Contestant(store, "one:1")
    contestant.start()
    assert await contestant.ended() == 1
    assert contestant.diary.names() == ["already_ended"]
    assert (contestant.candidate.figures(), contestant.candidate.exit_code) == (None, 1)
    assert [e.key for e in await store.list(KEYS.folder)] == [KEYS.end("default")]


async def test_the_next_leader_carries_out_an_order_to_stop(contest: Contest) -> None:
    await group_of_one(contest.one)
    contest.one.candidate.operators().stop("maintenance", 82)
    await until(lambda: KEYS.stop in contest.store._entries)
    await contest.one.end()
    await until(contest.two.leads)
    assert contest.two.diary.of("stop_requested") == [{"reason": "maintenance"}]
    assert await contest.two.ended() == 82  # after --stop-grace-s, in which no agent has come
    left = [e.key for e in await contest.store.list(KEYS.folder)]
    assert [key for key in left if not key.startswith(KEYS.incidents)] == [KEYS.end("default")]


async def test_an_order_to_stop_lost_by_the_store_is_restored_from_agents(contest: Contest) -> None:
    stream, _ = await group_of_one(contest.one)
    kinds(stream)
    contest.one.candidate.operators().stop("maintenance", 82)
    (order,) = (m.stop for m in sent(stream) if m.HasField("stop"))
    late = agent("n2", "4567")
    await contest.one.attended_by(late)
    assert [m.stop for m in sent(late) if m.HasField("stop")] == [order]
    await contest.one.end()
    await until(contest.two.leads)
    await contest.two.end()
    for entry in await contest.store.list(KEYS.folder):
        await contest.store.delete(entry.key)
    three = Contestant(contest.store, "three:1")
    three.start()
    await until(three.leads)
    again = agent("n1", "0123", slots=1)
    told = pb.AgentMessage(stop=order)
    await three.attended_by(again, told, told, view(worker("w", TRAINING, 1)))
    assert three.diary.of("stop_requested") == [{"reason": "maintenance"}]
    await until(lambda: KEYS.stop in contest.store._entries)
    assert json.loads(contest.store._entries[KEYS.stop].value) == {
        "reason": "maintenance",
        "exit_code": 82,
    }
    await three.end()


async def test_restarts_and_recoveries_are_kept_under_the_next_leader(contest: Contest) -> None:
    stream, _ = await group_of_one(contest.one)
    failure = job_pb2.Failure(worker="w", kind="FAILURE_KIND_SIGNAL", retryable=True)
    contest.one.says(stream, pb.AgentMessage(failure=failure))
    contest.one.says(stream, view(worker("x", READY)))
    named = contest.one.diary
    await until(lambda: named.of("generation_formed")[-1]["members"] == ["x"])
    number = named.of("generation_formed")[-1]["generation"]
    reformed = job_pb2.Reformed(worker="x", generation=number, committed=1)
    contest.one.says(stream, pb.AgentMessage(reformed=reformed))
    await until(lambda: "recovered" in named.names())
    before = contest.one.candidate.status()
    assert (before.restarts, len(before.recoveries_json)) == (1, 1)
    kept = contest.store._entries
    incident = KEYS.incident("default", 1)
    await until(lambda: incident in kept and b'"recovered"' in kept[incident].value)
    await until(lambda: b'"restarts": []' not in kept[KEYS.records].value)  # it comes last
    await contest.one.end()
    await until(contest.two.leads)
    after = contest.two.candidate.status()
    assert (after.restarts, list(after.recoveries_json)) == (1, list(before.recoveries_json))
    assert after.started_unix_s == before.started_unix_s


async def test_the_start_time_of_a_job_is_kept_under_the_next_leader(contest: Contest) -> None:
    await group_of_one(contest.one)
    before = contest.one.candidate.status()
    await until(lambda: KEYS.records in contest.store._entries)
    await contest.one.end()
    await until(contest.two.leads)
    assert contest.two.candidate.status().started_unix_s == before.started_unix_s


async def test_doubt_about_the_lease_is_recorded_once_and_so_is_its_end(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.store.lease_keeper._LOOKS_PER_TTL", 2000)
    keeper = contest.one.candidate._election._claim._keeper
    keeper._clock, keeper._sent_at = contest.clock, contest.clock.now  # a clock that stands still
    for lease in contest.store._leases.values():
        lease.deadline += 1000.0
    contest.store.refuses["renew"] = 10**9
    contest.clock.now += 100.0
    await until(lambda: "leadership_in_doubt" in contest.one.diary.names())
    assert contest.one.leads()
    assert not contest.one.candidate.status().leads
    contest.store.refuses.clear()
    await until(lambda: "leadership_confirmed" in contest.one.diary.names())
    assert contest.one.candidate.status().leads
    assert contest.one.diary.names().count("leadership_in_doubt") == 1
    assert await contest.leader() == "one:1"


async def test_a_refused_agent_is_told_each_time_and_reported_once(contest: Contest) -> None:
    for _ in range(3):
        stream = agent("n1", "0123", version="0.0.9")
        await contest.one.attended_by(stream)
        assert kinds(stream) == ["refused", None]
    (refused,) = contest.one.diary.of("node_refused")
    assert (refused["node"], "0.0.9" in refused["reason"]) == ("n1", True)
    await contest.one.attended_by(agent("n1", "0123"))
    await contest.one.attended_by(agent("n1", "0123", version="0.0.9"))
    assert len(contest.one.diary.of("node_refused")) == 2


async def test_a_drained_node_stays_out_under_the_next_leader(contest: Contest) -> None:
    told = r"no node 'n9' \(known nodes: none\); to keep out .* not connected yet, give --future"
    with pytest.raises(ConfigurationError, match=told):
        await contest.one.candidate.operators().drain("n9", "a new disk")
    assert "n9" in await contest.one.candidate.operators().drain("n9", "a new disk", future=True)
    await contest.one.end()
    await until(contest.two.leads)
    (node,) = contest.two.candidate.status().nodes
    assert (node.node, node.state, node.reason) == ("n9", "drained", "a new disk")
    operators = contest.two.candidate.operators()
    assert await operators.clear("n9") == "n9 may take part again"
    assert await operators.clear("n9") == "n9 was neither drained nor in quarantine"
    assert contest.two.diary.of("node_cleared") == [
        {"node": "n9", "machine": "", "state": "drained", "reason": "cleared by an operator"}
    ]


async def test_a_new_leader_looks_for_the_nodes_of_every_generation_that_may_train() -> None:
    one = Contestant(FailingStore(Clock()), "one:1")
    newest, earlier = (
        Generation(
            number=number,
            incarnation="c",
            members=(Member(worker=f"{node}-1", node=f"{node}@0", slot=0, endpoint="h:1"),),
            reason=ChangeReason.STARTED,
        )
        for number, node in ((4, "n1"), (3, "n2"))
    )
    leadership = await lead(one.store, job="job", candidate="before")
    await save_generation(one.store, leadership, newest, (earlier,))
    await one.store.delete(KEYS.leader)
    one.start()
    await until(lambda: len(one.diary.of("node_vanished")) == 2)
    assert [told["node"] for told in one.diary.of("node_vanished")] == ["n1", "n2"]
    await one.end()


async def test_a_follower_that_is_cancelled_ends_and_the_leader_stays(contest: Contest) -> None:
    await contest.two.end()
    assert contest.two.running is not None
    assert contest.two.running.cancelled()
    assert await contest.leader() == "one:1"
    assert contest.one.leads()


async def test_a_leader_ends_with_its_job_though_a_write_is_refused(contest: Contest) -> None:
    stream, number = await group_of_one(contest.one)
    contest.store.refuses["put"] = 1
    contest.one.says(stream, view(worker("w", FINISHED, number)))
    contest.one.lost(stream)
    assert await contest.one.ended() == 0
