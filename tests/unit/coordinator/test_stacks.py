"""The coordinator asks agents for stacks in rounds, and explains hangs by their answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from elastic.coordinator import holdups
from elastic.coordinator.connected_agents import ConnectedAgents
from elastic.coordinator.holdups import Hangs, StackRounds, asked_for, explain, reply
from elastic.coordinator.operators import timeline
from elastic.core.book.accounting import Kind
from elastic.core.book.slot_accounts import Period
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.membership import (
    ChangeReason,
    Generation,
    Member,
)
from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.control import AgentStream
from elastic.runtime.journal import Entry, Journal
from elastic.v1 import control_pb2 as control
from elastic.v1 import stacks_pb2 as pb
from elastic.v1 import timeline_pb2

ENGINE = pb.Frame(file="/v/site-packages/torch/autograd/graph.py", line=9, function="_run")
GETITEM = pb.Frame(file="/job/data.py", line=41, function="__getitem__")
GROUP = Generation(
    number=3,
    incarnation="x",
    members=tuple(
        Member(worker=f"{node}-1", node=f"{node}@token", slot=0, endpoint="") for node in "abc"
    ),
    reason=ChangeReason.STARTED,
)
VERDICT = (
    "rank 1 (node b) has not entered the all-reduce of step 7: it is loading data, in "
    "`__getitem__`, data.py:41, for 5 s; ranks 0, 2 wait for it"
)


class Place:
    """A coordinator with the agents of nodes a, b and c."""

    def __init__(self) -> None:
        self.nodes = ConnectedAgents()
        for name in "abc":
            self.nodes.arrive(AgentStream(control.AgentHello(node=name, start_token="token")))
        self.rounds = StackRounds(self.nodes)
        self.entries: list[Entry] = []
        self.posted: list[Any] = []
        self.tasks: list[asyncio.Future[Any]] = []
        self.hangs = Hangs(
            self.rounds,
            Journal(self.entries.append),
            post=self.posted.append,
            start=lambda work, _name: self.tasks.append(asyncio.ensure_future(work)),
        )

    async def request(self, name: str) -> pb.StacksRequest:
        """The next request that was sent to the node's agent."""
        node = self.nodes.by_name(name)
        assert node is not None
        sent = await anext(node.stream.outgoing())
        assert isinstance(sent, bytes)
        return control.CoordinatorMessage.FromString(sent).stacks

    async def tell(self, *names: str) -> None:
        for name in names:
            request = await self.request(name)
            node = self.nodes.by_name(name)
            assert node is not None
            told = pb.NodeStacks(request=request.request, workers=[worker(name)])
            self.rounds.told(node, told)


def worker(node: str) -> pb.WorkerStacks:
    """The stacks of a node's worker: the one of node b loads data, the others wait for it."""
    late = node == "b"
    frames = [GETITEM] if late else [ENGINE]
    threads = [pb.ThreadStack(name="MainThread", frames=frames), pb.ThreadStack(name="other")]
    return pb.WorkerStacks(
        worker=f"{node}-1",
        answer=pb.ANSWER_GIVEN,
        place=pb.PLACE_DATA if late else pb.PLACE_BACKWARD,
        place_s=5.2,
        committed=7,
        processes=[pb.ProcessStacks(pid=11, threads=threads)],
    )


@pytest.fixture
async def place() -> Place:
    return Place()


def found(*nodes: str) -> dict[str, pb.NodeStacks]:
    return {node: pb.NodeStacks(workers=[worker(node)]) for node in nodes}


async def test_a_round_ends_when_all_agents_have_answered(place: Place) -> None:
    asking = place.rounds.ask(brief=True)
    await place.tell("a", "b", "c")
    assert set(await asking) == {"a", "b", "c"}


async def test_an_agent_that_does_not_answer_does_not_hold_up_a_round(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdups, "_ANSWERS_S", 0.05)
    asking = place.rounds.ask(worker="a-1")
    request = await place.request("c")
    assert (request.worker, request.brief) == ("a-1", False)
    await place.tell("a")
    assert set(await asking) == {"a"}
    node = place.nodes.by_name("c")
    assert node is not None
    place.rounds.told(node, pb.NodeStacks(request=request.request))  # too late


async def test_the_log_of_a_worker_is_requested_from_its_node_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdups, "_ANSWERS_S", 5.0)
    node = place.nodes.by_name("b")
    assert node is not None

    async def answered(*workers: pb.WorkerStacks) -> str:
        asking = asyncio.ensure_future(place.rounds.log(node, "b-1"))
        message = await anext(node.stream.outgoing())
        assert isinstance(message, control.CoordinatorMessage)
        request = message.stacks
        assert (request.worker, request.log) == ("b-1", True)
        place.rounds.told(node, pb.NodeStacks(request=request.request, workers=workers))
        return await asking

    assert await answered(pb.WorkerStacks(worker="b-1", log="step 7\nstep 8")) == "step 7\nstep 8"
    with pytest.raises(TransientError, match="the agent of node b did not send the log of b-1"):
        await answered()
    monkeypatch.setattr(holdups, "_ANSWERS_S", 0.05)
    with pytest.raises(TransientError, match="node b did not send the log of b-1"):
        await place.rounds.log(node, "b-1")
    assert not place.rounds._rounds


async def test_a_round_without_agents_ends_at_once() -> None:
    assert await StackRounds(ConnectedAgents()).ask() == {}


async def test_an_explained_hang_is_recorded_and_posted_to_the_machine(place: Place) -> None:
    place.hangs.explain(fx.ExplainHang(generation=GROUP, step=7, standing_s=5.25))
    await place.tell("a", "b", "c")
    await asyncio.gather(*place.tasks)
    (entry,) = place.entries
    assert (entry.name, entry.fields["verdict"]) == ("hang", VERDICT)
    assert entry.fields["standing_s"] == 5.25
    (rank,) = entry.fields["ranks"]
    assert (rank["rank"], rank["node"], rank["place"]) == (1, "b", "/job/data.py:41")
    (explained,) = place.posted
    assert isinstance(explained, ev.HangExplained)
    assert (explained.generation, explained.verdict.text) == (3, VERDICT)
    assert place.hangs.verdict(committed=7)[0] == VERDICT
    assert place.hangs.verdict(committed=8) == ("", 0.0), "the step is committed"


async def test_a_new_group_waits_until_members_have_said_where_they_hang(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdups, "_BEFORE_GROUP_S", 3600.0)
    await place.hangs.answered()  # nobody was asked
    place.hangs.explain(fx.ExplainHang(generation=GROUP, step=7, standing_s=5.25))
    waiting = asyncio.ensure_future(place.hangs.answered())
    await place.tell("a", "b")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await place.tell("c")
    await waiting
    monkeypatch.setattr(holdups, "_BEFORE_GROUP_S", 0.01)
    place.hangs.explain(fx.ExplainHang(generation=GROUP, step=8, standing_s=5.25))
    await place.hangs.answered()  # no longer than that
    await place.tell("a", "b", "c")
    await asyncio.gather(*place.tasks)


@pytest.mark.parametrize("committed", [7, 8])
async def test_a_slow_step_is_recorded_unless_it_is_over(place: Place, committed: int) -> None:
    slow = fx.ExplainSlowStep(generation=GROUP, step=7, lasts_s=1.5, usual_s=0.1)
    place.hangs.explain_slow_step(slow, lambda: committed)
    await place.tell("a", "b", "c")
    await asyncio.gather(*place.tasks)
    assert [e.fields["verdict"] for e in place.entries] == [VERDICT] * (committed == 7)


def test_a_verdict_names_a_member_whose_agent_is_out_of_contact() -> None:
    assert "rank 1 (node b) has not entered" in explain(GROUP, found("a", "c")).text
    assert "its agent is out of contact" in explain(GROUP, found("a", "c")).text


def test_the_reply_has_members_by_rank_then_others() -> None:
    answer = reply(GROUP, found("a", "b", "c", "d"), "")
    assert [(r.rank, r.node, r.is_member) for r in answer.ranks] == [
        (0, "a", True),
        (1, "b", True),
        (2, "c", True),
        (0, "d", False),
    ]
    assert answer.verdict == VERDICT
    (one,) = reply(GROUP, found("b"), "b-1").ranks
    assert one.rank == 1
    assert len(one.stacks.processes[0].threads) == 2
    assert reply(None, {}, "") == pb.JobStacks()


def test_a_reply_that_is_too_large_has_main_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdups, "_MOST_BYTES", 100)
    answer = reply(GROUP, found("a", "b", "c"), "")
    assert {len(r.stacks.processes[0].threads) for r in answer.ranks} == {1}


def test_a_rank_or_a_worker_can_be_asked_for() -> None:
    names = ["a-1", "b-1", "c-1", "spare"]
    assert [asked_for(of, GROUP, names) for of in ("", "1", "spare")] == ["", "b-1", "spare"]
    with pytest.raises(ConfigurationError, match=r"no rank or worker '3'; there are ranks 0 to 2"):
        asked_for("3", GROUP, names)
    with pytest.raises(ConfigurationError, match="there are no ranks, and no workers"):
        asked_for("x", None, [])


async def test_a_timeline_has_workers_stretches_and_the_coordinators_periods(place: Place) -> None:
    start_up = Period(
        node="a", slot=0, worker="a-1", kind=Kind.START_UP, began=0.0, ended=time.monotonic()
    )
    asked = asyncio.ensure_future(timeline(place.rounds, lambda: [start_up], 3, 0))
    await asyncio.sleep(0)
    request = await place.request("a")
    assert 0 < request.stretches <= 1000
    node = place.nodes.by_name("a")
    assert node is not None
    stretches = [timeline_pb2.Stretch(step=n) for n in range(5)]
    workers = [pb.WorkerStacks(worker="a-1", stretches=stretches)]
    place.rounds.told(node, pb.NodeStacks(request=request.request, workers=workers))
    told = await asked
    (rank,) = told.ranks
    assert (rank.node, rank.worker, len(rank.stretches)) == ("a", "a-1", 5)
    (period,) = told.periods
    assert (period.node, period.worker, period.kind) == ("a", "a-1", "start_up")
    assert period.ended_unix_s == pytest.approx(time.time(), abs=60.0)
    assert told.silent == 2
