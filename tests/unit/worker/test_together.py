"""Functions that run in forked processes leave alone what only their parent may touch."""

from __future__ import annotations

import gc
import os

from tests.unit.worker.together import Seat, run_together


class Unreachable:
    """Is in a cycle, so only the collector finds it. Notes which process has finalized it."""

    finalized_by: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.myself = self

    def __del__(self) -> None:
        self.finalized_by.append(os.getpid())


def test_a_child_does_not_finalize_its_parents_garbage() -> None:
    def collect(seat: Seat) -> None:
        del seat
        gc.collect()
        assert not Unreachable.finalized_by
        Unreachable()
        gc.collect()
        assert Unreachable.finalized_by == [os.getpid()], "its own garbage is collected"

    gc.collect()
    gc.disable()
    try:
        Unreachable()
        run_together(collect)
    finally:
        gc.enable()
