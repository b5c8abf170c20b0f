"""A real Prometheus that scrapes a real job evaluates every expression of dashboards and rules."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.certificates import make_certificates, sign_for_job
from tests.deploy.expressions import (
    QUICK,
    RULES,
    Expression,
    alerts,
    of_dashboards,
    quick_rules,
    recorded,
)
from tests.etcd_cluster import etcd_cluster, free_ports
from tests.integration.loopback_job import LoopbackJob, tls_environment
from tests.integration.running import SCRIPTS, Place
from tests.prometheus import Prometheus, prometheus, require_program

JOB, NODE, WORKERS = "loopback", "a", 3
VARIABLES = {
    "$job": JOB,
    "$node": ".*",
    "$instance": ".*",
    "$__rate_interval": "1m",
}
"""What Grafana substitutes; where several values can be chosen, all of them."""
NO_SERIES = {
    "elastic_job_exit_code": "the job runs",
    "elastic_job_resumed_timestamp_seconds": "its nodes have not left",
    "job:elastic_ended:exit_code": "the job runs",
    "elastic_node_loop_longest_pause_seconds": "an agent that paused has one",
    'elastic_node_state{state="quarantined"}': "no node is in quarantine",
}
"""Selectors that may find nothing in a healthy job, and why; without matchers of variables."""
ONLY_IN_TROUBLE = {
    "elastic-control-plane.json: Agents without a coordinator",
}
"""Expressions that have no value while all is well, although their selectors find series."""

COUNT_THE_KILL = (
    "elastic_recovery_duration_seconds_count",
    "elastic_recovery_phase_duration_seconds_count",
    "elastic_worker_failures_total",
    "elastic_agent_worker_failures_total",
)


def filled(text: str) -> str:
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    assert "$" not in text, text
    return text


def plain(selector: str) -> str:
    """Return the selector without the matchers of the dashboards' variables."""
    for part in ('job="$job"', 'instance=~"$instance"', 'node=~"$node"'):
        selector = selector.replace(part, "")
    return selector.replace("{,", "{").replace(",}", "}").replace("{}", "")


class Job(LoopbackJob):
    """Two coordinators and an agent with three workers; Prometheus scrapes all three daemons."""

    def __init__(self, place: Place, etcd: str) -> None:
        self.certificates = make_certificates(place.files / "made")
        environment = tls_environment(sign_for_job(self.certificates, JOB))
        script = SCRIPTS / "shows_everything.py"
        super().__init__(place, (script,), etcd=etcd, job=JOB, **environment)
        self._saves = ("--checkpoint-dir", place.files / "checkpoints")
        self.targets = [f"127.0.0.1:{port}" for port in free_ports(3)]

    def start_all(self) -> None:
        leader, standby, agent = self.targets
        for target in (leader, standby):
            (port,) = free_ports(1)
            where = ("--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{port}")
            most = ("--max-workers", str(WORKERS))  # otherwise the first group waits for more
            events = ("--events-file", "/dev/stderr")
            kept = (*self._saves, "--after-end", "serve")
            options = (*where, *most, *events, *kept, "--http-address", target)
            self.coordinators.append(self.start("coordinator", *options))
            self.wait(lambda: self.events("elected"), "a leader")
        every = ("--checkpoint-every", "10", *self._saves)
        workers = ("--nproc-per-node", str(WORKERS), "--spares", "0")
        self.start_agent(NODE, *workers, *every, "--http-address", agent)

    def kill_one(self, scraped: Prometheus) -> None:
        """Kill a worker, once there is a checkpoint and Prometheus has seen the counters at zero:
        it shows an increase only from a value that it has seen."""
        self.wait(lambda: self.events("checkpoint_committed"), "a checkpoint")
        for counter in COUNT_THE_KILL:
            scraped.wait(lambda c=counter: scraped.ask(f"{c} == 0"), lambda c=counter: c)
        started = self.agents[NODE][0].named("worker_started")
        member = self.events("generation_formed")[-1]["members"][0]
        (pid,) = [e["pid"] for e in started if e["worker"] == member]
        os.kill(int(pid), signal.SIGKILL)
        self.wait(lambda: self.events("recovered"), "a recovery")
        self.wait(lambda: self.world() == WORKERS, "a whole group again")
        self.wait(lambda: self.events("straggler"), "the slow rank's name")


@pytest.fixture
def scraped(place: Place) -> Iterator[tuple[Job, Prometheus]]:
    require_program("prometheus")
    with (
        etcd_cluster(size=1) as etcd,
        contextlib.closing(Job(place, etcd.endpoints())) as job,
        prometheus(place.files / "prometheus", targets=job.targets, rules=[RULES]) as one,
    ):
        job.start_all()
        job.kill_one(one)
        yield job, one


def without_data(scraped: Prometheus, expressions: list[Expression]) -> dict[str, str]:
    """Return, by place, the expressions without a value or without a label of their legend."""
    found = {}
    for expression in expressions:
        series = scraped.ask(filled(expression.text))
        labels = {label for one in series for label in one["metric"]}
        finite = [one for one in series if one["value"][1] not in ("NaN", "+Inf", "-Inf")]
        missing = [s for s in expression.selectors if not scraped.ask(filled(s))]
        if missing and {plain(selector) for selector in missing} <= set(NO_SERIES):
            continue
        if missing or not finite or not labels.issuperset(expression.shows):
            found[expression.where] = f"{filled(expression.text)}: {missing or series}"
    return found


def of_alerts(scraped: Prometheus) -> dict[str, str]:
    """Return the alerts' selectors that find nothing. Alerts themselves have no value here."""
    return {
        f"{expression.where}: {selector}": "selects nothing"
        for expression in alerts()
        for selector in expression.selectors
        if plain(selector) not in NO_SERIES and not scraped.ask(selector)
    }


@pytest.mark.long
def test_every_expression_has_data_in_a_prometheus_that_scrapes_a_job(
    scraped: tuple[Job, Prometheus],
) -> None:
    job, one = scraped
    boards = of_dashboards()
    assert {e.where for e in boards} > ONLY_IN_TROUBLE
    shown = [e for e in boards if e.where not in ONLY_IN_TROUBLE]
    kept = [Expression(where=name, text=name) for name in recorded()]

    def lacking() -> dict[str, str]:
        return without_data(one, [*shown, *kept]) | of_alerts(one)

    one.wait(lambda: not lacking(), lambda: "\n".join(map(str, lacking().items())))
    rules = [rule for group in one.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(recorded()) + len(alerts())
    assert {
        rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"
    } == {}
    for trouble in (e for e in boards if e.where in ONLY_IN_TROUBLE):
        assert one.ask(filled(trouble.text)) == []
    (firing,) = one.ask('ALERTS{alertname="ElasticLossNotFinite",alertstate="firing"}')
    assert (firing["metric"]["job"], firing["metric"]["name"]) == (JOB, "broken")
    ended = "job:elastic_ended:exit_code"
    assert one.ask(ended) == []
    assert job.start("stop").wait() == 0
    one.wait(lambda: [e["value"][1] for e in one.ask(ended)] == ["82"], lambda: ended)
    alerts_now = 'ALERTS{alertstate="firing"}'
    one.wait(lambda: one.ask(alerts_now) == [], lambda: str(one.ask(alerts_now)))


@pytest.mark.long
def test_an_expiring_certificate_is_the_only_alert_besides_the_scripts_own(place: Place) -> None:
    rules = place.files / "quick.yml"
    rules.write_text(quick_rules())
    with etcd_cluster(size=1) as etcd:
        job = Job(place, etcd.endpoints())
        try:
            with prometheus(place.files / "prometheus", targets=job.targets, rules=[rules]) as one:
                job.start_all()
                job.wait(lambda: job.world() == WORKERS, "a whole group")
                expiry = "elastic_certificate_expiry_timestamp_seconds"
                one.wait(lambda: len(one.ask(expiry)) == len(job.targets), lambda: expiry)
                sign_for_job(job.certificates, JOB, days=1)
                name = f"ElasticCertificateExpiring{QUICK}"
                firing = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
                everyone = len(job.targets)
                one.wait(lambda: len(one.ask(firing)) == everyone, lambda: name, 90.0)
                told = one.ask('count by (alertname) (ALERTS{alertstate="firing"})')
                others = {series["metric"]["alertname"] for series in told} - {name}
                of_the_script = {"ElasticLossNotFinite", "ElasticStraggler"}
                assert others <= {f"{alert}{QUICK}" for alert in of_the_script}
        finally:
            job.close()
