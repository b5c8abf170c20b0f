"""Reads the state for its digests, by which the members of a new group find that they agree.

What blocks and the code between them change is read while the group forms. The rest, which is
almost all of it, is read while the next block is computed: its optimizer waits for that. Digests of
both parts can be combined, so the result does not depend on what each member has learnt.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future

from elastic.worker.state.digest import ReadBefore, combined, digest_by_name
from elastic.worker.state.job_state import JobState
from elastic.worker.state.tree import memory_of
from elastic.worker.state.undo import Undo


class StateDigests:
    """The digests of the state at both marks, which a thread of its own reads."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._marks: Future[tuple[int, int]] | None = None
        self._rest: Future[int] | None = None
        self._has_rest = False
        self.before = ReadBefore()
        self._left_out: Collection[str] = ()

    @property
    def begun(self) -> bool:
        """Whether there are digests, or will be, of the state as it is."""
        return self._marks is not None

    def begin(self, state: JobState, undo: Undo, *, at_begin: bool) -> None:
        """Begin to read. Nothing may change the state before `digests` has returned, nor anything
        but what is known to change before `wait` has."""
        self.wait()
        marks, rest = self._marks, self._rest = Future[tuple[int, int]](), Future[int]()
        places = {memory_of(tensor) for tensor in undo.unwritten() if tensor.numel()}
        self._has_rest = bool(places)
        self.look_up_unwritten(undo)

        def read() -> None:
            try:
                unwritten = {}
                if places:
                    tensors, _ = state.replicated()
                    unwritten = {n: t for n, t in tensors.items() if memory_of(t) in places}
                self._left_out = frozenset(unwritten)
                marks.set_result(_digests(state, undo, unwritten.keys(), at_begin=at_begin))
                rest.set_result(digest_by_name(unwritten, self.before))
            except Exception as error:  # noqa: BLE001 - raised where a digest is asked for
                for future in (marks, rest):
                    if not future.done():
                        future.set_exception(error)

        self._thread = threading.Thread(target=read, name="elastic-digest", daemon=True)
        self._thread.start()

    def digests(self, *, whole: bool) -> tuple[int, int, bool]:
        """Wait for (the digest at the commit mark, the one at the begin mark, whether `rest` is not
        part of them). 0: this member does not have that state. Raises an error of the reading."""
        if self._marks is None:
            return 0, 0, False
        commit, begin = self._marks.result()
        if self._has_rest and not whole and begin:
            return commit, begin, True
        rest = self.rest()
        return combined(commit, rest) if commit else 0, combined(begin, rest) if begin else 0, False

    def rest(self) -> int:
        """Wait for the digest of the rest. Everything is read then. Raises an error of the
        reading."""
        return self._rest.result() if self._rest is not None else 0

    def rest_now(self, state: JobState) -> int:
        """Read all of the rest again: something may have changed it while it was read, or earlier
        without a sign."""
        self.before.forget()  # the next group must find a difference, too
        tensors, _ = state.replicated()
        return digest_by_name({name: t for name, t in tensors.items() if name in self._left_out})

    def look_up_unwritten(self, undo: Undo) -> None:
        """Look up what need not be read again as long as nothing is seen to write to it."""
        self.before.unwritten = {memory_of(tensor) for tensor in undo.untouched()}

    def wait(self) -> None:
        """Return when all is read: it may change."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def script_goes_on(self) -> None:
        """Keep only what `rest` returns: what was read at once may change."""
        self._marks = None

    def another_state_comes(self) -> None:
        """Wait until nothing is read: memory will be filled, which shows in no version."""
        self.wait()
        self.before.forget()

    def forget(self) -> None:
        """Wait until nothing is read, and drop the digests: the state changes."""
        self.wait()
        self._thread = self._marks = self._rest = None


def _digests(
    state: JobState, undo: Undo, left_out: Collection[str], *, at_begin: bool
) -> tuple[int, int]:
    def digest() -> int:
        tensors, rest = state.replicated()
        read = {name: t for name, t in tensors.items() if name not in left_out}
        return combined(digest_by_name(read), rest)

    now = digest() if at_begin or not undo.changed_since_commit() else 0
    commit = 0
    if undo.holds_commit:
        if now and not undo.changed_since_commit():
            commit = now
        else:
            with undo.as_of_commit():
                commit = digest()
    return commit, now if at_begin else 0
