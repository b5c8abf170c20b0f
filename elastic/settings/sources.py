"""Merges the command line, the environment and a TOML file into validated `RunSettings`.

Plain pydantic rather than pydantic-settings: that one reads `os.environ` by itself, passes over
misspelt variables, and merges its sources before it validates, after which an error can no longer
name the place where the user wrote the value.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter

from elastic.errors import ConfigurationError
from elastic.settings.run import ENVIRONMENT_PREFIX, Option, RunSettings, run_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
SYSTEM_VARIABLE_PREFIXES = (ENVIRONMENT_PREFIX + "WORKER_",)
"""Variables that `elastic` gives to its own processes: no settings, whatever follows."""
TABLE = "run"

_ADDRESS = re.compile(r"(\[[^\s\[\]]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_NODES = re.compile(r"([0-9]+)(?::([0-9]+))?")


class DeviceCounts(NamedTuple):
    """What `--nproc-per-node auto`, `gpu` and `cpu` are resolved with on this machine."""

    gpu: int
    cpu: int


class _Nodes(NamedTuple):
    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where the user wrote it."""

    spelling: str
    source: str
    value: object

    @property
    def label(self) -> str:
        return f"{self.spelling} ({self.source})"


_Givens = dict[str, _Given]


def load_run_settings(
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    config_file: Path | None,
    device_counts: Callable[[], DeviceCounts],
) -> RunSettings:
    """Merge and validate: command line over environment over TOML file over defaults.

    `command_line` has the names of `describe_run_settings()`; None means that it was not given.
    `config_file` is `--config`; without it ELASTIC_CONFIG names the file, if any. `device_counts`
    is called only where `nproc_per_node` is auto, gpu or cpu.

    Raises `ConfigurationError` with one line for each problem.
    """
    problems: list[str] = []
    given = _from_file(_config_file(config_file, environment), problems)
    given |= _from_environment(environment, problems)
    given |= _from_command_line(command_line)
    values = _validated(given, problems)
    _resolve_processes(given, values, device_counts, problems)
    _check_reachable(given, values, problems)
    if problems:
        raise ConfigurationError("\n".join(problems))
    return _settings(values)


def _settings(values: dict[str, Any]) -> RunSettings:
    fields = dict(values)
    nodes: _Nodes | None = fields.pop("nnodes", None)
    if nodes is not None:
        fields |= {"nnodes_min": nodes.minimum, "nnodes_max": nodes.maximum}
    return RunSettings(**fields)


# Sources


@functools.cache
def _options() -> Mapping[str, Option]:
    return {option.name: option for option in run_options()}


def _from_command_line(command_line: Mapping[str, object]) -> _Givens:
    unknown = command_line.keys() - _options().keys()
    assert not unknown, f"the command line passes what is not a setting: {sorted(unknown)}"
    return {
        name: _Given(_options()[name].flag, "command line", value)
        for name, value in command_line.items()
        if value is not None
    }


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> _Givens:
    names = {option.variable: option.name for option in _options().values()}
    known = [*names, CONFIG_VARIABLE]
    found: _Givens = {}
    for variable, value in sorted(environment.items()):
        if not _is_setting(variable):
            continue
        if variable in names:
            found[names[variable]] = _Given(variable, "environment", value)
        elif _nearest(variable, known):  # else another program's, such as ELASTIC_PASSWORD
            # The value stays unsaid: it may be a secret after all.
            problems.append(_unknown(variable, "environment", known))
    return found


def _is_setting(variable: str) -> bool:
    return (
        variable.startswith(ENVIRONMENT_PREFIX)
        and not variable.startswith(SYSTEM_VARIABLE_PREFIXES)
        and variable != CONFIG_VARIABLE
    )


def _config_file(config_file: Path | None, environment: Mapping[str, str]) -> _Given | None:
    if config_file is not None:
        return _Given("--config", "command line", config_file)
    if CONFIG_VARIABLE in environment:
        return _Given(CONFIG_VARIABLE, "environment", environment[CONFIG_VARIABLE])
    return None


def _from_file(file: _Given | None, problems: list[str]) -> _Givens:
    document = {} if file is None else _parse_file(file, problems)
    source = "" if file is None else str(file.value)
    problems.extend(_misplaced(key, source) for key in document if key != TABLE)
    table = document.get(TABLE, {})
    if not isinstance(table, dict):
        problems.append(f"{TABLE} ({source}): {_shown(table)} is not allowed; expected a table")
        return {}
    return _from_table(table, f"{source}, [{TABLE}]", problems)


def _parse_file(file: _Given, problems: list[str]) -> dict[str, Any]:
    try:
        text = Path(str(file.value)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"{file.label}: can not read {_shown(file.value)}: {reason}")
        return {}
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{file.value}, line {_line(error, text)}: not valid TOML: {error}")
        return {}


def _line(error: tomllib.TOMLDecodeError, text: str) -> int:
    """The line of a syntax error; the parser gives none for one at the end of the document."""
    told = re.search(r"at line ([0-9]+)", str(error))
    return int(told[1]) if told else max(1, len(text.splitlines()))


def _from_table(table: Mapping[str, object], source: str, problems: list[str]) -> _Givens:
    found: _Givens = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _options():
            known = (option.replace("_", "-") for option in _options())
            problems.append(_unknown(key, source, known))
        elif name in found:
            problems.append(f"{key} ({source}): given twice, also as {found[name].spelling}")
        else:
            found[name] = _Given(key, source, value)
    return found


def _misplaced(key: str, source: str) -> str:
    if key.replace("-", "_") in _options():
        return f"{key} ({source}): stands outside of a table; move it below [{TABLE}]"
    return _unknown(key, source, [TABLE])


def _unknown(key: str, source: str, known: Iterable[str]) -> str:
    nearest = _nearest(key, known)
    advice = f"did you mean {nearest}?" if nearest else "`elastic run --help` lists the settings"
    return f"{key} ({source}): unknown setting; {advice}"


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The known name most like `key`, compared without case, prefix and kind of separator."""
    spellings = {_plain(name): name for name in known}
    matches = difflib.get_close_matches(_plain(key), spellings, n=1)
    return spellings[matches[0]] if matches else None


def _plain(name: str) -> str:
    return name.removeprefix(ENVIRONMENT_PREFIX).replace("-", "_").lower()


# Validation


def _parse_nodes(value: object) -> _Nodes:
    """torchrun's `--nnodes`: "N" or "MIN:MAX"."""
    match = _NODES.fullmatch(str(value))
    if not match:
        raise ValueError
    minimum = int(match[1])
    nodes = _Nodes(minimum, int(match[2]) if match[2] else minimum)
    if not 1 <= nodes.minimum <= nodes.maximum:
        raise ValueError
    return nodes


def _check_address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if not match or int(match[2]) > 65535:
        raise ValueError
    return value


_SPECIAL_TYPES: Mapping[str, Any] = {
    "nproc_per_node": Annotated[int, Field(ge=1)] | Literal["auto", "gpu", "cpu"],
    "nnodes": Annotated[_Nodes, PlainValidator(_parse_nodes)],
    "listen": Annotated[str, AfterValidator(_check_address)],
}


@functools.cache
def _adapters() -> Mapping[str, TypeAdapter[Any]]:
    """One parser per setting, made from the type of its field and its limits."""
    hints = get_type_hints(RunSettings)
    return {name: TypeAdapter(_accepted(option, hints)) for name, option in _options().items()}


def _accepted(option: Option, hints: Mapping[str, Any]) -> Any:
    if option.name in _SPECIAL_TYPES:
        return _SPECIAL_TYPES[option.name]
    return Annotated[hints[option.name], Field(**option.limits.bounds)]


def _validated(given: _Givens, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, one in given.items():
        _validate(name, one, values, problems)
    return values


def _validate(name: str, one: _Given, values: dict[str, Any], problems: list[str]) -> None:
    try:
        values[name] = _parse(name, one.value)
    except ValueError:
        expected = _options()[name].limits.text
        problems.append(f"{one.label}: {_shown(one.value)} is not allowed; expected {expected}")


def _parse(name: str, value: object) -> Any:
    # No setting is a yes or no, and pydantic would take true for 1; empty text is nowhere a value.
    if isinstance(value, bool) or value == "":
        raise ValueError
    return _adapters()[name].validate_python(value)


def _resolve_processes(
    given: _Givens,
    values: dict[str, Any],
    device_counts: Callable[[], DeviceCounts],
    problems: list[str],
) -> None:
    """Replace auto, gpu and cpu by the number of devices; with none it is a problem."""
    word = values.get("nproc_per_node")
    if not isinstance(word, str):
        return
    gpu, cpu = device_counts()
    count = {"auto": gpu or cpu, "gpu": gpu, "cpu": cpu}[word]
    if count >= 1:
        values["nproc_per_node"] = count
        return
    del values["nproc_per_node"]
    label = given["nproc_per_node"].label
    problems.append(f"{label}: {word!r} finds no such device here; expected a number, auto or cpu")


def _check_reachable(given: _Givens, values: dict[str, Any], problems: list[str]) -> None:
    involved = ("min_workers", "nproc_per_node", "nnodes")
    if "min_workers" not in values or any(n in given and n not in values for n in involved):
        return
    most = _settings({n: values[n] for n in involved[1:] if n in values}).max_world_size
    if values["min_workers"] > most:
        workers, each, on = (_mention(name, given) for name in involved)
        problems.append(
            f"{workers} can never be reached: {each} x {on} gives at most {most} workers; "
            f"lower {_name(involved[0], given)} or raise "
            f"{_name(involved[1], given)} or {_name(involved[2], given)}"
        )


def _name(name: str, given: _Givens) -> str:
    """The setting as the user wrote it, as a flag where it is the default."""
    return given[name].spelling if name in given else _options()[name].flag


def _mention(name: str, given: _Givens) -> str:
    """The setting and its value; flags and variables tell their source by their spelling."""
    if name not in given:
        return f"{_name(name, given)} {_options()[name].default}"
    one = given[name]
    evident = one.spelling.startswith(("--", ENVIRONMENT_PREFIX))
    return f"{one.spelling if evident else one.label} {one.value}"


def _shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    return repr(str(value)) if isinstance(value, Path) else repr(value)
