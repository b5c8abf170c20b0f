"""Keeps the script's thread in the newest group it belongs to, and out of superseded ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.core.membership import Generation, WorkerStatus
from elastic.core.worker.machine import AbortGroup, Effect, Worker
from elastic.errors import GroupLost
from elastic.worker.group.process_group import Backend, Group, StoreHost, first_line
from elastic.worker.group.stuck import STUCK_S, watch_script


@dataclass(slots=True)
class Durations:
    """How long the parts of the way into the present group took, in seconds."""

    abort_s: float = 0.0
    join_s: float = 0.0
    sync_s: float = 0.0
    ready_at: float = 0.0
    """Monotonic instant at which the group was ready to train."""

    def since_ready_s(self) -> float:
        """Seconds since the group was ready to train."""
        return time.monotonic() - self.ready_at


class Membership:
    """Runs the worker machine between two threads: the link's and the script's.

    report: sends a status to the agent; called under the lock, must not block for long.
    committed: the count of committed steps, for reports.
    give_up: called, if the script's thread does not come out of an aborted group; does not return.
    """

    def __init__(
        self,
        machine: Worker,
        *,
        report: Callable[[WorkerStatus], None],
        committed: Callable[[], int],
        join_timeout_s: float = 10.0,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.machine = machine
        """Asked by the script's protocol; its events come from here."""
        self._report = report
        self._committed = committed
        self.join_timeout_s = join_timeout_s
        self._give_up = give_up
        self._changed = threading.Condition()
        self._group: Group | None = None
        self.durations = Durations()
        self._built_at = 0.0

    @property
    def group(self) -> Group | None:
        """The group that the script's thread is in or is building."""
        return self._group

    @property
    def announced(self) -> Generation | None:
        """The newest generation heard of."""
        return self.machine.announced

    # ---- on the link's thread

    def announce(self, generation: Generation) -> None:
        """The coordinator decided."""
        with self._changed:
            self._execute(self.machine.generation_announced(generation))
            self._changed.notify_all()

    def report_again(self) -> None:
        """Send the status again: an agent or a coordinator may not know it."""
        with self._changed:
            self._report(self.machine.status)

    # ---- on the script's thread

    def attach(self) -> None:
        """The script called elastic.init()."""
        with self._changed:
            self._execute(self.machine.attached())

    def assign(self, slot: int) -> None:
        """The agent gave this worker a slot."""
        with self._changed:
            self._execute(self.machine.assigned(slot))

    def prepare(self, endpoint: str) -> None:
        """The script needs a group for the first time."""
        with self._changed:
            self._execute(self.machine.prepared(endpoint))

    def join(self, host: StoreHost, backend: Backend) -> Group:
        """Block until there is a generation to join, and build its group. Raises GroupLost."""
        group = self._begin_join(backend)
        started = time.monotonic()
        group.build(host, self.join_timeout_s)
        self._built_at = time.monotonic()
        self.durations.join_s = self._built_at - started
        return group

    def joined(self, committed: int) -> None:
        """The group has come to one state. Raises GroupLost if it was aborted meanwhile."""
        group = self._group
        assert group is not None, "joined without a group"
        group.check()
        with self._changed:
            self._execute(self.machine.joined(group.generation, committed))
        self.durations.ready_at = time.monotonic()
        self.durations.sync_s = self.durations.ready_at - self._built_at

    def must_leave(self) -> bool:
        """At a step boundary: has the group been superseded?"""
        return self.machine.must_leave(self._committed())

    def await_settlement(self, committed: int, timeout_s: float) -> bool:
        """Wait at the boundary of a planned change until it is settled; False after the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.machine.holds(committed), timeout_s)

    def await_successor(self, timeout_s: float | None) -> None:
        """Wait until a generation that follows this group's is announced, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.machine.following is not None, timeout_s)

    def leave(self) -> None:
        """At a step boundary: leave the group, as planned or because it was superseded."""
        self._close_group(broken=False)
        with self._changed:
            self._execute(self.machine.group_left(self._committed()))

    def lost(self, error: BaseException, *, held: bool = False) -> None:
        """The group broke under the script's thread: free the peers too, then say so, and whether
        the state is whole."""
        superseded = self.machine.superseded()
        self._close_group(broken=True)
        with self._changed:
            committed = self._committed()
            if superseded:
                self._execute(self.machine.group_left(committed, held=held))
            else:
                detail = first_line(error)
                self._execute(self.machine.group_broke(committed, detail, held=held))

    def drop_state(self) -> None:
        """The state here is not to be counted on any more."""
        with self._changed:
            self._execute(self.machine.state_dropped())

    def finish(self) -> None:
        """The script has ended well."""
        if self._group is not None:
            self._group.leave()
        with self._changed:
            self._execute(self.machine.finished(self._committed()))

    def abandon(self) -> None:
        """The script has failed: peers must not wait for this process to wind up."""
        if self._group is not None:
            self._group.abort()

    # ---- inside

    def _begin_join(self, backend: Backend) -> Group:
        with self._changed:
            while (generation := self.machine.joinable()) is None:
                self._changed.wait()
            rank = generation.rank_of(self.machine.status.worker)
            if rank is None:
                raise GroupLost(f"not a member of generation {generation.number}")
            self._group = Group(generation, rank, backend)
            self._execute(self.machine.join_began(generation))
            return self._group

    def _close_group(self, *, broken: bool) -> None:
        began = time.monotonic()
        group, self._group = self._group, None
        if group is not None:
            if broken:
                group.abort()  # at once: the peers that wait for this member are free too
            group.close()
        self.durations.abort_s = time.monotonic() - began

    def _execute(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, AbortGroup):
                group = self._group
                if group is not None and group.generation.number == effect.generation:
                    self._watch(group)  # first: an abort of NCCL may itself block
                    group.abort()
            else:
                self._report(effect.status)

    def _watch(self, group: Group) -> None:
        """A blocked thread may not come out of it."""
        threading.Thread(
            target=watch_script,
            args=(lambda: self._group is not group, self._give_up, STUCK_S),
            name="elastic-stuck",
            daemon=True,
        ).start()
