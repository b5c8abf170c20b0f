"""Prints tables for people and JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from elastic.errors import ConfigurationError


def require_format(output: str) -> bool:
    """Whether `output` is "json". Raises ConfigurationError unless it is "table" or "json"."""
    if output not in ("table", "json"):
        raise ConfigurationError(f"--output {output!r} is not allowed; expected table or json")
    return output == "json"


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


_WIDEST = 10_000  # characters of a line
_CONTROL = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str, *, colours: bool = False) -> str:
    """The text with control characters escaped: workers, nodes and scripts write it, and must not
    command the terminal. colours: keep escape sequences that set colours."""
    return _CONTROL.sub(lambda m: m[0] if colours and m[1] else repr(m[0])[1:-1], text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as wide as the terminal, or without one as wide as its cells. Long cells are
    folded, not cut off, so that names can be copied."""
    made = (Column(name, overflow="fold") for name in columns)
    table = Table(*made, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))  # as Text, not as markup
    console = Console(highlight=False)
    if not console.is_terminal:
        options = console.options.update(max_width=_WIDEST)
        console.width = console.measure(table, options=options).maximum
    console.print(table)
