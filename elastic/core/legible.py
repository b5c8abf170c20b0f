"""Checks whether texts and instants from foreign documents can be sent on and displayed."""

from __future__ import annotations

_END_OF_TIME_UNIX_S = 253402300800  # the year 10000, which datetime cannot represent


def is_utf8_encodable(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8, as every message requires. It cannot if it has lone
    surrogates: JSON may escape one, and Python decodes invalid bytes of paths and arguments to
    them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_representable_time(unix_s: float) -> bool:
    """Whether datetime can represent `unix_s` and it is not negative. False for NaN."""
    return 0 <= unix_s < _END_OF_TIME_UNIX_S
