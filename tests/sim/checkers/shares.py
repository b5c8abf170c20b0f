"""P4: a step takes a whole batch; its shares and micro-batches have each sample once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from elastic.core.data_order import SampleRange, loss_weight, micro_batches, share
from tests.sim.journal import Journal


def shares(journal: Journal) -> Iterator[str]:
    loaders = journal.job.loaders()
    for loader, size, world_size, start in {
        (loaders[c.loader], len(c.samples), c.world_size, c.samples.start) for c in journal.commits
    }:
        left = loader.length - start
        full = min(loader.fixed or loader.batch_size * world_size, loader.length)
        if full > 2 and left == full + 1:  # otherwise a single sample would be left
            full -= 1
        if size != min(full, left):
            yield f"a step of {world_size} members has {size} samples, {left} were left"
        yield from _wrong(size, world_size, loader.batch_size)


@cache
def _wrong(size: int, world_size: int, batch_size: int) -> tuple[str, ...]:
    samples = SampleRange(epoch=0, start=100, stop=100 + size)
    seen: list[int] = []
    passed: list[int] = []
    passes: set[int] = set()
    weight = 0.0
    for rank in range(world_size):
        own = share(samples, rank=rank, world_size=world_size, batch_size=batch_size)
        seen += range(own.start, own.stop)
        parts = micro_batches(samples, rank=rank, world_size=world_size, batch_size=batch_size)
        equal = micro_batches(
            samples, rank=rank, world_size=world_size, batch_size=batch_size, equal=True
        )
        passes.add(len(equal))
        stand_ins = sum(not p.weighted for p in parts)
        if stand_ins != (len(own) == 0) or [p for p in equal if p.weighted] != [
            p for p in parts if p.weighted
        ]:
            return (f"{stand_ins} stand-ins beside {len(own)} samples of {size}",)
        passed += (i for p in parts if p.weighted for i in range(p.start, p.stop))
        weight += sum(loss_weight(p, samples, world_size=world_size) for p in parts)
        if any(not 0 < len(p) <= batch_size for p in parts):
            return (f"passes of {[len(p) for p in parts]} samples, of at most {batch_size}",)
        if (batch_size > 2 or size % 2 == 0) and any(len(p) == 1 for p in parts) and size > 1:
            return (f"a single sample in a pass over {size} samples for {world_size}",)
    expected = list(range(100, 100 + size))
    if seen != expected or passed != expected or len(passes) != 1:
        return (f"shares of {size} samples for {world_size}: {seen}, {passed}, {passes} passes",)
    if abs(weight - world_size) > 1e-9:
        return (f"weights of {size} samples for {world_size} sum up to {weight}",)
    return ()
