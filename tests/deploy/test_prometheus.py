"""The Prometheus rules: every alert is documented and tested, and uses metrics that exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.runtime.http_pages import write
from tests.deploy.expressions import ROOT, RULES
from tests.deploy.helm import NAMESPACE, render
from tests.deploy.rendered import of_kind
from tests.metrics_doc import CATALOGS
from tests.prometheus import promtool
from tests.unit.coordinator.test_job_metrics import figures, found

TESTS = RULES.with_name("elastic.rules.test.yml")
RUNBOOK = (ROOT / "docs" / "RUNBOOK.md").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
OF_A_RELEASE = ["ElasticMetricsAbsent", "ElasticEtcdFilling"]
"""Alerts that only the chart has, because they name their release."""
SUFFIXES = ("_bucket", "_count", "_sum")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_runbook_section_and_a_test(alert: str) -> None:
    section = RUNBOOK.partition(f"\n## {alert}\n")[2].partition("\n## ")[0]
    for what in ("**Means:**", "**Look at:**", "**Do:**"):
        assert what in section
    assert f"docs/RUNBOOK.md#{alert.lower()}\n" in RULES.read_text()
    assert f"- name: {alert}\n" in TESTS.read_text()


def test_runbook_sections_match_the_alerts_and_each_alert_has_a_severity() -> None:
    assert re.findall(r"\n## (\w+)\n", RUNBOOK) == ALERTS + OF_A_RELEASE
    severities = re.findall(r"labels: \{severity: (critical|warning)\}", RULES.read_text())
    assert len(severities) == len(ALERTS)


@pytest.mark.parametrize("path", [RULES, TESTS], ids=lambda path: path.name)
def test_rules_and_their_tests_use_existing_metrics(path: Path) -> None:
    known = {metric.name for catalog in CATALOGS for metric in catalog.metrics}
    used = set(re.findall(r"(?<![:\w])elastic_\w+", path.read_text()))
    for name in sorted(used):
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        assert name in known or base in known, name


def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    for command in (("check", "rules", RULES), ("test", "rules", TESTS)):
        exit_code, said = promtool(*command)
        assert exit_code == 0, said


def test_promtool_finds_no_fault_in_the_metrics() -> None:
    metrics = write(found(figures(saves=True, values={"loss": 0.5}))).body.decode()
    assert promtool("check", "metrics", given=metrics) == (0, "")


# ---- the rule of each release of the chart


@functools.cache
def release_rules() -> dict[str, Any]:
    """Return the groups of rules that a release with a PodMonitor has for itself."""
    documents = render(
        {
            "script": {"path": "/app/train.py"},
            "checkpoint": {"allowLoss": True},
            "etcd": {"bundled": {"enabled": True, "image": "etcd:3"}},
            "tls": {"mode": "insecure"},
            "coordinators": {"http": {"podMonitor": True}},
        }
    )
    (rule,) = of_kind(documents, "PrometheusRule")
    groups: dict[str, Any] = rule["spec"]
    return groups


def firing(directory: Path, series: dict[str, str], wanted: list[str]) -> tuple[int, str]:
    """Ask promtool whether after 10 minutes exactly the wanted alerts of the release fire."""
    (directory / "release.rules.yml").write_text(yaml.safe_dump(release_rules()))
    test = {
        "rule_files": ["release.rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": [
                    {
                        "expr": 'sum by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "10m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in wanted
                        ],
                    }
                ],
            }
        ],
    }
    path = directory / "release.rules.test.yml"
    path.write_text(yaml.safe_dump(test))
    return promtool("test", "rules", path)


LEADER = f'elastic_leader{{job="gpt",namespace="{NAMESPACE}",pod="gpt-coordinator-x"}}'
AGENT = f'elastic_agent_connected{{job="gpt",namespace="{NAMESPACE}",pod="gpt-0"}}'
OTHERS = 'elastic_leader{job="gpt",namespace="elsewhere",pod="gpt-coordinator-x"}'
SIZE = f'etcd_mvcc_db_total_size_in_bytes{{namespace="{NAMESPACE}",pod="gpt-etcd-0"}}'
QUOTA = f'etcd_server_quota_backend_bytes{{namespace="{NAMESPACE}",pod="gpt-etcd-0"}}'


@pytest.mark.parametrize(
    ("series", "wanted"),
    [
        ({}, ["ElasticMetricsAbsent"]),
        ({OTHERS: "1x20"}, ["ElasticMetricsAbsent"]),
        ({AGENT: "0x20"}, ["ElasticMetricsAbsent"]),
        ({LEADER: "1x2 stale"}, ["ElasticMetricsAbsent"]),
        ({LEADER: "1x7 stale"}, []),  # a short gap
        ({LEADER: "0x20"}, []),
        ({LEADER: "1x20", SIZE: "900x20", QUOTA: "2000x20"}, []),
        ({LEADER: "1x20", SIZE: "1100x20", QUOTA: "2000x20"}, ["ElasticEtcdFilling"]),
        ({LEADER: "1x20", SIZE.replace("gpt-", "x-"): "1100x20", QUOTA: "2000x20"}, []),
    ],
)
def test_a_release_has_alerts_for_absent_metrics_and_a_filling_etcd(
    series: dict[str, str], wanted: list[str], tmp_path: Path
) -> None:
    assert firing(tmp_path, series, wanted)[0] == 0, firing(tmp_path, series, wanted)[1]


def test_alerts_of_a_release_are_those_of_the_runbook() -> None:
    (group,) = release_rules()["groups"]
    assert [rule["alert"] for rule in group["rules"]] == OF_A_RELEASE
    for rule in group["rules"]:
        section = RUNBOOK.partition(f"\n## {rule['alert']}\n")[2].partition("\n## ")[0]
        for what in ("**Means:**", "**Look at:**", "**Do:**"):
            assert what in section
        assert rule["annotations"]["runbook"] == f"docs/RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
