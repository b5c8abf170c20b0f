"""The right to decide: an election key in the store, which guards every decision written."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import TransientError
from elastic.store.interface import Guard, Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Leadership:
    """Held while the election key is the one created at `guard.created`."""

    guard: Guard
    incarnation: str
    last_generation: int


async def lead(store: Store, *, job: str, candidate: str) -> Leadership:
    """Take the election key of `job`; raises TransientError if somebody else holds it."""
    key = f"elastic/{job}/leader"
    entry = await store.create(key, candidate.encode())
    if entry is None:
        raise TransientError(f"another coordinator leads the job {job!r}")
    generation = await store.get(generation_key(job))
    return Leadership(
        guard=Guard(key=key, created=entry.created),
        incarnation=candidate,
        last_generation=int(generation.value) if generation is not None else 0,
    )


def generation_key(job: str) -> str:
    """Where the number of the newest generation is kept."""
    return f"elastic/{job}/generation"
