"""Lists the faults to plant in elastic.core: file, text to replace, replacement, and what it breaks.

Each is a mistake that is easily made: an operator changed, a guard dropped, an argument swapped, a
value not reset. Changes that make no difference to anybody (a longer timeout, say) do not belong
here. Nor do faults that only scripts for torchrun meet, since the simulator does not have these.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sim.mutants import coordinator, decisions, node, protocol


class Mutant(NamedTuple):
    """One planted fault."""

    file: str
    """Below elastic/core."""
    find: str
    """Occurs exactly once in the file."""
    replacement: str
    breaks: str

    def plant(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError unless `find` occurs exactly once."""
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"{self.file} has {self.find!r} {count} times, not once")
        return source.replace(self.find, self.replacement)

    def lines(self, source: str) -> tuple[int, int]:
        """The first and the last line of the fault's place, counted from 1."""
        at = source.index(self.find)
        blank = len(self.find) - len(self.find.lstrip())
        first = source.count("\n", 0, at + blank) + 1
        return first, first + self.find.strip().count("\n")


CATALOGUE: tuple[Mutant, ...] = tuple(
    Mutant(file, *fault)
    for file, faults in (
        ("coordinator/formation.py", decisions.FORMATION),
        ("coordinator/view.py", decisions.VIEW),
        ("coordinator/formation.py", decisions.PLANNED),
        ("coordinator/machine.py", coordinator.MACHINE),
        ("coordinator/stopping.py", decisions.STOPPING),
        ("coordinator/generations.py", coordinator.LINEAGE),
        ("coordinator/nodes.py", coordinator.NODES),
        ("coordinator/nodes.py", coordinator.DEPARTURES),
        ("coordinator/generations.py", coordinator.CHECKPOINTS),
        ("coordinator/formation.py", coordinator.CLOCKS),
        ("coordinator/nodes.py", coordinator.NEWCOMERS),
        ("coordinator/progress.py", coordinator.PROGRESS),
        ("agent/machine.py", node.AGENT),
        ("worker/machine.py", node.WORKER),
        ("membership.py", node.MEMBERSHIP),
        ("recovery.py", protocol.RECOVERY),
        ("worker/participation.py", protocol.PARTICIPATION),
        ("data_order.py", node.DATA_ORDER),
        ("restarts.py", node.RESTARTS),
        ("coordinator/formation.py", node.RANKS),
    )
    for fault in faults
)
