"""A process group as its members see it: collectives that complete, break, or complete in part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from elastic.core.membership import Generation
from elastic.errors import GroupLost
from tests.sim.clock import Clock
from tests.sim.thread import Body, Wait

if TYPE_CHECKING:
    from tests.sim.process import Process

RENDEZVOUS = "rendezvous"
STEP = "step"
GARBAGE: dict[str, Any] = {}
"""The result of a step's collective that took what an aborted member sent."""


class _Collective:
    """`parties`: the members that take part. `at_store`: members only wait at the store, so broken
    connections between them do not matter."""

    def __init__(self, parties: Sequence[str], *, at_store: bool, is_step: bool) -> None:
        self.parties, self.at_store, self.is_step = parties, at_store, is_step
        self.contributions: dict[str, Any] = {}
        self.waiting: dict[str, Process] = {}
        self.whole = False


class Group:
    """The members of one generation that have arrived, and the collectives under way."""

    def __init__(
        self,
        clock: Clock,
        generation: Generation,
        on_whole: Callable[[Hashable], None],
        are_connected: Callable[[str, str], bool] = lambda _one, _other: True,
        *,
        on_abort: Callable[[Generation, Sequence[str]], None] | None = None,
    ) -> None:
        """are_connected: whether packets pass between two nodes. Where they do not, members wait,
        and hear of no reset, until they pass again (`heal`).

        on_abort: called with the members that are not frozen when one aborts. None: members do not
        freeze; a lost peer resets connections, and an abort frees. Else collectives are queued on
        a device: they hang without a peer, and an aborted one feeds garbage to the peers in it.
        """
        self._on_abort = on_abort
        self._frozen: set[str] = set()
        self._hanging: dict[str, _Collective] = {}
        """By member, a collective on its device that its script does not wait for any more."""
        self._clock, self._on_whole = clock, on_whole
        self._are_connected = are_connected
        self._node_of = {m.worker: m.node for m in generation.members}
        self.generation = generation
        self._ranks = [m.worker for m in generation.members]
        self._collectives: dict[Hashable, _Collective] = {}
        self._blocked_in: dict[str, _Collective] = {}
        self._reset: set[str] = set()
        self._resets_under_way: set[str] = set()
        self._gone: set[str] = set()

    def collective(
        self,
        name: Hashable,
        member: Process,
        contribution: Any = None,
        *,
        took_s: float = 0.004,
        parties: Sequence[str] = (),
        at_store: bool = False,
    ) -> Body:
        """Contribute and wait for all, or for `parties` alone. Returns all contributions by member;
        raises GroupLost. `at_store`: members meet at the store, where the others go on waiting if
        one of them dies."""
        if (
            member.name in self._gone
            or (member.name in self._reset and not at_store)
            or (member.name in self._frozen and at_store)
        ):
            yield self._clock.between(0.0, 0.001)
            raise GroupLost("the connection was reset")
        collective = self._collectives.get(name)
        if collective is None:
            is_step = isinstance(name, tuple) and name[0] == STEP
            collective = _Collective(parties or self._ranks, at_store=at_store, is_step=is_step)
            self._collectives[name] = collective
        collective.contributions[member.name] = contribution
        collective.waiting[member.name] = member
        self._blocked_in[member.name] = collective
        # Count those that wait: a member that has left cannot forward data.
        if len(collective.waiting) == len(collective.parties) and self._all_connected(collective):
            self._complete(name, collective, took_s)
        result = yield Wait.COLLECTIVE
        return result

    def heal(self) -> None:
        """Packets pass again: what was sent meanwhile arrives."""
        for name, collective in list(self._collectives.items()):
            if not collective.whole and len(collective.waiting) == len(collective.parties):
                self._complete(name, collective, 0.004)
        for worker in sorted(self._resets_under_way):
            self._notice_reset(worker, True)
        self._resets_under_way.clear()

    def _all_connected(self, collective: _Collective) -> bool:
        nodes = sorted({self._node_of[name] for name in collective.parties})
        return all(self._are_connected(a, b) for a in nodes for b in nodes if a < b)

    def check(self, member: Process) -> None:
        """Raise GroupLost if the member's side was aborted, or frozen."""
        if member.name in self._gone or member.name in self._frozen:
            raise GroupLost("the group was aborted")

    def waits_at(self, name: Hashable, member: Process) -> bool:
        """True while the member waits for others in the collective `name`."""
        collective = self._blocked_in.get(member.name)
        return collective is not None and collective is self._collectives.get(name)

    def free_from_store(self, member: Process, error: Exception) -> None:
        """End the member's wait at the store: raise `error` in its script."""
        self._forget(member.name)
        member.thread.fail(error)

    def leave(self, member: Process, *, died: bool = False, silent: bool = False) -> None:
        """Close the member's side. Data that it sent before still arrives, but may be lost if it
        `died`. `silent`: nobody can notice (power loss)."""
        if member.name in self._gone:
            return
        self._gone.add(member.name)
        self._forget(member.name)
        if silent:
            return
        self._reset_neighbours(member.name, lossy=died)
        if died and member.name == self._ranks[0]:
            self._lose_store()

    def abort(self, member: Process) -> None:
        """Free the member's own thread, now."""
        self._gone.add(member.name)
        if self._on_abort is not None:
            self._frozen.add(member.name)
            self._feed(self._hanging.pop(member.name, None) or self._blocked_in.get(member.name))
        self._reset_neighbours(member.name, lossy=True)
        self._free(member.name, "aborted")

    def freeze(self, member: Process) -> None:
        """No result counts for the member any more. Its thread comes free only at the store."""
        self._frozen.add(member.name)
        self._clock.after(self._clock.between(0.0, 0.02), self._look_at_store, member.name)

    def _look_at_store(self, worker: str) -> None:
        collective = self._blocked_in.get(worker)
        if collective is not None and collective.at_store:
            self._free(worker, "frozen")

    def _feed(self, collective: _Collective | None) -> None:
        """A member aborts in this collective: others that are in it take garbage for its data."""
        if collective is None or collective.at_store or self._on_abort is None:
            return
        unfrozen = [name for name in self._ranks if name not in self._frozen]
        self._on_abort(self.generation, unfrozen)
        if collective.is_step:
            for worker in collective.waiting:
                delay_s = self._clock.between(0.0, 0.003)
                self._clock.after(delay_s, self._take_garbage, worker, collective)

    def _take_garbage(self, worker: str, collective: _Collective) -> None:
        if self._blocked_in.get(worker) is collective:
            member = collective.waiting[worker]
            self._forget(worker)
            member.note("takes garbage")
            self._resume(member, GARBAGE)

    def _resume(self, member: Process, result: Any) -> None:
        if member.name in self._frozen:
            member.thread.fail(GroupLost("frozen"))
        else:
            member.thread.complete(result)

    def break_link(self, member: Process) -> None:
        """A connection of this member fails although nobody is dead."""
        self._notice_reset(member.name, True)

    def _complete(self, name: Hashable, collective: _Collective, took_s: float) -> None:
        """All have contributed: each member completes at an instant of its own."""
        collective.whole = True
        self._on_whole(name)
        for worker in collective.waiting:
            delay_s = self._clock.between(0.1, 1.0) * took_s
            self._clock.after(delay_s, self._finish, worker, collective)

    def _finish(self, worker: str, collective: _Collective) -> None:
        if self._blocked_in.get(worker) is collective:
            member = collective.waiting[worker]
            self._forget(worker)
            self._resume(member, collective.contributions)

    def _reset_neighbours(self, worker: str, *, lossy: bool) -> None:
        """Break its connections to its ring neighbours and to members that wait for it alone."""
        if self._on_abort is not None:
            return
        rank = self._ranks.index(worker)
        neighbours = [self._ranks[rank - 1], self._ranks[(rank + 1) % len(self._ranks)]]
        neighbours += [
            other
            for other, c in self._blocked_in.items()
            if c.parties is not self._ranks and worker in c.parties and other not in neighbours
        ]
        for neighbour in neighbours:
            if not self._are_connected(self._node_of[worker], self._node_of[neighbour]):
                self._resets_under_way.add(neighbour)
            elif neighbour != worker:
                delay_s = self._clock.between(0.0, 0.003)
                self._clock.after(delay_s, self._notice_reset, neighbour, lossy)

    def _notice_reset(self, worker: str, lossy: bool) -> None:
        self._reset.add(worker)
        collective = self._blocked_in.get(worker)
        if collective is None:
            return
        if collective.whole or not collective.at_store:
            if self._on_abort is not None and not collective.at_store:
                self._hanging[worker] = collective
            self._free(worker, "connection reset by peer", lossy)

    def _lose_store(self) -> None:
        waiting = [name for name, c in self._blocked_in.items() if c.at_store]
        for worker in waiting:
            self._clock.after(self._clock.between(0.0, 0.003), self._free, worker, "store is gone")

    def _free(self, worker: str, why: str, lossy: bool = True) -> None:
        """Free a blocked member. Its collective completes if all had contributed; if `lossy`, only
        in half of the cases."""
        collective = self._blocked_in.get(worker)
        if collective is None:
            return
        member = collective.waiting[worker]
        self._forget(worker)
        if collective.whole and (not lossy or self._clock.chance(0.5)):
            member.thread.complete(collective.contributions)
        else:
            member.thread.fail(GroupLost(why))

    def _forget(self, worker: str) -> None:
        collective = self._blocked_in.pop(worker, None)
        if collective is not None:
            del collective.waiting[worker]
