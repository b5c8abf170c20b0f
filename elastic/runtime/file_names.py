"""Shortens names of nodes, jobs and workers to fit into file names."""

from __future__ import annotations

import hashlib

MAX_LENGTH = 255
"""The longest file name, in bytes (path_resolution(7))."""
_DIGEST_CHARACTERS = 16
_END_CHARACTERS = 16
MIN_LENGTH = _DIGEST_CHARACTERS + _END_CHARACTERS + 2 + 8
"""The smallest limit, in bytes, that `shortened_name` can shorten a name to."""


def shortened_name(name: str, most: int) -> str:
    """Return an ASCII name, shortened to `most` characters, at least `MIN_LENGTH`, if it is longer:
    its beginning, a digest of the whole name, and its end. No other name is shortened to the same.
    """
    if len(name) <= most:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_CHARACTERS // 2).hexdigest()
    end = name[-_END_CHARACTERS:]
    return f"{name[: most - len(digest) - len(end) - 2]}~{digest}~{end}"
