"""A coordinator's snapshot becomes metrics."""

from __future__ import annotations

import math

from elastic.agent import metrics as agent
from elastic.coordinator import metrics
from elastic.coordinator.holdups import SlowRank
from elastic.coordinator.metrics import CATALOG, JobFigures, collect
from elastic.coordinator.node_registry import NodeFigures
from elastic.coordinator.totals import Totals
from elastic.core.book.accounting import Kind
from elastic.core.book.slot_accounts import Accounts
from elastic.core.membership import WorkerPhase
from elastic.core.stragglers import Part, Straggler
from elastic.runtime.http_pages import write
from elastic.runtime.metrics import Found, Metric
from tests.unit.coordinator.agents import worker
from tests.unit.coordinator.test_totals import some, tell

NO_TIME = dict.fromkeys(Kind, 0.0)
WORKERS = (
    (worker("a", WorkerPhase.TRAINING), worker("b", WorkerPhase.TRAINING)),
    (worker("c", WorkerPhase.TRAINING),),
)
ACCOUNTS = Accounts(
    kinds={**NO_TIME, Kind.PRODUCTIVE: 30.0, Kind.HANG: 10.0},
    settled={**NO_TIME, Kind.PRODUCTIVE: 25.0, Kind.HANG: 10.0},
    nodes={"a": {Kind.HANG: 10.0}},
    wall_s=40.0,
    wanted=2,
)

SLOW = SlowRank(
    found=Straggler(worker="b", rank=1, part=Part.DATA, late_s=0.025, step_s=0.1, since=8, at=24),
    node="a",
    slot=1,
)


def found(figures: JobFigures | None) -> Found:
    found = Found(job="digits")
    collect(found, figures)
    return found


def value(found: Found, metric: Metric, **labels: str) -> float | None:
    for sample in found.samples.get(metric, ()):
        if sample.labels == {"job": "digits", **labels}:
            return sample.value
    return None


def figures(totals: Totals | None = None, **fields: object) -> JobFigures:
    return JobFigures(
        phase="running",
        totals=(totals if totals is not None else some()).copy(),
        **fields,  # type: ignore[arg-type]
    )


def test_a_standby_exports_that_it_does_not_lead_and_how_the_run_has_ended() -> None:
    assert list(found(None).samples) == [metrics.LEADER]
    assert value(found(None), metrics.LEADER) == 0
    after = Found(job="digits")
    collect(after, None, exit_code=82)
    assert value(after, metrics.EXIT_CODE) == 82


def test_a_leader_exports_the_state_of_the_job() -> None:
    nodes = (
        NodeFigures(node="a", state="ready"),
        NodeFigures(node="b", state="quarantined", failures=3, longest_pause_s=0.5),
    )
    job = found(figures(nodes=nodes, restarts_left=7, workers=WORKERS, step=6))
    assert value(job, metrics.LEADER) == 1
    assert value(job, metrics.PHASE, phase="running") == 1
    assert value(job, metrics.PHASE, phase="waiting") == 0
    assert value(job, metrics.LAST_COMMIT) == 101.0
    assert value(job, metrics.STEPS) == 6
    assert value(job, metrics.FAILURES, kind="signal") == 1
    assert value(job, metrics.FAILURES, kind="exception") == 0, "from the start on"
    assert value(job, metrics.NODES, state="ready") == 1
    assert value(job, metrics.NODES, state="drained") == 0
    assert value(job, metrics.NODE_STATE, node="b", state="quarantined") == 1
    assert value(job, metrics.NODE_FAILURES, node="b") == 3
    assert value(job, metrics.NODE_FAILURES, node="a") is None
    assert value(job, metrics.WORKERS, phase="training") == 3
    assert value(job, metrics.WORKERS, phase="spare") == 0
    assert value(job, metrics.RESTARTS_LEFT) == 7
    assert value(job, metrics.EXIT_CODE) is None
    assert value(found(figures(exit_code=82)), metrics.EXIT_CODE) == 82


def test_time_is_exported_by_kind_and_lost_time_by_node() -> None:
    job = found(figures(accounts=ACCOUNTS))
    assert value(job, metrics.GOODPUT) == 0.75
    assert value(job, metrics.WANTED_SLOTS) == 2
    assert value(job, metrics.SLOT_SECONDS, kind="productive") == 25.0, "of steps that are over"
    assert value(job, metrics.SLOT_SECONDS, kind="hang") == 10.0
    assert value(job, metrics.SLOT_SECONDS, kind="join") == 0.0, "from the start on"
    assert value(job, metrics.LOST_SECONDS, node="a") == 10.0


def test_values_that_are_not_finite_and_learning_rates_are_exported() -> None:
    job = found(
        figures(values={"loss": math.nan}, not_finite=("loss",), learning_rates={"sgd/1": 0.1})
    )
    assert value(job, metrics.NOT_FINITE, name="loss") == 1
    assert value(job, metrics.LEARNING_RATE, name="sgd/1") == 0.1
    assert value(job, metrics.GLOBAL_BATCH) is None, "before the first step"


def test_slow_ranks_are_exported_by_slot_and_by_what_they_are_slow_in() -> None:
    totals = some()
    tell(totals, "straggler", slow_in="data")
    job = found(figures(totals, slow_ranks=(SLOW,), straggler_ratio=0.125))
    assert value(job, metrics.STRAGGLER, node="a", slot="1", kind="data") == 0.25
    assert value(job, metrics.STRAGGLER_RATIO) == 0.125
    assert value(job, metrics.STRAGGLERS, kind="data") == 1
    assert value(job, metrics.STRAGGLERS, kind="compute") == 0, "from the start on"


def test_the_time_of_the_last_commit_is_missing_before_the_first_commit() -> None:
    job = found(figures(Totals()))
    assert value(job, metrics.LAST_COMMIT) is None
    assert value(job, metrics.STEPS) == 0


def test_only_a_job_with_checkpoints_exports_metrics_of_them() -> None:
    assert value(found(figures()), metrics.CHECKPOINT_STEP) is None
    assert value(found(figures()), metrics.CHECKPOINT_INTERVAL) is None
    job = found(figures(saves=True, checkpoint_step=5, checkpoint_every=20))
    assert (value(job, metrics.CHECKPOINT_STEP), value(job, metrics.CHECKPOINT_TIME)) == (5, 50.0)
    assert value(job, metrics.CHECKPOINT_INTERVAL) == 20
    before = found(figures(Totals(), saves=True, started_unix_s=7.0))
    assert value(before, metrics.CHECKPOINT_TIME) == 7.0, "so that a lack of saves is noticed"
    assert value(before, metrics.ROLL_BACK_TIME) == 0.0
    totals = Totals()
    totals.last_roll_back_unix_s = 9.0
    assert value(found(figures(totals)), metrics.ROLL_BACK_TIME) == 9.0


def test_a_limited_number_of_a_scripts_finite_values_is_exported() -> None:
    values = {f"v{n:05}": float(n) for n in range(10_000)}
    job = found(figures(values={**values, "a": math.nan, "b": math.inf, "loss": 0.5}))
    assert value(job, metrics.VALUE, name="loss") == 0.5
    assert value(job, metrics.VALUE, name="a") is None
    assert len(job.samples[metrics.VALUE]) == metrics.MOST_VALUES


def test_a_snapshot_does_not_change_with_later_events() -> None:
    totals = some()
    before = figures(totals)
    text = write(found(before)).body
    tell(totals, "worker_failed", kind="signal")
    totals.steps.observe(1.0)
    assert write(found(before)).body == text
    assert write(found(figures(totals))).body != text


def test_every_defined_metric_is_found_in_some_snapshot() -> None:
    node = NodeFigures(node="a", state="ready", failures=1, longest_pause_s=0.1)
    totals = some()
    totals.resumed_unix_s = 9.0
    all_of_it = figures(
        totals,
        nodes=(node,),
        saves=True,
        exit_code=0,
        step_usual_s=0.1,
        values={"loss": 1.0},
        accounts=ACCOUNTS,
        slow_ranks=(SLOW,),
        not_finite=("loss",),
        learning_rates={"optimizer": 0.1},
        global_batch=64,
    )
    assert set(found(all_of_it).samples) == set(CATALOG.metrics)
    of_agent = Found(job="digits")
    agent.collect(of_agent, agent.AgentFigures(node="a", slots=1, connected=True, registered=True))
    assert set(of_agent.samples) == set(agent.CATALOG.metrics)


def test_machines_that_have_had_one_node_name_share_its_metrics() -> None:
    out = NodeFigures(node="a", state="drained", failures=1)
    job = found(figures(nodes=(out, out, NodeFigures(node="a", state="ready", failures=2))))
    assert value(job, metrics.NODES, state="drained") == 2
    assert len(job.samples[metrics.NODE_STATE]) == 2
    assert value(job, metrics.NODE_FAILURES, node="a") == 2


def test_a_scrape_of_a_thousand_nodes_is_bounded() -> None:
    nodes = tuple(
        NodeFigures(node=f"node-{n:04}.cluster.example", state="ready", failures=1)
        for n in range(1000)
    )
    assert len(write(found(figures(nodes=nodes))).body) < 2_000_000
