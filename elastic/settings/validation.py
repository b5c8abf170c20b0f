"""Judges given values: each by its own limits, then those that must fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from elastic.core.legible import is_text
from elastic.settings.commands import SHARED_TABLE, Command, options_by_name
from elastic.settings.fields import Option, defaults_of, relations_of
from elastic.settings.given import Given, Givens, SpelledAsGiven, shown

_PROCESSES = "nproc_per_node"


class DeviceCounts(NamedTuple):
    """What `--nproc-per-node auto`, `gpu` and `cpu` are resolved with on this machine."""

    gpu: int
    cpu: int


def validated(
    given: Givens,
    command: Command,
    device_counts: Callable[[], DeviceCounts] | None,
    problems: list[str],
) -> dict[str, Any]:
    """The parsed values of what was given; a line in `problems` for each that is wrong."""
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
    _relate(given, values, command, problems)
    return values


def parse(option: Option, value: object) -> Any:
    """The value as its field holds it; raises ValueError if it is outside of the limits."""
    # pydantic would take true for 1; empty text is nowhere a value.
    is_empty = value == "" and not option.limits.may_be_empty
    if (isinstance(value, bool) and not option.is_switch) or is_empty:
        raise ValueError
    return _adapter(option).validate_python(value)


def _adapter(option: Option) -> TypeAdapter[Any]:
    """A parser made from the type of the field and its limits."""
    limits = option.limits
    accepted: Any = limits.accepts or Annotated[option.hint, Field(**limits.bounds)]
    return TypeAdapter(accepted)


def _validate(option: Option, one: Given, values: dict[str, Any], problems: list[str]) -> None:
    hidden = option.secret or option.limits.may_hold_secrets
    told = "the value (not shown)" if hidden else shown(one.value)
    if not _can_be_told(one.value):
        problems.append(f"{one.label}: {told} is not allowed; expected UTF-8 without null bytes")
        return
    try:
        values[option.name] = parse(option, one.value)
    except ValueError:
        problems.append(f"{one.label}: {told} is not allowed; expected {option.limits.text}")


def _can_be_told(value: object) -> bool:
    """Workers, stores and messages are told of values in UTF-8, and no path has a null byte."""
    if isinstance(value, list):
        return all(map(_can_be_told, value))
    text = str(value) if isinstance(value, (str, Path)) else ""
    return is_text(text) and "\0" not in text


def _resolve_processes(
    given: Given, values: dict[str, Any], counts: DeviceCounts, problems: list[str]
) -> None:
    """Replace auto, gpu and cpu by the number of devices; with none it is a problem."""
    word = values.pop(_PROCESSES)
    count = {"auto": counts.gpu or counts.cpu, "gpu": counts.gpu, "cpu": counts.cpu}[word]
    if count >= 1:
        values[_PROCESSES] = count
        return
    problems.append(
        f"{given.label}: {word!r} finds no such device here; expected a number, auto or cpu"
    )


def missing(option: Option, command: Command) -> str:
    """What is said of a setting that the command cannot do without."""
    return (
        f"{option.name} is missing: give {option.flag} on the command line, {option.variable} in "
        f"the environment, or {option.name} below [{command.table}] or [{SHARED_TABLE}] in the "
        f"file of --config; expected {option.limits.text}"
    )


def _relate(given: Givens, values: dict[str, Any], command: Command, problems: list[str]) -> None:
    """Settings of which one is wrong by itself, or missing, are not compared."""
    defaults = defaults_of(command.settings)
    known = {name: value for name, value in defaults.items() if name not in given} | values
    naming = SpelledAsGiven(given, options_by_name(command))
    for relation in relations_of(command.settings):
        if all(name in known for name in relation.names):
            problems.extend(relation.problems({n: known[n] for n in relation.names}, naming))
