"""Names of files that are made of others' names, which may be longer than a file's can be."""

from __future__ import annotations

import hashlib

LONGEST = 255
"""Bytes of a file's name (path_resolution(7))."""
_DIGEST_CHARACTERS = 16
_END_CHARACTERS = 16
LEAST = _DIGEST_CHARACTERS + _END_CHARACTERS + 2 + 8
"""Bytes that a shortened name needs."""


def fitting(name: str, most: int) -> str:
    """The name, or one of at most `most` characters, at least `LEAST`, that no other name has: its
    begin, a digest of all of it, its end. For ASCII names."""
    if len(name) <= most:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_CHARACTERS // 2).hexdigest()
    end = name[-_END_CHARACTERS:]
    return f"{name[: most - len(digest) - len(end) - 2]}~{digest}~{end}"
