"""The coordinator's state machine: takes an event, asks `decide`, and returns effects."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import assert_never

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator import stopping
from elastic.core.coordinator.decisions import (
    Decision,
    End,
    Form,
    GiveUp,
    TooFew,
    Wait,
    WaitReason,
)
from elastic.core.coordinator.formation import (
    Clocks,
    assign_ranks,
    counts_steps,
    decide,
    in_place,
    is_left,
    may_abort,
    settle,
)
from elastic.core.coordinator.freezing import Freezing
from elastic.core.coordinator.generations import (
    CheckpointTracker,
    Lineage,
    PastGenerations,
    superseded,
)
from elastic.core.coordinator.nodes import (
    Departures,
    NewcomerPolicy,
    Newcomers,
    Nodes,
    Replacements,
)
from elastic.core.coordinator.phases import TERMINAL, TRANSITIONS, JobPhase
from elastic.core.coordinator.progress import Hang, ProgressWatch, StallPolicy
from elastic.core.coordinator.reachability import LeftOut, Probing
from elastic.core.coordinator.stopping import EXIT_LEFT, Stop, decide_stop, inherited, within_grace
from elastic.core.coordinator.view import (
    FormationPolicy,
    GroupView,
    ObservedWorker,
    return_patience_s,
)
from elastic.core.invariants import check_succession, require
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    NodeId,
    Purpose,
    WorkerId,
    WorkerPhase,
)
from elastic.core.restarts import RestartPolicy, Verdict

_KILLS = (signal.SIGKILL, signal.SIGTERM)
_TOLD_BEFORE = "the other members already know that this save was given up"
_BEHIND = (
    "holds a state that is not newer than the newest checkpoint, from which a fresh worker "
    "continues"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """The part of the job's settings that the machine needs."""

    incarnation: str
    formation: FormationPolicy = field(default_factory=FormationPolicy)
    stall: StallPolicy = field(default_factory=StallPolicy)
    newcomers: NewcomerPolicy = field(default_factory=NewcomerPolicy)
    max_restarts: int = 100
    restart_window_s: float = 3600.0
    planned_notice_s: float = 0.35
    """A planned change takes effect at the first step that should end later than this. Longer than
    the age of a report of progress plus the time for the news to reach the members."""
    stop_grace_s: float = 30.0
    saves: bool = True
    """The job keeps checkpoints."""
    nodes_may_fail: bool = True
    """The loss of a node, or its leaving, is no failure. False: it counts as one of a worker, as
    under torchrun."""
    agents_outlive: bool = False
    """Agents may report a group that an earlier coordinator has formed and the store has lost."""


class Coordinator:
    """One job's coordinator. Only `handle` changes it, and returns the effects to carry out."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        last: Generation | None = None,
        may_train: tuple[Generation, ...] = (),
        restarted_at: Sequence[float] = (),
        begun: bool = False,
        now: float = 0.0,
    ) -> None:
        """last: the newest generation of earlier coordinators, whose group may still train.
        may_train: earlier generations that may still train too, oldest first.
        restarted_at: the instants of the restarts that count against the budget, oldest first.
        begun: a step of the job was committed under an earlier coordinator."""
        self._settings = settings
        self._policy = settings.formation
        self._number = 0
        self._nodes = Nodes()
        self._lineage = Lineage()
        self._departures = Departures()
        self._replacements = Replacements(self._policy.join_timeout_s)
        self._probed_at = -math.inf
        self._past = PastGenerations()
        self._freezing = Freezing(self._past)
        self._current: Generation | None = None
        self._previous_group: Generation | None = None
        """The group that trains until a planned change takes effect."""
        self._persisting: Generation | None = None
        self._begun = begun or (last is not None and last.begun)
        self._trained_in = 0
        self._began_in = 0
        """The newest generation that has committed a step."""
        self._formed_at = 0.0
        self._unannounced = False
        self._adopted_at: float | None = None
        self._since = Clocks()
        self._restarts = RestartPolicy(
            settings.max_restarts, settings.restart_window_s, saves=settings.saves
        )
        self._restarts.restore(restarted_at)
        self._checkpoints = CheckpointTracker()
        self._progress = ProgressWatch(settings.stall)
        self._newcomers = Newcomers(settings.newcomers)
        self._hang = Hang()
        self._probing = Probing(self._policy.probe_s)
        self._cut_off = LeftOut(settings.newcomers.backoff)
        self._stop: Stop | None = None
        self._deposed = False
        self.phase = JobPhase.GATHERING
        self._agents_return_until = -math.inf
        if last is not None:
            self._adopt(last, may_train, now)
        elif settings.agents_outlive:
            self._agents_return_until = now + return_patience_s(self._policy)

    def _adopt(self, last: Generation, may_train: tuple[Generation, ...], now: float) -> None:
        """Assume that the members train until they or their nodes report otherwise."""
        self._number = last.number
        for generation in may_train:  # these may be saving
            self._past.remember(generation)
        self._make_current(last)
        self._formed_at = self._adopted_at = now
        self._trained_in = self._began_in = last.number
        self._freezing.adopted(last, may_train)
        for generation in (*may_train, last):
            self._lineage.exists(generation)
            self._newcomers.presume_trained(generation)
        newest = WorkerPhase.TRAINING
        if last.leave_after is not None and may_train:  # it may not have taken effect yet
            self._previous_group, newest = may_train[-1], WorkerPhase.READY
            self._nodes.presumed(may_train[-1], WorkerPhase.TRAINING, now)
        self._since = Clocks(assembling=now if self._previous_group is None else None)
        self._nodes.presumed(last, newest, now)
        for generation in reversed(may_train):
            self._nodes.presumed_left_behind(generation, now)
        self.phase = JobPhase.RUNNING if last.members else JobPhase.WAITING
        if last.purpose is Purpose.SAVE_AND_LEAVE:
            grace_s, save_s = self._settings.stop_grace_s, self._save_s()
            self._begin_stop(inherited(now=now, grace_s=grace_s, save_s=save_s))

    # ---- for the daemon to read

    @property
    def current(self) -> Generation | None:
        """The newest generation that exists, in its newest form."""
        return self._current

    @property
    def committed(self) -> int:
        return self._progress.committed

    def last_commit_at(self, now: float) -> float:
        """When the newest step was committed, as far as reported; `now` if no step is known."""
        return self._progress.last_commit_at(now)

    @property
    def begun(self) -> bool:
        """A step of the job is known to have been committed, at any time."""
        return self._begun

    @property
    def writes(self) -> bool:
        """A generation is being written to the store and does not exist yet."""
        return self._persisting is not None

    def restarts_spent(self, now: float) -> int:
        """How many restarts count against the budget at `now`."""
        return self._restarts.spent(now)

    def restarts(self) -> tuple[float, ...]:
        """When these restarts were, oldest first."""
        return self._restarts.instants()

    def can_replace_slow(self, worker: WorkerId) -> bool:
        """True if the group trains, without a change under way, and can do with one less."""
        current = self._current
        if (
            current is None
            or self.phase is not JobPhase.RUNNING
            or self._previous_group is not None
        ):
            return False
        enough = len(current.members) > max(1, self._policy.min_workers)
        return enough and worker in current.worker_ids

    def members_that_may_train(self) -> list[Member]:
        """The members of every group that is not known to have stopped."""
        return self._lineage.members()

    def home_of(self, worker: WorkerId) -> NodeId | None:
        """The node whose agent has this worker; None: not known."""
        seen = self._nodes.workers().get(worker)
        if seen is not None:
            return seen.node
        members = (*self._lineage.members(), *self._past.last_members())
        return next((m.node for m in members if m.worker == worker), None)

    def nodes_out_of_contact(self) -> list[NodeId]:
        return self._nodes.out_of_contact()

    def generation(self, number: int) -> Generation | None:
        return self._past.get(number)

    # ---- events

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Take one event; return the effects to carry out, in order. now: monotonic seconds."""
        if self.phase in TERMINAL or self._deposed:
            return []
        effects = self._apply(event, now)
        if self.phase not in TERMINAL and not self._deposed:
            effects += self._consider(now)
        return effects

    def _apply(self, event: ev.Event, now: float) -> list[fx.Effect]:
        match event:
            case ev.NodeReported():
                return self._node_reported(event, now)
            case ev.NodesReported():
                return [e for report in event.reports for e in self._apply(report, now)]
            case ev.NodeReconnected():
                self._nodes.reconnected(event.node, now)
                return []
            case ev.NodeLost():
                return self._node_lost(event, now)
            case ev.NodeGone():
                return self._node_gone(event)
            case ev.NodeLeaving():
                return self._node_leaving(event, now)
            case ev.NodeWelcomed():
                self._nodes.welcomed(event.node)
                self._departures.forget(event.node)
                self._cut_off.gone(event.node)
                return []
            case ev.WorkerFailed():
                return self._worker_failed(event, now)
            case ev.ClassicScriptReported():
                self._policy = replace(self._policy, restart_all=True)
                self._restarts.progress_is_known = False
                return []
            case ev.ProgressReported():
                return self._progress_reported(event, now)
            case ev.HangExplained():
                self._hang.explained(event.generation, event.verdict, now)
                return []
            case ev.StragglerFound():
                return self._straggler_found(event, now)
            case ev.GroupBegan():
                self._begun, self._began_in = True, max(self._began_in, event.generation)
                return self._checkpoints.began(event.generation, event.step)
            case ev.ShardReported():
                return self._shard_reported(event)
            case ev.CheckpointCommitted():
                return self._checkpoint_committed(event)
            case ev.SaveReportedFailed():
                return self._save_reported_failed(event)
            case ev.GenerationPersisted():
                return self._generation_persisted(event, now)
            case ev.PersistRefused():
                self._deposed = True
                return [fx.StepDown(message=event.detail)]
            case ev.StopRequested():
                return self._stop_requested(event, now)
            case ev.PeersProbed():
                if self._probing.heard(event.node, event.number, event.unreached, event.by_port):
                    return self._refuse_cut_off(now)
                return []
            case ev.TimerFired():
                return []
            case _:
                assert_never(event)

    def _node_reported(self, event: ev.NodeReported, now: float) -> list[fx.Effect]:
        statuses = self._freezing.heard(event.workers)
        lost = self._nodes.reported(
            event.node, event.slots, statuses, now, restarting=event.restarting
        )
        self._lineage.reported(event.node, [s.worker for s in event.workers])
        for status in self._nodes.workers_of(event.node):
            if status.phase is WorkerPhase.TRAINING and status.generation > self._trained_in:
                self._trained_in = status.generation
                self._progress.goes_on_from(status.committed)
            if status.has_state:
                self._begun = self._begun or status.committed > 0
                if self._counts(status.worker):
                    self._progress.advance(status.committed, now)
                self._newcomers.committed(status.generation, status.committed)
            if status.has_state and status.compiling is not None:
                self._progress.compiles(status.compiling)
        return self._checkpoints.abandon(lost.union(self._told_before()))

    def _node_lost(self, event: ev.NodeLost, now: float) -> list[fx.Effect]:
        if failed := self._node_failed(event.node, "its node was lost", now):
            return failed
        groups = (self._current, self._previous_group)
        trained = self._past.last_members() if self._trained_in > 0 else ()
        if self._policy.agent_grace_s > 0.0 and self._nodes.is_needed(event.node, groups, trained):
            self._nodes.lost_contact(event.node, now)
            return []
        if self._policy.agent_grace_s > 0.0 and event.node not in self._departures.released:
            return self._checkpoints.abandon(self._nodes.unneeded_lost_contact(event.node, now))
        return self._checkpoints.abandon(self._nodes.lost(event.node))

    def _node_gone(self, event: ev.NodeGone) -> list[fx.Effect]:
        self._lineage.node_gone(event.node)
        self._departures.forget(event.node)
        self._newcomers.node_gone(event.node)
        self._cut_off.gone(event.node)
        self._nodes.welcomed(event.node)
        return self._checkpoints.abandon(self._nodes.lost(event.node))

    def _node_failed(self, node: NodeId, message: str, now: float) -> list[fx.Effect]:
        """Judge the end of a node's members as a failure, if it counts as one."""
        members = self._current.members if self._current is not None else ()
        here = [m.worker for m in members if m.node == node]
        if self._settings.nodes_may_fail or self._stop is not None or not here:
            return []
        failure = Failure(worker=here[0], kind=FailureKind.SIGNAL, message=message)
        if not self._past.is_unexplained_failure(failure):
            return []
        verdict = self._restarts.judge(
            failure, now=now, committed=self.committed, running=frozenset()
        )
        if verdict is Verdict.RESTART:
            return []
        self._enter(JobPhase.FAILED)
        return [stopping.end_failed(verdict, failure)]

    def _node_leaving(self, event: ev.NodeLeaving, now: float) -> list[fx.Effect]:
        if failed := self._node_failed(event.node, f"its node leaves: {event.reason}", now):
            return failed
        self._nodes.left(event.node)
        self._departures.forget(event.node)  # tell the node again: it may not know
        if self._stop is None and self._nodes.all_leave():
            reason = f"every node leaves: {event.reason}"
            self._begin_stop(self._asked_to_stop(EXIT_LEFT, reason, now))
        return []

    def _worker_failed(self, event: ev.WorkerFailed, now: float) -> list[fx.Effect]:
        self._begun = self._begun or event.committed > 0
        if max(1, self._trained_in) <= event.committed_in <= self._number:
            self._progress.advance(event.committed, now)  # no later group has gone on from fewer
        workers, refused = self._nodes.workers(), list[fx.Effect]()
        worker, verdict = workers.get(event.failure.worker), Verdict.RESTART
        if worker is not None and _is_killed_spare(worker, event.failure):
            pass  # not the script's fault, and nobody waits for this worker
        elif self._stop is not None and event.failure.kind is FailureKind.LEFT_OUT:
            pass  # it has no part in the save of the others, and is not replaced
        elif (
            worker is not None
            and not event.failure.state_lost
            and self._group_can_do_without(worker)
        ):
            refused = self._newcomer_failed(worker, event, now)
        elif not self._policy.restart_all or self._past.is_unexplained_failure(event.failure):
            failure = event.failure
            if failure.state_lost and self._is_held_elsewhere(worker):
                failure = replace(failure, retryable=True)  # the next group includes that holder
            verdict = self._restarts.judge(
                failure,
                now=now,
                committed=self.committed,
                running=frozenset(workers),
                members=frozenset(m.worker for m in self._past.last_members()),
                node=event.node,
                generation=worker.status.generation if worker is not None else 0,
            )
        lost = self._nodes.failed(event.node, event.failure.worker)
        self._lineage.ended((event.failure.worker,))
        if verdict is not Verdict.RESTART:
            self._enter(JobPhase.FAILED)
            return [stopping.end_failed(verdict, event.failure, self._hang.text)]
        return [*refused, *self._checkpoints.abandon(lost)]

    def _progress_reported(self, event: ev.ProgressReported, now: float) -> list[fx.Effect]:
        if not counts_steps(
            event.generation, self._current, none_left_yet=self._since.assembling is None
        ):
            return []
        if event.probed:
            self._progress.answered(event, now)
        else:
            self._newcomers.committed(event.generation, event.committed)
            self._trained_in = max(self._trained_in, event.generation)
            under_way = self._progress.under_way
            slow_s = self._progress.observe(
                event.committed,
                now,
                step_s=event.step_s,
                longest_s=event.longest_step_s,
                in_step_s=event.in_step_s,
                first_step=event.first_step,
                waiting_s=event.waiting_s,
                steps_total_s=event.steps_total_s,
                joining=event.joining,
            )
            if slow_s > 0.0:
                usual_s = event.step_s
                return [fx.StepWasSlow(step=under_way, lasted_s=slow_s, usual_s=usual_s)]
            return self._explain_slow_step(event.committed, now)
        return []

    def _straggler_found(self, event: ev.StragglerFound, now: float) -> list[fx.Effect]:
        if not self.can_replace_slow(event.worker):
            return []
        return [
            fx.ReplaceWorker(
                node=self._nodes.home_of(worker),
                worker=worker,
                kind=FailureKind.SLOW,
                message=event.message,
            )
            for worker in self._replacements.ask([event.worker], now)
        ]

    def _shard_reported(self, event: ev.ShardReported) -> list[fx.Effect]:
        generation = self._past.get(event.generation)
        if generation is None:
            return []
        if self._checkpoints.is_superseded(event.generation, event.step):
            return [superseded(event.step, event.generation)]
        if self._checkpoints.written(generation, event.step, event.index, event.count):
            return [fx.CommitCheckpoint(generation=event.generation, step=event.step)]
        if self._told_before() and self._checkpoints.is_given_up(event.step, event.generation):
            return [_abandoned(event, "other members had already ended their scripts")]
        if self._has_missed_the_news(event):
            return [_abandoned(event, _TOLD_BEFORE)]
        alive = self._nodes.workers()
        writers = [m.worker for m in generation.members]
        dead = [name for name in writers if name not in alive or alive[name].left_behind]
        return self._checkpoints.abandon([*dead, *self._told_before()])

    def _checkpoint_committed(self, event: ev.CheckpointCommitted) -> list[fx.Effect]:
        group = self._past.get(event.generation)
        if group is not None:
            self._checkpoints.committed(group, event.step)
        return []

    def _save_reported_failed(self, event: ev.SaveReportedFailed) -> list[fx.Effect]:
        if self._checkpoints.refused(event.step, event.generation):
            return [_abandoned(event, event.message)]
        return [_abandoned(event, _TOLD_BEFORE)] if self._has_missed_the_news(event) else []

    def _generation_persisted(self, event: ev.GenerationPersisted, now: float) -> list[fx.Effect]:
        if self._persisting is None or self._persisting.number != event.number:
            return []
        generation, self._persisting = self._persisting, None
        check_succession(self._current, generation)
        self._lineage.exists(generation)
        planned = generation.leave_after is not None
        self._previous_group = self._current if planned else None
        self._make_current(generation)
        self._formed_at, self._adopted_at = now, None
        is_slow = self._progress.in_first_step  # members in it are free only when it is over
        moves = not planned and not generation.freezes
        self._since = Clocks(assembling=now if moves else None, is_slow=is_slow)
        self._progress.regroup()
        self._unannounced = self._is_overtaken(generation, now)
        return [] if self._unannounced else [fx.AnnounceGeneration(generation=generation)]

    def _stop_requested(self, event: ev.StopRequested, now: float) -> list[fx.Effect]:
        if self._stop is None or self._stop.inherited:
            self._begin_stop(self._asked_to_stop(event.exit_code, event.reason, now))
        return []

    # ---- decisions from the whole view

    def _consider(self, now: float) -> list[fx.Effect]:
        if self._persisting is not None:
            return []  # decided again when it is known to exist
        workers = self._nodes.workers()
        first_step = self._progress.in_first_step
        self._since.update(
            self._current,
            workers,
            self._policy,
            now,
            previous=self._previous_group,
            first_step=first_step,
        )
        self._lineage.seen(workers)
        effects = self._settle(now)
        self._note_arrival(workers)
        if self._stop is None:  # else all nodes save and leave soon
            gone = self._departures.completed(self._nodes, self._current, self._previous_group)
            effects += [fx.NodeDrained(node=node) for node in gone]
        effects += self._probe_peers(now)
        decision = self._decide(now)
        if isinstance(decision, Form):
            decision = self._with_room_for_others(decision, now)
            chosen = [m.worker for m in decision.members]
            if not self._lineage.allows(chosen):
                blocking = self._lineage.blocking_joiners(chosen, self._nodes.workers())
                effects += self._replace(decision.left_out | blocking, now)
                decision = Wait(reason=WaitReason.ANOTHER_GROUP_MAY_TRAIN)
            elif behind := self._behind_checkpoint(decision, now):
                effects += self._replace(behind, now, _BEHIND)
                decision = Wait(reason=WaitReason.ASSEMBLING)
        return [*effects, *self._follow(decision, now)]

    def _probe_peers(self, now: float) -> list[fx.Effect]:
        """Begin a round of probes between all workers that could form a group, if one is due."""
        refused = self._refuse_cut_off(now) if self._probing.is_over(now) else []
        if self._stop is not None or self._policy.restart_all:
            self._probing.rest()
            return refused
        if not self._probing.is_due(self._view(now), self._policy, now):
            return refused
        there = [
            w
            for w in self._deciding(now).values()
            if w.out_of_contact_since is None
            and w.status.phase in (WorkerPhase.READY, WorkerPhase.JOINING, WorkerPhase.TRAINING)
        ]
        ranks = [m.worker for m in self._past.last_members()]
        ports_count = self._progress.fruitless_breaks > 0 or bool(self._cut_off.by_port)
        peers = self._probing.begin(there, ranks, now, ports_count=ports_count)
        if not peers:
            return refused
        probe = fx.ProbePeers(
            number=self._probing.round,
            peers=peers,
            within_s=self._policy.probe_s,
            all_ports=self._has_failed_to_assemble(),
        )
        return [*refused, probe]

    def _has_failed_to_assemble(self) -> bool:
        """True if the newest group has not committed a step, or a firewall by port kept an earlier
        one from that, whose node waits to join. (gloo may connect two members only when the first
        collective needs it, so members that have arrived prove nothing.)"""
        current = self._current
        if current is None or current.number > self._began_in:
            return True
        self._cut_off.by_port.difference_update(m.node for m in current.members)
        return bool(self._cut_off.by_port)

    def _refuse_cut_off(self, now: float) -> list[fx.Effect]:
        """A round of probes is over: hold back the newcomers that do not reach all members."""
        current, workers = self._current, self._deciding(now)
        if current is None or not current.members:
            return []
        probed = self._probing.findings.probed
        members = probed & current.worker_ids
        newcomers = [
            name
            for name in sorted(probed - members)
            if name in workers and workers[name].status.phase is WorkerPhase.READY
        ]
        unable = self._probing.findings.unable(members, newcomers)
        return self._leave_cut_off(unable, members | probed.intersection(newcomers), now)

    def _leave_cut_off(
        self, unable: Collection[WorkerId], among: Collection[WorkerId], now: float
    ) -> list[fx.Effect]:
        """Hold back the nodes of these workers, which do not reach all of the others."""
        workers = self._nodes.workers()
        nodes = sorted({workers[name].node for name in unable if name in workers})
        if not nodes:
            return []
        delays = [self._cut_off.again(node, now) for node in nodes]
        found = self._probing.findings.between(among)
        told = [u for u in found if u.by in nodes or u.peer.node in nodes]
        ends = {node for u in told if u.by_port for node in (u.by, u.peer.node)}
        self._cut_off.by_port.update(ends.intersection(nodes))
        return [
            fx.PeersUnreachable(
                unreached=tuple(told), at=now, left_out=tuple(nodes), retry_s=max(delays)
            )
        ]

    def _behind_checkpoint(self, decision: Form, now: float) -> frozenset[WorkerId]:
        """The holders of the state in the group to form, if a group that went on without them is
        lost but has saved a checkpoint that is no older: fresh workers begin from it instead."""
        if self._stop is not None or self._policy.restart_all:
            return frozenset()
        known = self._deciding(now)
        holders = [known[m.worker].status for m in decision.members]
        holders = [s for s in holders if s.has_state]
        if not holders or not all(map(self._checkpoints.is_beyond, holders)):
            return frozenset()
        return frozenset(s.worker for s in holders)

    def _with_room_for_others(self, decision: Form, now: float) -> Form:
        """Include a member of each group that may train. If the group is too full for one, it takes
        the place of a newcomer: otherwise no group could ever be formed."""
        workers, members = self._deciding(now), decision.members
        missing = self._lineage.missing([m.worker for m in members], workers)
        replaceable = [m for m in members if not workers[m.worker].status.has_state]
        if decision.reason is not ChangeReason.STARTED or len(missing) > len(replaceable):
            return decision
        dropped = replaceable[len(replaceable) - len(missing) :]
        stay = tuple(m for m in members if m not in dropped)
        return replace(decision, members=(*stay, *(w.as_member() for w in missing)))

    def _note_arrival(self, workers: Mapping[WorkerId, ObservedWorker]) -> None:
        current = self._current
        if current is None or not (self._previous_group or self._newcomers.awaits(current)):
            return
        if (
            not current.members
            and self._previous_group
            and not is_left(self._previous_group, workers)
        ):
            return  # the group dissolves, and members still train in it
        if in_place(current, workers):
            if self._previous_group is not None:
                self._nodes.arrived(current)
            self._previous_group = None
            self._newcomers.arrived(current, workers)

    def _is_overtaken(self, newest: Generation, now: float) -> bool:
        """True if a holder of the state came back while this generation without the state was
        written: then another one follows at once, and this one is not announced."""
        if self._stop is not None or self._policy.restart_all or not newest.members:
            return False
        decision = decide(replace(self._view(now), unannounced=True), self._policy, now)
        return (
            isinstance(decision, Form)
            and decision.reason is ChangeReason.STARTED
            and self._lineage.allows([m.worker for m in decision.members])
        )

    def _group_can_do_without(self, worker: ObservedWorker) -> bool:
        """True if the worker is new, and there are enough others that are not."""
        if self._policy.restart_all or not self._newcomers.is_new(worker.status.worker):
            return False
        others = [
            w
            for name, w in self._nodes.workers().items()
            if w.out_of_contact_since is None and not self._newcomers.is_new(name)
        ]
        return len(others) >= max(1, self._policy.min_workers)

    def _is_held_elsewhere(self, worker: ObservedWorker | None) -> bool:
        """True if a worker outside of this worker's group has come back with the state, which that
        group has found to be lost."""
        group = self._past.get(worker.status.generation) if worker is not None else None
        group = group or self._current
        return any(
            w.status.phase is WorkerPhase.READY
            and w.status.has_state
            and w.status.committed > 0
            and w.out_of_contact_since is None
            for name, w in self._nodes.workers().items()
            if group is None or name not in group.worker_ids
        )

    def _newcomer_failed(
        self, worker: ObservedWorker, event: ev.WorkerFailed, now: float
    ) -> list[fx.Effect]:
        generation, current = worker.status.generation, self._current
        if current is not None and event.failure.worker in current.worker_ids:
            generation = current.number
        retry_s = self._newcomers.failed(worker, generation, event.failure, now)
        if retry_s == 0.0:
            return []
        return [fx.RefuseNewcomers(node=event.node, failure=event.failure, retry_s=retry_s)]

    def _settle(self, now: float) -> list[fx.Effect]:
        current, previous, settled = self._current, self._previous_group, None
        if current is not None and previous is not None:
            settled = settle(current, previous, self._nodes.workers())
        elif (
            current is not None
            and current.freezes
            and may_abort(self._view(now), self._policy, now)
        ):
            settled = replace(current, provisional=False)
            self._freezing.ended(current.number, self._deciding(now).values())
            self._since.assembling = now
        if settled is None:
            return []
        self._make_current(settled)
        return [fx.SettleGeneration(generation=settled)]

    def _follow(self, decision: Decision | End, now: float) -> list[fx.Effect]:
        if isinstance(decision, Wait):
            self._run_if_formed(decision)
            if self.phase is JobPhase.FORMING and decision.reason is WaitReason.BELOW_MINIMUM:
                self._enter(JobPhase.WAITING)
            timer = fx.SetTimer(at=self._next_look(decision.until, now))
            return [timer, *self._probe(decision, now)]
        if isinstance(decision, Form):
            return self._form(decision, now)
        if isinstance(decision, End):
            return self._end_stop(in_time=decision.in_time)
        if isinstance(decision, GiveUp):
            self._enter(JobPhase.FAILED)
            return [stopping.end_given_up(decision)]
        if isinstance(decision, TooFew):
            self._enter(JobPhase.FAILED)
            return [stopping.end_too_few(decision)]
        return self._complete()

    def _probe(self, decision: Wait, now: float) -> list[fx.Effect]:
        due = now >= self._probed_at + self._policy.probe_interval_s
        wanted = decision.reason is WaitReason.OUT_OF_CONTACT or self._progress.should_probe(now)
        if not wanted or not due:
            return []
        self._probed_at = now
        return [fx.ProbeGroup()]

    def _asked_to_stop(self, exit_code: int, reason: str, now: float) -> Stop:
        grace_s, save_s = self._settings.stop_grace_s, self._save_s()
        return within_grace(exit_code, reason, now=now, grace_s=grace_s, save_s=save_s)

    def _save_s(self) -> float:
        """The part of a stop's grace that is kept for members to come to the last save, and for the
        save itself."""
        return 2 * self._policy.join_timeout_s if self._settings.saves else 0.0

    def _begin_stop(self, stop: Stop) -> None:
        self._stop, self._checkpoints.gives_up_on_loss = stop, False
        self._enter(JobPhase.DRAINING)

    def _complete(self) -> list[fx.Effect]:
        self._enter(JobPhase.FINISHED)
        return [fx.DismissWorkers(), stopping.end_complete(self._stop)]

    def _decide(self, now: float) -> Decision | End:
        if self._stop is None:
            return decide(self._view(now), self._policy, now)
        return decide_stop(self._view(now), self._policy, self._stop, now)

    def _end_stop(self, *, in_time: bool) -> list[fx.Effect]:
        stop = self._stop
        assert stop is not None
        self._enter(JobPhase.FINISHED if in_time else JobPhase.FAILED)
        grace_s, restart_all = self._settings.stop_grace_s, self._policy.restart_all
        return [
            stopping.end_stopped(stop, in_time=in_time, grace_s=grace_s, restart_all=restart_all)
        ]

    def _form(self, decision: Form, now: float) -> list[fx.Effect]:
        previous = self._current
        # A planned change, or a dissolved group, leaves no node behind.
        goes_on = decision.members and not decision.planned
        left_behind = self._nodes.leave_behind_out_of_contact(previous) if goes_on else ()
        abandoned, alive = self._checkpoints.abandon(left_behind), self._nodes.workers()
        lost = tuple(
            m.worker
            for m in (previous.members if previous else ())
            if m.worker not in alive
            or alive[m.worker].out_of_contact_since is not None
            or m.worker in decision.left_out
            or m.worker in self._replacements
        )
        out = self._cut_off_from(decision)  # known only now, after the group was given up for it
        lost += tuple(m.worker for m in self._past.last_members() if m.worker in out)
        lost += self._lost_before_drop(decision)
        goes_on_parted = previous is not None and not previous.members
        broke = decision.reason is ChangeReason.GROUP_BROKEN and not goes_on_parted
        if not decision.planned and broke and decision.members:
            self._progress.count_break()
        self._number += 1
        generation = Generation(
            number=self._number,
            incarnation=self._settings.incarnation,
            members=self._ranked(decision),
            reason=decision.reason,
            leave_after=self._progress.step_after(self._settings.planned_notice_s, now)
            if decision.planned
            else None,
            provisional=decision.planned or (self._freezing.queues and previous is not None),
            queues=self._freezing.queues,
            frozen=()
            if decision.members
            else self._freezing.to_freeze(self._deciding(now).values()),
            purpose=Purpose.TRAIN if self._stop is None else Purpose.SAVE_AND_LEAVE,
            save_first=self._checkpoints.abandoned,
            begun=self._begun,
            restart_count=self._past.restart_count(decision) if self._policy.restart_all else 0,
            max_restarts=self._settings.max_restarts if self._policy.restart_all else 0,
        )
        self._persisting = generation
        parts = broke and not decision.members  # for a moment, and not because too few are left
        if self._stop is None:
            self._enter(JobPhase.FORMING if generation.members or parts else JobPhase.WAITING)
        effects = [*self._explain_hang(decision, now), *abandoned]
        effects += self._tell_parted(decision, out, now)
        effects += self._replace(decision.left_out & alive.keys(), now)
        if lost or broke or decision.reason is ChangeReason.STALLED:
            since = self._progress.quiet_since(now)
            effects.append(
                fx.Lost(workers=lost, reason=decision.reason, at=now, standing_since=since)
            )
        may_train = self._lineage.may_train
        return [*effects, fx.PersistGeneration(generation=generation, may_train=may_train)]

    def _lost_before_drop(self, decision: Form) -> tuple[WorkerId, ...]:
        """Members that a planned change drops and that were lost before it: a node that has left in
        time does not count as out of contact."""
        current, previous = self._current, self._previous_group
        lost = set(decision.dropped)
        if current is not None and previous is not None and not decision.planned:
            alive = self._nodes.workers()
            going = (previous.worker_ids - current.worker_ids) & alive.keys()
            lost |= {w for w in going if alive[w].out_of_contact_since is not None}
        return tuple(sorted(lost))

    def _tell_parted(
        self, decision: Form, out: Collection[WorkerId], now: float
    ) -> list[fx.Effect]:
        """Record who does not reach whom as the group is given up for that, and hold back those
        that are left out as the next one is formed."""
        findings, current = self._probing.findings, self._current
        if decision.unreachable and current is not None:
            unreached = findings.between(findings.probed & current.worker_ids)
            return [fx.PeersUnreachable(unreached=unreached, at=now, parted=True)]
        chosen = {m.worker for m in decision.members}
        return self._leave_cut_off(out, chosen.union(out), now)

    def _cut_off_from(self, decision: Form) -> list[WorkerId]:
        """The workers that an unplanned group leaves out since they do not reach its members."""
        if decision.planned or not decision.members:
            return []
        missing = self._probing.findings.missing
        chosen = {m.worker for m in decision.members}
        return [
            name
            for name, w in self._nodes.workers().items()
            if name not in chosen
            and w.out_of_contact_since is None
            and w.status.phase is WorkerPhase.READY
            and not missing.get(name, frozenset()).isdisjoint(chosen)
        ]

    def _explain_hang(self, decision: Form, now: float) -> list[fx.Effect]:
        """Ask where members are before they learn of the change, which frees those that wait."""
        group = self._previous_group or self._current
        if group is None or not group.members:
            return []
        late = [w for name, w in self._nodes.workers().items() if name in decision.left_out]
        if decision.reason is not ChangeReason.STALLED and all(
            self._hang.of(w.status, now)[0] for w in late
        ):
            return []  # it is known why these do not come
        since = self._progress.quiet_since(now)
        standing_s = now - since if since is not None else 0.0
        step = self._progress.committed
        return [fx.ExplainHang(generation=group, step=step, standing_s=standing_s)]

    def _explain_slow_step(self, step: int, now: float) -> list[fx.Effect]:
        group = self._previous_group or self._current
        lasts_s = self._progress.lags_s(now)
        if lasts_s == 0.0 or group is None or self._persisting is not None:
            return []
        usual_s = self._progress.usual_s
        return [fx.ExplainSlowStep(generation=group, step=step, lasts_s=lasts_s, usual_s=usual_s)]

    def _ranked(self, decision: Form) -> tuple[Member, ...]:
        last = self._past.last_members()
        workers = self._nodes.workers()
        holders = frozenset(w for w, s in workers.items() if s.status.has_state)
        members = [
            replace(m, counts_from=self._freezing.counts_from(workers[m.worker].status))
            for m in decision.members
        ]
        return assign_ranks([m.worker for m in last], members, holders)

    def _replace(self, workers: Iterable[WorkerId], now: float, why: str = "") -> list[fx.Effect]:
        number = self._current.number if self._current else 0
        late = why or f"did not join generation {number} in time"
        known = self._nodes.workers()
        effects: list[fx.Effect] = []
        for worker in self._replacements.ask(workers, now):
            hung, place = self._hang.of(known[worker].status, now)
            effects.append(
                fx.ReplaceWorker(
                    node=self._nodes.home_of(worker),
                    worker=worker,
                    kind=FailureKind.LEFT_OUT,
                    message=hung or late,
                    place=place,
                )
            )
        return effects

    # ---- the view

    def _deciding(self, now: float) -> Mapping[WorkerId, ObservedWorker]:
        """The workers that decisions count: not those being ended, unless all restart together."""
        workers = self._nodes.workers()
        others = self._replacements.others(workers, now)
        return workers if self._policy.restart_all else others

    def _view(self, now: float) -> GroupView:
        return GroupView(
            current=self._current,
            previous_group=self._previous_group,
            workers=self._deciding(now),
            slots=self._nodes.slots,
            formed_at=self._formed_at,
            unannounced=self._unannounced,
            adopted_at=self._adopted_at,
            agents_return_until=self._agents_return_until,
            trained_in=self._trained_in,
            no_group_since=self._since.no_group,
            enough_since=self._since.enough,
            broken_since=self._since.broken,
            newcomers_since=self._since.newcomers,
            assembling_since=self._since.assembling,
            is_slow=self._since.is_slow,
            slow_until=self._since.slow_until,
            fruitless_breaks=self._progress.fruitless_breaks,
            stalled=self._progress.stalled,
            stuck=self._progress.stuck,
            held_back=self._held_back(),
            quiet_since=self._progress.quiet_since(now),
            findings=self._probing.findings,
            probed_by=self._probing.answered_by if self._probing.under_way else -math.inf,
            released_nodes=self._departures.released,
            past_members=self._past.past_members() if self._policy.restart_all else frozenset(),
        )

    def _held_back(self) -> dict[WorkerId, float]:
        workers = self._nodes.workers().values()
        until = self._cut_off.held_back(workers)
        for worker, at in self._newcomers.held_back(workers).items():
            until[worker] = max(at, until.get(worker, at))
        return until

    def _has_missed_the_news(self, event: ev.ShardReported | ev.SaveReportedFailed) -> bool:
        """True if the reporting member waits for a save that was given up, because it was out of
        contact, or had not begun to save, when the others were told."""
        if not self._checkpoints.is_known_given_up(event.step, event.generation):
            return False
        generation = self._past.get(event.generation)
        return generation is not None and generation in (self._current, self._previous_group)

    def _told_before(self) -> list[WorkerId]:
        """After a change of leader: members whose scripts have ended. The previous coordinator told
        them the outcome of their saves. It may not have told others, which would wait for parts
        that are not written again."""
        if self._adopted_at is None:
            return []
        workers = self._nodes.workers().items()
        return [name for name, w in workers if w.status.phase is WorkerPhase.FINISHED]

    def _counts(self, worker: WorkerId) -> bool:
        """True if the worker's steps are those of the present group. A worker outside of it may
        have come back with more steps, from which the job had to go back."""
        groups = [g for g in (self._current, self._previous_group) if g is not None and g.members]
        return not groups or any(worker in g.worker_ids for g in groups)

    def _make_current(self, generation: Generation) -> None:
        self._current = generation
        self._past.remember(generation)

    def _run_if_formed(self, decision: Wait) -> None:
        if self.phase is JobPhase.FORMING and decision.reason in (
            WaitReason.STEADY,
            WaitReason.COLLECTING_NEWCOMERS,
        ):
            self._enter(JobPhase.RUNNING)

    def _next_look(self, until: float | None, now: float) -> float | None:
        instants = [until, self._replacements.next_at, self._probing.next_at]
        if self._stop is not None:
            give_up_at = self._stop.give_up_at
            instants += [give_up_at if now < give_up_at else None, self._stop.deadline]
        bounded = [at for at in instants if at is not None and at < math.inf]
        return max(min(bounded), now) if bounded else None

    def _enter(self, phase: JobPhase) -> None:
        if phase is self.phase:
            return
        require(phase in TRANSITIONS[self.phase], f"{self.phase.value} to {phase.value}")
        self.phase = phase


def _abandoned(
    event: ev.ShardReported | ev.SaveReportedFailed, message: str
) -> fx.AbandonCheckpoint:
    failed = isinstance(event, ev.SaveReportedFailed)
    reason = "failed" if failed else "member_lost"
    return fx.AbandonCheckpoint(
        generation=event.generation, step=event.step, message=message, reason=reason
    )


def _is_killed_spare(worker: ObservedWorker, failure: Failure) -> bool:
    """True if the worker waited for a slot and was ended by SIGKILL or SIGTERM."""
    idle = worker.status.phase is WorkerPhase.SPARE and worker.status.slot is None
    return idle and failure.kind is FailureKind.SIGNAL and failure.code in _KILLS
