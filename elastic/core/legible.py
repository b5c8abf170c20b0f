"""Checks whether texts and instants from outside can be sent on, and makes texts displayable."""

from __future__ import annotations

import re

_END_OF_TIME_UNIX_S = 253402300800  # the year 10000, which datetime cannot represent


def is_utf8_encodable(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8, as every message requires. It cannot if it has lone
    surrogates: JSON may escape one, and Python decodes invalid bytes of paths and arguments to
    them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_representable_time(unix_s: float) -> bool:
    """Whether datetime can represent `unix_s` and it is not negative. False for NaN."""
    return 0 <= unix_s < _END_OF_TIME_UNIX_S


# Also what ends a line for some programs, and what reverses the direction of the text behind it.
_CONTROL = re.compile(
    r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
_CONTINUED = "\n    "


def printable(text: str, *, colours: bool = False) -> str:
    """The text with control characters escaped: workers, nodes, scripts and files have written
    parts of it, and must not command the terminal, nor write what looks like a line of its own.

    Lines after the first are indented. colours: keep escape sequences that set colours.
    """
    lines = text.split("\n")
    shown = (_CONTROL.sub(lambda m: m[0] if colours and m[1] else _escaped(m[0]), x) for x in lines)
    return _CONTINUED.join(shown)


def _escaped(control: str) -> str:
    return control.encode("unicode_escape").decode()
