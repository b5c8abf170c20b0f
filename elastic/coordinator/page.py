"""Builds what a job's page shows: sections of small parts, so that only changes are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.coordinator.connected_agents import name_of
from elastic.coordinator.history import Departed, HistoryEntry
from elastic.coordinator.metrics import JobFigures
from elastic.coordinator.node_registry import NodeFigures
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import Generation, WorkerId, WorkerPhase, WorkerStatus
from elastic.errors import ExitCode
from elastic.runtime.process_metrics import Document
from elastic.store.job_documents import LeaderDocument
from elastic.version import __version__

Part = dict[str, Any]

MOST_NAMED_WORKERS = 512
"""With more workers, the page omits their names and process ids; `elastic status` has more."""
MOST_NODES = 2000
_MOST_INCIDENTS = 30
_MOST_VALUES = 12
_STANDS_FACTOR, _STANDS_S = 5.0, 3.0  # a step that lasts longer than both is standing
_GONE_SHOWN_S = 3600.0
_LONGEST_PAUSE_TOLD_S = 0.05
_AS_ASKED = (ExitCode.OK, ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_SAME_INSTANT_S = 0.5  # Unix time is computed for each document, and varies a little
_LETTERS = {
    WorkerPhase.STARTING: "S",
    WorkerPhase.SPARE: "W",
    WorkerPhase.PREPARING: "P",
    WorkerPhase.READY: "R",
    WorkerPhase.JOINING: "J",
    WorkerPhase.TRAINING: "T",
    WorkerPhase.FINISHED: "F",
}
_BROKEN = "B"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A snapshot of a job, as its leader knows it; it does not change."""

    at_unix_s: float
    job: str
    run_id: str
    coordinator: str
    """Where the leader listens for agents; empty for `elastic run`."""
    figures: JobFigures
    generation: Generation | None = None
    recovering_since_unix_s: float | None = None
    """When the first sign came of a loss after which no step is committed yet."""
    incidents: Sequence[Mapping[str, Any]] = ()
    """Brief records, oldest first: of losses, hangs and failed saves, while the accounts also have
    every other change of the group."""
    ending: str = ""
    """Why the job has ended."""
    stop_reason: str = ""
    """Why the job is asked to stop."""
    verdict: str = ""
    verdict_unix_s: float = 0.0
    checkpoint_dir: str = ""
    longest_pause_s: float = 0.0
    entries: Sequence[HistoryEntry] = ()
    departed: Mapping[str, Departed] = field(default_factory=dict)


def state_of(view: JobView) -> str:
    """Return the job's state in one word:

    finished, stopped (as somebody asked), ended (with another exit code), stopping, recovering,
    gathering, forming, waiting (below the minimum), starting (no step yet), standing (the step
    lasts suspiciously long), between (steps: the script does something else), running (a script
    written for torchrun), training.
    """
    figures = view.figures
    if figures.exit_code is not None:
        as_asked = "finished" if figures.exit_code == 0 else "stopped"
        return as_asked if figures.exit_code in _AS_ASKED else "ended"
    if figures.phase == JobPhase.DRAINING.value:
        return "stopping"
    if view.recovering_since_unix_s is not None:
        return "recovering"
    if figures.phase != JobPhase.RUNNING.value:
        return figures.phase
    if not figures.counts_steps:
        return "running"
    if not figures.step_usual_s and not figures.totals.last_commit_unix_s:
        return "starting"
    suspicious_s = max(_STANDS_S, _STANDS_FACTOR * figures.step_usual_s)
    if figures.step_elapsed_s > suspicious_s:
        return "standing"
    since_s = view.at_unix_s - figures.totals.last_commit_unix_s
    return "between" if since_s > suspicious_s and not figures.step_elapsed_s else "training"


def standby(job: str, run_id: str, address: str, leader: LeaderDocument | None) -> Document:
    """Return the document of a coordinator that does not lead."""
    head: Part = {
        "job": job,
        "run": run_id,
        "version": __version__,
        "state": "standby",
        "coordinator": address,
        "leader": leader.address if leader is not None else "",
        "leader_page": leader.page if leader is not None else "",
    }
    return {"head": head}


class PageBuilder:
    """Makes documents of views, on any thread, but one at a time."""

    def __init__(self) -> None:
        self._ranks: Mapping[WorkerId, int] = {}
        self._generation: Generation | None = None
        self._rows: dict[str, tuple[NodeFigures, Part]] = {}
        self._instants: dict[int, float] = {}

    def document(self, view: JobView) -> Document:
        """Takes some milliseconds for a thousand nodes."""
        if view.generation is not self._generation:
            self._generation = view.generation
            members = view.generation.members if view.generation is not None else ()
            self._ranks = {m.worker: rank for rank, m in enumerate(members)}
            self._rows = {}
        return {
            "head": _head(view),
            "values": _values(view.figures.values),
            "kinds": {k.value: round(s, 1) for k, s in view.figures.accounts.kinds.items() if s},
            "nodes": self._nodes(view),
            "incidents": self._incidents(view),
            "events": {str(e.number): _event(e) for e in view.entries},
        }

    def _incidents(self, view: JobView) -> Part:
        """The newest incidents: what the accounts and the records have of each, with its phases."""
        counted = {int(i["number"]): i for i in view.figures.accounts.incidents}
        recorded = {int(i["number"]): i for i in view.incidents}
        newest = sorted(counted)[-_MOST_INCIDENTS:]
        found: Part = {}
        for number in newest:
            incident = {**counted[number], **recorded.get(number, {})}
            at_unix_s = self._instants.get(number, 0.0)
            if abs(incident["unix_s"] - at_unix_s) > _SAME_INSTANT_S:
                at_unix_s = incident["unix_s"]
            shown = {
                **incident,
                "unix_s": at_unix_s,
                "nodes": list(incident["nodes"])[:_MOST_VALUES],
                "workers": list(incident["workers"])[:_MOST_VALUES],
                "lost_s": round(incident["lost_s"], 2),
                "seconds": {kind: round(s, 2) for kind, s in incident["seconds"].items()},
                "followed_by": incident.get("followed_by", incident.get("generation", 0)),
            }
            if recovery := shown.pop("recovery", None):
                shown["phases"] = {k: v for k, v in recovery.items() if k.endswith("_s")}
                shown["committed"] = recovery.get("committed")
            found[str(number)] = shown
        self._instants = {n: found[str(n)]["unix_s"] for n in newest}
        return found

    def _nodes(self, view: JobView) -> Part:
        names_workers = sum(len(n.workers) for n in view.figures.nodes) <= MOST_NAMED_WORKERS
        known, rows, found = self._rows, {}, Part()
        for node in view.figures.nodes[:MOST_NODES]:
            if node.node in found and not node.connected:
                continue  # another machine that had the name
            before = known.get(node.node)
            row = before[1] if before is not None and before[0] == node else None
            rows[node.node] = (node, row or self._node(node, names_workers=names_workers))
            found[node.node] = rows[node.node][1]
        self._rows = rows
        for name, gone in view.departed.items():
            is_recent = view.at_unix_s - gone.unix_s < _GONE_SHOWN_S
            if name not in found and is_recent and len(found) < MOST_NODES:
                state = "left" if gone.as_wanted else "lost"
                found[name] = {"state": state, "since": round(gone.unix_s, 1), **self._lost(name)}
        return found

    def _lost(self, name: str) -> Part:
        """The row of a node that is out of contact, or lost: its members may still train."""
        members = self._generation.members if self._generation is not None else ()
        slots = [[m.slot, "?", rank] for rank, m in enumerate(members) if name_of(m.node) == name]
        return {"slots": len(slots), "workers": slots}

    def _node(self, node: NodeFigures, *, names_workers: bool) -> Part:
        row: Part = {"state": node.state, "slots": node.slots}
        if node.host:
            row["host"] = node.host
        if node.reason:
            row["reason"] = node.reason
        if node.failures:
            row["failures"] = node.failures
        if node.longest_pause_s >= _LONGEST_PAUSE_TOLD_S:
            row["pause_s"] = node.longest_pause_s
        row["workers"] = [self._worker(w, names=names_workers) for w in node.workers]
        return row

    def _worker(self, status: WorkerStatus, *, names: bool) -> list[int | str]:
        """Return slot (-1: none), phase, rank (-1: none) and, if wanted, process id and name."""
        number = self._generation.number if self._generation is not None else 0
        is_broken = status.broken and status.generation == number
        slot = status.slot if status.slot is not None else -1
        letter = _BROKEN if is_broken else _LETTERS[status.phase]
        short: list[int | str] = [slot, letter, self._ranks.get(status.worker, -1)]
        return [*short, status.pid, status.worker] if names else short


def _head(view: JobView) -> Part:
    figures = view.figures
    accounts, totals = figures.accounts, figures.totals
    head: Part = {
        "job": view.job,
        "run": view.run_id,
        "version": __version__,
        "state": state_of(view),
        "coordinator": view.coordinator,
        "leads": figures.leads,
        "started": round(figures.started_unix_s, 1),
        "phase": figures.phase,
        "step": figures.step,
        "epoch": figures.epoch,
        "counts_steps": figures.counts_steps,
        "step_s": round(figures.step_usual_s, 6),
        "in_step_s": round(figures.step_elapsed_s, 1),
        "samples_per_s": round(figures.samples_per_s, 1),
        "samples": totals.samples,
        "last_commit": round(totals.last_commit_unix_s, 1),
        "world_size": figures.world_size,
        "wanted": max(figures.wanted, accounts.wanted),
        "minimum": figures.minimum,
        "generation": figures.generation,
        "goodput": round(accounts.goodput, 4) if accounts.goodput is not None else None,
        "slot_s": round(accounts.wall_s, 0),
        "restarts_left": figures.restarts_left,
        "restarts_allowed": figures.restarts_allowed,
        "steps_lost": totals.steps_lost,
        "steps_recomputed": totals.steps_recomputed,
        "saves": figures.saves,
        "checkpoint_step": figures.checkpoint_step,
        "checkpoint_at": round(totals.last_checkpoint_unix_s, 1),
        "checkpoint_dir": view.checkpoint_dir,
        "pause_s": round(view.longest_pause_s, 3),
    }
    optional: Part = {
        "exit_code": figures.exit_code,
        "ending": view.ending or None,
        "stop_reason": view.stop_reason or None,
        "recovering_since": view.recovering_since_unix_s,
        "verdict": view.verdict or None,
        "verdict_at": round(view.verdict_unix_s, 1) or None,
    }
    return head | {name: value for name, value in optional.items() if value is not None}


def _values(values: Mapping[str, float]) -> Part:
    """JSON has no infinity or NaN: they are written as text."""
    first = sorted(values.items())[:_MOST_VALUES]
    return {name[:100]: v if math.isfinite(v) else str(v) for name, v in first}


def _event(entry: HistoryEntry) -> Part:
    found: Part = {
        "at": entry.unix_s,
        "name": entry.name,
        "severity": entry.severity,
        "fields": dict(entry.fields),
    }
    if entry.detail:
        found["detail"] = entry.detail
    return found
