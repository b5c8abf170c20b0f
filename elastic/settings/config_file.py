"""Reads settings from a TOML file: a table for each command, and one for all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.settings.commands import (
    SHARED_TABLE,
    TABLES,
    Command,
    belongs_elsewhere,
    every_option,
    options_by_name,
    owners,
)
from elastic.settings.given import Given, Givens, nearest, shown, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def from_file(file: Given | None, command: Command, problems: list[str]) -> Givens:
    """What the command is given by the shared table and, above it, its own; `file` names it."""
    if file is None:
        return {}
    return _Reader(command, str(file.value), problems).read(_parse(file, problems))


def _parse(file: Given, problems: list[str]) -> dict[str, Any]:
    try:
        text = Path(str(file.value)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"{file.label}: cannot read {shown(file.value)}: {reason}")
        return {}
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{file.value}, line {_line(error, text)}: not valid TOML: {error}")
    except (ValueError, RecursionError) as error:  # too many digits, or brackets within brackets
        problems.append(f"{file.value}: cannot be taken for TOML: {error}")
    return {}


def _line(error: tomllib.TOMLDecodeError, text: str) -> int:
    """The line of a syntax error; the parser gives none for one at the end of the document."""
    told = re.search(r"at line ([0-9]+)", str(error))
    return int(told[1]) if told else max(1, len(text.splitlines()))


class _Reader:
    """One reading of one document for one command."""

    def __init__(self, command: Command, path: str, problems: list[str]) -> None:
        self._command = command
        self._own = options_by_name(command)
        self._path = path
        self._problems = problems

    def read(self, document: Mapping[str, Any]) -> Givens:
        tables = {key: value for key, value in document.items() if self._is_table(key, value)}
        found: Givens = {}
        for name in filter(None, (SHARED_TABLE, self._command.borrows, self._command.table)):
            found |= self._from_table(name, tables.get(name, {}))
        return found

    def _is_table(self, key: str, value: object) -> bool:
        if key in TABLES and isinstance(value, dict):
            return True
        option = key.replace("-", "_")
        if option in every_option() and not isinstance(value, dict):
            has_it = option in self._own
            table = self._command.table if has_it else owners(option)[0].table
            self._problems.append(
                f"{key} ({self._path}): stands outside of a table; move it below [{table}]"
            )
        elif key in TABLES:
            self._problems.append(
                f"{key} ({self._path}): {shown(value)} is not allowed; expected a table"
            )
        else:
            self._unknown(key, self._path, nearest(key, TABLES))
        return False

    def _from_table(self, table: str, entries: Mapping[str, object]) -> Givens:
        found: Givens = {}
        source = f"{self._path}, [{table}]"
        for key, value in entries.items():
            name = key.replace("-", "_")
            if not self._is_setting(name, key, table):
                continue
            if name in found:
                self._problems.append(
                    f"{key} ({source}): given twice, also as {found[name].spelling}"
                )
            else:
                found[name] = Given(key, source, value)
        return found

    def _is_setting(self, name: str, key: str, table: str) -> bool:
        """Whether this command takes it; says what is wrong unless another one takes it."""
        source = f"{self._path}, [{table}]"
        shared = table in (SHARED_TABLE, self._command.borrows)
        allowed = every_option() if shared else self._own
        if name not in every_option():
            known = (option.replace("_", "-") for option in allowed)
            self._unknown(key, source, nearest(key, known))
            return False
        if every_option()[name].secret:
            self._problems.append(
                f"{key} ({source}): is not read from this file, which may be anybody's to read; "
                f"give {name}_file, or {every_option()[name].variable} in the environment"
            )
            return False
        if name in self._own or shared:
            return name in self._own
        elsewhere = belongs_elsewhere(name, self._command.title)
        self._problems.append(
            f"{key} ({source}): {elsewhere}; move it to [{owners(name)[0].table}] "
            f"or [{SHARED_TABLE}]"
        )
        return False

    def _unknown(self, key: str, source: str, nearest_name: str | None) -> None:
        self._problems.append(unknown(key, source, nearest_name, self._command.help))
