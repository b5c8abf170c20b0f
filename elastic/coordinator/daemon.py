"""The coordinator: feeds its machine from the agents' streams and carries out what it answers."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.checkpoint.directory import CheckpointDirectory
from elastic.coordinator.checkpoint_commits import CheckpointCommits
from elastic.coordinator.leadership import Leadership, generation_key
from elastic.coordinator.ledger_file import LedgerFile
from elastic.coordinator.recoveries import Recoveries
from elastic.coordinator.wording import ending
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.formation import FormationPolicy
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.membership import Generation, WorkerStatus
from elastic.errors import ElasticError
from elastic.rpc.codec import failure_from_pb, generation_to_pb, status_to_pb, statuses_from_pb
from elastic.rpc.control import AgentStream
from elastic.runtime.driver import Driver
from elastic.runtime.journal import Journal
from elastic.runtime.tasks import TaskSupervisor
from elastic.store.interface import GuardFailed, Store
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What the coordinator is told of the job."""

    job: str
    formation: FormationPolicy
    stall: StallPolicy
    max_restarts: int
    restart_window_s: float
    stop_grace_s: float
    checkpoints: CheckpointDirectory | None = None
    keep_checkpoints: int = 3
    ledger: Path | None = None


@dataclass(slots=True)
class _Node:
    stream: AgentStream
    statuses: tuple[WorkerStatus, ...] = field(default_factory=tuple)


class CoordinatorDaemon:
    """One job's coordinator; the handler of elastic.rpc.control.ControlServer."""

    def __init__(
        self, options: JobOptions, store: Store, leadership: Leadership, journal: Journal
    ) -> None:
        self._options = options
        self._store = store
        self._leadership = leadership
        self._journal = journal
        self._machine = Coordinator(
            CoordinatorSettings(
                incarnation=leadership.incarnation,
                formation=options.formation,
                stall=options.stall,
                max_restarts=options.max_restarts,
                restart_window_s=options.restart_window_s,
                stop_grace_s=options.stop_grace_s,
            ),
            last_generation=leadership.last_generation,
        )
        self._driver: Driver[ev.Event, fx.Effect] = Driver(
            self._machine, self._execute, ev.TimerFired(), on_error=self._crashed
        )
        self._tasks = TaskSupervisor(self._crashed)
        self._nodes: dict[str, _Node] = {}
        self._recoveries = Recoveries()
        self._progress = job_pb2.Progress()
        self._started_unix_s = time.time()
        self._checkpoint_step = 0
        self._commits = _commits(options)
        self._ledger = (
            LedgerFile(options.ledger, incarnation=leadership.incarnation)
            if options.ledger is not None
            else None
        )
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The job's exit code, once it has one."""

    async def close(self) -> None:
        """End what still runs here."""
        self._driver.close()
        await self._tasks.close()
        if self._ledger is not None:
            self._ledger.close()

    # ---- ControlHandler

    def agent_connected(self, stream: AgentStream) -> None:
        """An agent has said hello."""
        if stream.node in self._nodes:
            self._journal.record("node_refused", node=stream.node, reason="the name is taken")
            stream.close()
            return
        self._nodes[stream.node] = _Node(stream)
        self._journal.record(
            "node_connected", node=stream.node, host=stream.host, slots=stream.slots
        )
        current = self._machine.current
        if current is not None:
            stream.send(generation=generation_to_pb(current))

    def agent_lost(self, stream: AgentStream) -> None:
        """Its stream has ended."""
        node = self._nodes.get(stream.node)
        if node is None or node.stream is not stream:
            return
        del self._nodes[stream.node]
        self._recoveries.sign(time.monotonic())
        if not self.ended.done():
            self._journal.record("node_lost", node=stream.node)
        self._driver.post(ev.NodeLost(node=stream.node))

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        """A message of one of the nodes."""
        node = self._nodes.get(stream.node)
        if node is None or node.stream is not stream:
            return
        kind = message.WhichOneof("kind")
        if kind is not None and (heard := self._hearing().get(kind)) is not None:
            heard(node, getattr(message, kind))

    def status(self) -> pb.JobStatus:
        """The job as it is now."""
        current = self._machine.current
        return pb.JobStatus(
            job=self._options.job,
            phase=self._machine.phase.value,
            generation=generation_to_pb(current) if current is not None else None,
            nodes=[
                pb.NodeStatus(node=name, host=n.stream.host, workers=self._statuses_pb(n))
                for name, n in sorted(self._nodes.items())
            ],
            progress=self._progress,
            started_unix_s=self._started_unix_s,
            restarts=self._machine.restarts_spent(time.monotonic()),
            max_restarts=self._options.max_restarts,
            recoveries_json=[json.dumps(r) for r in self._recoveries.finished],
            checkpoint_step=self._checkpoint_step,
            checkpoint_dir=self._commits.url if self._commits is not None else "",
        )

    def stop(self, reason: str, exit_code: int) -> None:
        """Have the job saved and left."""
        self._journal.record("stop_requested", reason=reason)
        self._driver.post(ev.StopRequested(exit_code=exit_code, reason=reason))

    # ---- what agents say

    def _hearing(self) -> dict[str, Callable[[_Node, Any], None]]:
        return {
            "view": self._on_view,
            "failure": self._on_failure,
            "progress": self._on_progress,
            "reformed": self._on_reformed,
            "shard_saved": self._on_shard_saved,
            "save_failed": self._on_save_failed,
            "ledger": self._on_ledger,
            "notice": self._on_notice,
            "stop": lambda _node, stop: self.stop(stop.reason, stop.exit_code),
        }

    def _on_view(self, node: _Node, view: pb.NodeView) -> None:
        node.statuses = statuses_from_pb(view.workers)
        current = self._machine.current
        if current is not None and any(
            s.broken and s.generation == current.number for s in node.statuses
        ):
            self._recoveries.sign(time.monotonic())
        self._driver.post(
            ev.NodeReported(node=node.stream.node, slots=node.stream.slots, workers=node.statuses)
        )

    def _on_failure(self, node: _Node, message: job_pb2.Failure) -> None:
        failure = failure_from_pb(message)
        self._recoveries.sign(time.monotonic())
        self._journal.record(
            "worker_failed",
            worker=failure.worker,
            node=node.stream.node,
            kind=failure.kind.name.lower(),
            message=failure.message,
            traceback=failure.traceback,
            log=failure.log,
        )
        self._driver.post(ev.WorkerFailed(node=node.stream.node, failure=failure))

    def _on_progress(self, node: _Node, progress: job_pb2.Progress) -> None:
        del node
        current = self._machine.current
        if current is None or progress.generation != current.number:
            return
        self._progress = progress
        self._journal.record(
            "progress",
            step=progress.committed,
            epoch=progress.epoch,
            generation=progress.generation,
            world_size=current.world_size,
            step_s=round(progress.step_s, 6),
            samples_per_s=round(progress.samples_per_s, 1),
            **{name: round(value, 6) for name, value in progress.reported.items()},
        )
        self._driver.post(
            ev.ProgressReported(
                generation=progress.generation,
                committed=progress.committed,
                step_s=progress.step_s,
                in_step_s=progress.in_step_s,
            )
        )

    def _on_reformed(self, node: _Node, report: job_pb2.Reformed) -> None:
        del node
        if report.source:
            self._journal.record("state_restored", source=report.source, committed=report.committed)
        record = self._recoveries.reformed(report, time.monotonic())
        if record is not None:
            self._journal.record("recovered", **record)

    def _on_shard_saved(self, node: _Node, report: job_pb2.ShardSaved) -> None:
        del node
        if self._commits is not None:
            self._commits.reported(report)
        self._driver.post(
            ev.ShardReported(
                worker=report.worker,
                generation=report.generation,
                step=report.step,
                index=report.index,
                count=report.count,
            )
        )

    def _on_save_failed(self, node: _Node, report: job_pb2.SaveFailed) -> None:
        del node
        self._driver.post(
            ev.SaveReportedFailed(
                generation=report.generation, step=report.step, message=report.message
            )
        )

    def _on_ledger(self, node: _Node, entries: local_pb2.LedgerEntries) -> None:
        del node
        if self._ledger is not None:
            stored = self._ledger.append(entries.entries)
            self._broadcast(ledger_stored=local_pb2.LedgerStored(committed=stored))

    def _on_notice(self, node: _Node, notice: local_pb2.Notice) -> None:
        self._journal.record(notice.name, node=node.stream.node, **dict(notice.fields))

    # ---- what the machine wants

    def _execute(self, effect: fx.Effect) -> None:
        self._carry_out(effect)

    @functools.singledispatchmethod
    def _carry_out(self, effect: Any) -> None:
        raise TypeError(f"not an effect of the coordinator: {effect!r}")

    @_carry_out.register
    def _(self, effect: fx.PersistGeneration) -> None:
        self._tasks.start(self._persist(effect.generation), "persist")

    @_carry_out.register
    def _(self, effect: fx.AnnounceGeneration) -> None:
        generation = effect.generation
        self._recoveries.announced(generation, time.monotonic())
        self._broadcast(generation=generation_to_pb(generation))
        self._journal.record(
            "generation_formed",
            generation=generation.number,
            reason=generation.reason.name.lower(),
            world_size=generation.world_size,
            members=[m.worker for m in generation.members],
            after_step=generation.leave_after,
        )

    @_carry_out.register
    def _(self, effect: fx.ReplaceWorker) -> None:
        node = self._nodes.get(effect.node)
        if node is not None:
            kind = job_pb2.FailureKind.Name(effect.kind.value)
            node.stream.send(
                replace=pb.Replace(worker=effect.worker, kind=kind, message=effect.message)
            )

    @_carry_out.register
    def _(self, effect: fx.DismissWorkers) -> None:
        del effect
        self._broadcast(dismiss=local_pb2.Dismiss())

    @_carry_out.register
    def _(self, effect: fx.CommitCheckpoint) -> None:
        self._tasks.start(self._commit(effect), "commit-checkpoint")

    @_carry_out.register
    def _(self, effect: fx.AbandonCheckpoint) -> None:
        if self._commits is not None:
            self._commits.forget(effect.step, effect.generation)
        self._checkpoint_failed(effect.step, effect.message)

    @_carry_out.register
    def _(self, effect: fx.SetTimer) -> None:
        self._driver.set_timer(effect.at)

    @_carry_out.register
    def _(self, effect: fx.Lost) -> None:
        self._recoveries.lost(effect)

    @_carry_out.register
    def _(self, effect: fx.EndJob) -> None:
        message = ending(effect, self._options.max_restarts, self._options.restart_window_s)
        self._end(effect.exit_code, message)

    # ---- parts

    async def _persist(self, generation: Generation) -> None:
        try:
            await self._store.put(
                generation_key(self._options.job),
                str(generation.number).encode(),
                guard=self._leadership.guard,
            )
        except GuardFailed as error:
            self._driver.post(ev.PersistRefused(number=generation.number, detail=str(error)))
            return
        self._driver.post(ev.GenerationPersisted(number=generation.number))

    async def _commit(self, effect: fx.CommitCheckpoint) -> None:
        if self._commits is None:
            return
        try:
            size_bytes = await asyncio.to_thread(
                self._commits.commit, effect.step, effect.generation
            )
        except ElasticError as error:
            self._checkpoint_failed(effect.step, str(error))
            return
        self._checkpoint_step = effect.step
        self._journal.record("checkpoint_committed", step=effect.step, bytes=size_bytes)
        self._broadcast(checkpoint=local_pb2.CheckpointCommitted(step=effect.step))

    def _checkpoint_failed(self, step: int, message: str) -> None:
        self._journal.record("checkpoint_abandoned", step=step, message=message)
        self._broadcast(checkpoint=local_pb2.CheckpointCommitted(step=step, abandoned=True))

    def _end(self, exit_code: int, message: str) -> None:
        if self.ended.done():
            return
        self._journal.record(
            "job_finished" if exit_code == 0 else "job_ended",
            exit_code=exit_code,
            committed=self._machine.committed,
            **({"message": message} if message else {}),
        )
        self._broadcast(job_ended=pb.JobEnded(exit_code=exit_code, message=message))
        self.ended.set_result(exit_code)

    def _crashed(self, error: BaseException) -> None:
        """A bug here must not look like a hang."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def _broadcast(self, **kind: Any) -> None:
        for node in self._nodes.values():
            node.stream.send(**kind)

    def _statuses_pb(self, node: _Node) -> list[job_pb2.WorkerStatus]:
        return [status_to_pb(s) for s in node.statuses]


def _commits(options: JobOptions) -> CheckpointCommits | None:
    if options.checkpoints is None:
        return None
    return CheckpointCommits(
        options.checkpoints, job=options.job, keep_last=options.keep_checkpoints
    )
