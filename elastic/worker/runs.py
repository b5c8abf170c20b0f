"""The `session.run` calls since the last commit, for members that must repeat one for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.errors import GroupLost


class Runs:
    """A call can complete here and break on another member, which then needs this one again."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._before = 0  # calls made by others before this member joined: never needed again

    @property
    def done(self) -> int:
        """Calls completed since the last commit."""
        return self._before + len(self._calls)

    def completed(self, call: Callable[[], Any]) -> None:
        """A call has completed on this member."""
        self._calls.append(call)

    def forget(self) -> None:
        """A step was committed: every member was past every call."""
        self._calls.clear()
        self._before = 0

    def adopt(self, done: int) -> None:
        """A newcomer starts where the others are."""
        self._calls.clear()
        self._before = done

    def repeat(self, first: int) -> None:
        """Repeat the calls from number `first` on, for the members that have not completed them."""
        if first < self._before:
            raise GroupLost("a member needs a session.run() call from before this one joined")
        for call in self._calls[first - self._before :]:
            call()
