"""Tries many points in few jobs: a new one begins when a fault ends a job, or after some points."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from errno import EIO
from pathlib import Path

from tests.faults.long_running import ClusterJob, LongJob, LongOutcome, MachineJob, Over
from tests.faults.points import Counts, Point, drawn
from tests.faults.reference import Reference
from tests.faults.running import new_place

IN_CLUSTER = ("coordinator", "agent")
_ON_MACHINE = ("run", "keeper", "zygote")
_OF_MACHINE_JOB = 30  # points in one job; the first is one of the job's start
_OF_CLUSTER_JOB = 60
_MACHINE_SHARE = 3  # times as many points in jobs of a machine as in the job of a cluster
_NEVER = 1_000_000_000


class Campaign:
    """Draws points by a seed and tries them one after another."""

    def __init__(self, library: Path, etcd: str, seed: int) -> None:
        self._library, self._etcd, self._seed = library, etcd, seed
        self._reference = Reference()
        self._jobs = 0

    def outcomes(self, *, of_each_kind: int = _OF_CLUSTER_JOB) -> Iterator[LongOutcome]:
        """Endless, from both kinds of job in turn. A job of a cluster has `of_each_kind` points."""
        begin, rest = self._machine_points()
        cluster = self._cluster_points()
        while True:
            for _ in range(of_each_kind * _MACHINE_SHARE // _OF_MACHINE_JOB):
                points = [next(rest) for _ in range(_OF_MACHINE_JOB - 1)]
                yield from self._on_machine(next(begin), points)
            yield from self._in_cluster([next(cluster) for _ in range(of_each_kind)])

    def several(self, points: Iterable[Point]) -> Iterator[LongOutcome]:
        """The outcomes of these points. A point in a cluster or at the start of a machine's job
        gets a job of its own; the others share one."""
        together: list[Point] = []
        for point in points:
            if point.role in IN_CLUSTER:
                yield from self._in_cluster([point])
            elif point.role == "worker" or point.since_kill:
                together.append(point)
            else:
                yield from self._on_machine(point, [])
        yield from self._on_machine(None, together)

    # ---- jobs

    def _on_machine(self, begin: Point | None, points: list[Point]) -> Iterator[LongOutcome]:
        rest = deque(points)
        while begin is not None or rest:
            first, begin = begin, None
            with self._machine_job(first) as job:
                yield from _tried(job, first, rest)

    def _in_cluster(self, points: list[Point]) -> Iterator[LongOutcome]:
        rest = deque(points)
        while rest:
            with self._cluster_job() as job:
                yield from _tried(job, None, rest)

    @contextlib.contextmanager
    def _machine_job(self, point: Point | None) -> Iterator[MachineJob]:
        self._jobs += 1
        with new_place() as place:
            job = MachineJob(self._library, place, self._reference, self._seed + self._jobs, point)
            with contextlib.closing(job):
                yield job

    @contextlib.contextmanager
    def _cluster_job(self) -> Iterator[ClusterJob]:
        self._jobs += 1
        with new_place() as place:
            seed = self._seed + self._jobs
            job = ClusterJob(self._library, place, self._reference, seed, self._etcd)
            with contextlib.closing(job):
                yield job

    # ---- points

    def _machine_points(self) -> tuple[Iterator[Point], Iterator[Point]]:
        """Points at the start of a job, and points in a job that trains."""
        with self._machine_job(None) as job:
            start, later, all_told = _counted(job, _never("worker"))
        beginning = {kind: n for kind, n in start.items() if kind[0] in _ON_MACHINE}
        running = {kind: n for kind, n in later.items() if kind[0] in _ON_MACHINE}
        running |= {kind: n for kind, n in all_told.items() if kind[0] == "worker"}
        return drawn(beginning, self._seed), drawn(running, self._seed, since_kill=_ON_MACHINE)

    def _cluster_points(self) -> Iterator[Point]:
        with self._cluster_job() as job:
            start, later, _ = _counted(job, _never("agent"))
        beginning = {kind: n for kind, n in start.items() if kind[0] in IN_CLUSTER}
        running = {kind: n for kind, n in later.items() if kind[0] in IN_CLUSTER}
        restarted = drawn(beginning, self._seed)
        since_kill = drawn(running, self._seed, since_kill=IN_CLUSTER)
        while True:
            yield next(restarted)
            yield next(since_kill)


def _tried(job: LongJob, first: Point | None, points: deque[Point]) -> Iterator[LongOutcome]:
    """Try points until the job ends, and remove those tried from `points`."""
    last = LongOutcome(point=first)
    try:
        last = job.settle(first)
        if first is not None or last.wrong:
            yield last
        while points:
            last = job.attempt(points.popleft())
            yield last
    except Over as over:
        yield over.args[0]
        return
    if wrong := job.stop():
        ended = "its job's end"
        yield LongOutcome(
            point=last.point, ended=ended, ends_job=True, wrong=wrong, story=job.story()
        )


def _never(role: str) -> Point:
    """A point that only kills a worker: no call reaches it."""
    return Point(role=role, function="open", number=_NEVER, error=EIO, since_kill=role != "worker")


def _counted(job: LongJob, never: Point) -> tuple[Counts, Counts, Counts]:
    """The calls at a job's start, those that follow from a worker's end, and all so far."""
    settled = job.settle()
    assert not settled.wrong, settled.story
    start = job.counts()
    for _ in range(2):
        before = job.counts()
        outcome = job.attempt(never)
        assert not outcome.wrong, outcome.story
    after = job.counts()
    later: Counts = Counter({kind: n - before.get(kind, 0) for kind, n in after.items()})
    return start, later, after
