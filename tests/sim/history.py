"""Runs the history of one seed and judges it."""

from __future__ import annotations

from tests.sim.checkers import violations
from tests.sim.draw import plan
from tests.sim.world import Parts, World


def check(seed: int, parts: Parts | None = None, stress: str = "") -> list[str]:
    """Return the violations in the history of `seed`. `stress` names the only kind of faults."""
    world = World(plan(seed, stress), parts)
    found = violations(world.run())
    world.take_apart()
    return found


def fingerprint(seed: int) -> str:
    """Equal for equal histories."""
    return World(plan(seed)).run().fingerprint()
