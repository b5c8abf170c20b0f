"""The simulated undo: the copies that elastic/worker/state/undo.py keeps, and what it misses."""

from __future__ import annotations

from tests.sim.replica import BLANK, Content


class Undo:
    """Copies of the tracked state at its marks."""

    def __init__(self) -> None:
        self.commit: Content | None = None
        """At the commit mark, if it can be had."""
        self._begin = BLANK
        self._retry: Content | None = None
        self._misses = False
        self.missed = False
        """A commit mark was lost, or a block could not be undone."""

    def begin(self, content: Content, *, misses_gap: bool, misses_block: bool) -> None:
        """A step is handed out. misses_gap: what has changed since the commit was not copied.
        misses_block: the block changes what is not copied."""
        if misses_gap and self.commit is not None and self.commit != content:
            self.commit, self.missed = None, True
        self._begin, self._misses = content, misses_block

    def end(self, content: Content) -> None:
        """The block has ended and its step counts."""
        self.commit = content

    def received(self, content: Content, *, at_commit: bool) -> None:
        self.commit = content if at_commit else None

    def put_back(self, content: Content) -> tuple[Content, bool]:
        """The state at the block's begin, and whether it really is."""
        if self._misses and content != self._begin:
            self.missed = True
            return self._begin._replace(weights=hash((content.weights, -1))), False
        return self._begin, True

    def keep_for_retry(self, content: Content) -> None:
        self._retry = content

    def put_back_for_retry(self, content: Content) -> Content:
        kept, self._retry = self._retry, None
        return content if kept is None else kept
