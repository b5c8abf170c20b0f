"""Simulates elastic/worker/state/undo.py: keeps its copies, and misses some changes."""

from __future__ import annotations

from tests.sim.replica import BLANK, Content


class Undo:
    """Copies of the tracked state at its marks."""

    def __init__(self) -> None:
        self.commit: Content | None = None
        """The state at the commit mark; None if it is lost."""
        self._begin = BLANK
        self._retry: Content | None = None
        self._misses = self._misses_gap = False
        self.missed = False
        """A commit mark was lost, or a block could not be undone."""

    def begin(self, content: Content, *, misses_gap: bool, misses_block: bool) -> None:
        """A step begins. `misses_gap`: changes since the commit were not copied. `misses_block`:
        the block changes something that is not copied. A void block's gap misses as the last one.
        """
        if misses_gap and self.commit is not None and self.commit != content:
            self.commit, self.missed = None, True
        self._begin, self._misses, self._misses_gap = content, misses_block, misses_gap

    def end(self, content: Content) -> None:
        """The block has ended and its step is committed."""
        self.commit = content

    def received(self, content: Content, *, at_commit: bool) -> None:
        self.commit = content if at_commit else None

    def put_back(self, content: Content) -> tuple[Content, bool]:
        """Return the state at the block's start, and whether it was restored whole."""
        if self._misses and content != self._begin:
            self.missed = True
            return self._begin._replace(weights=hash((content.weights, -1))), False
        return self._begin, True

    def keep_for_retry(self, content: Content) -> None:
        self._retry = content

    def put_back_for_retry(self, content: Content) -> tuple[Content, bool]:
        """Return the state as it was kept, and whether it was restored whole."""
        kept, self._retry = self._retry, None
        if kept is None or content == kept:
            return content, True
        if self._misses_gap:
            self.missed = True
            return kept._replace(weights=hash((content.weights, -2))), False
        return kept, True
