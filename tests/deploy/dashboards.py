"""Writes deploy/grafana: `python -m tests.deploy.dashboards`; the freshness test uses it, too.

Expressions use metrics only, no recording rules: the Prometheus that a Grafana reads may have
loaded no rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TARGET = Path(__file__).parent.parent.parent / "deploy" / "grafana"
_WIDTH = 24  # columns of Grafana's grid
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_WRITTEN = {
    "{job": '{job="$job"',
    "{node": '{job="$job",node=~"$node"',
    "{instance": '{job="$job",instance=~"$instance"',
    "[rate]": "[$__rate_interval]",
}
"""Abbreviations in the expressions below, and their full text."""

Query = tuple[str, str]
"""An expression, and the legend of its series."""
Panel = stat.Panel | timeseries.Panel | table.Panel


def documents() -> dict[str, str]:
    """Return every file of deploy/grafana, by name."""
    made = (_job(), _nodes(), _control_plane())
    for board in made:
        for number, panel in enumerate(board.panels or (), start=1):
            panel.id_val = number
    return {
        f"{board.uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n"
        for board in made
    }


# ---- the dashboards


def _job() -> models.Dashboard:
    board = _board("job", "Whether the job trains, how fast, what time was lost, and why.")
    _row(
        board,
        "Is it training?",
        _stat(
            "Since the last commit",
            "time() - max(elastic_last_commit_timestamp_seconds{job})",
            unit="s",
            worse_from=(60, 600),
            about="It grows while the job stands still, whatever the cause.",
        ),
        _stat(
            "Phase",
            "max by (phase) (elastic_job_phase{job}) == 1",
            legend="{{phase}}",
            shows_name=True,
        ),
        _stat("Workers", "max(elastic_world_size{job})"),
        _stat(
            "Workers missing",
            "max(elastic_wanted_world_size{job}) - max(elastic_world_size{job})",
            worse_from=(1, None),
            about="Workers that the participating nodes have slots for but that do not train.",
        ),
        _stat(
            "Goodput of the run",
            "max(elastic_goodput_ratio{job})",
            unit="percentunit",
            better_from=(0.8, 0.95),
        ),
        _stat(
            "Restarts left",
            "max(elastic_restarts_left{job} / (elastic_restarts_allowed{job} > 0))",
            unit="percentunit",
            better_from=(0.25, 0.5),
            about="Share of the failures that the budget allows within the restart window.",
        ),
        _stat(
            "Since the last checkpoint",
            "time() - max(elastic_checkpoint_timestamp_seconds{job})",
            unit="s",
            worse_from=(3600, 7200),
            none="no checkpoints",
            about="Since the start of the run, as long as no checkpoint of it is known.",
        ),
        _stat(
            "Exit code",
            "max(elastic_job_exit_code{job})",
            worse_from=(None, 1),
            none="running",
        ),
    )
    _row(
        board,
        "Speed",
        _curves(
            "Step time",
            *_quantiles("elastic_step_duration_seconds"),
            ("max(elastic_step_usual_seconds{job})", "usual"),
            unit="s",
        ),
        _curves(
            "Current step",
            ("max(elastic_step_elapsed_seconds{job})", "elapsed"),
            unit="s",
            about="It grows while a step hangs, and is 0 between steps.",
        ),
        _curves(
            "Workers",
            ("max(elastic_world_size{job})", "members"),
            ("max(elastic_wanted_world_size{job})", "wanted"),
            ("max(elastic_min_world_size{job})", "minimum"),
        ),
        _curves(
            "Samples per second",
            ("sum(rate(elastic_samples_committed_total{job}[rate]))", "committed"),
        ),
        _curves(
            "Steps per second",
            ("sum(rate(elastic_steps_committed_total{job}[rate]))", "committed"),
            ("sum(rate(elastic_steps_lost_total{job}[rate]))", "lost"),
            ("sum(rate(elastic_steps_recomputed_total{job}[rate]))", "computed again"),
            ("sum(rate(elastic_steps_slow_total{job}[rate]))", "slow"),
        ),
        _curves(
            "Step and epoch",
            ("max(elastic_step{job})", "step"),
            ("max(elastic_epoch{job})", "epoch"),
        ),
    )
    of_all = " / on () group_left () (sum(rate(elastic_slot_seconds_total{job}[rate])) > 0)"
    _row(
        board,
        "Where the time goes",
        _curves(
            "Goodput",
            (
                'sum by (kind) (rate(elastic_slot_seconds_total{job,kind="productive"}[rate]))'
                + of_all,
                "of this interval",
            ),
            ("max(elastic_goodput_ratio{job})", "of the run"),
            unit="percentunit",
        ),
        _curves(
            "Badput by kind",
            (
                'sum by (kind) (rate(elastic_slot_seconds_total{job,kind!="productive"}[rate]))'
                + of_all,
                "{{kind}}",
            ),
            unit="percentunit",
            stacked=True,
            about="Shares of the time of all wanted slots; docs/GUIDE.md says what each kind is.",
        ),
        _curves(
            "Slots lost by node",
            _sum("node", "rate(elastic_slot_seconds_lost_total{job}[rate])"),
            stacked=True,
            about="By the node that caused the loss; without a name: no node did.",
        ),
    )
    _row(
        board,
        "Recoveries",
        _curves(
            "Groups formed",
            _sum("reason", "increase(elastic_generations_total{job}[rate])"),
            bars=True,
        ),
        _curves(
            "Recoveries by reason",
            (
                "sum by (reason) (increase(elastic_recovery_duration_seconds_count{job}[rate])) > 0",
                "{{reason}}",
            ),
            bars=True,
        ),
        _curves(
            "Mean recovery by reason",
            (_mean("elastic_recovery_duration_seconds", by="reason"), "{{reason}}"),
            unit="s",
            points=True,
        ),
        _curves(
            "Mean recovery by phase",
            (_mean("elastic_recovery_phase_duration_seconds", by="phase"), "{{phase}}"),
            unit="s",
            points=True,
            about="abort overlaps with the other phases, which add up to the whole.",
        ),
        _curves(
            "Workers that failed",
            (
                "sum by (kind) (increase(elastic_worker_failures_total{job}[rate])) > 0",
                "{{kind}}",
            ),
            bars=True,
        ),
        _curves(
            "Restart budget",
            ("max(elastic_restarts_left{job})", "left"),
            ("max(elastic_restarts_allowed{job})", "allowed"),
        ),
    )
    _row(
        board,
        "Slow ranks",
        _curves(
            "Ranks named as slow",
            (
                "max by (node, slot, kind) (elastic_straggler{job})",
                "{{node}}, slot {{slot}}: {{kind}}",
            ),
            unit="percentunit",
            points=True,
            about="The share of each step by which the rank holds up the others, and what it is slow in.",
        ),
        _curves(
            "Slowest rank, even if only briefly",
            ("max(elastic_straggler_ratio{job})", "share of a step"),
            unit="percentunit",
        ),
        _curves(
            "Ranks named as slow, by kind",
            _sum("kind", "increase(elastic_stragglers_total{job}[rate])"),
            bars=True,
        ),
    )
    _row(
        board,
        "Checkpoints",
        _curves(
            "Age of the newest checkpoint",
            ("time() - max(elastic_checkpoint_timestamp_seconds{job})", "newest"),
            unit="s",
        ),
        _curves(
            "Steps since the newest checkpoint",
            ("max(elastic_step{job}) - max(elastic_checkpoint_step{job})", "steps"),
        ),
        _curves(
            "Saves",
            ("sum(increase(elastic_checkpoints_total{job}[rate]))", "committed"),
            ("sum(increase(elastic_checkpoint_failures_total{job}[rate]))", "given up"),
            bars=True,
        ),
        _curves(
            "Training held up by a save",
            *_quantiles("elastic_checkpoint_stall_duration_seconds"),
            unit="s",
            points=True,
        ),
        _curves(
            "Time of a save, from step boundary to commit",
            *_quantiles("elastic_checkpoint_duration_seconds"),
            unit="s",
            points=True,
        ),
        _curves(
            "Bytes written",
            ("sum(rate(elastic_checkpoint_bytes_total{job}[rate]))", "checkpoints"),
            unit="Bps",
        ),
    )
    _row(
        board,
        "The script",
        _curves(
            "Values of step.report",
            _max("name", "elastic_script_value{job}"),
        ),
        _curves(
            "NaN or infinite",
            _max("name", "elastic_script_value_not_finite{job}"),
            points=True,
        ),
        _curves(
            "Learning rate",
            _max("name", "elastic_learning_rate{job}"),
        ),
        _curves(
            "Global batch",
            ("max(elastic_global_batch_samples{job})", "samples per step"),
        ),
    )
    return board.build()


def _nodes() -> models.Dashboard:
    board = _board("nodes", "Which machine causes trouble.", node="elastic_node_state")
    _row(
        board,
        "All nodes",
        _curves(
            "Nodes by state",
            _max("state", "elastic_nodes{job}"),
            stacked=True,
        ),
        _curves(
            "Workers by phase",
            _max("phase", "elastic_workers{job}"),
            stacked=True,
        ),
        _curves(
            "Nodes lost, quarantined, drained",
            ("sum(increase(elastic_node_losses_total{job}[rate]))", "agents lost"),
            ("sum(increase(elastic_node_quarantines_total{job}[rate]))", "quarantined"),
            ("sum(increase(elastic_node_drains_total{job}[rate]))", "drained"),
            bars=True,
        ),
    )
    _row(
        board,
        "Each node, as the leader knows it",
        _table(
            "State",
            "max by (node, state) (elastic_node_state{node})",
        ),
        _curves(
            "Failures that count against it",
            _max("node", "elastic_node_failures{node}"),
        ),
        _curves(
            "Slots lost because of it",
            _sum("node", "rate(elastic_slot_seconds_lost_total{node}[rate])"),
            stacked=True,
        ),
        _curves(
            "Its slow slots",
            (
                "max by (node, slot, kind) (elastic_straggler{node})",
                "{{node}}, slot {{slot}}: {{kind}}",
            ),
            unit="percentunit",
            points=True,
        ),
        _curves(
            "Longest pause of its agent",
            _max("node", "elastic_node_loop_longest_pause_seconds{node}"),
            unit="s",
        ),
    )
    _row(
        board,
        "Each node, as its agent reports (agents with --http-address)",
        _curves(
            "Connected to a coordinator",
            _min("node", "elastic_agent_connected{node}"),
        ),
        _curves(
            "Registered in etcd",
            _min("node", "elastic_agent_registered{node}"),
        ),
        _curves(
            "Times it lost its coordinator",
            _sum("node", "increase(elastic_agent_coordinator_losses_total{node}[rate])"),
            bars=True,
        ),
        _curves(
            "Workers by phase",
            _sum("phase", "elastic_agent_workers{node}"),
            ("sum(elastic_agent_slots{node})", "slots"),
        ),
        _curves(
            "Workers that failed",
            (
                "sum by (node, kind) (increase(elastic_agent_worker_failures_total{node}[rate])) > 0",
                "{{node}}: {{kind}}",
            ),
            bars=True,
        ),
        _curves(
            "Workers started",
            _sum("node", "increase(elastic_agent_workers_started_total{node}[rate])"),
            (
                "sum by (node) (increase(elastic_agent_workers_not_started_total{node}[rate]))",
                "{{node}}: could not be started",
            ),
            (
                "sum by (node) (increase(elastic_agent_zygote_losses_total{node}[rate]))",
                "{{node}}: zygote lost",
            ),
            bars=True,
        ),
        _curves(
            "Steps committed",
            _max("node", "elastic_agent_step{node}"),
            about="From the last reports of its workers, which report at least when the group changes.",
        ),
    )
    return board.build()


def _control_plane() -> models.Dashboard:
    board = _board(
        "control-plane",
        "Coordinators, etcd, certificates and disks.",
        instance="elastic_build_info",
    )
    _row(
        board,
        "Does a coordinator lead?",
        _stat(
            "Leaders",
            "sum(elastic_leader{job})",
            better_from=(1, 1),
        ),
        _stat(
            "Leader in doubt",
            "max(elastic_leader_in_doubt{job})",
            worse_from=(None, 1),
            about="1: etcd did not confirm in time that the leader still leads.",
        ),
        _stat(
            "Standby coordinators",
            "count(elastic_leader{job} == 0)",
            better_from=(None, 1),
            none="none",
        ),
        _stat(
            "Agents without a coordinator",
            "count(elastic_agent_connected{job} == 0)",
            worse_from=(None, 1),
            none="none",
        ),
        _stat(
            "Longest silence of etcd",
            "max((time() - elastic_store_last_answer_timestamp_seconds{job}) unless on (instance) (elastic_leader{job} == 0))",
            unit="s",
            worse_from=(15, 60),
            about="Without standby coordinators, which rarely ask etcd.",
        ),
        _stat(
            "First certificate expires in",
            "min(elastic_certificate_expiry_timestamp_seconds{job}) - time()",
            unit="s",
            better_from=(86400, 604800),
            none="no TLS",
        ),
        _stat(
            "Least free space",
            "min(elastic_directory_free_bytes{job} / elastic_directory_size_bytes{job})",
            unit="percentunit",
            better_from=(0.1, 0.2),
        ),
        _stat("Generation", "max(elastic_generation{job})"),
    )
    _row(
        board,
        "Coordinators",
        _curves("Leader", _max("instance", "elastic_leader{instance}")),
        _curves(
            "Control plane events",
            ("sum(increase(elastic_elections_total{job}[rate]))", "elections"),
            ("sum(increase(elastic_leader_doubts_total{job}[rate]))", "doubts"),
            ("sum(increase(elastic_store_roll_backs_total{job}[rate]))", "roll-backs"),
            ("sum(increase(elastic_newcomers_refused_total{job}[rate]))", "newcomers kept out"),
            ("sum(increase(elastic_state_differences_total{job}[rate]))", "state differs"),
            ("sum(increase(elastic_ledger_failures_total{job}[rate]))", "ledger failed"),
            bars=True,
        ),
        _table(
            "Versions",
            "max by (instance, version, python_version) (elastic_build_info{instance})",
        ),
    )
    _row(
        board,
        "etcd, as the daemons measure it",
        _curves(
            "Duration of calls, 99th percentile",
            (
                "histogram_quantile(0.99, sum by (kind, le) (rate(elastic_store_call_duration_seconds_bucket{instance}[rate])))",
                "{{kind}}",
            ),
            unit="s",
        ),
        _curves(
            "Calls per second",
            _sum("kind", "rate(elastic_store_call_duration_seconds_count{instance}[rate])"),
        ),
        _curves(
            "Calls that failed",
            _sum("kind", "increase(elastic_store_errors_total{instance}[rate])"),
            bars=True,
        ),
        _curves(
            "Since the last answer",
            (
                "time() - elastic_store_last_answer_timestamp_seconds{instance}",
                "{{instance}}",
            ),
            unit="s",
        ),
    )
    _row(
        board,
        "Daemons",
        _curves(
            "Age of the figures",
            ("time() - elastic_snapshot_timestamp_seconds{instance}", "{{instance}}"),
            unit="s",
            about="If it is large, the event loop stands still and all other figures of the daemon are old.",
        ),
        _curves(
            "Share of time that event loops stood still",
            _sum("instance", "rate(elastic_loop_pause_seconds_total{instance}[rate])"),
            unit="percentunit",
        ),
        _curves(
            "Pauses of event loops",
            _sum("instance", "increase(elastic_loop_pauses_total{instance}[rate])"),
            bars=True,
        ),
        _curves(
            "Longest pause so far",
            _max("instance", "elastic_loop_longest_pause_seconds{instance}"),
            unit="s",
        ),
        _curves(
            "Certificate expires in",
            (
                "elastic_certificate_expiry_timestamp_seconds{instance} - time()",
                "{{instance}}",
            ),
            unit="s",
        ),
        _curves(
            "Free space",
            (
                "elastic_directory_free_bytes{instance} / elastic_directory_size_bytes{instance}",
                "{{instance}}: {{kind}}",
            ),
            unit="percentunit",
        ),
    )
    return board.build()


# ---- expressions


def _written(expression: str) -> str:
    for short, long in _WRITTEN.items():
        expression = expression.replace(short, long)
    return expression


def _mean(histogram: str, *, by: str) -> str:
    """Return the mean of a histogram; no value, instead of NaN, where nothing was observed."""
    total = f"sum by ({by}) (rate({histogram}_sum{{job}}[rate]))"
    return f"{total} / (sum by ({by}) (rate({histogram}_count{{job}}[rate])) > 0)"


def _sum(by: str, values: str) -> Query:
    return f"sum by ({by}) ({values})", f"{{{{{by}}}}}"


def _max(by: str, values: str) -> Query:
    return f"max by ({by}) ({values})", f"{{{{{by}}}}}"


def _min(by: str, values: str) -> Query:
    return f"min by ({by}) ({values})", f"{{{{{by}}}}}"


def _quantiles(histogram: str) -> Sequence[Query]:
    rate = f"sum by (le) (rate({histogram}_bucket{{job}}[rate]))"
    return (
        (f"histogram_quantile(0.5, {rate})", "median"),
        (f"histogram_quantile(0.99, {rate})", "99th percentile"),
    )


# ---- parts of a dashboard


def _board(name: str, about: str, **variables: str) -> builders.Dashboard:
    """Make a dashboard. variables: those besides `job`, each with the metric that has its values."""
    board = (
        builders.Dashboard(f"elastic: {name.replace('-', ' ')}")
        .uid(f"elastic-{name}")
        .description(about)
        .tags(["elastic"])
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-3h", "now")
        .refresh("30s")
        .with_variable(
            builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(_variable("job", "label_values(elastic_build_info, job)"))
        .link(
            builders.DashboardLink("elastic")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["elastic"])
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(
            builders.AnnotationQuery()
            .name("Groups formed")
            .datasource(_SOURCE)
            .icon_color("blue")
            .expr(_written("sum by (reason) (increase(elastic_generations_total{job}[1m])) > 0"))
        )
    )
    for variable, metric in variables.items():
        values = _written(f"label_values({metric}{{job}}, {variable})")
        several = _variable(variable, values).multi(True).include_all(True).all_value(".*")
        board.with_variable(several.current(models.VariableOption(text="All", value="$__all")))
    return board


def _variable(name: str, values: str) -> builders.QueryVariable:
    """Make a variable; Grafana queries its values again when the time range changes."""
    return (
        builders.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(values)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _row(board: builders.Dashboard, title: str, *panels: Panel) -> None:
    """Add a row: eight figures side by side in a line, or three other panels."""
    board.with_row(builders.Row(title))
    for panel in panels:
        board.with_panel(panel.datasource(_SOURCE))


def _stat(
    title: str,
    expression: str,
    *,
    unit: str = "short",
    legend: str = "",
    about: str = "",
    none: str = "no data",
    shows_name: bool = False,
    worse_from: tuple[float | None, float | None] | None = None,
    better_from: tuple[float | None, float | None] | None = None,
) -> stat.Panel:
    """Make a panel of one figure. worse_from: the values from which it is yellow, and red;
    better_from: from which it is yellow instead of red, and green; a bound of None: never."""
    panel = stat.Panel().title(title).unit(unit).height(4).span(_WIDTH // 8).no_value(none)
    panel.description(about)
    shown = common.BigValueTextMode.NAME if shows_name else common.BigValueTextMode.VALUE
    panel.text_mode(shown).graph_mode(common.BigValueGraphMode.NONE)
    panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    colors, bounds = ("text",), ()
    if worse_from is not None:
        colors, bounds = ("green", "yellow", "red"), worse_from
    if better_from is not None:
        colors, bounds = ("red", "yellow", "green"), better_from
    steps = [models.Threshold(value=None, color=colors[0])]
    for bound, color in zip(bounds, colors[1:], strict=True):
        if bound is not None:
            steps.append(models.Threshold(value=bound, color=color))
    panel.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    return panel.with_target(_query(0, (expression, legend)).instant())


def _curves(
    title: str,
    *queries: Query,
    unit: str = "short",
    about: str = "",
    stacked: bool = False,
    bars: bool = False,
    points: bool = False,
) -> timeseries.Panel:
    """Make a panel of values over time. bars: for counts; points: for values that are rare."""
    panel = timeseries.Panel().title(title).unit(unit).height(7).span(_WIDTH // 3).min(0)
    panel.description(about)
    panel.tooltip(
        common_builders.VizTooltipOptions()
        .mode(common.TooltipDisplayMode.MULTI)
        .sort(common.SortOrder.DESCENDING)
    )
    if stacked or bars:
        normal = common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        panel.stacking(normal).fill_opacity(40)
    if bars:
        panel.draw_style(common.GraphDrawStyle.BARS)
    if points:
        panel.draw_style(common.GraphDrawStyle.POINTS).point_size(6)
    for number, query in enumerate(queries):
        panel.with_target(_query(number, query).range())
    return panel


def _table(title: str, expression: str) -> table.Panel:
    """Make a table of the labels of each series."""
    query = _query(0, (expression, "")).instant().format(PromQueryFormat.TABLE)
    hidden = models.DataTransformerConfig(
        id_val="organize", options={"excludeByName": {"Time": True, "Value": True}}
    )
    panel = table.Panel().title(title).height(7).span(_WIDTH // 3)
    return panel.with_target(query).with_transformation(hidden)


def _query(number: int, query: Query) -> prometheus.Dataquery:
    expression, legend = query
    made = prometheus.Dataquery().expr(_written(expression)).datasource(_SOURCE)
    return made.legend_format(legend).ref_id(chr(ord("A") + number))


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for name, document in documents().items():
        (TARGET / name).write_text(document)
