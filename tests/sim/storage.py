"""The simulated checkpoint directory: shards, and manifests that make them visible."""

from __future__ import annotations

from collections import defaultdict

from elastic.core.membership import Generation
from tests.sim.replica import Replica


class Storage:
    """Shards and committed checkpoints, which outlive every process."""

    def __init__(self) -> None:
        self._shards: dict[tuple[int, int], Replica] = {}
        self._parts: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._whole: set[tuple[int, int]] = set()
        self.committed: list[Replica] = []
        self.torn: list[str] = []
        """Violations: shards of one step that differ, or that are missing at the commit."""

    @property
    def newest(self) -> Replica:
        """The newest committed checkpoint; the blank state if there is none."""
        return self.committed[-1] if self.committed else Replica()

    def put_shard(self, generation: Generation, rank: int, replica: Replica) -> None:
        key = (generation.number, replica.committed)
        self._parts[key].add(rank)
        if len(self._parts[key]) == generation.world_size:
            self._whole.add(key)
        if self._shards.setdefault(key, replica) != replica:
            self.torn.append(f"shards of step {replica.committed} of {generation.number} differ")

    def commit(self, generation: int, step: int) -> None:
        if (generation, step) not in self._whole:
            self.torn.append(f"a part of step {step} of {generation} is missing")
        replica = self._shards[generation, step]
        if replica.age > self.newest.age:
            self.committed.append(replica)
