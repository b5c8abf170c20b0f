"""Checks what must be true of every history, with one checker for each promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.sim.checkers.agents import agents
from tests.sim.checkers.control_plane import control_plane
from tests.sim.checkers.drains import drains
from tests.sim.checkers.every_sample_once import every_sample_once
from tests.sim.checkers.liveness import liveness
from tests.sim.checkers.membership import membership
from tests.sim.checkers.newcomers import newcomers
from tests.sim.checkers.no_step_lost import no_step_lost
from tests.sim.checkers.one_lineage import one_lineage
from tests.sim.checkers.planned_changes import planned_changes
from tests.sim.checkers.promptness import promptness
from tests.sim.checkers.same_state import same_state
from tests.sim.checkers.saves import saves
from tests.sim.checkers.shares import shares
from tests.sim.checkers.slow_steps import slow_steps
from tests.sim.checkers.stopping import stopping
from tests.sim.checkers.stranding import stranding
from tests.sim.journal import Journal

Checker = Callable[[Journal], Iterator[str]]

CHECKERS: tuple[Checker, ...] = (
    liveness,
    one_lineage,
    same_state,
    no_step_lost,
    planned_changes,
    every_sample_once,
    stopping,
    drains,
    control_plane,
    membership,
    promptness,
    saves,
    shares,
    newcomers,
    slow_steps,
    stranding,
    agents,
)


def violations(journal: Journal) -> list[str]:
    """Return the violations in a history, each with the name of its checker."""
    return [f"{check.__name__}: {what}" for check in CHECKERS for what in check(journal)]
