"""Connections between workers, as probes have found them, and which workers can form a group.

Two workers have a connection unless the node of one has failed to reach the other worker.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.core.membership import NodeId, WorkerId

_ANCHORS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A worker to probe, at host:port of its group's store."""

    worker: WorkerId
    node: NodeId
    endpoint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreached:
    """A node has not reached a worker of another one."""

    by: NodeId
    peer: Peer
    why: str
    by_port: bool = False
    """Its store's port answers, but not a port of its node that the kernel chose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The result of one round of probes."""

    asked_at: float = -math.inf
    probed: frozenset[WorkerId] = frozenset()
    """The workers that took part."""
    unreached: tuple[Unreached, ...] = ()
    missing: Mapping[WorkerId, frozenset[WorkerId]] = field(default_factory=dict)
    """By worker: those with which it has no connection."""
    certain: bool = True
    """Each missing connection was found missing from both ends, or in the round before, too."""

    def divide(self, workers: Collection[WorkerId]) -> bool:
        """True if two of these workers have no connection."""
        names = set(workers)
        return any(self.missing.get(w, frozenset()) & names for w in names)

    def unable(
        self, members: Iterable[WorkerId], newcomers: Sequence[WorkerId]
    ) -> frozenset[WorkerId]:
        """The newcomers without a connection to a member, and of those that lack one to each other
        as many as must stay away."""
        group = frozenset(members)
        able = [w for w in newcomers if not self.missing.get(w, frozenset()) & group]
        return frozenset(newcomers) - largest_group(able, self.missing)

    def admit(self, members: Iterable[WorkerId], newcomers: Sequence[WorkerId]) -> bool:
        """True if the newcomers took part and have connections to all members and each other."""
        return self.probed.issuperset(newcomers) and not self.unable(members, newcomers)

    def between(self, workers: Iterable[WorkerId]) -> tuple[Unreached, ...]:
        """What these workers' missing connections were found by."""
        names = set(workers)
        concerned = {w for n in names for w in self.missing.get(n, ())} & names
        return tuple(u for u in self.unreached if u.peer.worker in concerned)


NOTHING_FOUND = Findings()


def largest_group(
    workers: Sequence[WorkerId],
    missing: Mapping[WorkerId, frozenset[WorkerId]],
    newest: Collection[WorkerId] = (),
) -> frozenset[WorkerId]:
    """The workers of the largest group in which all have a connection to all others.

    newest: one of these must be in it; empty: none must. Equal input gives an equal result; of two
    groups of one size the one of the earlier workers wins. Around each of the best connected
    workers that may be needed, the worker with the most missing connections is dropped until none
    is missing. That finds the largest group of up to 5 workers, and a large one of more.
    """
    among = frozenset(workers)
    missing = {w: missing[w] & among for w in workers if w in missing}
    names = [w for w in workers if missing.get(w)]
    free = among.difference(names)
    needed = [] if free.intersection(newest) else [w for w in names if w in set(newest)]
    anchors = sorted(needed or names, key=lambda w: len(missing[w].intersection(names)))[:_ANCHORS]
    found = [_around(anchor, names, missing) for anchor in anchors]
    return free | max(found, key=len, default=frozenset())


def _around(
    anchor: WorkerId, names: Sequence[WorkerId], missing: Mapping[WorkerId, frozenset[WorkerId]]
) -> frozenset[WorkerId]:
    left = {w: at for at, w in enumerate(names) if w not in missing[anchor]}
    lacks = {w: len(missing[w].intersection(left)) for w in left}
    while (most := max(lacks.values())) > 0:
        dropped = max((w for w in left if lacks[w] == most), key=left.__getitem__)
        del left[dropped], lacks[dropped]
        for other in missing[dropped].intersection(left):
            lacks[other] -= 1
    return frozenset(left)
