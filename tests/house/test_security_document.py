"""The tests that docs/SECURITY.md names as evidence exist, and every threat has some."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "SECURITY.md"


def test_each_threat_names_tests_that_exist() -> None:
    threats = DOCUMENT.read_text().partition("\n## Threats\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in threats.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    for who, *_, shown in rows[2:]:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
        assert named, who
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"
