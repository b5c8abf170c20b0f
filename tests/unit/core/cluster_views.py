"""Short constructors of workers, generations and views for tests of the coordinator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastic.core.coordinator.view import FormationPolicy, GroupView, ObservedWorker
from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase, WorkerStatus

READY, TRAINING, JOINING = WorkerPhase.READY, WorkerPhase.TRAINING, WorkerPhase.JOINING
FINISHED, STARTING = WorkerPhase.FINISHED, WorkerPhase.STARTING
POLICY = FormationPolicy(min_workers=2, max_workers=4)


def status(worker: str, phase: WorkerPhase, generation: int = 0, **fields: object) -> WorkerStatus:
    """A worker that has acknowledged `generation`, and holds the state unless that is 0."""
    base = WorkerStatus(
        worker=worker,
        phase=phase,
        slot=int(worker[1:]),
        generation=generation,
        acknowledged=generation,
        has_state=generation > 0,
        endpoint=f"{worker}:1",
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def generation(number: int, *workers: str, **fields: object) -> Generation:
    base = Generation(
        number=number,
        incarnation="x",
        members=tuple(member(w) for w in workers),
        reason=ChangeReason.STARTED,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def member(worker: str) -> Member:
    return Member(worker=worker, node=worker[0], slot=int(worker[1:]), endpoint=f"{worker}:1")


def view(current: Generation | None, *statuses: WorkerStatus, **fields: object) -> GroupView:
    workers = {s.worker: ObservedWorker(node=s.worker[0], status=s) for s in statuses}
    base = GroupView(current=current, workers=workers, slots=len(statuses))
    return replace(base, **fields)  # type: ignore[arg-type]


def leaving(base: GroupView, *nodes: str) -> GroupView:
    """`base` while exactly these nodes leave: their slots do not count."""
    workers = {w: replace(s, on_leaving_node=s.node in nodes) for w, s in base.workers.items()}
    staying = sum(s.node not in nodes for s in base.workers.values())
    return replace(base, workers=workers, slots=staying)


def silent(base: GroupView, since: float, nodes: Collection[str]) -> GroupView:
    """`base` while exactly these nodes are out of contact."""
    workers = {
        w: replace(s, out_of_contact_since=since if s.node in nodes else None)
        for w, s in base.workers.items()
    }
    return replace(base, workers=workers)
