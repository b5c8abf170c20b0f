"""The simulated coordinator process: the real Coordinator machine, and a store that is slow."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from elastic.core.agent import events as agent_events
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.membership import Generation
from tests.sim.clock import Link, Timer

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World


class Leader:
    """Carries out the effects of the coordinator's machine."""

    def __init__(
        self,
        world: World,
        settings: CoordinatorSettings,
        last: Generation | None = None,
        may_train: tuple[Generation, ...] = (),
    ) -> None:
        self.world, self.clock = world, world.clock
        self.machine: Coordinator = world.parts.coordinator(
            settings, last=last, may_train=may_train, now=self.clock.now
        )
        self.alive = True
        self.ended = False
        self._nodes: dict[str, Node] = {}
        self._timer = Timer(self.clock, lambda: self.tell(ev.TimerFired()))
        # From the manifests: a member may have missed what an earlier leader committed.
        self._committed = {replica.committed for replica in world.storage.committed}
        self._newest_whole = -1
        self._first = last.number if last is not None else 0
        self._given_up: set[tuple[int, int]] = set()
        self._written: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        # Manifests and generations go through one ordered queue: a generation that is known to
        # exist must not restore a checkpoint older than one that was decided before it.
        self._store = Link(self.clock, 0.001, 0.03)

    def die(self) -> None:
        """Kill the process. A generation on its way to the store still arrives unless another
        leader is elected first; a manifest does not."""
        self.alive = False
        self._timer.set(None)

    def connected(self, node: Node) -> None:
        if not self.alive:
            return
        if self._nodes.get(node.name) is node:  # the loss of its stream was not noticed
            self.tell(ev.NodeReconnected(node=node.name))
        self._nodes[node.name], node.is_known = node, True
        if node.drains:  # the order is kept in the store
            self.tell(ev.NodeLeaving(node=node.name, reason="drained"))
        if self.machine.current is not None:
            node.hear(agent_events.GenerationAnnounced(generation=self.machine.current))
        if self.ended:
            self._tell_end(node)

    def lost(self, node: Node) -> None:
        if not self.alive:
            return
        if self._nodes.get(node.name) is node and not (node.connected and node.alive):
            del self._nodes[node.name]
            self.tell(ev.NodeLost(node=node.name))

    def gone(self, name: str) -> None:
        """The store says that nothing of this node runs any more."""
        if name not in self._nodes:
            self.tell(ev.NodeGone(node=name))

    def tell(self, event: ev.Event) -> None:
        if self.ended or not self.alive:
            return
        effects = self.machine.handle(event, self.clock.now)
        if self.world.observer is not None:
            self.world.observer(self.clock.now, "coordinator", event, effects)
        for effect in effects:
            self._do(effect)

    def unsettled_saves(self) -> list[tuple[int, int, set[int]]]:
        """Generation, step and written parts of saves that are neither whole nor given up. Saves of
        generations before this leader's first one are not among them."""
        return [
            (number, step, parts)
            for (number, step), parts in self._written.items()
            if number >= self._first and step > self._newest_whole and step not in self._committed
            if (number, step) not in self._given_up
        ]

    def shard_saved(self, node: Node, event: ev.ShardReported) -> None:
        """A part is saved. A member that missed the outcome of its save reports again."""
        self._written[event.generation, event.step].add(event.index)
        if self.alive and event.step in self._committed:
            node.hear_of_checkpoint(event.step, event.generation, abandoned=False)
        else:
            self.tell(event)

    def _do(self, effect: fx.Effect) -> None:
        match effect:  # the most frequent one first
            case fx.SetTimer(at=at):
                self._timer.set(at)
            case fx.PersistGeneration(generation=generation, may_train=may_train):
                self.world.decided(generation)
                self._store.send(self._persisted, generation, may_train)
            case (
                fx.AnnounceGeneration(generation=generation)
                | fx.SettleGeneration(generation=generation)
            ):
                if isinstance(effect, fx.SettleGeneration):
                    self.world.settled(generation)
                for node in self._nodes.values():
                    node.hear(agent_events.GenerationAnnounced(generation=generation))
            case fx.ReplaceWorker(node=name, worker=worker, kind=kind, message=message):
                self.world.replaced(worker)
                if name in self._nodes:
                    self._nodes[name].hear(
                        agent_events.ReplaceRequested(worker=worker, kind=kind, message=message)
                    )
            case fx.DismissWorkers():
                for node in self._nodes.values():
                    node.hear(agent_events.DismissRequested())
            case fx.CommitCheckpoint(generation=number, step=step):
                self._newest_whole = max(step, self._newest_whole)
                self._store.send(self._checkpoint_committed, number, step)
            case fx.AbandonCheckpoint(generation=number, step=step):
                again = (number, step) in self._given_up  # a member has missed the news
                self._given_up.add((number, step))
                if step > self._newest_whole and not again:
                    self.world.gave_up(number, step, self._written[number, step])
                self._settle_checkpoint(step, number, abandoned=True, again=again)
            case fx.ProbeGroup():
                for node in self._nodes.values():
                    node.hear_probe()
            case fx.ProbePeers(number=number, peers=peers, within_s=within_s):
                for name, asked in peers.items():
                    if name in self._nodes:
                        workers = tuple(p.worker for p in asked)
                        self._nodes[name].hear_peers(number, workers, within_s)
            case fx.PeersUnreachable(left_out=nodes):
                self.world.journal.note(self.clock.now, "coordinator", "unreachable", *nodes)
            case fx.NodeDrained(node=name):
                if name in self._nodes:
                    self.world.journal.drained(self.clock.now, name)
                    self.world.node_released(self._nodes[name])
                    self._nodes[name].hear(agent_events.Drained())
            case fx.EndJob():
                self._end(effect)

    def _persisted(self, generation: Generation, may_train: tuple[Generation, ...]) -> None:
        if not self.world.persist(self, generation, may_train):
            return
        self.tell(ev.GenerationPersisted(number=generation.number))

    def _checkpoint_committed(self, generation: int, step: int) -> None:
        if not self.alive:
            return
        self.world.storage.commit(generation, step)
        self._committed.add(step)
        self.tell(ev.CheckpointCommitted(generation=generation, step=step))
        self._settle_checkpoint(step, generation, abandoned=False)

    def _settle_checkpoint(
        self, step: int, generation: int, *, abandoned: bool, again: bool = False
    ) -> None:
        self.world.journal.note(self.clock.now, "coordinator", "checkpoint", step, abandoned)
        if not again:
            self.world.journal.saves.append((self.clock.now, not abandoned))
        for node in self._nodes.values():
            node.hear_of_checkpoint(step, generation, abandoned=abandoned)

    def _end(self, effect: fx.EndJob) -> None:
        self.ended = True
        self.world.note_end()
        self.exit_code = effect.exit_code
        self.world.journal.outcome = (
            self.machine.phase.value,
            effect.exit_code,
            effect.message or str(effect.verdict),
        )
        for node in self._nodes.values():
            self._tell_end(node)

    def _tell_end(self, node: Node) -> None:
        node.hear(agent_events.JobEnded(exit_code=self.exit_code))
