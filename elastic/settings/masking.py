"""Leaves out of URLs and command lines what may be a secret, for display and for stores that others
can read.

Lists of names that sound secret always miss some. So nothing of an argument is shown but its name,
and numbers; and nothing of a URL but its scheme, host and path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MASK = "***"
_WORD = re.compile(r"\S+")
_BARE_USER_INFO = re.compile(r"^[^/\s:]+:(?!//)[^/\s]*@")  # user:password@host
_QUERY = re.compile(r"(?<=[?&;#])([^=&;#?\s]*)=[^&;#\s]*")
_NAME = re.compile(r"(--?|\+{1,2}|~)?([A-Za-z][\w.-]*)")
_NUMBER = re.compile(r"[-+]?(\d{1,8}|\d*\.\d{1,8}|\d+\.)(e[-+]?\d{1,3})?", re.IGNORECASE)
_SECRET = re.compile(r"pass|pwd|pin|secret|token|key|auth|cred|sig|hash|code", re.IGNORECASE)


def masked_url(url: str) -> str:
    """Mask the user and password before the URL's host, and the values of its query."""
    shown = _WORD.sub(_without_user_info, _BARE_USER_INFO.sub(f"{_MASK}@", url))
    return _QUERY.sub(rf"\1={_MASK}", shown)


def _without_user_info(word: re.Match[str]) -> str:
    """Mask up to the last "@": a password may contain "@" and "/". Without a colon it is a token in
    HTTP, else a bare user name, or a container of Azure's (abfs://container@account)."""
    scheme, separator, rest = word[0].partition("://")
    user_info, at, host = rest.rpartition("@")
    if at and (":" in user_info or scheme.lower().endswith(("http", "https"))):
        return f"{scheme}{separator}{_MASK}@{host}"
    return word[0]


def masked_arguments(program: str, arguments: Iterable[str]) -> list[str]:
    """Return the program and its arguments with all values masked but numbers.

    What follows a name that sounds secret is masked, also a number and what looks like an option.
    `-pSECRET`, which has no space, shows the first letter.
    """
    shown, name = [program], ""
    for argument in arguments:
        before, equals, value = argument.partition("=")
        named = _NAME.fullmatch(before) if not _SECRET.search(name) else None
        if equals and named is not None:
            shown.append(f"{before}={_value(value, before)}")
            name = ""
        elif named is not None and (named[1] or "").startswith("-") and not equals:
            short = named[1] == "-" and len(before) > 2
            name = before[:2] if short else before
            shown.append(f"{name}{_MASK}" if short else name)
        else:
            shown.append(_value(argument, name))
            name = ""
    return shown


def _value(value: str, name: str) -> str:
    return value if _NUMBER.fullmatch(value) and not _SECRET.search(name) else _MASK
