"""Lists the commands and maps each to its settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.doctor import DoctorSettings
from elastic.settings.fields import Option, options_of
from elastic.settings.node import NodeSettings
from elastic.settings.operator import OperatorSettings
from elastic.settings.run import RunSettings

SHARED_TABLE = "job"
"""The table of the TOML file that every command reads."""


class Command(NamedTuple):
    """A command, or several with the same settings; `table` is its own table in the TOML file."""

    table: str
    settings: type
    title: str
    help: str
    """The command line that lists its settings."""
    borrows: str = ""
    """Another command's table: it reads from there the settings it has; its own table wins."""


COMMANDS = (
    Command("run", RunSettings, "`elastic run`", "elastic run --help"),
    Command(
        "coordinator", CoordinatorSettings, "`elastic coordinator`", "elastic coordinator --help"
    ),
    Command("agent", NodeSettings, "`elastic agent`", "elastic agent --help"),
    Command("operator", OperatorSettings, "the operator commands", "elastic status --help"),
    Command("doctor", DoctorSettings, "`elastic doctor`", "elastic doctor --help", "agent"),
)
TABLES = (SHARED_TABLE, *(command.table for command in COMMANDS))


def command_of(settings: type) -> Command:
    (command,) = (one for one in COMMANDS if one.settings is settings)
    return command


@functools.cache
def options_by_name(command: Command) -> Mapping[str, Option]:
    return {option.name: option for option in options_of(command.settings)}


@functools.cache
def every_option() -> Mapping[str, Option]:
    """The settings of all commands by name; the first of a name stands for all, as limits agree."""
    found: dict[str, Option] = {}
    for command in COMMANDS:
        for name, option in options_by_name(command).items():
            found.setdefault(name, option)
    return found


def owners(name: str) -> list[Command]:
    return [command for command in COMMANDS if name in options_by_name(command)]


def belongs_elsewhere(name: str, title: str) -> str | None:
    """Return "is a setting of X, not of `title`", or None if no command has this setting."""
    titles = [command.title for command in owners(name)]
    if not titles:
        return None
    return f"is a setting of {' and '.join(titles)}, not of {title}"
