"""Which texts and instants of documents that others wrote can be passed on and shown."""

from __future__ import annotations

_END_OF_TIME_UNIX_S = 253402300800  # the year 10000, of which the calendar knows nothing


def is_text(text: str) -> bool:
    """Whether it is UTF-8: JSON may escape half of a surrogate pair, and Python keeps bytes of
    paths and arguments that are no text as such halves. No message takes them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_instant(unix_s: float) -> bool:
    """Whether the calendar knows it; not a number is no instant."""
    return 0 <= unix_s < _END_OF_TIME_UNIX_S
