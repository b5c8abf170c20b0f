"""The leader of a job: feeds its machine from the agents' streams and carries out its effects."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from typing_extensions import assert_never

from elastic.coordinator.connected_agents import (
    ConnectedAgents,
    ConnectedNode,
    ViewBatches,
    name_of,
    node_id,
)
from elastic.coordinator.history import JobHistory
from elastic.coordinator.holdups import Hangs, SlowRanks, StackRounds
from elastic.coordinator.job_options import JobOptions, make_commits, make_machine, make_recorders
from elastic.coordinator.leadership import (
    Command,
    Leadership,
    StopOrder,
    Stored,
    load_stop,
    save_generation,
    save_stop,
)
from elastic.coordinator.node_registry import DepartingNodes, Exclusions, NodeRegistry
from elastic.coordinator.record_keeper import RecordKeeper, ToldOnce
from elastic.coordinator.records import since_boot
from elastic.coordinator.saves import Saves
from elastic.coordinator.totals import Totals
from elastic.coordinator.watch import Watch
from elastic.coordinator.wording import ending, refusal, unreachable, why_left_out
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.connections import Peer
from elastic.core.membership import WorkerId
from elastic.core.quarantine import NodeFailures
from elastic.errors import ConfigurationError, ExitCode
from elastic.rpc.codec import (
    Codec,
    failure_from_pb,
    generation_from_pb,
    generation_to_pb,
    status_from_pb,
)
from elastic.rpc.control import AgentStream
from elastic.rpc.refusals import SparingReport
from elastic.runtime.driver import Driver
from elastic.runtime.journal import Journal
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.tasks import TaskSupervisor
from elastic.store.interface import GuardFailed, Store
from elastic.store.job_documents import NodeDocument
from elastic.store.job_runs import RunEnd
from elastic.store.retries import retry
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, local_pb2, stacks_pb2

_PROGRESS = Codec(ev.ProgressReported, job_pb2.Progress, without=("joining",))
_REPLACE = Codec(fx.ReplaceWorker, pb.Replace, without=("node",))
_STOP = Codec(StopOrder, pb.StopRequest)
_HELD = "another agent is registered under this name; give one of them another --node-name"
_LEAD_INSTEAD = "a coordinator with this directory can lead the job"
_MOST_REFUSED = 1000  # names whose last refusal is remembered
_MOST_WORKERS = 10_000  # of a node
_LONGEST_WHY = 100  # characters of the reason why a worker was not reached
_STORED_WITHIN_S = 1.0
_FAREWELL_S = 10.0  # for agents to end their workers after the job
_NOTICES = {
    *("state_differed", "step_copies_state", "untracked_state", "checkpoint_damaged"),
    *(
        "report_failed",
        "output_lost",
        "failed_at_end",
        "script_ended",
        "left_early",
        "variables_ignored",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFigures:
    """A leader's group in three figures."""

    generation: int = 0
    """The group's number; 0: there is no group yet."""
    world_size: int = 0
    step: int = 0
    """Steps committed, as far as members have reported."""


class CoordinatorDaemon:
    """One job's leader. It handles agents' messages (elastic.rpc.control.AgentHandler) and changes
    of nodes in the store (NodeHandler). Operators read its public parts.

    history: for the page, if there is one; it listens to the journal. leads: whether it is certain
    at this moment that nobody else leads. pauses: of this process. totals: of the run; they listen
    to the journal.
    """

    def __init__(
        self,
        options: JobOptions,
        store: Store,
        leadership: Leadership,
        journal: Journal,
        *,
        leads: Callable[[], bool] = lambda: True,
        totals: Totals | None = None,
        history: JobHistory | None = None,
        pauses: LoopPauses | None = None,
    ) -> None:
        self.options, self._journal = options, journal
        self._store, self.leadership = store, leadership
        self.leads = leads
        self.machine = make_machine(options, leadership, time.monotonic())
        self.watch = Watch(
            leadership,
            self.machine,
            journal,
            most=options.formation.max_workers,
            totals=totals,
            history=history,
            pauses=pauses,
        )
        self.nodes = ConnectedAgents(
            options.isolation_timeout_s,
            leadership.command,
            self._may_train,
            self.machine.nodes_out_of_contact,
            run_id=options.run_id,
            saves=options.checkpoints is not None,
        )
        self._views = ViewBatches(self.nodes.count, lambda batch: self._driver.post(batch))
        self._driver: Driver[ev.Event, fx.Effect] = Driver(
            self.machine,
            self._execute,
            ev.TimerFired(),
            on_error=self._crashed,
            before=self._views.take,
            observe=self.watch.observe,
        )
        self._tasks = TaskSupervisor(self._crashed)
        self._failures = NodeFailures(options.quarantine_after, options.quarantine_window_s)
        known = leadership.records
        self._failures.restore({n: since_boot(found) for n, found in known.failures.items()})
        self._told_once = ToldOnce(known.told_once)
        self.departing = DepartingNodes(
            self.nodes,
            Exclusions(store, job=options.job, guard=leadership.guard),
            self._failures,
            journal,
            post=self._driver.post,
            start=self._tasks.start,
        )
        self._refused: dict[str, str] = {}  # reasons, by node name
        self._refusals = SparingReport(journal.record)
        self._doubtful: set[AgentStream] = set()  # refused for now: their next view decides
        self._records = RecordKeeper(
            store,
            leadership,
            self.machine,
            self._failures,
            self._told_once,
            self.watch,
            job=options.job,
            run_id=options.run_id,
            start=self._tasks.start,
        )
        self.saves = Saves(
            make_commits(options, leadership),
            journal,
            post=self._driver.post,
            broadcast=self.nodes.broadcast,
            start=self._tasks.start,
            on_failed=self.watch.save_failed,
            on_committed=self.watch.saved,
        )
        self._ledger, self._curve = make_recorders(
            options, leadership, journal, broadcast=self.nodes.broadcast, may_record=leads
        )
        self._recorders = [r for r in (self._ledger, self._curve) if r is not None]
        self.rounds = StackRounds(self.nodes)
        self.hangs = Hangs(
            self.rounds,
            journal,
            post=self._driver.post,
            start=self._tasks.start,
            on_explained=self.watch.explained,
        )
        self.slow_ranks = SlowRanks(
            journal,
            replaces=options.replaces_stragglers,
            post=self._driver.post,
            current=lambda: self.machine.current,
            may_replace=self._may_replace_slow,
        )
        self.ended: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        """How the run ended, once it has."""
        self.deposed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason, once another coordinator leads."""
        self.store_lost: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        """The generation that the store has lost, once an agent has reported it."""
        self._retired = False
        self._lost_generation: Stored | None = None
        self.order: StopOrder | None = None
        self.checkpoint_every = 0
        """Steps between two checkpoints; 0: none is due before the end, or it is not known."""
        self.is_classic = False
        """The script is written for torchrun, so its steps are not known."""
        self.registry: NodeRegistry | None = None
        """The registered nodes; the candidate sets it."""
        self.heard_at = time.monotonic()
        """When an agent last said hello to this leader, even one that was turned away, or when the
        stream of one ended."""

    async def start(self) -> None:
        """Load what earlier leaders stored; waits out outages of the store.

        Raises ConfigurationError, and TransientError if a file of the run cannot be used now.
        """
        for recorder in self._recorders:
            await recorder.start()
        await self.departing.load()
        await self.saves.load()
        order = await retry(
            lambda: load_stop(self._store, self.options.job), "look for an order to stop"
        )
        if order is not None:
            self.stop(order, is_stored=True)
        self._tasks.start(self.watch.sample(self.wanted, self.ended.done), "history")

    def retire(self) -> None:
        """The term is over: ignore what agents say from now on."""
        self._retired = True

    async def close(self) -> None:
        """End the tasks that still run, and every stream."""
        self._views.take()
        self._driver.close()
        for stream in (*(node.stream for node in self.nodes), *self._doubtful):
            stream.close()
        await self._tasks.close()
        for recorder in self._recorders:
            await recorder.close()

    async def wait_until_stored(self) -> None:
        """Return when the store has what must outlive the run, or after _STORED_WITHIN_S."""
        await self._records.wait_until_stored(_STORED_WITHIN_S)

    async def flushed(self) -> None:
        """Return when every agent has received its messages and left, or after _FAREWELL_S."""
        ends_at = time.monotonic() + _FAREWELL_S
        while any(True for _ in self.nodes) and time.monotonic() < ends_at:
            await asyncio.sleep(0.05)

    def leadership_confirmed(self) -> None:
        """The election is certain again: write the records that waited for that."""
        for recorder in self._recorders:
            recorder.record()

    @property
    def group(self) -> GroupFigures:
        current = self.machine.current
        if current is None:
            return GroupFigures()
        step = self.machine.committed
        return GroupFigures(generation=current.number, world_size=current.world_size, step=step)

    def wanted(self) -> int:
        """Return for how many workers the participating nodes have room, up to the job's limit."""
        room = sum(self.departing.room())
        return min(self.options.formation.max_workers, room)

    @property
    def is_attended(self) -> bool:
        """Agents are connected."""
        return self.nodes.count() > 0 or bool(self._doubtful)

    @property
    def awaits_nodes(self) -> bool:
        """Nodes are registered, so their agents should connect."""
        return self.registry is not None and self.registry.has_nodes

    # ---- AgentHandler

    def agent_connected(self, stream: AgentStream, *, has_members: bool = False) -> None:
        """An agent has said hello, or has sent the view that decides whether it is let in."""
        self.heard_at = time.monotonic()
        refused = self.nodes.refusal(stream.hello, has_members=has_members)
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
            stream.close()  # it comes again: the registry here may lag behind the store
            return
        self._refused.pop(stream.node, None)
        has_members = self._has_members(node_id(stream.node, stream.hello.start_token))
        self.watch.connected(is_first=not any(self.nodes), has_members=has_members)
        before, node = self.nodes.arrive(stream)
        if before is not None:
            before.stream.close()
            is_same = before.node == node.node
            news = ev.NodeReconnected if is_same else ev.NodeLost
            self._driver.post(news(node=before.node))
        self._journal.record(
            "node_connected", node=stream.node, host=stream.host, slots=stream.slots
        )
        mismatch = self.nodes.checkpoint_mismatch(stream.hello)
        if mismatch and stream.hello.saves:  # the group saves, but this one would commit nothing
            self._crashed(ConfigurationError(f"{mismatch}. Training goes on; {_LEAD_INSTEAD}"))
        elif mismatch:
            self._journal.record("warning", source="checkpoints", message=mismatch)
        if self.registry is not None:
            self.registry.connected(stream.node, stream.hello.start_token)
        self.checkpoint_every = stream.hello.checkpoint_every
        if stream.hello.classic:
            self.is_classic = True
            self._driver.post(ev.ClassicScriptReported())
        self.departing.arrived(node)
        stream.send(keep_curve=local_pb2.KeepCurve(keep=self._curve is not None))
        current = self.machine.current
        if current is not None:
            stream.send(generation=generation_to_pb(current))
        if self.order is not None:
            stream.send(stop=_STOP.to_pb(self.order))

    def _has_members(self, node: str) -> bool:
        current = self.machine.current
        return current is not None and bool(current.workers_on(node))

    def _is_held_by_another(self, stream: AgentStream) -> bool:
        """Return True if another agent is connected under this name and registered for it."""
        present = self.nodes.by_name(stream.node)
        if present is None or self.registry is None:
            return False
        token = present.stream.hello.start_token
        if token == stream.hello.start_token or self.registry.holder(stream.node) != token:
            return False
        if self._is_news(stream.node, _HELD):
            self._journal.record("node_refused", node=stream.node, reason=_HELD)
        return True

    def _is_news(self, node: str, refusal: str) -> bool:
        """Return False if the node was told so already: a refused agent comes again and again."""
        if self._refused.get(node) == refusal:
            return False
        if len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[node] = refusal
        return True

    def agent_lost(self, stream: AgentStream) -> None:
        if self._retired:
            return
        self._doubtful.discard(stream)
        node = self.nodes.leave(stream)
        if node is None:
            return
        self.heard_at = time.monotonic()
        if not self.ended.done():
            as_wanted = self.departing.leaves(node.node)
            self._journal.record("node_lost", node=stream.node, as_wanted=as_wanted)
        if self.registry is not None:
            self.registry.disconnected(stream.node, stream.hello.start_token)
        self._driver.post(ev.NodeLost(node=node.node))

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        """Handle one message; ignore kinds that only a newer version knows."""
        if self._retired:
            return
        if stream in self._doubtful and message.HasField("view"):
            self._decide_by_view(stream, message.view)
        node, once = self.nodes.by_stream(stream), message.once
        if node is None or self._lost_generation is not None:
            return
        if message.HasField("pulse"):
            stream.send(pulse=message.pulse)
            return
        heard = not once.number or self._told_once.hear(once, stream)
        if heard and self._may_say(node, message):
            match message.WhichOneof("kind"):
                case "view":
                    self._viewed(node, message.view)
                case "failure":
                    self._worker_failed(node, message.failure, once.age_s)
                case "progress":
                    self._progressed(node, message.progress)
                case "reformed":
                    self._reformed(message.reformed, once.age_s)
                case "shard_saved":
                    self.saves.saved(stream, message.shard_saved)
                case "save_failed":
                    self.saves.failed(stream, message.save_failed)
                case "ledger":
                    self._steps_recorded(node, message.ledger)
                case "curve" if self._curve is not None:
                    curve = message.curve
                    self._curve.take(node, curve.points, whole=curve.whole, group=curve.generation)
                case "notice":
                    self._notice(node, message.notice)
                case "known":
                    self._agent_knows(node, message.known)
                case "stacks":
                    self.rounds.told(node, message.stacks)
                case "peers_probed":
                    self._peers_probed(node, message.peers_probed)
                case "leave":
                    self.departing.leave_requested(node, message.leave.reason)
                case "leave_timed_out":
                    self._left_late(node, message.leave_timed_out.waited_s)
                case "stop" if self.order is None:  # the agent asks, or the store has lost it
                    self.stop(_STOP.from_pb(message.stop))
                case "worker_time":
                    self.watch.spent(message.worker_time.worker, message.worker_time.spent)
                case "worker_pace":
                    self.slow_ranks.heard(message.worker_pace.worker, message.worker_pace.pace)
        self._records.keep()

    def _may_say(self, node: ConnectedNode, message: pb.AgentMessage) -> bool:
        """Whether the node has the worker and is in the group that the message is about.

        Otherwise a holder of one node's certificate could end the others' groups by their names.
        """
        kind = message.WhichOneof("kind")
        said = getattr(message, kind) if kind is not None else None
        worker, number = getattr(said, "worker", ""), getattr(said, "generation", 0)
        has_it = not worker or self._home_of(node, worker) == node.stream.node
        if has_it and self._is_in(node, number):
            return True
        reason = f"{kind} of worker {worker!r}, generation {number}, which is not this node's"
        self._refusals("message_refused", source=node.stream.node, reason=reason)
        return False

    def _is_in(self, node: ConnectedNode, generation: int) -> bool:
        """Whether the node has a member in this group; also if the group is not known here."""
        group = self.machine.generation(generation)
        members = group.members if group is not None else ()
        return not members or any(name_of(m.node) == node.stream.node for m in members)

    def _home_of(self, node: ConnectedNode, worker: WorkerId) -> str:
        """The name of the worker's node: this one if no other node is known to have it."""
        if any(s.worker == worker for s in node.statuses):
            return node.stream.node
        return name_of(self.machine.home_of(worker) or node.node)

    def _decide_by_view(self, stream: AgentStream, view: pb.NodeView) -> None:
        """Decide about an agent with another command, by the workers that it has found on its node.
        If no member is among them, those of the earlier command have ended there."""
        node = node_id(stream.node, stream.hello.start_token)
        live = {w.worker for w in view.workers}
        members = self.machine.members_that_may_train()
        has_members = any(m.node == node and m.worker in live for m in members)
        if not has_members:
            self._driver.post(ev.NodeGone(node=node))
        self.agent_connected(stream, has_members=has_members)

    def _viewed(self, node: ConnectedNode, view: pb.NodeView) -> None:
        if len(view.workers) > _MOST_WORKERS:
            raise ValueError(f"a view of {len(view.workers)} workers of one node")
        node.statuses = tuple(
            s
            for s in map(status_from_pb, view.workers)
            if self._home_of(node, s.worker) == node.stream.node
        )
        node.longest_pause_s = view.longest_pause_s
        report = ev.NodeReported(
            node=node.node,
            slots=node.stream.slots,
            workers=node.statuses,
            restarting=view.restarting,
        )
        if (batch := self._views.batch(report)) is not None:
            self._driver.post(batch)

    def _worker_failed(self, node: ConnectedNode, message: job_pb2.Failure, age_s: float) -> None:
        failure, age_s = failure_from_pb(message), _duration_s(age_s)
        took_part = self._is_in(node, message.committed_in)
        self._journal.record(
            "worker_failed",
            worker=failure.worker,
            node=name_of(node.node),
            kind=failure.kind.name.lower(),
            message=failure.message,
            traceback=failure.traceback,
            log_tail=failure.log_tail,
            log=failure.log,
        )
        self._driver.post(
            ev.WorkerFailed(
                node=node.node,
                failure=failure,
                age_s=age_s,
                committed=message.committed if took_part else 0,
                committed_in=message.committed_in if took_part else 0,
            )
        )
        self.departing.worker_failed(node, failure, step=self.machine.committed)

    def _progressed(self, node: ConnectedNode, progress: job_pb2.Progress) -> None:
        group, current = self.machine.generation(progress.generation), self.machine.current
        if group is None or current is None:
            return
        if group is not current and current.leave_after is None:
            return  # the group was left at once: this report is outdated
        # One that joins is elsewhere for a moment, for example when it fails to get the state.
        joining = progress.place == stacks_pb2.PLACE_JOINING or any(
            s.worker == progress.worker and not s.has_state for s in node.statuses
        )
        if not progress.probed and not joining:
            self.watch.progressed(progress, group.world_size)
        self.watch.spent(progress.worker, progress.spent)
        self.slow_ranks.heard(progress.worker, progress.pace)
        report = _PROGRESS.from_pb(progress)
        self._driver.post(replace(report, joining=joining))

    def _reformed(self, report: job_pb2.Reformed, age_s: float) -> None:
        """A member has committed its first step in a group, `age_s` seconds ago."""
        self.saves.began(report.generation, report.committed)
        self.watch.reformed(report, _duration_s(age_s))

    def _steps_recorded(self, node: ConnectedNode, entries: local_pb2.LedgerEntries) -> None:
        """Members keep records until they are told that these are stored, by whichever leader."""
        if self._ledger is not None:
            self._ledger.take(node, entries.entries, whole=entries.whole, group=entries.generation)
        elif entries.entries:  # nobody stores a ledger: members may forget these
            last = entries.entries[-1]
            self.nodes.broadcast(
                ledger_stored=local_pb2.LedgerStored(
                    committed=last.step + 1, run=last.run, generation=last.generation
                )
            )

    def _notice(self, node: ConnectedNode, notice: local_pb2.Notice) -> None:
        """Record a worker's own event: only a known name, and its fields apart from ours."""
        source = name_of(node.node)
        if notice.name in _NOTICES:
            self._journal.record(notice.name, node=source, details=dict(notice.fields))
        else:
            self._journal.record("notice", node=source, details={"name": notice.name})

    def _left_late(self, node: ConnectedNode, waited_s: float) -> None:
        """The agent ends the node's workers, since they did not leave in time."""
        self._journal.record(
            "leave_timed_out",
            node=node.stream.node,
            waited_s=round(waited_s, 3),
            reason="its workers did not reach a step boundary",
        )
        members = self.machine.members_that_may_train()
        if any(m.node == node.node for m in members):
            self.watch.left_late(node.stream.node)

    # ---- NodeHandler: changes of nodes in the store

    def node_registered(self, node: str, document: NodeDocument) -> None:
        """An agent has registered the name: another one that is connected under it must go."""
        self.departing.registered(node_id(node, document.start_token), document.machine)
        present = self.nodes.by_name(node)
        if present is not None and present.stream.hello.start_token != document.start_token:
            self._journal.record("node_refused", node=node, reason=_HELD)
            present.stream.close()

    def node_vanished(self, node: str) -> None:
        self._journal.record("node_vanished", node=node)

    def node_gone(self, node: str, start_token: str | None) -> None:
        ids = [node_id(node, start_token)] if start_token else self._absent_ids(node)
        for gone in ids:
            self.departing.gone(gone)
            self._driver.post(ev.NodeGone(node=gone))

    def _absent_ids(self, name: str) -> list[str]:
        """Return the known nodes of this name, except the connected and the registered one."""
        known = {m.node for m in self.machine.members_that_may_train()}
        known.update(self.machine.nodes_out_of_contact())
        token = self.registry.holder(name) if self.registry is not None else None
        held = node_id(name, token) if token is not None else None
        absent = (n for n in known if name_of(n) == name and not self.nodes.find(n))
        return sorted(n for n in absent if n != held)

    # ---- what the store has lost

    def _agent_knows(self, node: ConnectedNode, known: job_pb2.Known) -> None:
        """An agent reports the newest generation that it knows. If that is newer than the store's,
        the store was emptied, or restored from a backup."""
        before = generation_from_pb(known.before) if known.HasField("before") else None
        newest = generation_from_pb(known.newest)
        leads_from, current = self.leadership, self.machine.current
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
        self._lost_generation = Stored(
            generation=newest,
            may_train=(before,) if before is not None else (),
            revision=0,
            command=Command(text=hello.command, digest=hello.command_digest),
        )
        # Otherwise _persist does this when its write is done.
        if not self.machine.writes and not self.store_lost.done():
            self.store_lost.set_result(self._lost_generation)

    # ---- the machine's effects

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.PersistGeneration():
                self._tasks.start(self._persist(effect), "persist")
            case fx.AnnounceGeneration():
                self._announce_generation(effect)
            case fx.SettleGeneration():
                self.nodes.broadcast(generation=generation_to_pb(effect.generation))
            case fx.ReplaceWorker():
                self._replace_worker(effect)
            case fx.DismissWorkers():
                self.nodes.broadcast(dismiss=local_pb2.Dismiss())
            case fx.CommitCheckpoint():
                self._tasks.start(self.saves.commit(effect), "commit-checkpoint")
            case fx.AbandonCheckpoint():
                self.saves.abandon(effect)
            case fx.ProbeGroup():
                self.nodes.broadcast(probe=pb.Probe())
            case fx.ProbePeers():
                self._probe_peers(effect)
            case fx.PeersUnreachable():
                self._journal.record("peers_unreachable", **unreachable(effect))
                self.departing.left_out(why_left_out(effect))
            case fx.NodeDrained():
                self._node_drained(effect)
            case fx.SetTimer():
                self._driver.set_timer(effect.at)
            case fx.StepWasSlow():
                self._step_was_slow(effect)
            case fx.ExplainHang():
                self.hangs.explain(effect)
            case fx.ExplainSlowStep():
                self.hangs.explain_slow_step(effect, lambda: self.machine.committed)
            case fx.Lost():
                self._members_lost(effect)
            case fx.RefuseNewcomers():
                self._refuse_newcomers(effect)
            case fx.StepDown():
                if not self.deposed.done():
                    self.deposed.set_result(effect.message)
            case fx.EndJob():
                restarts, window_s = self.options.max_restarts, self.options.restart_window_s
                self._end(effect.exit_code, ending(effect, restarts, window_s))
            case _:
                assert_never(effect)
        self._records.keep()

    def _announce_generation(self, effect: fx.AnnounceGeneration) -> None:
        generation = effect.generation
        self.departing.takes_part(m.node for m in generation.members)
        self.nodes.broadcast(generation=generation_to_pb(generation))
        self._journal.record(
            "generation_formed",
            generation=generation.number,
            reason=generation.reason.name.lower(),
            world_size=generation.world_size,
            members=[m.worker for m in generation.members],
            after_step=generation.leave_after,
        )

    def _replace_worker(self, effect: fx.ReplaceWorker) -> None:
        node = self.nodes.find(effect.node)
        if node is not None:
            node.stream.send(replace=_REPLACE.to_pb(effect))

    def _probe_peers(self, effect: fx.ProbePeers) -> None:
        for name, peers in effect.peers.items():
            node = self.nodes.find(name)
            if node is not None:
                asked = [
                    pb.Peer(
                        worker=p.worker,
                        endpoint=p.endpoint,
                        other_endpoint=self._other_endpoint(p) if effect.all_ports else "",
                    )
                    for p in peers
                ]
                node.stream.send(
                    probe_peers=pb.ProbePeers(
                        number=effect.number, peers=asked, within_s=effect.within_s
                    )
                )

    def _other_endpoint(self, peer: Peer) -> str:
        node = self.nodes.find(peer.node)
        port = node.stream.hello.probe_port if node is not None else 0
        return f"{peer.endpoint.rpartition(':')[0]}:{port}" if port else ""

    def _peers_probed(self, node: ConnectedNode, told: pb.PeersProbed) -> None:
        unreached = {u.worker: u.why[:_LONGEST_WHY] for u in told.unreached}
        by_port = frozenset(u.worker for u in told.unreached if u.by_port)
        self._driver.post(
            ev.PeersProbed(node=node.node, number=told.number, unreached=unreached, by_port=by_port)
        )

    def _node_drained(self, effect: fx.NodeDrained) -> None:
        node = self.nodes.find(effect.node)
        if node is not None:
            self.departing.left_group(node)

    def _step_was_slow(self, effect: fx.StepWasSlow) -> None:
        self._journal.record(
            "step_was_slow",
            step=effect.step,
            lasted_s=round(effect.lasted_s, 3),
            usual_s=round(effect.usual_s, 6),
        )

    def _members_lost(self, effect: fx.Lost) -> None:
        members = self.machine.members_that_may_train()
        self.departing.members_lost({m.node for m in members if m.worker in effect.workers})

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
        """Only while half of the restarts are left: a slow job is better than one without any."""
        spent = self.machine.restarts_spent(time.monotonic())
        return 2 * spent < self.options.max_restarts and self.machine.can_replace_slow(worker)

    def _may_train(self) -> bool:
        """While a group may train somewhere, the job's command cannot be changed."""
        return bool(self.machine.members_that_may_train())

    async def _persist(self, effect: fx.PersistGeneration) -> None:
        generation = effect.generation
        try:
            command = self.nodes.note_command(name_of(m.node) for m in generation.members)
            await save_generation(
                self._store,
                self.leadership,
                generation,
                effect.may_train,
                command,
                self.watch.loss(),
            )
        except GuardFailed as error:
            self._driver.post(ev.PersistRefused(number=generation.number, detail=str(error)))
            return
        await self.hangs.answered()  # members learn of the generation once it counts as persisted
        if self._lost_generation is not None:
            if not self.store_lost.done():
                self.store_lost.set_result(self._lost_generation)
        else:
            self._driver.post(ev.GenerationPersisted(number=generation.number))

    def stop(self, order: StopOrder, *, is_stored: bool = False) -> None:
        """Have the job save and end. is_stored: the store has the order already."""
        self.order = self.order or order
        self.nodes.broadcast(stop=_STOP.to_pb(order))
        self._journal.record("stop_requested", reason=order.reason)
        self._driver.post(ev.StopRequested(exit_code=order.exit_code, reason=order.reason))
        if not is_stored:
            self._tasks.start(self._keep_stop(order), "keep-stop")

    async def _keep_stop(self, order: StopOrder) -> None:
        with contextlib.suppress(GuardFailed):  # the next leader can be asked again
            await save_stop(self._store, self.leadership, order)

    def _end(self, exit_code: int, message: str) -> None:
        if self.ended.done():
            return
        self.saves.give_up_last()
        left = exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        # If all workers were lost with an earlier leader, only that one was told of their steps.
        committed = self.machine.committed or self.watch.committed
        lost = self.machine.committed - self.saves.newest_step
        was_to_save = left or exit_code in (ExitCode.STOPPED, ExitCode.OK)
        if was_to_save and self.saves.url and lost > 0:
            message = self._not_saved(message, lost)
            exit_code = int(ExitCode.NOT_SAVED)
        self.watch.ended(message)
        accounts = self.watch.accounts().to_document()
        self._journal.record(
            "job_finished" if exit_code == 0 else "job_ended",
            exit_code=exit_code,
            committed=committed,
            goodput=accounts["goodput"],
            slot_seconds={kind: s for kind, s in accounts["kinds"].items() if s > 0.0},
            **({"message": message} if message else {}),
        )
        self.nodes.broadcast(job_ended=pb.JobEnded(exit_code=exit_code, message=message))
        end = RunEnd(
            run_id=self.options.run_id,
            exit_code=exit_code,
            message=message,
            committed=committed,
            ended_unix_s=time.time(),
            left=left,
        )
        self.ended.set_result(end)

    def _not_saved(self, message: str, lost: int) -> str:
        why = self.saves.last_failure
        save = f"the last save failed ({why})" if why else "no save was complete in time"
        newest = self.saves.newest_step
        since = f"since the checkpoint of step {newest}" if newest else "since the start of the job"
        begin = f"{message}; " if message else ""
        return f"{begin}{save}: {lost} steps {since} are not saved"

    def _crashed(self, error: BaseException) -> None:
        """End the run with this error: a bug here must not look like a hang."""
        if not self.ended.done():
            self.ended.set_exception(error)


def _duration_s(reported: float) -> float:
    """Return a duration that an agent reports; 0 if it is none."""
    return max(0.0, reported) if math.isfinite(reported) else 0.0
