"""The Prometheus rules: every alert is documented and tested, and uses metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.runtime.http_pages import write
from tests.deploy.expressions import ROOT, RULES
from tests.metrics_doc import CATALOGS
from tests.prometheus import promtool
from tests.unit.coordinator.test_job_metrics import figures, found

TESTS = RULES.with_name("elastic.rules.test.yml")
RUNBOOK = (ROOT / "docs" / "RUNBOOK.md").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
SUFFIXES = ("_bucket", "_count", "_sum")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_runbook_section_and_a_test(alert: str) -> None:
    section = RUNBOOK.partition(f"\n## {alert}\n")[2].partition("\n## ")[0]
    for what in ("**Means:**", "**Look at:**", "**Do:**"):
        assert what in section
    assert f"docs/RUNBOOK.md#{alert.lower()}\n" in RULES.read_text()
    assert f"- name: {alert}\n" in TESTS.read_text()


def test_runbook_sections_match_the_alerts_and_each_alert_has_a_severity() -> None:
    assert re.findall(r"\n## (\w+)\n", RUNBOOK) == ALERTS
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
