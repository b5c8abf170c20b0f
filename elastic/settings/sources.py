"""Merges the command line, the environment and a TOML file into validated settings.

Each value is checked by its own limits, then the relations between values are checked.

This uses plain pydantic instead of pydantic-settings, which reads `os.environ` by itself, ignores
misspelt variables, and merges its sources before it validates, so that an error could not name the
place where the user wrote the value.
"""

from __future__ import annotations

import difflib
import enum
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from elastic.core.legible import is_utf8_encodable
from elastic.errors import ConfigurationError
from elastic.settings.commands import (
    SHARED_TABLE,
    TABLES,
    Command,
    belongs_elsewhere,
    command_of,
    every_option,
    options_by_name,
    owners,
)
from elastic.settings.fields import ENVIRONMENT_PREFIX, Option, build, defaults_of, relations_of
from elastic.settings.masking import masked_url
from elastic.settings.node import NodeSettings
from elastic.settings.run import RunSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DeviceCounts", "is_given", "load_settings", "script_of"]

CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"

# Kubernetes gives every container of a namespace variables that describe each service, such as
# ELASTIC_COORDINATOR_SERVICE_HOST.
_SERVICE_VARIABLE = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?)"
)

S = TypeVar("S")


_MOST_PROBLEMS = 20  # shown: a file of something else may have thousands of unknown keys


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

    `settings` is the settings class of one of `COMMANDS`. Or `part_of` is such a class, `settings`
    has some of its settings, and the others are ignored. `command_line` maps names of options to
    values; None means that the option was not given. `config_file` is `--config`; without it
    ELASTIC_CONFIG names the file, if any. In the file the command's own table wins over the shared
    one. `device_counts` is called only if `nproc_per_node` is auto, gpu or cpu.

    Variables and shared keys of other commands are ignored, so that one environment and one file
    serve all commands. Raises `ConfigurationError` with one line for each problem.
    """
    whole = command_of(settings if part_of is None else part_of)
    command, problems = whole._replace(settings=settings), list[str]()
    given = _given(whole, command_line, environment, config_file, problems)
    given = {name: one for name, one in given.items() if name in options_by_name(command)}
    values = validated(given, command, device_counts, problems)
    if problems:
        left_out = len(problems) - _MOST_PROBLEMS
        more = [f"and {left_out} more problems"] if left_out > 0 else []
        raise ConfigurationError("\n".join(problems[:_MOST_PROBLEMS] + more))
    built = build(settings, values)
    assert isinstance(built, settings)
    return built


def script_of(settings: RunSettings | NodeSettings) -> list[str]:
    """Return the script and its arguments, which the workers run.

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
    """Return whether any source gives the setting, with a valid value or not.

    Callers that can do without a required setting ask this first. It raises nothing:
    `load_settings` reports the problems.
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
            # The message omits the value: it may be a secret.
            problems.append(unknown(variable, "environment", meant, command.help))
    return found


def _may_be_misspelt(variable: str) -> bool:
    """Other programs have variables such as ELASTIC_PASSWORD; `nearest` must find one as well."""
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


ALIKE, VERY_ALIKE = 0.6, 0.8
"""Cutoffs for `difflib`: for elastic's names, and for variables, which may be another program's."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value, how the user spelled the setting, and in which source."""

    spelling: str
    source: str
    value: object

    @property
    def label(self) -> str:
        return f"{self.spelling} ({self.source})"


Givens = dict[str, Given]


class SpelledAsGiven:
    """Names settings as the user wrote them, or as flags if they have their default."""

    def __init__(self, given: Givens, options: Mapping[str, Option]) -> None:
        self._given = given
        self._options = options

    def name(self, setting: str, /) -> str:
        if setting in self._given:
            return self._given[setting].spelling
        option = self._options[setting]
        return option.variable if option.secret else option.flag

    def mention(self, setting: str, /) -> str:
        """Return name and value, and the source unless a flag's or variable's spelling shows it."""
        if setting not in self._given:
            return f"{self.name(setting)} {self._options[setting].default}"
        one = self._given[setting]
        evident = one.spelling.startswith(("--", ENVIRONMENT_PREFIX))
        return f"{one.spelling if evident else one.label} {one.value}"


def unknown(key: str, source: str, nearest_name: str | None, help_command: str) -> str:
    advice = (
        f"did you mean {nearest_name}?" if nearest_name else f"`{help_command}` lists the settings"
    )
    return f"{key} ({source}): unknown setting; {advice}"


def nearest(key: str, known: Iterable[str], cutoff: float = ALIKE) -> str | None:
    """Return the known name most like `key`; case, prefix and kind of separator do not count."""
    spellings = {_plain(name): name for name in known}
    matches = difflib.get_close_matches(_plain(key), spellings, n=1, cutoff=cutoff)
    return spellings[matches[0]] if matches else None


_MOST_SHOWN = 300  # characters of a value


def shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value[:_MOST_SHOWN]))}]"
    try:
        text = repr(masked_url(str(value)) if isinstance(value, (str, Path)) else value)
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... (cut)"
    except ValueError:  # an integer with more digits than Python converts
        return f"a {type(value).__name__} that is too long to be shown"


def _plain(name: str) -> str:
    return name.removeprefix(ENVIRONMENT_PREFIX).replace("-", "_").lower()


_PROCESSES = "nproc_per_node"


class DeviceCounts(NamedTuple):
    """The devices of this machine, to resolve `--nproc-per-node` auto, gpu and cpu."""

    gpu: int
    cpu: int
    hidden: str = ""
    """What may hide GPUs; empty: nothing."""


def validated(
    given: Givens,
    command: Command,
    device_counts: Callable[[], DeviceCounts] | None,
    problems: list[str],
) -> dict[str, Any]:
    """Return the parsed valid values; append a line to `problems` for each problem."""
    options = options_by_name(command)
    values: dict[str, Any] = {}
    for name, one in given.items():
        _validate(options[name], one, values, problems)
    if isinstance(values.get(_PROCESSES), str):
        assert device_counts is not None, "a command with workers must count devices"
        _resolve_processes(given[_PROCESSES], values, device_counts(), problems)
    problems.extend(
        missing(option, command)
        for option in options.values()
        if option.required and option.name not in given
    )
    _check_relations(given, values, command, problems)
    return values


def parse(option: Option, value: object) -> Any:
    """Return the value as its field holds it. Raises ValueError if it is outside its limits."""
    # pydantic would take true for 1; empty text is a value only where the limits allow it.
    is_empty = value == "" and not option.limits.may_be_empty
    if (isinstance(value, bool) and not option.is_switch) or is_empty:
        raise ValueError
    return _adapter(option).validate_python(value)


def _adapter(option: Option) -> TypeAdapter[Any]:
    limits = option.limits
    accepted: Any = limits.accepts or Annotated[option.hint, Field(**limits.bounds)]
    return TypeAdapter(accepted)


def _validate(option: Option, one: Given, values: dict[str, Any], problems: list[str]) -> None:
    hidden = option.secret or option.limits.may_hold_secrets
    as_text = "the value (not shown)" if hidden else shown(one.value)
    if not _is_valid_text(one.value):
        problems.append(f"{one.label}: {as_text} is not allowed; expected UTF-8 without null bytes")
        return
    try:
        values[option.name] = parse(option, one.value)
    except ValueError:
        problems.append(f"{one.label}: {as_text} is not allowed; expected {option.limits.text}")


def _is_valid_text(value: object) -> bool:
    """Workers, stores and messages get values as UTF-8, and paths cannot contain a null byte."""
    if isinstance(value, list):
        return all(map(_is_valid_text, value))
    text = str(value) if isinstance(value, (str, Path)) else ""
    return is_utf8_encodable(text) and "\0" not in text


def _resolve_processes(
    given: Given, values: dict[str, Any], counts: DeviceCounts, problems: list[str]
) -> None:
    """Replace auto, gpu or cpu by the number of devices; none at all is a problem."""
    word = values.pop(_PROCESSES)
    count = {"auto": counts.gpu or counts.cpu, "gpu": counts.gpu, "cpu": counts.cpu}[word]
    if count >= 1:
        values[_PROCESSES] = count
        return
    why = f" ({counts.hidden})" if counts.hidden else ""
    problems.append(
        f"{given.label}: {word!r} finds no such device here{why}; expected a number, auto or cpu"
    )


def missing(option: Option, command: Command) -> str:
    """Return the message about a required setting that no source gives."""
    return (
        f"{option.name} is missing: give {option.flag} on the command line, {option.variable} in "
        f"the environment, or {option.name} below [{command.table}] or [{SHARED_TABLE}] in the "
        f"file of --config; expected {option.limits.text}"
    )


def _check_relations(
    given: Givens, values: dict[str, Any], command: Command, problems: list[str]
) -> None:
    """Check relations; skip one if any of its settings is missing or invalid by itself."""
    defaults = defaults_of(command.settings)
    known = {name: value for name, value in defaults.items() if name not in given} | values
    naming = SpelledAsGiven(given, options_by_name(command))
    for relation in relations_of(command.settings):
        if all(name in known for name in relation.names):
            problems.extend(relation.problems({n: known[n] for n in relation.names}, naming))


def from_file(file: Given | None, command: Command, problems: list[str]) -> Givens:
    """Return what the file gives the command; its own table wins over the shared one."""
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
    except (ValueError, RecursionError) as error:  # too many digits, or brackets nested too deep
        problems.append(f"{file.value}: cannot be parsed as TOML: {error}")
    return {}


def _line(error: tomllib.TOMLDecodeError, text: str) -> int:
    """Return the line of a syntax error: the last if the parser names none, at the end."""
    match = re.search(r"at line ([0-9]+)", str(error))
    return int(match[1]) if match else max(1, len(text.splitlines()))


class _Reader:
    """Reads one TOML document for one command and appends what is wrong to `problems`."""

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
                f"{key} ({self._path}): is outside any table; move it below [{table}]"
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
        """Return whether this command takes the key; report it unless another one takes it here."""
        source = f"{self._path}, [{table}]"
        shared = table in (SHARED_TABLE, self._command.borrows)
        allowed = every_option() if shared else self._own
        if name not in every_option():
            known = (option.replace("_", "-") for option in allowed)
            self._unknown(key, source, nearest(key, known))
            return False
        if every_option()[name].secret:
            self._problems.append(
                f"{key} ({source}): is not read from this file, since other users may be able to "
                f"read it; give {name}_file, or {every_option()[name].variable} in the environment"
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
