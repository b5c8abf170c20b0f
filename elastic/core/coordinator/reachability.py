"""Decides when workers probe whether they reach each other, and who is left out of a group.

A node probes the ports at which other workers meet their group. A node that does not answer in time
is no evidence: its contact with the coordinator is judged elsewhere.

gloo and NCCL connect at further ports, which the kernel chooses and a firewall may close. While a
group does not assemble, nodes try such a port of each other, too. If none of them answers anywhere,
that is evidence only when the group breaks again without a step: the collectives may use another
interface.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from elastic.core.coordinator.connections import (
    NOTHING_FOUND,
    Findings,
    Peer,
    Unreached,
    largest_group,
)
from elastic.core.coordinator.view import FormationPolicy, GroupView, ObservedWorker
from elastic.core.membership import NodeId, WorkerId, WorkerPhase
from elastic.core.restarts import Backoff

FRESH_S = 5.0
"""How long the findings of a round count for newcomers."""
_SLACK_S = 0.5  # for the answers, on top of the time of a probe
_EVERY_S = 0.5  # between the first two rounds of one doubt; each later pause is twice as long
_HELD_EVERY_S = 2.0  # between two rounds while no group is large enough
_ALL = 64  # so many workers probe all others; of more, each probes some
_SAMPLE = 8
_FORGIVEN_S = 60.0


class Probing:
    """Decides when workers probe each other, and keeps what they found."""

    def __init__(self, probe_s: float) -> None:
        """probe_s: how long a connection may take. 0: nobody probes."""
        self._probe_s = probe_s
        self._round = 0
        self._asked_at = -math.inf
        self._asked: dict[NodeId, dict[Peer, None]] = {}
        self._waits_for: set[NodeId] = set()
        self._silent: set[NodeId] = set()
        self._peers: dict[WorkerId, Peer] = {}
        self._unreached: list[Unreached] = []
        self._ports_count = False
        self.findings = NOTHING_FOUND
        self.next_at = math.inf
        """When to look again, if nothing happens before."""

    @property
    def round(self) -> int:
        return self._round

    @property
    def under_way(self) -> bool:
        return bool(self._waits_for)

    def is_due(self, view: GroupView, policy: FormationPolicy, now: float) -> bool:
        """True if a round should begin now."""
        self.next_at = math.inf
        if self._probe_s <= 0.0:
            return False
        if self.under_way:
            self.next_at = self.answered_by
            return False
        at = self._due_at(view, policy, now)
        if now >= at:
            return True
        self.next_at = at
        return False

    def rest(self) -> None:
        """Begin no round, and do without the answers to the one under way."""
        self._waits_for.clear()
        self.next_at = math.inf

    @property
    def answered_by(self) -> float:
        return self._asked_at + self._probe_s + _SLACK_S

    def begin(
        self,
        workers: Iterable[ObservedWorker],
        ranks: Sequence[WorkerId],
        now: float,
        *,
        ports_count: bool = False,
    ) -> Mapping[NodeId, tuple[Peer, ...]]:
        """Begin a round among these workers; return whom each node should probe.

        ranks: the members of the group in their order, which are neighbours in collectives.
        ports_count: ports that the kernel chose are evidence even if they answer nowhere.
        """
        self._ports_count = ports_count
        order = {worker: rank for rank, worker in enumerate(ranks)}
        known = sorted(
            (w for w in workers if w.status.endpoint),
            key=lambda w: (order.get(w.status.worker, len(order)), w.status.worker),
        )
        peers = [
            Peer(worker=w.status.worker, node=w.node, endpoint=w.status.endpoint) for w in known
        ]
        asked: defaultdict[NodeId, dict[Peer, None]] = defaultdict(dict)
        for at, peer in enumerate(peers):
            for other in _probed_by(at, peers):
                if other.node != peer.node:
                    asked[peer.node][other] = None
        self._round += 1
        self._asked_at, self._unreached = now, []
        self._peers = {p.worker: p for p in peers}
        self._asked, self._waits_for, self._silent = asked, set(asked), set(asked)
        self.next_at = self.answered_by if asked else math.inf
        if not asked:
            self._complete()
        return {node: tuple(found) for node, found in asked.items()}

    def heard(
        self,
        node: NodeId,
        number: int,
        unreached: Mapping[WorkerId, str],
        by_port: Collection[WorkerId] = (),
    ) -> bool:
        """A node tells which workers it has not reached, and why. True if that ends the round."""
        if number != self._round or node not in self._waits_for:
            return False
        self._waits_for.discard(node)
        self._silent.discard(node)
        self._unreached += [
            Unreached(by=node, peer=self._peers[worker], why=why, by_port=worker in by_port)
            for worker, why in unreached.items()
            if worker in self._peers and self._peers[worker].node != node
        ]
        if not self._waits_for:
            self._complete()
        return not self._waits_for

    def is_over(self, now: float) -> bool:
        """End the round if its time is over; True if that ends it."""
        if not self.under_way or now < self.answered_by:
            return False
        self._waits_for.clear()
        self._complete()
        return True

    def _reached_any(self) -> bool:
        """True if a node has reached a worker of another one at all ports that it tried."""
        failed = {(found.by, found.peer.worker) for found in self._unreached}
        heard = self._asked.keys() - self._silent
        return any((n, peer.worker) not in failed for n in heard for peer in self._asked[n])

    def _complete(self) -> None:
        if not self._ports_count and not self._reached_any():
            self._unreached = [found for found in self._unreached if not found.by_port]
        on_node: defaultdict[NodeId, list[WorkerId]] = defaultdict(list)
        for peer in self._peers.values():
            on_node[peer.node].append(peer.worker)
        told: set[tuple[WorkerId, WorkerId]] = set()
        missing: defaultdict[WorkerId, set[WorkerId]] = defaultdict(set)
        for found in self._unreached:
            for worker in on_node[found.by]:
                told.add((worker, found.peer.worker))
                missing[worker].add(found.peer.worker)
                missing[found.peer.worker].add(worker)
        before = self.findings
        again = before.missing if self._asked_at - before.asked_at < FRESH_S else {}
        self.findings = Findings(
            asked_at=self._asked_at,
            probed=frozenset(self._peers),
            unreached=tuple(self._unreached),
            missing={worker: frozenset(others) for worker, others in missing.items()},
            certain=all((b, a) in told or b in again.get(a, ()) for a, b in told),
        )

    def _due_at(self, view: GroupView, policy: FormationPolicy, now: float) -> float:
        current = view.current
        here = {n: w for n, w in view.workers.items() if w.out_of_contact_since is None}
        if current is None or not current.members:
            ready = [n for n, w in here.items() if w.status.phase is WorkerPhase.READY]
            held = self.findings.divide(ready)
            return self._asked_at + _HELD_EVERY_S if held else math.inf
        if view.broken_since is not None and self._asked_at < view.broken_since:
            return now
        doubts = [view.quiet_since] if view.quiet_since is not None else []
        if view.assembling_since is not None and any(
            m.worker in here and not _has_arrived(here[m.worker], current.number)
            for m in current.members
        ):
            doubts.append(max(view.assembling_since, view.formed_at) + _EVERY_S)
        at = min((self._after(since) for since in doubts), default=math.inf)
        active = [m for m in current.members if m.worker in view.workers]
        if len(active) < policy.max_workers:
            newcomers = [
                n
                for n, w in here.items()
                if n not in current.worker_ids
                and w.status.phase is WorkerPhase.READY
                and not w.on_leaving_node
                and now >= view.held_back.get(n, -math.inf)
            ]
            names = [m.worker for m in active]
            if not self.findings.admit(names, newcomers):
                at = now
            elif newcomers:
                at = min(at, self.findings.asked_at + FRESH_S)
        return at

    def _after(self, since: float) -> float:
        """The next round of a doubt that exists since then."""
        if self._asked_at < since:
            return since
        if not self.findings.certain:
            return self._asked_at + _EVERY_S
        return self._asked_at + max(_EVERY_S, self._asked_at - since)


def _has_arrived(w: ObservedWorker, generation: int) -> bool:
    s = w.status
    return s.phase is WorkerPhase.FINISHED or (
        s.phase is WorkerPhase.TRAINING and s.generation == generation
    )


def _probed_by(at: int, peers: Sequence[Peer]) -> Iterable[Peer]:
    """Whom the worker at this place probes: all, or rank 0, its neighbours, and some others."""
    count = len(peers)
    if count <= _ALL:
        return peers
    stride = max(1, count // _SAMPLE)
    places = [0, at - 1, at + 1, *(at + k * stride for k in range(1, _SAMPLE))]
    return [peers[place % count] for place in dict.fromkeys(p % count for p in places)]


class LeftOut:
    """The nodes that were left out because they cannot reach others. Each time in a row delays
    their return more."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._times: dict[NodeId, tuple[int, float]] = {}
        """By node: how often in a row, and until when it is held back."""
        self.by_port: set[NodeId] = set()
        """Those that a firewall by port cuts off, until they are members of a group that trains."""

    def again(self, node: NodeId, now: float) -> float:
        """The node is left out once more. Returns for how many seconds."""
        times, until = self._times.get(node, (0, -math.inf))
        if now < until:
            return until - now
        delay_s = self._backoff.delay_s(times + 1)
        if now > until + max(_FORGIVEN_S, delay_s):
            times = 0
        delay_s = self._backoff.delay_s(times + 2)  # the first delay of a backoff is none
        self._times[node] = times + 1, now + delay_s
        return delay_s

    def until(self, node: NodeId) -> float:
        return self._times[node][1] if node in self._times else -math.inf

    def held_back(self, workers: Iterable[ObservedWorker]) -> dict[WorkerId, float]:
        """The instants before which these workers may not join a group that trains."""
        if not self._times:
            return {}
        return {w.status.worker: self.until(w.node) for w in workers if w.node in self._times}

    def gone(self, node: NodeId) -> None:
        self._times.pop(node, None)
        self.by_port.discard(node)


def able_to_work(workers: Sequence[ObservedWorker], findings: Findings) -> list[ObservedWorker]:
    """Of these, those that can form the largest group with one of the newest states among them."""
    names = [w.status.worker for w in workers]
    if not findings.divide(names):
        return list(workers)
    holders = [w for w in workers if w.status.has_state]
    best = max(map(_age, holders), default=None)
    newest = [w.status.worker for w in holders if _age(w) == best]
    kept = largest_group(names, findings.missing, newest)
    return [w for w in workers if w.status.worker in kept]


def _age(w: ObservedWorker) -> tuple[int, int]:
    """The higher one of two states is the job's."""
    return w.status.trained_in, w.status.committed
