"""Describes settings: options, their limits, and the dataclasses that hold them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, get_type_hints

ENVIRONMENT_PREFIX = "ELASTIC_"


class Limits(NamedTuple):
    """What a value must satisfy: as a phrase for people and as keywords of `pydantic.Field`.

    `accepts` replaces the field's type if users write another type than the field holds; it may
    carry pydantic validators.
    """

    text: str
    bounds: Mapping[str, Any] = {}
    accepts: Any = None
    may_be_empty: bool = False
    """Whether empty text is a valid value."""
    may_hold_secrets: bool = False
    """Messages do not repeat what users wrote."""


class Option(NamedTuple):
    """One setting as the user meets it; `default` is its plain value, `hint` its parsed type."""

    name: str
    default: str | int | float | None
    help: str
    limits: Limits
    hint: Any
    required: bool = False
    secret: bool = False
    """The setting is read only from the environment, and its value is never shown."""
    group: str = ""
    """The title of its group if several commands share it; empty if it is one command's own."""
    positional: str = ""
    """Its name in the command's usage if it is a positional argument; empty for an option."""
    short: str = ""
    """A short flag that users know from other programs, such as -m."""

    @property
    def flag(self) -> str:
        return self.positional or flag_of(self.name)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Return whether it is a boolean, given as --flag or --no-flag."""
        return self.hint is bool

    @property
    def shown_default(self) -> str:
        if self.is_switch:
            return str(self.default).lower()
        return "unset" if self.default is None else str(self.default)


class Naming(Protocol):
    """Spells settings in messages."""

    def name(self, setting: str, /) -> str:
        """Return the setting as the user wrote it, or as a flag if no source gives it."""

    def mention(self, setting: str, /) -> str:
        """Return the same followed by the value."""


class Relation(NamedTuple):
    """A condition between settings, checked only if each of them is valid by itself.

    `problems` gets the values of `names`, defaults included, and yields a line for each problem.
    """

    names: tuple[str, ...]
    problems: Callable[[Mapping[str, Any], Naming], Iterator[str]]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def about(
    help_text: str, limits: Limits, *, secret: bool = False, positional: str = "", short: str = ""
) -> dict[str, Any]:
    """Return the metadata that makes a dataclass field a setting."""
    spelling = {"positional": positional, "short": short}
    return {"help": help_text, "limits": limits, "secret": secret, **spelling}


def setting(default: Any, help_text: str, limits: Limits) -> Any:
    """Return a dataclass field for a setting that only one command has."""
    return dataclasses.field(default=default, metadata=about(help_text, limits))


def group(title: str) -> dict[str, Any]:
    """Return the metadata of a field that holds a settings class which several commands share."""
    return {"group": title}


def options_of(settings: type) -> Iterator[Option]:
    """Yield every setting, those of groups included, in the order of the help."""
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            for option in options_of(hints[one.name]):
                yield option._replace(group=one.metadata["group"])
        elif one.metadata:
            yield _option(one, hints[one.name])


def relations_of(settings: type) -> Iterator[Relation]:
    """Yield the relations between the settings, those of groups included."""
    yield from getattr(settings, "relations", ())
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            yield from relations_of(hints[one.name])


def defaults_of(settings: type) -> Mapping[str, Any]:
    """Return the parsed defaults of all optional settings by name, those of groups included."""
    hints = get_type_hints(settings)
    defaults: dict[str, Any] = {}
    for one in dataclasses.fields(settings):
        if "group" in one.metadata:
            defaults |= defaults_of(hints[one.name])
        elif one.default is not dataclasses.MISSING:
            defaults[one.name] = one.default
    return defaults


def build(settings: type, values: Mapping[str, Any]) -> Any:
    """Return an instance with the given values, also in its groups, and defaults for the rest."""
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
