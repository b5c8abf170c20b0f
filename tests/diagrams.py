"""Draws the machines' transition tables into docs/ARCHITECTURE.md: `python -m tests.diagrams`."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.core.coordinator import phases as coordinator
from elastic.core.worker import machine as worker

DOCUMENT = Path(__file__).parent.parent / "docs" / "ARCHITECTURE.md"
TABLES: dict[str, Mapping[Any, frozenset[Any]]] = {
    "coordinator": coordinator.TRANSITIONS,
    "worker": worker.TRANSITIONS,
}


def diagram(table: Mapping[Any, frozenset[Any]]) -> str:
    """A mermaid state diagram that begins with the first state."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_name(next(iter(table)))}"]
    for state, following in table.items():
        lines += [
            f"    {_name(state)} --> {_name(n)}" for n in sorted(following, key=list(table).index)
        ]
        if not following:
            lines.append(f"    {_name(state)} --> [*]")
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """The document with every diagram drawn from the present tables."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- diagram: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda m, t=table: f"{m[1]}{diagram(t)}\n{m[2]}", text)
        assert count == 1, f"no place for the diagram of the {name}"
    return text


def _name(state: enum.Enum) -> str:
    return state.name.lower()


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text()))
