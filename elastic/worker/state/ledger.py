"""Which samples each committed step consumed."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from elastic.worker.state.backlog import Backlog


class LedgerRecord(NamedTuple):  # one is made at every step, in a third of a dataclass's time
    """The samples of one committed step: positions [start, stop) of the epoch's order.

    run: the incarnation of the job that committed it. A checkpoint brings records of an earlier
    one, which counted its generations by itself. Empty in checkpoints of before there were runs.
    """

    step: int
    epoch: int
    generation: int
    world_size: int
    start: int
    stop: int
    run: str = ""


LedgerBacklog: TypeAlias = Backlog[LedgerRecord]
