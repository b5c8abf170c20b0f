"""Tables for people, JSON for programs."""

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
    """Whether JSON is wanted; ConfigurationError unless it is "table" or "json"."""
    if output not in ("table", "json"):
        raise ConfigurationError(f"--output {output!r} is not allowed; expected table or json")
    return output == "json"


def print_json(document: Any) -> None:
    """One JSON document."""
    print(json.dumps(document, indent=2))


_WIDEST = 10_000  # characters of a line
_CONTROL = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str, *, colours: bool = False) -> str:
    """The text without what commands a terminal: titles, cursors, keys. Workers, nodes and their
    scripts have written it. colours: keep these."""
    return _CONTROL.sub(lambda m: m[0] if colours and m[1] else repr(m[0])[1:-1], text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table as wide as the terminal, or as what it holds where there is none. Nothing is cut off:
    names may be long, and are to be copied."""
    made = (Column(name, overflow="fold") for name in columns)
    table = Table(*made, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))  # no markup
    console = Console(highlight=False)
    if not console.is_terminal:
        options = console.options.update(max_width=_WIDEST)
        console.width = console.measure(table, options=options).maximum
    console.print(table)
