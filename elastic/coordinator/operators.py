"""Answers operators, and makes the job's status, metrics and page from its leader."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from elastic.coordinator.connected_agents import name_of
from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.holdups import StackRounds, asked_for
from elastic.coordinator.leadership import StopOrder
from elastic.coordinator.metrics import JobFigures
from elastic.coordinator.node_registry import WANTED
from elastic.coordinator.page import JobView
from elastic.coordinator.records import to_unix
from elastic.core.book.slot_accounts import Period
from elastic.errors import ConfigurationError
from elastic.rpc.codec import generation_to_pb
from elastic.runtime.journal import RecentEntries
from elastic.runtime.loop_watch import LoopPauses
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, stacks_pb2, timeline_pb2
from elastic.version import __version__

_MOST_SHOWN = 80  # characters of an unknown name in a message
TRAINING = "training"
_MOST_STEPS = 1000  # of one worker
_MOST_SPANS_TOLD = 100_000  # stretches of all workers together: some 7 MB


async def timeline(
    rounds: StackRounds, periods: Callable[[], Sequence[Period]], workers: int, steps: int
) -> timeline_pb2.JobTimeline:
    """Return each worker's newest `steps` steps (0: the most); fewer with many workers."""
    most = max(1, min(steps or _MOST_STEPS, _MOST_STEPS, _MOST_SPANS_TOLD // max(1, workers)))
    found = await rounds.ask(stretches=most)
    now = time.monotonic()
    ahead_s, told = time.time() - now, timeline_pb2.JobTimeline()
    for node, answers in sorted(found.items()):
        for answer in answers.workers:
            told.ranks.add(node=node, worker=answer.worker, stretches=answer.stretches[-most:])
    for period in periods():
        told.periods.add(
            node=period.node,
            slot=period.slot,
            worker=period.worker,
            kind=period.kind.value if period.kind is not None else TRAINING,
            began_unix_s=period.began + ahead_s,
            ended_unix_s=period.ended + ahead_s,
        )
    told.silent = max(0, workers - len(told.ranks))
    return told


class Operators:
    """The handler of elastic.rpc.control.ControlServer while `leader` leads.

    pauses: of the event loop. recent: the journal entries that operators can ask for.
    """

    def __init__(
        self, leader: CoordinatorDaemon, pauses: LoopPauses, recent: RecentEntries
    ) -> None:
        self.leader, self._pauses, self._recent = leader, pauses, recent

    def agents(self) -> CoordinatorDaemon:
        return self.leader

    def operators(self) -> Operators:
        return self

    def stop(self, reason: str, exit_code: int) -> None:
        """Have the job save and end. Raises ConfigurationError if it has ended already."""
        self._require_going_on()
        self.leader.stop(StopOrder(reason=reason, exit_code=exit_code))

    async def drain(self, name: str, reason: str, *, future: bool = False) -> str:
        """Drain a node and keep it out; return a message for the operator.

        Raises TransientError, and ConfigurationError if the job has ended, or if the node is
        unknown and not announced for the `future`.
        """
        leader = self.leader
        self._require_going_on()
        known = {node.node for node in leader.departing.statuses()}
        known |= leader.departing.machines()
        known |= {name_of(m.node) for m in leader.machine.members_that_may_train()}
        registered = leader.registry is not None and leader.registry.holder(name) is not None
        if not (future or registered or name in known):
            there_are = ", ".join(sorted(known)) or "none"
            raise ConfigurationError(
                f"there is no node {name[:_MOST_SHOWN]!r} (known nodes: {there_are}); to keep out "
                "a node that has not connected yet, give --future"
            )
        return await leader.departing.drain(name, reason)

    async def clear(self, name: str) -> str:
        """Let a node take part again; return a message for the operator.

        Raises TransientError, and ConfigurationError if the job has ended, or if the name is
        ambiguous or impossible.
        """
        self._require_going_on()
        return await self.leader.departing.clear(name)

    async def stacks(self, of: str) -> stacks_pb2.JobStacks:
        """Return the Python stacks of all ranks, or of one rank or worker, at this instant. Raises
        ConfigurationError if there is no such rank or worker, and if the job has ended."""
        leader = self.leader
        self._require_going_on()
        workers = [s.worker for node in leader.nodes for s in node.statuses]
        return await leader.hangs.stacks(of, leader.machine.current, workers)

    async def log(self, of: str) -> str:
        """Return the last log lines of a worker that runs, by its rank or name. Raises
        ConfigurationError if there is none, and TransientError if its agent does not answer."""
        leader = self.leader
        nodes = {s.worker: node for node in leader.nodes for s in node.statuses}
        worker = asked_for(of, leader.machine.current, list(nodes))
        if worker not in nodes:
            raise ConfigurationError(f"no connected agent has a worker {worker!r}")
        return await leader.rounds.log(nodes[worker], worker)

    async def timeline(self, steps: int = 0) -> timeline_pb2.JobTimeline:
        """Return what each slot did in the last minutes, with each worker's newest `steps` steps at
        most (0: as many as are remembered). Raises ConfigurationError if the job has ended."""
        leader = self.leader
        self._require_going_on()
        workers = sum(s.slot is not None for node in leader.nodes for s in node.statuses)
        return await timeline(leader.rounds, leader.watch.periods, workers, steps)

    def incidents(self, number: int | None = None) -> list[str]:
        """Return an incident's record as JSON (0: the newest), or all of them in brief for None.
        Raises ConfigurationError if there is none of this number."""
        if number is None:
            return [json.dumps(document) for document in self.leader.watch.incidents()]
        return [json.dumps(self.leader.watch.incident(number))]

    def follow_events(self, *, follow: bool) -> AsyncIterator[str]:
        """Yield the journal as JSON lines: what is remembered, then new entries if `follow`."""
        return self._recent.follow() if follow else self._recent.remembered()

    def status(self) -> pb.JobStatus:
        leader = self.leader
        current, nodes = leader.machine.current, leader.departing.statuses()
        self._note_steps(nodes)
        policy = leader.options.formation
        verdict, verdict_unix_s = leader.hangs.verdict(leader.machine.committed)
        room = sum(node.slots for node in nodes if node.state in WANTED)
        progress = job_pb2.Progress()
        progress.CopyFrom(leader.watch.progress)
        progress.committed = leader.machine.committed  # any member may have reported more
        return pb.JobStatus(
            job=leader.options.job,
            phase=leader.machine.phase.value,
            generation=generation_to_pb(current) if current is not None else None,
            nodes=nodes,
            min_workers=policy.min_workers,
            wanted_workers=min(policy.max_workers, room),
            progress=progress,
            started_unix_s=leader.leadership.records.started_unix_s,
            restarts=leader.machine.restarts_spent(time.monotonic()),
            max_restarts=leader.options.max_restarts,
            recoveries_json=[json.dumps(r) for r in leader.watch.recoveries()],
            checkpoint_step=leader.saves.newest_step,
            checkpoint_dir=leader.saves.url,
            coordinator=leader.options.address,
            leads=leader.leads(),
            longest_pause_s=round(self._pauses.longest_s, 3),
            verdict=verdict,
            verdict_unix_s=verdict_unix_s,
            accounts_json=json.dumps(leader.watch.accounts().to_document()),
            slow=leader.slow_ranks.to_pb(),
            version=__version__,
            certificate_expires_unix_s=leader.options.certificate_expires(),
        )

    def figures(self) -> JobFigures:
        leader = self.leader
        now, current = time.monotonic(), leader.machine.current
        options, progress, attending = leader.options, leader.watch.progress, list(leader.nodes)
        elapsed_s = progress.in_step_s
        return JobFigures(
            phase=leader.machine.phase.value,
            totals=leader.watch.totals.copy(),
            accounts=leader.watch.accounts(),
            leads=leader.leads(),
            started_unix_s=leader.leadership.records.started_unix_s,
            exit_code=self._exit_code(),
            counts_steps=not leader.is_classic,
            step=leader.machine.committed,
            epoch=progress.epoch,
            step_elapsed_s=elapsed_s + now - leader.watch.progressed_at if elapsed_s else 0.0,
            step_usual_s=progress.step_s,
            samples_per_s=progress.samples_per_s,
            world_size=current.world_size if current is not None else 0,
            wanted=leader.wanted(),
            minimum=options.formation.min_workers,
            generation=current.number if current is not None else 0,
            restarts_left=max(0, options.max_restarts - leader.machine.restarts_spent(now)),
            restarts_allowed=options.max_restarts,
            nodes=tuple(leader.departing.figures()),
            workers=tuple(node.statuses for node in attending),
            saves=bool(leader.saves.url),
            checkpoint_every=leader.checkpoint_every,
            checkpoint_step=leader.saves.newest_step,
            values=dict(progress.reported),
            not_finite=tuple(leader.watch.script_values.not_finite),
            learning_rates=dict(progress.learning_rates),
            global_batch=progress.global_batch,
            slow_ranks=tuple(leader.slow_ranks.now),
            straggler_ratio=leader.slow_ranks.worst,
        )

    def view(self) -> JobView:
        leader = self.leader
        now_unix_s, history = time.time(), leader.watch.history
        since = leader.watch.recovering_since
        verdict, verdict_unix_s = leader.hangs.verdict(leader.machine.committed)
        ended = self._exit_code() is not None
        return JobView(
            at_unix_s=now_unix_s,
            job=leader.options.job,
            run_id=leader.options.run_id,
            coordinator=leader.options.address,
            figures=self.figures(),
            generation=leader.machine.current,
            recovering_since_unix_s=to_unix((since,))[0] if since is not None else None,
            incidents=leader.watch.incidents(),
            ending=leader.ended.result().message if ended else "",
            stop_reason=leader.order.reason if leader.order is not None else "",
            verdict=verdict,
            verdict_unix_s=verdict_unix_s,
            checkpoint_dir=leader.saves.url,
            longest_pause_s=self._pauses.longest_s,
            entries=tuple(history.entries) if history is not None else (),
            departed=dict(history.departed) if history is not None else {},
        )

    def _exit_code(self) -> int | None:
        ended = self.leader.ended
        if not ended.done() or ended.cancelled() or ended.exception() is not None:
            return None
        return ended.result().exit_code

    def _note_steps(self, nodes: Iterable[pb.NodeStatus]) -> None:
        """Use rank 0's count for members: they report theirs only when the group changes."""
        current, progress = self.leader.machine.current, self.leader.watch.progress
        if current is None or progress.generation != current.number:
            return
        for worker in (worker for node in nodes for worker in node.workers):
            if worker.generation == current.number and current.rank_of(worker.worker) is not None:
                worker.committed = max(worker.committed, progress.committed)

    def _require_going_on(self) -> None:
        """Raise ConfigurationError if the job has ended: the coordinator stays for some seconds
        afterwards, so that agents learn of the end."""
        ended = self.leader.ended
        if ended.done() and not ended.exception():
            told = ended.result().ended_message(self.leader.options.job)
            raise ConfigurationError(f"the run has ended, so nothing was changed: {told}")
