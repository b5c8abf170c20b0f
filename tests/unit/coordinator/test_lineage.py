"""A node that comes back with a lineage that was given up costs the job neither a checkpoint nor a
record: agents' messages go through a whole leader, to files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import group_name, path_in_step, shard_name
from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.leadership import Leadership, lead
from elastic.core.membership import WorkerPhase
from elastic.rpc.control import AgentStream
from elastic.store.interface import Store
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2
from tests.unit.coordinator.agents import Diary, agent, options, sent, view, worker
from tests.waiting import until


class Node:
    """A node with two workers, which are ready and then train in the leader's newest group."""

    def __init__(self, directory: CheckpointDirectory, run: str, name: str) -> None:
        self.directory, self.run, self.name = directory, run, name
        self.workers = [f"{name}-0", f"{name}-1"]
        self.leader: CoordinatorDaemon | None = None
        self.stream: AgentStream | None = None
        self.generation = 0

    def connects(self, leader: CoordinatorDaemon) -> None:
        self.leader, self.stream = leader, agent(self.name, "0123")
        leader.agent_connected(self.stream)

    def says(self, **kind: Any) -> None:
        assert self.leader is not None
        assert self.stream is not None
        self.leader.agent_said(self.stream, pb.AgentMessage(**kind))

    def reports(self, phase: WorkerPhase, committed: int = 0) -> None:
        self.views(phase, self.generation, committed=committed)

    def views(self, phase: WorkerPhase, generation: int, **fields: Any) -> None:
        has_state = phase is WorkerPhase.TRAINING
        known = [
            replace(
                worker(name, phase, generation),
                slot=slot,
                endpoint=f"{name}:1",
                acknowledged=generation,
                has_state=has_state,
                **fields,
            )
            for slot, name in enumerate(self.workers)
        ]
        self.says(view=view(*known).view)

    async def trains(self, began_at: int) -> None:
        """Form a group of this node, and commit its first step."""
        assert self.leader is not None
        machine = self.leader.machine
        self.reports(WorkerPhase.READY)
        names = frozenset(self.workers)
        await until(lambda: machine.current is not None and machine.current.worker_ids == names)
        assert machine.current is not None
        self.generation = machine.current.number
        self.reports(WorkerPhase.TRAINING, began_at)
        self.says(
            reformed=job_pb2.Reformed(
                worker=self.workers[0], generation=self.generation, committed=began_at
            )
        )
        self.began_at = began_at

    def saves(self, step: int) -> None:
        group = group_name(self.generation, self.run)
        for index, name in enumerate(self.workers):
            shard = shard_name(index, 2, group)
            digest = self.directory.write(path_in_step(step, shard), b"x")
            file = job_pb2.FileDigest(
                name=shard, size_bytes=digest.size_bytes, xxh3_128=digest.xxh3_128
            )
            self.says(
                shard_saved=job_pb2.ShardSaved(
                    worker=name,
                    step=step,
                    generation=self.generation,
                    index=index,
                    count=2,
                    files=[file],
                    learning_rate_json="{}",
                    began_at=self.began_at,
                )
            )

    def records(self, first: int, end: int, *, whole: bool = True) -> None:
        rows = [
            job_pb2.LedgerEntry(
                step=s, run=self.run, generation=self.generation, world_size=2, start=s, stop=s + 1
            )
            for s in range(first, end)
        ]
        self.says(
            ledger=local_pb2.LedgerEntries(entries=rows, whole=whole, generation=self.generation)
        )


class Job:
    """A job with checkpoints and a ledger; the test ends and replaces its leader."""

    def __init__(self, files: Path, store: Store, leadership: Leadership) -> None:
        self.files, self.store, self.diary = files, store, Diary()
        self.directory = open_directory(str(files / "checkpoints"))
        self.leadership = leadership
        self.leaders: list[CoordinatorDaemon] = []

    async def leader(self) -> CoordinatorDaemon:
        leader = CoordinatorDaemon(
            options(
                checkpoints=self.directory, keep_checkpoints=3, ledger=self.files / "ledger.jsonl"
            ),
            self.store,
            self.leadership,
            self.diary.journal,
        )
        await leader.start()
        self.leaders.append(leader)
        return leader

    def node(self, name: str) -> Node:
        return Node(self.directory, self.leadership.incarnation, name)

    async def until_saved(self, *steps: int) -> None:
        await until(lambda: catalog.list_checkpoints(self.directory) == steps)

    def ledger(self) -> list[tuple[int, int]]:
        """The (step, generation) of the records that count."""
        found: dict[int, int] = {}
        for line in map(json.loads, (self.files / "ledger.jsonl").read_text().splitlines()):
            if "resume" in line:
                found = {s: g for s, g in found.items() if s < line["resume"]}
            elif "step" in line:
                found[line["step"]] = line["generation"]
        return sorted(found.items())


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    store = MemoryStore()
    job = Job(tmp_path, store, await lead(store, job="job", candidate="c"))
    yield job
    for leader in job.leaders:
        await leader.close()


@pytest.mark.parametrize("replaced", [False, True], ids=["same leader", "next leader"])
async def test_a_node_that_wakes_up_with_a_lineage_that_was_given_up_changes_nothing(
    job: Job, replaced: bool
) -> None:
    leader = await job.leader()
    old, new = job.node("old"), job.node("new")
    old.connects(leader)
    await old.trains(began_at=0)
    old.saves(40)
    old.records(0, 45)
    await job.until_saved(40)
    assert old.stream is not None
    leader.agent_lost(old.stream)
    leader.node_gone("old", "0123")
    new.connects(leader)
    await new.trains(began_at=40)
    assert new.generation > old.generation
    new.records(40, 50)
    await until(lambda: len(job.ledger()) == 50)
    if replaced:
        await until(lambda: catalog.read(job.directory).forks[-1].step == 40)  # type: ignore[union-attr]
        leader.retire()
        await leader.close()
        job.leadership = await lead_again(job)
        leader = await job.leader()
    old.connects(leader)  # it wakes up, and sends what was queued
    old.views(WorkerPhase.TRAINING, old.generation, committed=260)
    for step in (220, 240, 260):
        old.saves(step)
    old.records(0, 260)
    if replaced:
        new.connects(leader)
        new.reports(WorkerPhase.TRAINING, 50)
    for step in (60, 80, 100):
        new.saves(step)
    new.records(50, 60)
    await job.until_saved(100, 80, 60)
    await until(lambda: len(job.ledger()) == 60)
    assert catalog.newest_step(job.directory) == 100
    assert {catalog.read_manifest(job.directory, s).generation for s in (60, 80, 100)} == {
        new.generation
    }
    found = job.ledger()
    assert [step for step, _ in found] == list(range(60))
    assert {g for s, g in found if s >= 40} == {new.generation}
    assert leader.saves.newest_step == 100
    assert old.stream is not None
    told = [m.checkpoint for m in sent(old.stream) if m.HasField("checkpoint")]
    assert {(c.step, c.abandoned) for c in told if c.step > 200} <= {
        (step, True) for step in (220, 240, 260)
    }


async def lead_again(job: Job) -> Leadership:
    """The next leader, once the key of the one before is gone."""
    await job.store.delete(JobKeys("job").leader)
    return await lead(job.store, job="job", candidate="d")
