"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from elastic.errors import ConfigurationError


def require_format(output: str) -> bool:
    """Whether JSON is wanted; ConfigurationError unless it is "table" or "json"."""
    if output not in ("table", "json"):
        raise ConfigurationError(f"--output {output!r} is not allowed; expected table or json")
    return output == "json"


def print_json(document: Any) -> None:
    """One JSON document."""
    print(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table as wide as the terminal."""
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(highlight=False).print(table)
