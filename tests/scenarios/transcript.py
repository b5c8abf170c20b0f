"""Render a simulated history as text: the events that the machines handle and their effects."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.core.agent import effects as agent_effects
from elastic.core.coordinator import effects as coordinator_effects
from elastic.core.membership import Failure, Generation, WorkerStatus
from tests.sim.checkers import violations
from tests.sim.clock import SteadyClock
from tests.sim.plan import Plan
from tests.sim.world import World

_UNINTERESTING = (
    agent_effects.SetTimer,
    agent_effects.ReportNode,
    coordinator_effects.SetTimer,
)


def transcript(plan: Plan) -> str:
    """List each event with the effects that follow from it; omit events without such effects."""
    lines: list[str] = []

    def observe(now: float, who: str, event: Any, effects: Sequence[Any]) -> None:
        lines.extend(_lines(now, who, event, effects))

    journal = World(plan, clock=SteadyClock(), observer=observe).run()
    wrong = [v for v in violations(journal) if not v.startswith("liveness: the job is failed")]
    assert not wrong, wrong
    return "\n".join(lines) + "\n"


def _lines(now: float, who: str, event: Any, effects: Sequence[Any]) -> Iterator[str]:
    wanted = [e for e in effects if not isinstance(e, _UNINTERESTING)]
    if wanted:
        yield f"{now:7.3f} {who}: {_words(event)}"
        yield from (f"            -> {_words(effect)}" for effect in wanted)


def _words(message: Any) -> str:
    fields = (_field(f.name, getattr(message, f.name)) for f in dataclasses.fields(message))
    return " ".join([type(message).__name__, *filter(None, fields)])


def _field(name: str, value: Any) -> str:
    match value:
        case None | "" | () | float():
            return ""
        case Generation():
            return _generation(value)
        case Failure():
            return f"{value.worker} {value.kind.name} {value.signature!r}"
        case enum.Enum():
            return value.name
        case WorkerStatus():
            return _status(value)
        case (Generation(), *_):
            return f"beside {', '.join(str(g.number) for g in value)}"
        case (WorkerStatus(), *_):
            return "[" + ", ".join(_status(s) for s in value) + "]"
        case tuple():
            return "[" + ", ".join(map(str, value)) + "]"
        case str():
            return value
        case _:
            return f"{name}={value}"


def _generation(generation: Generation) -> str:
    members = ", ".join(m.worker for m in generation.members)
    after = "" if generation.leave_after is None else f" after step {generation.leave_after}"
    purpose = f"{generation.purpose.name} {generation.reason.name}"
    form = " provisional" if generation.provisional else ""
    return f"{generation.number}{form} {purpose} [{members}]{after}"


def _status(status: WorkerStatus) -> str:
    generation = f" {generation}" if (generation := status.generation) else ""
    broken = " broken" if status.broken else ""
    committed = f" @{status.committed}" if status.committed else ""
    return f"{status.worker} {status.phase.name}{generation}{broken}{committed}"
