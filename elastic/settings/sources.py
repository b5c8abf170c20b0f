"""Merges the command line, the environment and a TOML file into validated settings.

Plain pydantic rather than pydantic-settings: that one reads `os.environ` by itself, passes over
misspelt variables, and merges its sources before it validates, after which an error can no longer
name the place where the user wrote the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from elastic.errors import ConfigurationError
from elastic.settings.commands import Command, command_of, every_option, options_by_name
from elastic.settings.config_file import from_file
from elastic.settings.fields import ENVIRONMENT_PREFIX, build
from elastic.settings.given import VERY_ALIKE, Given, Givens, nearest, unknown
from elastic.settings.node import NodeSettings
from elastic.settings.run import RunSettings
from elastic.settings.validation import DeviceCounts, missing, validated

__all__ = ["DeviceCounts", "is_given", "load_run_settings", "load_settings", "script_of"]

CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"

# Kubernetes describes each service to every container in its namespace, in variables such as
# ELASTIC_COORDINATOR_SERVICE_HOST.
_SERVICE_VARIABLE = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?)"
)

S = TypeVar("S")


def load_settings(
    settings: type[S],
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    config_file: Path | None,
    device_counts: Callable[[], DeviceCounts] | None = None,
    *,
    part_of: type | None = None,
) -> S:
    """Merge and validate: command line over environment over TOML file over defaults.

    `settings` is the class of one of `COMMANDS`, or has some of the settings of `part_of`, which is
    one; the others are passed over then. `command_line` has the names of its options; None means
    that one was not given. `config_file` is `--config`; without it ELASTIC_CONFIG names the file,
    if any; the command's own table there wins over the shared one. `device_counts` is called only
    where `nproc_per_node` is auto, gpu or cpu.

    Variables and shared keys of other commands are passed over, so that one environment and one
    file serve all commands. Raises `ConfigurationError` with one line for each problem.
    """
    whole = command_of(settings if part_of is None else part_of)
    command, problems = whole._replace(settings=settings), list[str]()
    given = _given(whole, command_line, environment, config_file, problems)
    given = {name: one for name, one in given.items() if name in options_by_name(command)}
    values = validated(given, command, device_counts, problems)
    if problems:
        raise ConfigurationError("\n".join(problems))
    built = build(settings, values)
    assert isinstance(built, settings)
    return built


def load_run_settings(
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    config_file: Path | None,
    device_counts: Callable[[], DeviceCounts],
) -> RunSettings:
    """`load_settings` of `elastic run`."""
    return load_settings(RunSettings, command_line, environment, config_file, device_counts)


def script_of(settings: RunSettings | NodeSettings) -> list[str]:
    """What the workers run: the script and its arguments.

    Raises ConfigurationError if no source gives a script.
    """
    if settings.script is None:
        command = command_of(type(settings))
        raise ConfigurationError(missing(options_by_name(command)["script"], command))
    return [str(settings.script), *settings.args]


def is_given(
    setting: str,
    settings: type,
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    config_file: Path | None,
) -> bool:
    """Whether any source gives the setting, rightly or not: for what can do without a required one.

    Raises nothing; `load_settings` says what is wrong.
    """
    return setting in _given(command_of(settings), command_line, environment, config_file, [])


def _given(
    command: Command,
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    config_file: Path | None,
    problems: list[str],
) -> Givens:
    given = from_file(_config_file(config_file, environment), command, problems)
    given |= _from_environment(environment, command, problems)
    return given | _from_command_line(command_line, command)


def _from_command_line(command_line: Mapping[str, object], command: Command) -> Givens:
    options = options_by_name(command)
    unknown_names = command_line.keys() - options.keys()
    assert not unknown_names, f"no settings of {command.title}: {sorted(unknown_names)}"
    secret = [name for name in command_line if options[name].secret]
    assert not secret, f"every process on this machine could read {secret} on the command line"
    return {
        name: Given(options[name].flag, "command line", value)
        for name, value in command_line.items()
        if value is not None
    }


def _from_environment(
    environment: Mapping[str, str], command: Command, problems: list[str]
) -> Givens:
    names = {option.variable: option.name for option in every_option().values()}
    known = [*names, CONFIG_VARIABLE]
    found: Givens = {}
    for variable, value in sorted(environment.items()):
        if variable in names:
            if names[variable] in options_by_name(command):  # else another command's
                found[names[variable]] = Given(variable, "environment", value)
        elif _may_be_misspelt(variable) and (meant := nearest(variable, known, VERY_ALIKE)):
            # The value stays unsaid: it may be a secret after all.
            problems.append(unknown(variable, "environment", meant, command.help))
    return found


def _may_be_misspelt(variable: str) -> bool:
    """Other programs have variables such as ELASTIC_PASSWORD; `nearest` must agree too."""
    return (
        variable.startswith(ENVIRONMENT_PREFIX)
        and not _SERVICE_VARIABLE.fullmatch(variable)
        and variable != CONFIG_VARIABLE
    )


def _config_file(config_file: Path | None, environment: Mapping[str, str]) -> Given | None:
    if config_file is not None:
        return Given("--config", "command line", config_file)
    if CONFIG_VARIABLE in environment:
        return Given(CONFIG_VARIABLE, "environment", environment[CONFIG_VARIABLE])
    return None
