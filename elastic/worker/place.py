"""What part of the training the script's thread is in, for readers on other threads."""

from __future__ import annotations

import time

from elastic.core.whereabouts import Place


class CurrentPlace:
    """Set by the script's thread, without a call: some ten times a step. Read by others."""

    def __init__(self) -> None:
        self.now = (Place.STARTING, time.monotonic())
        """Where it is, and since when."""

    def look(self) -> tuple[Place, float]:
        """Where it is, and for how many seconds."""
        place, since = self.now
        return place, time.monotonic() - since
