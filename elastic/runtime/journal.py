"""The journal: what happened to the job, one event at a time, to whoever listens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Something that happened. `fields` are JSON values; durations carry their unit in the name."""

    unix_s: float
    name: str
    fields: Mapping[str, Any]

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"time": round(self.unix_s, 6), "event": self.name, **self.fields})


Listener = Callable[[Entry], None]


class Journal:
    """Distributes entries to listeners, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def record(self, name: str, /, **fields: Any) -> None:
        """Something happened."""
        entry = Entry(unix_s=time.time(), name=name, fields=fields)
        for listener in self._listeners:
            listener(entry)


class JsonLines:
    """Writes each entry as one JSON line and flushes it."""

    def __init__(self, stream: TextIO, *, quiet: frozenset[str] = frozenset()) -> None:
        self._stream = stream
        self._quiet = quiet

    def __call__(self, entry: Entry) -> None:
        """Write the entry unless its name is one of the quiet ones."""
        if entry.name not in self._quiet:
            self._stream.write(entry.to_json() + "\n")
            self._stream.flush()
