"""What a worker holds in memory: how far it is, and by which lineage it got there."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from elastic.core.data_order import DataPosition, PerWorkerBatch, SampleRange, advance, next_range

START = DataPosition()


class Job(NamedTuple):
    """The training job: what every script knows."""

    length: int
    batch_size: int
    epochs: int
    save_every: int
    saves: bool = True
    """Checkpoints are saved now and then and at the end, not only when the job stops."""

    @lru_cache(maxsize=1024)  # noqa: B019 - jobs are small, and members ask for the same
    def samples_after(self, position: DataPosition, world_size: int) -> SampleRange | None:
        """The samples of the next step, or None after the last one."""
        policy = PerWorkerBatch(batch_size=self.batch_size)
        samples = next_range(
            position, length=self.length, global_batch=policy.global_batch(world_size)
        )
        return samples if samples.epoch < self.epochs else None


class Replica(NamedTuple):
    """The state; `lineage` is equal for equal histories of committed steps."""

    committed: int = 0
    generation: int = 0
    """The generation of the last committed step."""
    position: DataPosition = START
    lineage: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Of two replicas the one with the higher age has the job's state."""
        return self.generation, self.committed

    def commit(self, generation: int, samples: SampleRange) -> Replica:
        step = (self.lineage, generation, samples.epoch, samples.start, samples.stop)
        return Replica(
            committed=self.committed + 1,
            generation=generation,
            position=advance(self.position, samples),
            lineage=hash(step),
        )

    def complete(self, job: Job) -> bool:
        return job.samples_after(self.position, 1) is None
