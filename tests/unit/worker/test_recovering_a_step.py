"""What a step that lost its group leaves behind: a committed step, a whole state, or a torn one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.data_order import SampleRange
from elastic.errors import GroupLost
from elastic.worker.control import LocalControl
from elastic.worker.session import Session


class Part:
    """Stands where Participation is: remembers how the group was lost."""

    group = SimpleNamespace(generation=SimpleNamespace(number=1), world_size=1, rank=0)
    torn: bool | None = None

    def lose(self, error: Exception, *, torn: bool = False) -> None:
        del error
        self.torn = torn

    def enter(self) -> None: ...

    def committed(self) -> None: ...


@pytest.mark.parametrize(
    ("reduced", "optimizers", "stepped", "committed", "torn"),
    [
        (False, 1, 0, False, False),  # in the first backward pass
        (True, 1, 0, False, False),  # after a backward pass, before the optimizer's step
        (True, 2, 0, False, False),  # in the second of two models' backward passes
        (True, 1, 1, True, False),  # in a collective of the script, after everything
        (True, 2, 1, False, True),  # between two optimizers' steps
        (True, 0, 0, False, True),  # who can tell whether an unknown optimizer has stepped
    ],
)
def test_recovering(
    reduced: bool, optimizers: int, stepped: int, committed: bool, torn: bool
) -> None:
    session: Any = Session(LocalControl())
    part = session._part = Part()
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(optimizers)]
    tracked = [torch.optim.SGD([p], lr=0.1) for p in parameters]
    session.track(**{f"optimizer{i}": optimizer for i, optimizer in enumerate(tracked)})
    for optimizer in tracked[:stepped]:
        optimizer.step()
    step = SimpleNamespace(index=0, samples=SampleRange(epoch=0, start=0, stop=4))
    assert session.recover(step, GroupLost("gone"), reduced=reduced) is committed
    assert part.torn is torn
    assert session.committed == int(committed)
