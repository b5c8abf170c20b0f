"""Masks the secrets that users write into URLs and arguments, for display."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MASK = "***"
_SECRET = r"(?:[\w.-]*(?:password|passwd|secret|token|credential|api[_-]?key|access[_-]?key|sig))"
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_PARAMETER = re.compile(rf"(?i)(?<=[?&;])({_SECRET})=[^&;\s]*")
_OPTION = re.compile(rf"(?i)(-{{0,2}}{_SECRET})(=.*)?", re.DOTALL)


def masked_url(url: str) -> str:
    """Mask the user and password before the URL's host, and secret parameters of its query."""
    return _PARAMETER.sub(rf"\1={_MASK}", _USER_INFO.sub(_MASK, url))


def masked_arguments(arguments: Iterable[str]) -> list[str]:
    """Mask the values of options whose names suggest secrets, and the secrets in URLs."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if hide_next and not argument.startswith("-"):
            shown.append(_MASK)
            hide_next = False
            continue
        hide_next = option is not None and option[2] is None and argument.startswith("-")
        if option is not None and option[2] is not None:
            shown.append(f"{option[1]}={_MASK}")
        else:
            shown.append(masked_url(argument))
    return shown
