"""Brings this member and its new group to one state: agree, then send, receive or restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.core.recovery import Declaration, RecoveryPlan
from elastic.errors import GroupLost
from elastic.worker.group.agreement import agree
from elastic.worker.group.process_group import Group
from elastic.worker.group.transfer import receive_json, receive_tensors, send_json, send_tensors
from elastic.worker.runs import Runs
from elastic.worker.state.job_state import JobState
from elastic.worker.state.tensor_specs import TensorSpec, describe


@dataclass(slots=True)
class Outcome:
    """What the last synchronisation did."""

    source: str = ""
    """"initial" or the checkpoint, if nobody held the state."""
    bytes_received: int = 0
    repeat_runs_from: int = 0
    """The first `session.run` call that this member must repeat for others."""


class Synchronisation:
    """One member's side of it.

    restore: loads what storage has, when nobody holds the state; says where it came from.
    on_dropped: told before the state of another member begins to overwrite this one's.
    """

    def __init__(
        self,
        state: JobState,
        runs: Runs,
        *,
        restore: Callable[[JobState], str],
        on_dropped: Callable[[], None],
    ) -> None:
        self._state = state
        self._runs = runs
        self._restore = restore
        self._on_dropped = on_dropped
        self._took_part = False
        self.intact = False
        """The state is that of exactly `committed` steps."""
        self.outcome = Outcome()

    def synchronise(self, group: Group, *, in_run: bool) -> int:
        """Come to one state with the group; return the committed steps. Raises GroupLost."""
        mine = Declaration(
            committed=self._state.committed,
            intact=self.intact,
            signature=self._state.signature(),
            took_part=self._took_part,
            committed_in=self._state.committed_in,
            runs_done=self._runs.done,
            in_run=in_run,
        )
        plan, repeat_from = agree(group, mine, self._state.structure)
        if repeat_from is None:
            raise GroupLost("a newcomer joined while session.run() was under way")
        self.outcome = Outcome(repeat_runs_from=repeat_from)
        self._carry_out(plan, group)
        if not self._took_part or self._runs.done < repeat_from:
            self._runs.adopt(repeat_from)
        self.intact = True
        self._took_part = True
        return self._state.committed

    def _carry_out(self, plan: RecoveryPlan, group: Group) -> None:
        if plan.committed is None and group.rank == 0:
            self.outcome.source = self._restore(self._state)
            self._state.committed_in = group.generation.number
        for transfer in plan.transfers:
            if transfer.source == group.rank:
                self._send(group, transfer.target)
            elif transfer.target == group.rank:
                self._receive(group, transfer.source)

    def _send(self, group: Group, rank: int) -> None:
        flat = self._state.capture()
        specs = describe(flat.tensors)
        table = [[s.name, s.dtype, list(s.shape)] for s in specs]
        document = {"tensors": table, "skeleton": flat.skeleton, "extra": self._state.extra()}
        send_json(group, document, rank)
        send_tensors(group, {s.name: flat.tensors[s.name] for s in specs}, rank)

    def _receive(self, group: Group, rank: int) -> None:
        if self.intact:
            self._on_dropped()
        self.intact = False  # until all of it is here
        document = receive_json(group, rank)
        specs = [
            TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
            for name, dtype, shape in document["tensors"]
        ]
        tensors, self.outcome.bytes_received = receive_tensors(group, specs, rank)
        self._state.restore(document["skeleton"], tensors, document["extra"])
