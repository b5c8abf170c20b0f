"""Values as users wrote them, and the words in which they are told what is wrong with them."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.settings.fields import ENVIRONMENT_PREFIX, Option

ALIKE, VERY_ALIKE = 0.6, 0.8
"""Ratios of `difflib`, for names that are surely ours and for those that may be another's."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where the user wrote it."""

    spelling: str
    source: str
    value: object

    @property
    def label(self) -> str:
        """Where it is, for a message."""
        return f"{self.spelling} ({self.source})"


Givens = dict[str, Given]


class SpelledAsGiven:
    """Names settings as the user wrote them, as flags where they are the default."""

    def __init__(self, given: Givens, options: Mapping[str, Option]) -> None:
        self._given = given
        self._options = options

    def name(self, setting: str, /) -> str:
        """Without its value."""
        if setting in self._given:
            return self._given[setting].spelling
        option = self._options[setting]
        return option.variable if option.secret else option.flag

    def mention(self, setting: str, /) -> str:
        """With its value; flags and variables tell their source by their spelling."""
        if setting not in self._given:
            return f"{self.name(setting)} {self._options[setting].default}"
        one = self._given[setting]
        evident = one.spelling.startswith(("--", ENVIRONMENT_PREFIX))
        return f"{one.spelling if evident else one.label} {one.value}"


def unknown(key: str, source: str, nearest_name: str | None, help_command: str) -> str:
    """What is said of a name that is no setting."""
    advice = (
        f"did you mean {nearest_name}?" if nearest_name else f"`{help_command}` lists the settings"
    )
    return f"{key} ({source}): unknown setting; {advice}"


def nearest(key: str, known: Iterable[str], cutoff: float = ALIKE) -> str | None:
    """The known name most like `key`, compared without case, prefix and kind of separator."""
    spellings = {_plain(name): name for name in known}
    matches = difflib.get_close_matches(_plain(key), spellings, n=1, cutoff=cutoff)
    return spellings[matches[0]] if matches else None


def shown(value: object) -> str:
    """A value, for a message."""
    if isinstance(value, enum.Enum):
        return repr(value.value)
    try:
        return repr(str(value)) if isinstance(value, Path) else repr(value)
    except ValueError:  # a number of more digits than Python shows
        return f"a {type(value).__name__} that is too long to be shown"


def _plain(name: str) -> str:
    return name.removeprefix(ENVIRONMENT_PREFIX).replace("-", "_").lower()
