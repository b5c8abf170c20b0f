"""The members of a group find out who is right, and who tracks another model."""

from __future__ import annotations

import pytest
import torch

from elastic.core.recovery import Declaration, RecoveryPlan, Transfer
from elastic.errors import GroupLost, ModelMismatch
from elastic.worker.group.agreement import agree
from elastic.worker.state.tensor_specs import describe
from tests.unit.worker.together import Seat, run_together

BIG = 2**62 + 12345  # a signature does not fit a float


def test_everybody_comes_to_the_same_plan() -> None:
    def go(seat: Seat) -> None:
        mine = Declaration(
            committed=9 - seat.rank,
            committed_in=1 + seat.rank,
            intact=True,
            signature=BIG,
            took_part=True,
            runs_done=0,
            in_run=seat.rank == 1,
        )
        plan, repeat_from = agree(seat.join(), mine, tuple)
        assert plan == RecoveryPlan(committed=8, transfers=(Transfer(source=1, target=0),))
        assert repeat_from == 0

    run_together(go, go)


def test_the_odd_member_is_told_what_differs() -> None:
    def right(seat: Seat) -> None:
        mine = Declaration(committed=7, intact=True, signature=BIG)
        specs = describe({"model.w": torch.zeros(2, 3), "model.b": torch.zeros(2)})
        with pytest.raises(GroupLost, match="rank 1 tracks another model"):
            agree(seat.join(), mine, lambda: specs)

    def odd(seat: Seat) -> None:
        mine = Declaration(committed=0, intact=False, signature=BIG + 1)
        specs = describe({"model.w": torch.zeros(2, 4), "model.b": torch.zeros(2)})
        with pytest.raises(ModelMismatch, match=r"model\.w is float32\[2, 4\] here and .*2, 3"):
            agree(seat.join(), mine, lambda: specs)

    run_together(right, odd)
