"""The vocabulary of settings: options, their limits, and the classes that hold them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, get_type_hints

ENVIRONMENT_PREFIX = "ELASTIC_"


class Limits(NamedTuple):
    """What a value must satisfy: as a phrase for people and as keywords of `pydantic.Field`.

    `accepts` replaces the type of the field where users write something else than it holds; it may
    carry pydantic validators.
    """

    text: str
    bounds: Mapping[str, Any] = {}
    accepts: Any = None
    may_be_empty: bool = False
    """Empty text is a value."""
    may_hold_secrets: bool = False
    """What users wrote is not repeated in messages."""


class Option(NamedTuple):
    """One setting as the user meets it; `default` is its plain value, `hint` its parsed type."""

    name: str
    default: str | int | float | None
    help: str
    limits: Limits
    hint: Any
    required: bool = False
    secret: bool = False
    """Read from the environment alone, and its value is never shown."""
    group: str = ""
    """What it belongs to in several commands, as a title; empty: to the command."""
    positional: str = ""
    """What it is called in the usage of the command, where it is no option but follows them."""
    short: str = ""
    """A letter for the command line, with its dash, where people know it from elsewhere."""

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return self.positional or flag_of(self.name)

    @property
    def variable(self) -> str:
        """The spelling in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether it is a yes or no, given as --flag or --no-flag."""
        return self.hint is bool

    @property
    def shown_default(self) -> str:
        """As it would be written."""
        if self.is_switch:
            return str(self.default).lower()
        return "unset" if self.default is None else str(self.default)


class Naming(Protocol):
    """How settings are called in a message."""

    def name(self, setting: str, /) -> str:
        """As the user wrote it; as a flag where nobody did."""

    def mention(self, setting: str, /) -> str:
        """The same with the value."""


class Relation(NamedTuple):
    """What must hold between settings; judged only where each of them is right by itself.

    `problems` gets the values of `names`, defaults included, and yields a line for each problem.
    """

    names: tuple[str, ...]
    problems: Callable[[Mapping[str, Any], Naming], Iterator[str]]


def flag_of(name: str) -> str:
    """The spelling of a setting on the command line."""
    return "--" + name.replace("_", "-")


def about(
    help_text: str, limits: Limits, *, secret: bool = False, positional: str = "", short: str = ""
) -> dict[str, Any]:
    """The metadata that makes a dataclass field one that users can set."""
    spelling = {"positional": positional, "short": short}
    return {"help": help_text, "limits": limits, "secret": secret, **spelling}


def setting(default: Any, help_text: str, limits: Limits) -> Any:
    """A dataclass field that users can set, of one command alone."""
    return dataclasses.field(default=default, metadata=about(help_text, limits))


def group(title: str) -> dict[str, Any]:
    """The metadata of a field that holds another settings class, shared by several commands."""
    return {"group": title}


def options_of(settings: type) -> Iterator[Option]:
    """Every setting that users can give, in the order of the help, those of groups included."""
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            for option in options_of(hints[one.name]):
                yield option._replace(group=one.metadata["group"])
        elif one.metadata:
            yield _option(one, hints[one.name])


def relations_of(settings: type) -> Iterator[Relation]:
    """What must hold between the settings, those of groups included."""
    yield from getattr(settings, "relations", ())
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            yield from relations_of(hints[one.name])


def defaults_of(settings: type) -> Mapping[str, Any]:
    """The parsed defaults of all that are not required, by name, those of groups included."""
    hints = get_type_hints(settings)
    defaults: dict[str, Any] = {}
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            defaults |= defaults_of(hints[one.name])
        elif one.default is not dataclasses.MISSING:
            defaults[one.name] = one.default
    return defaults


def build(settings: type, values: Mapping[str, Any]) -> Any:
    """An instance with the given values, groups built of theirs, and defaults for the rest."""
    hints = get_type_hints(settings)
    arguments: dict[str, Any] = {}
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            arguments[one.name] = build(hints[one.name], values)
        elif one.name in values:
            arguments[one.name] = values[one.name]
    return settings(**arguments)


def _option(one: dataclasses.Field[Any], hint: Any) -> Option:
    required = one.default is dataclasses.MISSING
    return Option(
        name=one.name,
        default=None if required else _plain(one.default),
        help=one.metadata["help"],
        limits=one.metadata["limits"],
        hint=hint,
        required=required,
        secret=one.metadata["secret"],
        positional=one.metadata["positional"],
        short=one.metadata["short"],
    )


def _plain(default: Any) -> str | int | float | None:
    if isinstance(default, enum.Enum):
        return str(default.value)
    if default == ():
        return None
    if default is None or isinstance(default, (str, int, float)):
        return default
    return str(default)
