"""Workers whose agents were asked to end them and to start others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic.core.coordinator.view import Sighting
from elastic.core.membership import WorkerId


class Replacements:
    """They are as good as gone for each decision, although reports of them still come.

    A request can be lost with the stream of an agent. A worker still there when the patience is
    over counts again, and is asked for again if need be.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until: dict[WorkerId, float] = {}

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._until

    @property
    def next_at(self) -> float | None:
        """When the first of them counts again."""
        return min(self._until.values(), default=None)

    def ask(self, workers: Iterable[WorkerId], now: float) -> list[WorkerId]:
        """End these workers; returns those that no request has named yet."""
        news = sorted(set(workers) - self._until.keys())
        self._until.update(dict.fromkeys(news, now + self._patience_s))
        return news

    def others(
        self, workers: Mapping[WorkerId, Sighting], now: float
    ) -> Mapping[WorkerId, Sighting]:
        """The workers that are not being ended."""
        if not self._until:
            return workers
        self._until = {w: at for w, at in self._until.items() if w in workers and now < at}
        return {name: w for name, w in workers.items() if name not in self._until}
