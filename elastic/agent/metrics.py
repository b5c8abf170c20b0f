"""Defines the metrics of a node, and fills them in from a snapshot of its agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.core.membership import FailureKind, WorkerPhase
from elastic.runtime.metrics import Catalog, Found

CATALOG = Catalog("Agent, and `elastic run`")
CONNECTED = CATALOG.gauge(
    "elastic_agent_connected",
    "1: a coordinator answers this agent; 0: its workers train on without one.",
    "node",
)
REGISTERED = CATALOG.gauge(
    "elastic_agent_registered",
    "1: etcd has confirmed in time that the node holds its name. `elastic run` does not have it.",
    "node",
)
LOST = CATALOG.counter(
    "elastic_agent_coordinator_losses_total",
    "Times that this agent lost its coordinator, or that the reason changed while it was lost.",
    "node",
)
SLOTS = CATALOG.gauge("elastic_agent_slots", "Workers that the node can run for the job.", "node")
WORKERS = CATALOG.gauge(
    "elastic_agent_workers",
    "Workers of the node, including warm spares, by phase.",
    *("node", "phase"),
)
STARTED = CATALOG.counter("elastic_agent_workers_started_total", "Workers forked.", "node")
NOT_STARTED = CATALOG.counter(
    "elastic_agent_workers_not_started_total", "Workers that could not be forked.", "node"
)
FAILED = CATALOG.counter(
    "elastic_agent_worker_failures_total", "Workers that failed, by kind.", *("node", "kind")
)
ZYGOTES_LOST = CATALOG.counter(
    "elastic_agent_zygote_losses_total", "Times that the process that forks workers ended.", "node"
)
STEP = CATALOG.gauge(
    "elastic_agent_step",
    "Steps that the node's workers have committed. They report this at least when the group "
    "changes.",
    "node",
)

_COUNTERS = {
    LOST: "coordinator_lost",
    STARTED: "worker_started",
    NOT_STARTED: "worker_not_started",
    ZYGOTES_LOST: "zygote_lost",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentFigures:
    """A snapshot of a node, which the thread that serves metrics reads."""

    node: str
    slots: int
    connected: bool
    registered: bool | None = None
    """None where nodes do not register, as in `elastic run`."""
    step: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    """Counts of workers by phase."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Counts of failed workers by kind."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of journal entries by name."""


def collect(found: Found, figures: AgentFigures) -> None:
    node = figures.node
    found.set(CONNECTED, figures.connected, node=node)
    found.set(REGISTERED, figures.registered, node=node)
    found.set(SLOTS, figures.slots, node=node)
    found.set(STEP, figures.step, node=node)
    for phase in WorkerPhase:
        name = phase.name.lower()
        found.set(WORKERS, figures.phases.get(name, 0), node=node, phase=name)
    for kind in FailureKind:
        name = kind.name.lower()
        found.set(FAILED, figures.failures.get(name, 0), node=node, kind=name)
    for metric, entry in _COUNTERS.items():
        found.set(metric, figures.counts.get(entry, 0), node=node)
