"""The coordinator in office: feeds its machine from the agents' streams and acts on its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from typing_extensions import assert_never

from elastic.coordinator.connected_agents import ConnectedAgents, ConnectedNode, name_of, node_id
from elastic.coordinator.hearing import Hearing, ScriptValues, ToldOnce, ViewBatches
from elastic.coordinator.history import SAMPLE_EVERY_S, JobHistory
from elastic.coordinator.holdups import Hangs, SlowRanks, StackRounds, timeline
from elastic.coordinator.incidents import IncidentRecords, Recoveries, ending, refusal
from elastic.coordinator.job_options import (
    JobOptions,
    make_commits,
    make_machine,
    make_recorders,
)
from elastic.coordinator.leadership import (
    Command,
    Leadership,
    StopOrder,
    Stored,
    load_stop,
    save_generation,
    save_stop,
)
from elastic.coordinator.metrics import JobFigures
from elastic.coordinator.node_registry import DepartingNodes, Exclusions, NodeRegistry
from elastic.coordinator.page import JobView
from elastic.coordinator.records import Records, save_records, since_boot, to_unix
from elastic.coordinator.saves import Saves
from elastic.coordinator.totals import SlotTime, Totals
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.curves import Sample
from elastic.core.membership import Generation
from elastic.core.quarantine import NodeFailures
from elastic.errors import ConfigurationError, ExitCode
from elastic.rpc.codec import generation_to_pb
from elastic.rpc.control import AgentStream
from elastic.runtime.driver import Driver
from elastic.runtime.journal import Journal, RecentEntries
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.tasks import TaskSupervisor
from elastic.store.interface import GuardFailed, Store
from elastic.store.job_documents import NodeDocument
from elastic.store.job_runs import RunEnd
from elastic.store.retries import retry
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2, stacks_pb2, timeline_pb2

_HELD = "another agent is registered under this name; give one of them another --node-name"
_LEAD_INSTEAD = "a coordinator that has the directory can lead it"
_MOST_SHOWN = 80  # characters of a name that is none
_MOST_REFUSED = 1000  # names of which it is known what they were told
_KEEP_TOTALS_S = 10.0  # while nothing but steps has been counted
_KEPT_WITHIN_S = 1.0
_FAREWELL_S = 10.0  # for agents to end their workers after the job


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """What a leader leads, in three figures."""

    generation: int = 0
    """Its number; 0: there is no group yet."""
    world_size: int = 0
    step: int = 0
    """The newest one committed, as far as rank 0 has told."""


class CoordinatorDaemon:
    """One job's coordinator; the handler of elastic.rpc.control.ControlServer.

    history: for the page, if there is one; it listens to the journal.
    in_office: whether it is certain at this moment that nobody else leads. recent: the entries of
    the journal that operators can ask for. pauses: those of its event loop. totals: of the run;
    they listen to the journal.
    """

    def __init__(
        self,
        options: JobOptions,
        store: Store,
        leadership: Leadership,
        journal: Journal,
        *,
        in_office: Callable[[], bool] = lambda: True,
        recent: RecentEntries | None = None,
        pauses: LoopPauses | None = None,
        totals: Totals | None = None,
        history: JobHistory | None = None,
    ) -> None:
        self._options, self._journal = options, journal
        self._store, self._leadership = store, leadership
        self._pauses = pauses if pauses is not None else LoopPauses()
        self._in_office = in_office
        self._recent = recent if recent is not None else RecentEntries()
        self._machine = make_machine(options, leadership, time.monotonic())
        self._slot_time = SlotTime(
            self._machine,
            journal,
            most=options.formation.max_workers,
            stored=leadership.records.accounts,
        )
        self._driver: Driver[ev.Event, fx.Effect] = Driver(
            self._slot_time, self._execute, ev.TimerFired(), on_error=self._crashed
        )
        self._tasks = TaskSupervisor(self._crashed)
        self._incidents = IncidentRecords(
            self._slot_time.slots,
            store,
            journal,
            job=options.job,
            run_id=options.run_id,
            guard=leadership.guard,
            start=self._tasks.start,
        )
        self._slot_time.also = self._incidents.observe
        self._nodes = ConnectedAgents(
            options.isolation_timeout_s,
            leadership.command,
            self._may_train,
            self._machine.nodes_out_of_contact,
            run_id=options.run_id,
            saves=options.checkpoints is not None,
        )
        self._views = ViewBatches(self._driver.post, self._nodes.count)
        self._failures = NodeFailures(options.quarantine_after, options.quarantine_window_s)
        known = leadership.records
        self._failures.restore({n: since_boot(found) for n, found in known.failures.items()})
        self._told_once = ToldOnce(known.told_once)
        self._departing = DepartingNodes(
            self._nodes,
            Exclusions(store, job=options.job, guard=leadership.guard),
            self._failures,
            journal,
            post=self._views.post,
            start=self._tasks.start,
        )
        self._refused: dict[str, str] = {}  # why, by name
        self._doubtful: set[AgentStream] = set()  # their views tell whether they are let in
        self._recoveries = Recoveries(
            known.recoveries,
            leads_since=time.monotonic(),
            last=leadership.last,
        )
        self._history = history
        self._totals = totals if totals is not None else Totals()
        self._totals.adopt(known.totals)
        self._kept: tuple[object, ...] = self._counted() if leadership.records.are_kept else ()
        self._kept_steps, self._kept_at = self._totals.steps_committed, time.monotonic()
        self._progressed_at = time.monotonic()
        self._keeping = False
        self._saves = Saves(
            make_commits(options, leadership),
            journal,
            post=self._views.post,
            broadcast=self._nodes.broadcast,
            start=self._tasks.start,
            on_failed=self._incidents.save_failed,
            on_committed=self._incidents.saved,
        )
        self._ledger, self._curve = make_recorders(
            options, leadership, journal, broadcast=self._nodes.broadcast, may_record=in_office
        )
        self._recorders = [r for r in (self._ledger, self._curve) if r is not None]
        self._rounds = StackRounds(self._nodes)
        self._hangs = Hangs(
            self._rounds,
            journal,
            post=self._views.post,
            start=self._tasks.start,
            on_explained=self._incidents.explained,
        )
        self._slow_ranks = SlowRanks(
            journal,
            replaces=options.replaces_stragglers,
            post=self._views.post,
            current=lambda: self._machine.current,
            may_replace=self._may_replace_slow,
        )
        self._script_values = ScriptValues(journal)
        self._hearing = Hearing(
            journal,
            self._recoveries,
            self._saves,
            self._ledger,
            self._curve,
            post=self._views.post,
            broadcast=self._nodes.broadcast,
            machine=self._machine,
            on_failure=self._departing.worker_failed,
            on_leave=self._departing.wants_to_leave,
            on_late=self._left_late,
            on_stop=self._agent_knows_of_stop,
            on_known=self._agent_knows,
            on_progress=self._progressed,
            on_reformed=self._reformed,
            on_recovered=self._incidents.recovered,
            on_stacks=self._hangs.told,
            on_spent=self._slot_time.spent,
            on_pace=self._slow_ranks.heard,
            told_once=self._told_once,
        )
        self.ended: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        """How the run ended, once it has."""
        self.deposed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why somebody else leads, once somebody does."""
        self.outdated: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        """What the store has lost, once an agent has told of it."""
        self._lost: Stored | None = None
        self._order: StopOrder | None = None
        self.registry: NodeRegistry | None = None
        """Where it is known which nodes there are, besides those that connect."""

    async def start(self) -> None:
        """Learn what earlier coordinators have kept; sits out outages.

        Raises ConfigurationError.
        """
        for recorder in self._recorders:
            await recorder.start()
        await self._departing.load()
        await self._incidents.load(self._leadership.last, self._leadership.records.recoveries)
        await self._saves.load()
        order = await retry(
            lambda: load_stop(self._store, self._options.job), "look for an order to stop"
        )
        if order is not None:
            self._stop(order)
        if self._history is not None:
            self._tasks.start(self._sample(self._history), "history")

    async def close(self) -> None:
        """End what still runs here, and every stream."""
        self._views.close()
        self._driver.close()
        for node in self._nodes:
            node.stream.close()
        await self._tasks.close()
        for recorder in self._recorders:
            await recorder.close()

    async def kept(self) -> None:
        """Return when the store has what is to outlive the run, or does not take it in time."""
        await self._incidents.kept(_KEPT_WITHIN_S)

    async def flushed(self) -> None:
        """Return when every agent has been told what was said to it, and has gone."""
        ends_at = time.monotonic() + _FAREWELL_S
        while any(True for _ in self._nodes) and time.monotonic() < ends_at:
            await asyncio.sleep(0.05)

    def leadership_confirmed(self) -> None:
        """The election is certain again: what waited for that can be done."""
        for recorder in self._recorders:
            recorder.record()

    # ---- ControlHandler

    def agent_connected(self, stream: AgentStream) -> None:
        """An agent has said hello."""
        self._let_in_or_not(stream)

    def _let_in_or_not(self, stream: AgentStream, *, has_members: bool = False) -> None:
        refused = self._nodes.refusal(stream.hello, has_members=has_members)
        if refused is not None and refused.for_now and stream not in self._doubtful:
            self._doubtful.add(stream)
            return
        self._doubtful.discard(stream)
        if refused is not None:
            if self._is_news(stream.node, refused.message):
                self._journal.record("node_refused", node=stream.node, reason=refused.message)
            stream.send(refused=refused)
            stream.close()
            return
        if self._is_held_by_another(stream):
            stream.close()  # to come again: the store may know more than has been heard here
            return
        self._refused.pop(stream.node, None)
        before, node = self._nodes.arrive(stream)
        if before is not None:
            before.stream.close()
            is_same = before.node == node.node
            news = ev.NodeReconnected if is_same else ev.NodeLost
            self._views.post(news(node=before.node))
        self._journal.record(
            "node_connected", node=stream.node, host=stream.host, slots=stream.slots
        )
        unlike = self._nodes.saves_unlike(stream.hello)
        if unlike and stream.hello.saves:  # the group saves, and would end unsaved under this one
            self._crashed(ConfigurationError(f"{unlike}. Training goes on; {_LEAD_INSTEAD}"))
        elif unlike:
            self._journal.record("warning", source="checkpoints", message=unlike)
        if self.registry is not None:
            self.registry.connected(stream.node, stream.hello.start_token)
        if stream.hello.classic:
            self._views.post(ev.ClassicScriptReported())
        self._departing.arrived(node)
        stream.send(keep_curve=local_pb2.KeepCurve(keep=self._curve is not None))
        current = self._machine.current
        if current is not None:
            if current.workers_on(node.node):
                self._recoveries.hears(time.monotonic())
            stream.send(generation=generation_to_pb(current))
        if self._order is not None:
            stream.send(stop=_to_pb(self._order))

    def _is_held_by_another(self, stream: AgentStream) -> bool:
        """Somebody attends under the name, and the name is registered for it."""
        present = self._nodes.named(stream.node)
        if present is None or self.registry is None:
            return False
        token = present.stream.hello.start_token
        if token == stream.hello.start_token or self.registry.holder(stream.node) != token:
            return False
        if self._is_news(stream.node, _HELD):
            self._journal.record("node_refused", node=stream.node, reason=_HELD)
        return True

    def _is_news(self, node: str, refusal: str) -> bool:
        """The node has not been told so: one that is refused comes again and again."""
        if self._refused.get(node) == refusal:
            return False
        if len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[node] = refusal
        return True

    def agent_lost(self, stream: AgentStream) -> None:
        """Its stream has ended."""
        self._doubtful.discard(stream)
        node = self._nodes.leave(stream)
        if node is None:
            return
        current = self._machine.current
        if current is not None and any(m.node == node.node for m in current.members):
            self._recoveries.sign(time.monotonic(), silent=node.node)
        if not self.ended.done():
            self._journal.record("node_lost", node=stream.node)
        if self.registry is not None:
            self.registry.disconnected(stream.node, stream.hello.start_token)
        self._views.post(ev.NodeLost(node=node.node))

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        """A message of one of the nodes."""
        if stream in self._doubtful and message.HasField("view"):
            self._look_into(stream, message.view)
        node = self._nodes.of(stream)
        if node is not None and self._lost is None:
            self._hearing.hear(node, message)
            self._keep_records()

    def _look_into(self, stream: AgentStream, view: pb.NodeView) -> None:
        """What an agent of another command has found on its node: the workers of the command before
        have ended if they are not among it."""
        node, live = (
            node_id(stream.node, stream.hello.start_token),
            {w.worker for w in view.workers},
        )
        members = self._machine.members_that_may_train()
        has_members = any(m.node == node and m.worker in live for m in members)
        if not has_members:
            self._views.post(ev.NodeGone(node=node))
        self._let_in_or_not(stream, has_members=has_members)

    def stop(self, reason: str, exit_code: int) -> None:
        """Have the job saved and left. Raises ConfigurationError if it has ended already."""
        self._require_going_on()
        self._take_stop(reason, exit_code)

    async def drain(self, name: str, reason: str, *, future: bool = False) -> str:
        """Have a node left and kept out; say what follows. Raises TransientError, and
        ConfigurationError for one that nobody knows, unless it may be one of the `future`, and if
        the job has ended."""
        self._require_going_on()
        known = {node.node for node in self._departing.statuses()}
        known |= self._departing.machines()
        known |= {name_of(m.node) for m in self._machine.members_that_may_train()}
        registered = self.registry is not None and self.registry.holder(name) is not None
        if not (future or registered or name in known):
            there_are = ", ".join(sorted(known)) or "none at all"
            raise ConfigurationError(
                f"there is no node {name[:_MOST_SHOWN]!r} ({there_are}); "
                "give --future to keep one out that has not come yet"
            )
        return await self._departing.drain(name, reason)

    async def clear(self, name: str) -> str:
        """Let a node take part again; say what follows. Raises TransientError, and
        ConfigurationError if the job has ended."""
        self._require_going_on()
        return await self._departing.clear(name)

    async def stacks(self, of: str) -> stacks_pb2.JobStacks:
        """The Python stacks of all ranks, or of one rank or worker, at this instant. Raises
        ConfigurationError if there is no such one, and if the job has ended."""
        self._require_going_on()
        workers = [s.worker for node in self._nodes for s in node.statuses]
        return await self._hangs.stacks(of, self._machine.current, workers)

    async def timeline(self, steps: int = 0) -> timeline_pb2.JobTimeline:
        """What each slot did in the last minutes; of each worker so many of its newest steps at
        most, 0: as many as are remembered. Raises ConfigurationError if the job has ended."""
        self._require_going_on()
        workers = sum(s.slot is not None for node in self._nodes for s in node.statuses)
        return await timeline(self._rounds, self._slot_time.slots, workers, steps)

    def incidents(self, number: int | None = None) -> list[str]:
        """All that is known of an incident as JSON, of the newest one for 0; of all in brief for
        None. Raises ConfigurationError if there is none of the number."""
        if number is None:
            return [json.dumps(document) for document in self._incidents.brief()]
        return [json.dumps(self._incidents.document(number))]

    def follow_events(self, *, follow: bool) -> AsyncIterator[str]:
        """The journal as JSON lines: what is remembered, then what comes."""
        return self._recent.follow() if follow else self._recent.remembered()

    @property
    def term(self) -> Term:
        """The group that it leads."""
        current = self._machine.current
        if current is None:
            return Term()
        return Term(
            generation=current.number,
            world_size=len(current.members),
            step=self._machine.committed,
        )

    def status(self) -> pb.JobStatus:
        """The job as it is now."""
        current, nodes = self._machine.current, self._departing.statuses()
        self._note_steps(nodes)
        policy = self._options.formation
        room = sum(node.slots for node in nodes if node.state == "ready")
        progress = job_pb2.Progress()
        progress.CopyFrom(self._hearing.progress)
        progress.committed = self._machine.committed  # as any member has reported it
        return pb.JobStatus(
            job=self._options.job,
            phase=self._machine.phase.value,
            generation=generation_to_pb(current) if current is not None else None,
            nodes=nodes,
            min_workers=policy.min_workers,
            wanted_workers=min(policy.max_workers, room),
            progress=progress,
            started_unix_s=self._leadership.records.started_unix_s,
            restarts=self._machine.restarts_spent(time.monotonic()),
            max_restarts=self._options.max_restarts,
            recoveries_json=[json.dumps(r) for r in self._recoveries.finished],
            checkpoint_step=self._saves.newest_step,
            checkpoint_dir=self._saves.url,
            coordinator=self._options.address,
            in_office=self._in_office(),
            longest_pause_s=round(self._pauses.longest_s, 3),
            verdict=self._hangs.newest,
            verdict_unix_s=self._hangs.newest_unix_s,
            accounts_json=json.dumps(self._slot_time.accounts().to_document()),
            slow=self._slow_ranks.to_pb(),
        )

    def figures(self) -> JobFigures:
        """The job as it is now, for its metrics."""
        now, current = time.monotonic(), self._machine.current
        policy, options, progress = self._options.formation, self._options, self._hearing.progress
        nodes = tuple(self._departing.figures())
        attending = list(self._nodes)
        elapsed_s = progress.in_step_s
        return JobFigures(
            phase=self._machine.phase.value,
            totals=self._totals.copy(),
            accounts=self._slot_time.accounts(),
            in_office=self._in_office(),
            started_unix_s=self._leadership.records.started_unix_s,
            exit_code=self._exit_code(),
            counts_steps=not any(node.stream.hello.classic for node in attending),
            step=self._machine.committed,
            epoch=progress.epoch,
            step_elapsed_s=elapsed_s + now - self._progressed_at if elapsed_s else 0.0,
            step_usual_s=progress.step_s,
            samples_per_s=progress.samples_per_s,
            world_size=current.world_size if current is not None else 0,
            wanted=self._wanted(),
            minimum=policy.min_workers,
            generation=current.number if current is not None else 0,
            restarts_left=max(0, options.max_restarts - self._machine.restarts_spent(now)),
            restarts_allowed=options.max_restarts,
            nodes=nodes,
            workers=tuple(node.statuses for node in attending),
            saves=bool(self._saves.url),
            checkpoint_step=self._saves.newest_step,
            values=dict(progress.reported),
            not_finite=tuple(self._script_values.not_finite),
            learning_rates=dict(progress.learning_rates),
            global_batch=progress.global_batch,
            slow_ranks=tuple(self._slow_ranks.now),
            straggler_ratio=self._slow_ranks.worst,
        )

    def view(self) -> JobView:
        """The same for its page."""
        now_unix_s, history = time.time(), self._history
        since = self._recoveries.under_way_since
        ended = self._exit_code() is not None
        return JobView(
            at_unix_s=now_unix_s,
            job=self._options.job,
            run_id=self._options.run_id,
            coordinator=self._options.address,
            figures=self.figures(),
            generation=self._machine.current,
            recovering_since_unix_s=to_unix((since,))[0] if since is not None else None,
            recoveries=tuple(self._recoveries.finished),
            incidents=self._incidents.brief(),
            ending=self.ended.result().message if ended else "",
            stop_reason=self._order.reason if self._order is not None else "",
            verdict=self._hangs.newest,
            verdict_unix_s=self._hangs.newest_unix_s,
            checkpoint_dir=self._saves.url,
            longest_pause_s=self._pauses.longest_s,
            entries=tuple(history.entries) if history is not None else (),
            departed=dict(history.departed) if history is not None else {},
        )

    async def _sample(self, history: JobHistory) -> None:
        while not self.ended.done():
            progress, current = self._hearing.progress, self._machine.current
            sample = Sample(
                step=self._machine.committed,
                world_size=current.world_size if current is not None else 0,
                wanted=self._wanted(),
                samples_per_s=progress.samples_per_s,
                values=dict(progress.reported),
            )
            history.sample(sample, self._totals.steps)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _wanted(self) -> int:
        """Workers that the nodes which take part have room for."""
        room = sum(self._departing.room())
        return min(self._options.formation.max_workers, room)

    def _exit_code(self) -> int | None:
        if not self.ended.done() or self.ended.cancelled() or self.ended.exception() is not None:
            return None
        return self.ended.result().exit_code

    def _progressed(self, progress: job_pb2.Progress) -> None:
        """Rank 0 of the present group reports."""
        self._progressed_at = time.monotonic()
        self._totals.progressed(progress, time.time())
        self._script_values.heard(progress.reported, progress.committed)
        self._incidents.progressed(progress)

    def _reformed(self, report: job_pb2.Reformed) -> None:
        """A member has committed its first step in a group."""
        self._totals.reformed(report)
        self._incidents.reformed(report)

    def _note_steps(self, nodes: Iterable[pb.NodeStatus]) -> None:
        """Members report their steps when the group changes; in between they are rank 0's."""
        current, progress = self._machine.current, self._hearing.progress
        if current is None or progress.generation != current.number:
            return
        for worker in (worker for node in nodes for worker in node.workers):
            if worker.generation == current.number and current.rank_of(worker.worker) is not None:
                worker.committed = max(worker.committed, progress.committed)

    # ---- NodeHandler: what the store says of nodes

    def node_registered(self, node: str, document: NodeDocument) -> None:
        """An agent has taken the name: another one that attends under it is not the node."""
        self._departing.registered(node_id(node, document.start_token), document.machine)
        present = self._nodes.named(node)
        if present is not None and present.stream.hello.start_token != document.start_token:
            self._journal.record("node_refused", node=node, reason=_HELD)
            present.stream.close()

    def node_vanished(self, node: str, at: float) -> None:
        """Its registration is lost."""
        del at
        self._journal.record("node_vanished", node=node)

    def node_gone(self, node: str, start_token: str | None) -> None:
        """Nothing of it runs any more."""
        ids = [node_id(node, start_token)] if start_token else self._absent_ids(node)
        for gone in ids:
            self._departing.gone(gone)
            self._views.post(ev.NodeGone(node=gone))

    def _absent_ids(self, name: str) -> list[str]:
        """Every machine that is known to have had this name, but those that have it now: the one
        that is connected, and the one that is registered."""
        known = {m.node for m in self._machine.members_that_may_train()}
        known.update(self._machine.nodes_out_of_contact())
        token = self.registry.holder(name) if self.registry is not None else None
        held = node_id(name, token) if token is not None else None
        absent = (n for n in known if name_of(n) == name and not self._nodes.find(n))
        return sorted(n for n in absent if n != held)

    def _left_late(self, node: ConnectedNode, waited_s: float) -> None:
        """Its workers are ended, since the time in which they were to leave is over."""
        self._journal.record(
            "leave_timed_out",
            node=node.stream.node,
            waited_s=round(waited_s, 3),
            reason="its workers came to no step boundary",
        )
        members = self._machine.members_that_may_train()
        if any(m.node == node.node for m in members):
            self._incidents.left_late(node.stream.node)
            now = time.monotonic()
            since = self._machine.last_commit_at(now)
            self._recoveries.left_late(since, now, self._machine.current)

    # ---- what the store has lost

    def _agent_knows(
        self, node: ConnectedNode, newest: Generation, before: Generation | None
    ) -> None:
        """The store was emptied, or restored from a backup, if this is newer than what it has."""
        leads_from, current = self._leadership, self._machine.current
        if current is not None and current.incarnation == newest.incarnation:
            is_lost = newest.number > current.number
        else:
            is_lost = current is None and leads_from.last is None
            if not is_lost:
                self._journal.record(
                    "stray_group_ended", node=node.stream.node, generation=newest.number
                )
                node.stream.send(stray=pb.Stray())
        if not is_lost:
            return
        hello = node.stream.hello
        self._lost = Stored(
            generation=newest,
            may_train=(before,) if before is not None else (),
            revision=0,
            command=Command(text=hello.command, digest=hello.command_digest),
        )
        if not self._machine.writes:  # else when it is known what became of that
            self.outdated.set_result(self._lost)

    # ---- what the machine wants

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.PersistGeneration():
                self._tasks.start(self._persist(effect), "persist")
            case fx.AnnounceGeneration():
                self._announce_generation(effect)
            case fx.SettleGeneration():
                self._nodes.broadcast(generation=generation_to_pb(effect.generation))
            case fx.ReplaceWorker():
                self._replace_worker(effect)
            case fx.DismissWorkers():
                self._nodes.broadcast(dismiss=local_pb2.Dismiss())
            case fx.CommitCheckpoint():
                self._tasks.start(self._saves.commit(effect), "commit-checkpoint")
            case fx.AbandonCheckpoint():
                self._saves.abandon(effect)
            case fx.ProbeGroup():
                self._nodes.broadcast(probe=pb.Probe())
            case fx.NodeDrained():
                self._node_drained(effect)
            case fx.SetTimer():
                self._driver.set_timer(effect.at)
            case fx.StepWasSlow():
                self._step_was_slow(effect)
            case fx.ExplainHang():
                self._hangs.explain(effect)
            case fx.ExplainSlowStep():
                self._hangs.explain_slow_step(effect, lambda: self._machine.committed)
            case fx.Lost():
                self._members_lost(effect)
            case fx.RefuseNewcomers():
                self._refuse_newcomers(effect)
            case fx.StepDown():
                if not self.deposed.done():
                    self.deposed.set_result(effect.message)
            case fx.EndJob():
                restarts, window_s = self._options.max_restarts, self._options.restart_window_s
                self._end(effect.exit_code, ending(effect, restarts, window_s))
            case _:
                assert_never(effect)
        self._keep_records()

    def _announce_generation(self, effect: fx.AnnounceGeneration) -> None:
        generation = effect.generation
        self._recoveries.announced(generation, time.monotonic())
        self._nodes.broadcast(generation=generation_to_pb(generation))
        self._journal.record(
            "generation_formed",
            generation=generation.number,
            reason=generation.reason.name.lower(),
            world_size=generation.world_size,
            members=[m.worker for m in generation.members],
            after_step=generation.leave_after,
        )

    def _replace_worker(self, effect: fx.ReplaceWorker) -> None:
        node = self._nodes.find(effect.node)
        if node is not None:
            kind = job_pb2.FailureKind.Name(effect.kind.value)
            node.stream.send(
                replace=pb.Replace(
                    worker=effect.worker, kind=kind, message=effect.message, place=effect.place
                )
            )

    def _node_drained(self, effect: fx.NodeDrained) -> None:
        node = self._nodes.find(effect.node)
        if node is not None:
            self._departing.left_group(node)

    def _step_was_slow(self, effect: fx.StepWasSlow) -> None:
        self._journal.record(
            "step_was_slow",
            step=effect.step,
            lasted_s=round(effect.lasted_s, 3),
            usual_s=round(effect.usual_s, 6),
        )

    def _members_lost(self, effect: fx.Lost) -> None:
        self._recoveries.lost(effect)
        members = self._machine.members_that_may_train()
        self._departing.members_lost({m.node for m in members if m.worker in effect.workers})

    def _refuse_newcomers(self, effect: fx.RefuseNewcomers) -> None:
        self._journal.record(
            "newcomers_refused",
            node=name_of(effect.node),
            worker=effect.failure.worker,
            message=refusal(effect),
            traceback=effect.failure.traceback,
            log_tail=effect.failure.log_tail,
            log=effect.failure.log,
            retry_s=round(effect.retry_s, 1),
        )

    # ---- parts

    def _may_replace_slow(self, worker: str) -> bool:
        """A slow job is better than one whose restarts are used up."""
        spent = self._machine.restarts_spent(time.monotonic())
        return 2 * spent < self._options.max_restarts and self._machine.can_replace_slow(worker)

    def _may_train(self) -> bool:
        """Somebody may, somewhere: what the job runs cannot be changed."""
        return bool(self._machine.members_that_may_train())

    def _counted(self) -> tuple[object, ...]:
        """Changes whenever there is more for the leaders after to know of."""
        newest = self._recoveries.finished[-1] if self._recoveries.finished else None
        counted = (self._machine.restarts()[-1:], self._failures.instants(), id(newest))
        return (*counted, self._totals.weight, self._told_once.count)

    def _keep_records(self) -> None:
        if self._keeping:
            return
        steps, since_s = self._totals.steps_committed, time.monotonic() - self._kept_at
        if steps != self._kept_steps and since_s >= _KEEP_TOTALS_S:
            self._kept = ()
        if self._counted() != self._kept:
            self._keeping = True
            self._tasks.start(self._save_records(), "records")

    async def _save_records(self) -> None:
        try:
            while (counted := self._counted()) != self._kept:
                told = self._told_once.heard()
                records = Records(
                    started_unix_s=self._leadership.records.started_unix_s,
                    restarts=to_unix(self._machine.restarts()),
                    failures={n: to_unix(found) for n, found in self._failures.instants().items()},
                    told_once=told,
                    recoveries=tuple(self._recoveries.finished),
                    totals=self._totals.to_document(),
                    accounts=self._slot_time.to_document(),
                )
                self._kept_steps, self._kept_at = self._totals.steps_committed, time.monotonic()
                guard = self._leadership.guard
                await save_records(self._store, job=self._options.job, guard=guard, records=records)
                self._kept = counted
                self._told_once.stored(told)
        except GuardFailed:
            return  # another one leads
        finally:
            self._keeping = False

    async def _persist(self, effect: fx.PersistGeneration) -> None:
        generation = effect.generation
        try:
            command = self._nodes.note_command(name_of(m.node) for m in generation.members)
            await save_generation(
                self._store,
                self._leadership,
                generation,
                effect.may_train,
                command,
                self._recoveries.loss(self._incidents.newest_open()),
            )
        except GuardFailed as error:
            self._views.post(ev.PersistRefused(number=generation.number, detail=str(error)))
            return
        if self._lost is not None:
            self.outdated.set_result(self._lost)
        else:
            self._views.post(ev.GenerationPersisted(number=generation.number))

    def _require_going_on(self) -> None:
        """It has not ended: the coordinator stays for some seconds, so that agents hear of it."""
        if self.ended.done() and not self.ended.exception():
            told = self.ended.result().told(self._options.job)
            raise ConfigurationError(f"nothing is changed, since it has ended: {told}")

    def _agent_knows_of_stop(self, reason: str, exit_code: int) -> None:
        """It asks for it, or has heard of it under a leader before: what the store has lost."""
        if self._order is None:
            self._take_stop(reason, exit_code)

    def _take_stop(self, reason: str, exit_code: int) -> None:
        order = StopOrder(reason=reason, exit_code=exit_code)
        self._stop(order)
        self._tasks.start(self._keep_stop(order), "keep-stop")

    def _stop(self, order: StopOrder) -> None:
        self._order = self._order or order
        self._nodes.broadcast(stop=_to_pb(order))
        self._journal.record("stop_requested", reason=order.reason)
        self._views.post(ev.StopRequested(exit_code=order.exit_code, reason=order.reason))

    async def _keep_stop(self, order: StopOrder) -> None:
        with contextlib.suppress(GuardFailed):  # the next leader may be asked again
            await save_stop(self._store, self._leadership, order)

    def _end(self, exit_code: int, message: str) -> None:
        if self.ended.done():
            return
        self._saves.give_up_last()
        left = exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        lost = self._machine.committed - self._saves.newest_step
        was_to_save = left or exit_code in (ExitCode.STOPPED, ExitCode.OK)
        if was_to_save and self._saves.url and lost > 0:
            message = self._not_saved(message, lost)
            exit_code = int(ExitCode.NOT_SAVED) if exit_code else exit_code
        self._incidents.ended(message)
        accounts = self._slot_time.accounts().to_document()
        self._journal.record(
            "job_finished" if exit_code == 0 else "job_ended",
            exit_code=exit_code,
            committed=self._machine.committed,
            goodput=accounts["goodput"],
            slot_seconds={kind: s for kind, s in accounts["kinds"].items() if s > 0.0},
            **({"message": message} if message else {}),
        )
        self._nodes.broadcast(job_ended=pb.JobEnded(exit_code=exit_code, message=message))
        end = RunEnd(
            run_id=self._options.run_id,
            exit_code=exit_code,
            message=message,
            committed=self._machine.committed,
            ended_unix_s=time.time(),
            left=left,
        )
        self.ended.set_result(end)

    def _not_saved(self, message: str, lost: int) -> str:
        why = f" ({self._saves.last_failure})" if self._saves.last_failure else ""
        newest = self._saves.newest_step
        since = f"since the checkpoint of step {newest}" if newest else "from the first on"
        begin = f"{message}; " if message else ""
        return f"{begin}the last save failed{why}: {lost} steps {since} are not saved"

    def _crashed(self, error: BaseException) -> None:
        """A bug here must not look like a hang."""
        if not self.ended.done():
            self.ended.set_exception(error)


def _to_pb(order: StopOrder) -> pb.StopRequest:
    return pb.StopRequest(reason=order.reason, exit_code=order.exit_code)
