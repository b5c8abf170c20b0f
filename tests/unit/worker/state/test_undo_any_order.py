"""Objects change in any order: a block is undone exactly, or is reported as not undone."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.worker.state import cells
from elastic.worker.state.cells import TorchGenerator
from tests.unit.worker.state.undoing import (
    Action,
    Script,
    add,
    both,
    layer,
    nothing,
    step_of,
    write_data,
)

# With larger objects each example takes long.
LARGE_FROM_6000_BYTES = mock.patch.object(cells, "SMALL_BYTES", 6000)


class World:
    """Objects of every kind, small and large, and operations that change them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(layer(40), nn.BatchNorm1d(40))
        self.net.register_buffer("count", torch.zeros(1))
        self.other = layer(40)
        self.small = layer(3)
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=0.1, fused=True)
        self.sgd = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        self.sgd._opt_called = True  # type: ignore[attr-defined]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 2, gamma=0.5)
        self.noise = TorchGenerator(torch.Generator().manual_seed(5))
        self.script = Script(
            net=self.net,
            other=self.other,
            small=self.small,
            adam=self.adam,
            sgd=self.sgd,
            schedule=self.schedule,
            noise=self.noise,
        )
        values = self.script.state.values
        self.operations: list[Action] = [
            step_of(self.adam, self.net),
            step_of(self.sgd, self.other),
            add(self.other),
            add(self.net[0], -0.25),
            write_data(self.small),
            self.schedule.step,
            lambda: self.net(torch.ones(2, 40)).sum(),
            lambda: setattr(self.net, "count", self.net.count + 1),
            lambda: torch.rand(2, generator=self.noise.generator),
            lambda: values.__setitem__("best", values.get("best", 0.0) + 1.0),
            lambda: values.pop("best", None),
            lambda: self.small.weight.requires_grad_(not self.small.weight.requires_grad),
            self.assign_data,
        ]
        self._kept: list[torch.Tensor] = []

    def assign_data(self) -> None:
        """The old memory is kept: otherwise a second assignment may get it again, with other
        content, which no sign would show."""
        self._kept.append(self.other.weight.data)
        self.other.weight.data = self.other.weight.data * 0.5

    def act(self, numbers: list[int]) -> Action:
        return both(*(self.operations[n] for n in numbers))


operations = st.lists(st.integers(0, 12), max_size=4)
histories = st.lists(st.tuples(operations, operations, operations), max_size=8)


@settings(max_examples=settings.default.max_examples)
@given(quiet=st.sampled_from([0, 4]), history=histories, last=operations, late=operations)
def test_any_block_is_undone_exactly_or_reported_as_not_undone(
    quiet: int, history: list[tuple[list[int], ...]], last: list[int], late: list[int]
) -> None:
    with LARGE_FROM_6000_BYTES:
        world = World()
        for _ in range(quiet):
            world.script.block(world.act([]), world.act([0]))
        for before, after, gap in history:
            undone = world.script.lost(world.act(before), world.act(after))
            if not undone:
                return  # another member's state follows
            world.script.block(world.act(before), world.act(after))
            world.act(gap)()
        world.script.lost(world.act(last), world.act(late) if late else nothing)


@settings(max_examples=settings.default.max_examples)
@given(habit=st.tuples(operations, operations))
def test_any_repeated_changes_are_undone_in_every_block(habit: tuple[list[int], list[int]]) -> None:
    with LARGE_FROM_6000_BYTES:
        world = World()
        before, after = map(world.act, habit)
        for _ in range(9):
            world.script.block(before, after)
            assert world.script.lost(before)
