"""An agent speaks only for its own node: its words about workers of others change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.leadership import lead
from elastic.core.membership import WorkerPhase
from elastic.rpc.control import AgentStream
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2
from tests.unit.coordinator.agents import Diary, agent, options, view, worker
from tests.waiting import until

NODES = ("n1", "n2")
TRAINS, READY = WorkerPhase.TRAINING, WorkerPhase.READY
FAR = 10**12


class Job:
    """A leader and a group of n1 and n2, each with one worker. n3 has an agent and no member."""

    def __init__(self, leader: CoordinatorDaemon, diary: Diary) -> None:
        self.leader, self.diary = leader, diary
        self.streams: dict[str, AgentStream] = {}

    async def begin(self) -> None:
        for name in (*NODES, "n3"):
            self.streams[name] = agent(name, f"{name}-start")
            self.leader.agent_connected(self.streams[name])
        for name in NODES:
            self.says(name, view=view(worker(f"{name}-1", READY)).view)
        await until(lambda: self.generation() > 0)
        for name in NODES:
            self.says(name, view=view(self.training(name)).view)

    def training(self, name: str) -> object:
        return worker(f"{name}-1", TRAINS, self.generation(), committed=5)

    def generation(self) -> int:
        current = self.leader.machine.current
        return current.number if current is not None and current.world_size == 2 else 0

    def says(self, node: str, **kind: object) -> None:
        self.leader.agent_said(self.streams[node], pb.AgentMessage(**kind))  # type: ignore[arg-type]


@pytest.fixture
async def job() -> AsyncIterator[Job]:
    store, diary = MemoryStore(), Diary()
    leadership = await lead(store, job="job", candidate="c")
    leader = CoordinatorDaemon(options(max_workers=2), store, leadership, diary.journal)
    job = Job(leader, diary)
    await job.begin()
    yield job
    await leader.close()


@pytest.mark.parametrize("who", ["n1", "n3"])
async def test_words_about_another_nodes_worker_are_refused(job: Job, who: str) -> None:
    """They could end its group while it trains, and let a second one form beside it."""
    before, number = job.leader.machine.members_that_may_train(), job.generation()
    said = {"worker": "n2-1", "generation": number}
    job.says(who, failure=job_pb2.Failure(worker="n2-1", kind=job_pb2.FAILURE_KIND_SIGNAL))
    job.says(who, progress=job_pb2.Progress(committed=FAR, **said))
    job.says(who, reformed=job_pb2.Reformed(committed=0, **said))
    job.says(who, shard_saved=job_pb2.ShardSaved(step=FAR, count=1, began_at=0, **said))
    job.says(who, save_failed=job_pb2.SaveFailed(step=5, **said))
    job.says(who, worker_time=job_pb2.WorkerTime(worker="n2-1"))
    job.says(who, worker_pace=job_pb2.WorkerPace(worker="n2-1"))
    assert job.leader.machine.members_that_may_train() == before
    assert (job.generation(), job.leader.machine.committed) == (number, 5)
    assert job.diary.of("worker_failed") == []
    told = job.diary.of("message_refused")
    assert [e["source"] for e in told] == [who] * 7
    assert "worker 'n2-1'" in told[0]["reason"]


async def test_a_view_with_another_nodes_worker_does_not_move_it(job: Job) -> None:
    stolen = worker("n2-1", TRAINS, job.generation(), broken=True, committed=FAR)
    job.says("n3", view=view(stolen).view)
    assert job.leader.machine.home_of("n2-1") == "n2@n2-start"
    assert job.leader.machine.committed == 5
    assert job.leader.nodes.by_name("n3").statuses == ()  # type: ignore[union-attr]
    job.says("n2", view=view(job.training("n2")).view)  # type: ignore[arg-type]
    assert job.leader.machine.current.number == job.generation()  # type: ignore[union-attr]


async def test_a_node_without_a_member_tells_nothing_about_the_group(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it could have checkpoints removed, as of a lineage that was given up."""
    began: list[tuple[int, int]] = []
    monkeypatch.setattr(job.leader.saves, "began", lambda *args: began.append(args))
    own = {"worker": "n3-1", "generation": job.generation()}
    job.says("n3", view=view(worker("n3-1", READY)).view)
    job.says("n3", reformed=job_pb2.Reformed(committed=0, **own))
    job.says("n3", shard_saved=job_pb2.ShardSaved(step=FAR, count=1, began_at=0, **own))
    job.says("n3", progress=job_pb2.Progress(committed=FAR, **own))
    job.says("n3", ledger=local_pb2.LedgerEntries(generation=job.generation()))
    failed = job_pb2.Failure(
        worker="n3-1",
        kind=job_pb2.FAILURE_KIND_SIGNAL,
        committed=FAR,
        committed_in=job.generation(),
    )
    job.says("n3", failure=failed)
    assert began == []
    assert job.leader.machine.committed == 5
    assert len(job.diary.of("message_refused")) == 4
    job.says("n1", reformed=job_pb2.Reformed(worker="n1-1", generation=job.generation()))
    assert began == [(job.generation(), 0)]
