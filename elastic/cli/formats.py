"""Prints tables for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from elastic.core.legible import printable
from elastic.errors import ConfigurationError


def require_format(output: str) -> bool:
    """Whether `output` is "json". Raises ConfigurationError unless it is "table" or "json"."""
    if output not in ("table", "json"):
        raise ConfigurationError(f"--output {output!r} is not allowed; expected table or json")
    return output == "json"


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


_WIDEST = 10_000  # characters of a line


def say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print `text`, made printable, as every command does."""
    print(printable(text), file=file, flush=flush)


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
