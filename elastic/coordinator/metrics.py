"""The metrics of a job: their catalog, and how they are collected from a snapshot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.coordinator.holdups import SlowRank
from elastic.coordinator.node_registry import NodeFigures
from elastic.coordinator.totals import SLOW_RECOVERY_S, Totals
from elastic.core.book.slot_accounts import Accounts
from elastic.core.coordinator.phases import JobPhase
from elastic.core.histogram import PHASE_BOUNDS_S, Histogram
from elastic.core.membership import ChangeReason, FailureKind, WorkerPhase, WorkerStatus
from elastic.core.stragglers import Part
from elastic.runtime.metrics import Catalog, Found

NODE_STATES = ("ready", "leaving", "unreachable", "drained", "quarantined")
MOST_VALUES = 100
"""The most values of a script, and the most learning rates, that have a metric."""

CATALOG = Catalog("Coordinator, and `elastic run`")
LEADER = CATALOG.gauge(
    "elastic_leader",
    "1: this coordinator leads the job; 0: it stands by. Only the leader serves the metrics of the "
    "job below.",
)
IN_DOUBT = CATALOG.gauge(
    "elastic_leader_in_doubt",
    "1: etcd has not confirmed in time that this coordinator still leads.",
)
PHASE = CATALOG.gauge("elastic_job_phase", "1 for the job's phase, 0 for the others.", "phase")
STARTED = CATALOG.gauge("elastic_job_start_timestamp_seconds", "When the run began.")
RESUMED = CATALOG.gauge(
    "elastic_job_resumed_timestamp_seconds",
    "When nodes last came back to a run that all nodes had left; absent: never.",
)
EXIT_CODE = CATALOG.gauge(
    "elastic_job_exit_code",
    "The exit code of the job; absent before its end. Every coordinator that stays after the end "
    "has it (--after-end serve). Others end some seconds later, so a scrape may miss it; `elastic "
    "jobs` has it, too.",
)
LAST_COMMIT = CATALOG.gauge(
    "elastic_last_commit_timestamp_seconds",
    "When the newest step was committed; it shows every kind of standstill. Absent until this "
    "leader knows of a commit.",
)
COUNTS_STEPS = CATALOG.gauge(
    "elastic_job_counts_steps",
    "1: the script uses the steps of elastic; 0: it was written for torchrun, and elastic does not "
    "know its steps.",
)
STEP = CATALOG.gauge("elastic_step", "Steps committed; a return to a checkpoint lowers it.")
EPOCH = CATALOG.gauge("elastic_epoch", "The epoch of the data, from 0.")
STEP_ELAPSED = CATALOG.gauge(
    "elastic_step_elapsed_seconds",
    "Time in the current step: rank 0's last report and the time since; 0 between steps.",
)
STEP_USUAL = CATALOG.gauge(
    "elastic_step_usual_seconds", "Length of recent steps, exponentially averaged."
)
SAMPLE_RATE = CATALOG.gauge(
    "elastic_samples_per_second", "Samples of the whole group, exponentially averaged."
)
STEP_SECONDS = CATALOG.histogram(
    "elastic_step_duration_seconds",
    "Time from one commit to the next, without the first step of each group.",
)
STEPS = CATALOG.counter(
    "elastic_steps_committed_total", "Steps committed, including those lost later."
)
STEPS_LOST = CATALOG.counter(
    "elastic_steps_lost_total", "Steps committed and lost: the job went back to a checkpoint."
)
STEPS_RECOMPUTED = CATALOG.counter(
    "elastic_steps_recomputed_total", "Steps that restarted because the group was lost in them."
)
STEPS_SLOW = CATALOG.counter(
    "elastic_steps_slow_total", "Steps that took suspiciously long but ended."
)
SAMPLES = CATALOG.counter("elastic_samples_committed_total", "Samples of all committed steps.")
WORLD_SIZE = CATALOG.gauge("elastic_world_size", "Members of the newest group.")
WANTED = CATALOG.gauge(
    "elastic_wanted_world_size",
    "Workers for which the participating nodes have slots, up to the job's limit.",
)
MINIMUM = CATALOG.gauge("elastic_min_world_size", "The fewest workers with which the job trains.")
GENERATION = CATALOG.gauge("elastic_generation", "The number of the newest group.")
GENERATIONS = CATALOG.counter("elastic_generations_total", "Groups formed, by reason.", "reason")
RECOVERY_SECONDS = CATALOG.histogram(
    "elastic_recovery_duration_seconds",
    "Time from the first sign of a loss to the first step committed without what was lost.",
    "reason",
)
RECOVERY_PHASES = CATALOG.histogram(
    "elastic_recovery_phase_duration_seconds",
    "Time of recoveries by phase. `abort` overlaps with others, which add up to the whole.",
    "phase",
)
FAILURES = CATALOG.counter("elastic_worker_failures_total", "Workers that failed, by kind.", "kind")
REFUSALS = CATALOG.counter(
    "elastic_newcomers_refused_total",
    "Times that newcomers were kept out for a while because they failed again and again.",
)
RESTARTS_LEFT = CATALOG.gauge(
    "elastic_restarts_left", "Failures that the budget still allows; one more ends the job."
)
RESTARTS_MOST = CATALOG.gauge(
    "elastic_restarts_allowed", "Failures that the budget allows within the restart window."
)
WORKERS = CATALOG.gauge("elastic_workers", "Workers on the connected nodes, by phase.", "phase")
NODES = CATALOG.gauge("elastic_nodes", "Nodes that are connected or kept out, by state.", "state")
NODE_STATE = CATALOG.gauge(
    "elastic_node_state", "1; the node's state is in the label.", "node", "state"
)
NODE_FAILURES = CATALOG.gauge(
    "elastic_node_failures", "Failures that count against a node; absent: none.", "node"
)
NODE_PAUSE = CATALOG.gauge(
    "elastic_node_loop_longest_pause_seconds",
    "Longest pause of the event loop of a node's agent; absent: none.",
    "node",
)
NODES_LOST = CATALOG.counter("elastic_node_losses_total", "Streams of agents that broke.")
QUARANTINES = CATALOG.counter("elastic_node_quarantines_total", "Nodes put into quarantine.")
DRAINS = CATALOG.counter("elastic_node_drains_total", "Nodes drained by operators.")
ELECTIONS = CATALOG.counter("elastic_elections_total", "Coordinators that were elected.")
DOUBTS = CATALOG.counter(
    "elastic_leader_doubts_total", "Times that etcd did not confirm the leader in time."
)
ROLL_BACKS = CATALOG.counter(
    "elastic_store_roll_backs_total", "Times that etcd was emptied or restored from a backup."
)
ROLL_BACK_TIME = CATALOG.gauge(
    "elastic_store_roll_back_timestamp_seconds",
    "When a leader last found that etcd was emptied or restored from a backup; 0: never.",
)
SLOW_RECOVERY_TIME = CATALOG.gauge(
    "elastic_slow_recovery_timestamp_seconds",
    f"When a recovery of more than {SLOW_RECOVERY_S:g} s last ended; 0: none has.",
)
CHECKPOINT_INTERVAL = CATALOG.gauge(
    "elastic_checkpoint_interval_steps",
    "Steps between two checkpoints; 0: none is due before the end, or the script, which is written "
    "for torchrun, saves by itself.",
)
CHECKPOINT_STEP = CATALOG.gauge(
    "elastic_checkpoint_step", "The step of the newest checkpoint; 0: there is none."
)
CHECKPOINT_TIME = CATALOG.gauge(
    "elastic_checkpoint_timestamp_seconds",
    "When this run last committed a checkpoint; when it began, as long as none is known.",
)
CHECKPOINTS = CATALOG.counter("elastic_checkpoints_total", "Checkpoints committed.")
CHECKPOINT_FAILURES = CATALOG.counter(
    "elastic_checkpoint_failures_total",
    "Saves that were given up: they failed, a member was lost (member_lost), or the job had gone "
    "on from an earlier step (superseded).",
    "reason",
)
CHECKPOINT_BYTES = CATALOG.counter(
    "elastic_checkpoint_bytes_total", "Bytes of the checkpoints committed."
)
CHECKPOINT_STALL = CATALOG.histogram(
    "elastic_checkpoint_stall_duration_seconds",
    "How long the slowest member held up training for a save.",
)
CHECKPOINT_SECONDS = CATALOG.histogram(
    "elastic_checkpoint_duration_seconds", "Time from the step boundary of a save to its commit."
)
DIFFERED = CATALOG.counter(
    "elastic_state_differences_total", "Members found with another state than the majority."
)
LEDGER_FAILURES = CATALOG.counter(
    "elastic_ledger_failures_total", "Times that the ledger could not be written from some step on."
)
GOODPUT = CATALOG.gauge(
    "elastic_goodput_ratio",
    "The share of the run's time, slot by slot, that went into steps that count.",
)
WANTED_SLOTS = CATALOG.gauge(
    "elastic_wanted_slots",
    "Slots whose time counts: the most that there were at once, up to the job's limit.",
)
SLOT_SECONDS = CATALOG.counter(
    "elastic_slot_seconds_total",
    "Time of wanted slots by what it went into; `productive` is steps that count. A step is added "
    "when it ends.",
    "kind",
)
LOST_SECONDS = CATALOG.counter(
    "elastic_slot_seconds_lost_total",
    "All time but `productive`, by the node that caused it; empty: no node did.",
    "node",
)
STRAGGLER_RATIO = CATALOG.gauge(
    "elastic_straggler_ratio",
    "The share of recent steps by which the slowest rank held up the others, even if it does not "
    "persist.",
)
STRAGGLER = CATALOG.gauge(
    "elastic_straggler",
    "The share of each step by which a slow rank held up the others when it was named; `kind` says "
    "in what it is slow. Absent: no rank is slow.",
    *("node", "slot", "kind"),
)
STRAGGLERS = CATALOG.counter(
    "elastic_stragglers_total", "Ranks named as slow, by what is slow.", "kind"
)
VALUE = CATALOG.gauge(
    "elastic_script_value",
    f"The last values that rank 0's script gave to `step.report`: the first {MOST_VALUES} names, "
    "only finite numbers.",
    "name",
)
NOT_FINITE = CATALOG.gauge(
    "elastic_script_value_not_finite",
    "1: the last value of this name is NaN or infinite. Absent: it is a number.",
    "name",
)
LEARNING_RATE = CATALOG.gauge(
    "elastic_learning_rate",
    "The rate of a tracked optimizer, by the name under which the script tracks it, and by the "
    "index of the parameter group if it has several.",
    "name",
)
GLOBAL_BATCH = CATALOG.gauge(
    "elastic_global_batch_samples", "Samples of the whole group in the newest step."
)

_COUNTERS = {  # the journal entry that each counts
    NODES_LOST: "node_lost",
    QUARANTINES: "node_quarantined",
    DRAINS: "node_drained",
    ELECTIONS: "elected",
    DOUBTS: "leadership_in_doubt",
    ROLL_BACKS: "store_rolled_back",
    STEPS_SLOW: "step_was_slow",
    REFUSALS: "newcomers_refused",
    CHECKPOINTS: "checkpoint_committed",
    DIFFERED: "state_differed",
    LEDGER_FAILURES: "ledger_failed",
}
_REASONS = tuple(reason.name.lower() for reason in ChangeReason)
_KINDS = tuple(kind.name.lower() for kind in FailureKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFigures:
    """A snapshot of a job, as its leader knows it; it does not change."""

    phase: str
    totals: Totals
    """A copy."""
    accounts: Accounts = field(default_factory=Accounts)
    leads: bool = True
    started_unix_s: float = 0.0
    exit_code: int | None = None
    counts_steps: bool = True
    step: int = 0
    epoch: int = 0
    step_elapsed_s: float = 0.0
    step_usual_s: float = 0.0
    samples_per_s: float = 0.0
    world_size: int = 0
    wanted: int = 0
    minimum: int = 1
    generation: int = 0
    restarts_left: int = 0
    restarts_allowed: int = 0
    nodes: tuple[NodeFigures, ...] = ()
    workers: tuple[tuple[WorkerStatus, ...], ...] = ()
    """Workers of each connected node; they are counted off the event loop."""
    saves: bool = False
    checkpoint_every: int = 0
    checkpoint_step: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    global_batch: int = 0
    slow_ranks: tuple[SlowRank, ...] = ()
    straggler_ratio: float = 0.0


def collect(found: Found, figures: JobFigures | None, exit_code: int | None = None) -> None:
    """Add what is known of the job to `found`.

    figures None: this coordinator stands by. exit_code: the run's if it has ended elsewhere.
    """
    found.set(LEADER, figures is not None)
    if figures is None:
        found.set(EXIT_CODE, exit_code)
        return
    found.set(IN_DOUBT, not figures.leads)
    found.set_each(PHASE, "phase", {p.value: p.value == figures.phase for p in JobPhase})
    found.set(STARTED, figures.started_unix_s)
    found.set(RESUMED, figures.totals.resumed_unix_s or None)
    found.set(EXIT_CODE, figures.exit_code)
    _progress(found, figures)
    _group(found, figures)
    _nodes(found, figures)
    _totals(found, figures.totals)
    _accounts(found, figures.accounts)
    _stragglers(found, figures)
    if figures.saves:
        found.set(CHECKPOINT_STEP, figures.checkpoint_step)
        found.set(CHECKPOINT_INTERVAL, figures.checkpoint_every)
        # A leader after one that lost the store knows of no earlier checkpoint. Without a value an
        # alert would wait for the first one.
        newest_unix_s = figures.totals.last_checkpoint_unix_s or figures.started_unix_s
        found.set(CHECKPOINT_TIME, newest_unix_s or None)
        found.buckets(CHECKPOINT_STALL, figures.totals.save_stalls)
        found.buckets(CHECKPOINT_SECONDS, figures.totals.saves)


def _progress(found: Found, figures: JobFigures) -> None:
    found.set(LAST_COMMIT, figures.totals.last_commit_unix_s or None)
    found.set(COUNTS_STEPS, figures.counts_steps)
    found.set(STEP, figures.step)
    found.set(EPOCH, figures.epoch)
    found.set(STEP_ELAPSED, figures.step_elapsed_s)
    found.set(STEP_USUAL, figures.step_usual_s or None)
    found.set(SAMPLE_RATE, figures.samples_per_s)
    finite = {name: v for name, v in sorted(figures.values.items()) if math.isfinite(v)}
    for name in list(finite)[:MOST_VALUES]:
        found.set(VALUE, finite[name], name=name)
    for name in figures.not_finite:
        found.set(NOT_FINITE, 1.0, name=name)
    for name, rate in sorted(figures.learning_rates.items())[:MOST_VALUES]:
        found.set(LEARNING_RATE, rate, name=name)
    found.set(GLOBAL_BATCH, figures.global_batch or None)


def _group(found: Found, figures: JobFigures) -> None:
    found.set(WORLD_SIZE, figures.world_size)
    found.set(WANTED, figures.wanted)
    found.set(MINIMUM, figures.minimum)
    found.set(GENERATION, figures.generation)
    found.set(RESTARTS_LEFT, figures.restarts_left)
    found.set(RESTARTS_MOST, figures.restarts_allowed)


def _nodes(found: Found, figures: JobFigures) -> None:
    phases = Counter(status.phase for workers in figures.workers for status in workers)
    found.set_each(WORKERS, "phase", {p.name.lower(): phases[p] for p in WorkerPhase})
    states = dict.fromkeys(NODE_STATES, 0)
    for node in figures.nodes:
        states[node.state] = states.get(node.state, 0) + 1
    found.set_each(NODES, "state", states)
    for node in {(n.node, n.state): n for n in figures.nodes}.values():  # machines may share names
        found.set(NODE_STATE, 1.0, node=node.node, state=node.state)
    for node in {n.node: n for n in figures.nodes}.values():
        found.set(NODE_FAILURES, node.failures or None, node=node.node)
        found.set(NODE_PAUSE, node.longest_pause_s or None, node=node.node)


def _accounts(found: Found, accounts: Accounts) -> None:
    found.set(GOODPUT, accounts.goodput)
    found.set(WANTED_SLOTS, accounts.wanted)
    found.set_each(SLOT_SECONDS, "kind", {k.value: s for k, s in accounts.settled.items()})
    for node, lost in sorted(accounts.nodes.items()):
        found.set(LOST_SECONDS, sum(lost.values()), node=node)


def _stragglers(found: Found, figures: JobFigures) -> None:
    found.set(STRAGGLER_RATIO, figures.straggler_ratio)
    slow = {(s.node, str(s.slot), s.found.part.value): s for s in figures.slow_ranks}
    for (node, slot, kind), rank in slow.items():  # machines may share names
        found.set(STRAGGLER, rank.found.share, node=node, slot=slot, kind=kind)
    for part in Part:
        count = figures.totals.events.get(("straggler", part.value), 0)
        found.set(STRAGGLERS, count, kind=part.value)


def _totals(found: Found, totals: Totals) -> None:
    found.buckets(STEP_SECONDS, totals.steps)
    found.set(STEPS, totals.steps_committed)
    found.set(STEPS_LOST, totals.steps_lost)
    found.set(STEPS_RECOMPUTED, totals.steps_recomputed)
    found.set(SAMPLES, totals.samples)
    found.set(CHECKPOINT_BYTES, totals.checkpoint_bytes)
    found.set(ROLL_BACK_TIME, totals.last_roll_back_unix_s)
    found.set(SLOW_RECOVERY_TIME, totals.last_slow_recovery_unix_s)
    for metric, entry in _COUNTERS.items():
        found.set(metric, totals.events.get((entry, ""), 0))
    for reason in _REASONS:
        found.set(GENERATIONS, totals.events.get(("generation_formed", reason), 0), reason=reason)
    for kind in _KINDS:
        found.set(FAILURES, totals.events.get(("worker_failed", kind), 0), kind=kind)
    for reason in ("failed", "member_lost", "superseded"):
        count = totals.events.get(("checkpoint_abandoned", reason), 0)
        found.set(CHECKPOINT_FAILURES, count, reason=reason)
    none = Histogram(PHASE_BOUNDS_S)  # exported from the start: `increase` sees the first one
    for reason in sorted({*_REASONS, *totals.recoveries}):
        found.buckets(RECOVERY_SECONDS, totals.recoveries.get(reason, none), reason=reason)
    for phase, durations in totals.phases.items():
        found.buckets(RECOVERY_PHASES, durations, phase=phase)
