"""The rules for Prometheus: every alert is explained and tested, and names metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic.runtime.metrics_text import write
from tests.metrics_doc import CATALOGS
from tests.unit.coordinator.test_job_metrics import figures, found

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "elastic.rules.yml"
TESTS = RULES.with_name("elastic.rules.test.yml")
RUNBOOK = (ROOT / "docs" / "RUNBOOK.md").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
SUFFIXES = ("_bucket", "_count", "_sum")

with_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Debian's package prometheus has promtool"
)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_section_and_a_test(alert: str) -> None:
    section = RUNBOOK.partition(f"\n## {alert}\n")[2].partition("\n## ")[0]
    for what in ("**Means:**", "**Look at:**", "**Do:**"):
        assert what in section
    assert f"docs/RUNBOOK.md#{alert.lower()}\n" in RULES.read_text()
    assert f"- name: {alert}\n" in TESTS.read_text()


def test_sections_are_of_alerts_and_each_has_a_severity() -> None:
    assert re.findall(r"\n## (\w+)\n", RUNBOOK) == ALERTS
    severities = re.findall(r"labels: \{severity: (critical|warning)\}", RULES.read_text())
    assert len(severities) == len(ALERTS)


@pytest.mark.parametrize("path", [RULES, TESTS], ids=lambda path: path.name)
def test_what_is_asked_for_exists(path: Path) -> None:
    known = {metric.name for catalog in CATALOGS for metric in catalog.metrics}
    used = set(re.findall(r"(?<![:\w])elastic_\w+", path.read_text()))
    for name in sorted(used):
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        assert name in known or base in known, name


@pytest.mark.long
@with_promtool
def test_the_rules_are_right_and_alerts_fire_for_their_faults() -> None:
    for command in (("check", "rules", RULES), ("test", "rules", TESTS)):
        done = subprocess.run(
            ["promtool", *map(str, command)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@with_promtool
def test_prometheus_has_nothing_to_say_about_the_metrics() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=write(found(figures(saves=True, values={"loss": 0.5}))).body.decode(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
