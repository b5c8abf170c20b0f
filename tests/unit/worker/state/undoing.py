"""Stands in for a training script whose blocks are given up, with actions for these blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.worker.optimizers import Optimizers
from elastic.worker.state import undo
from elastic.worker.state.job_state import JobState
from elastic.worker.state.undo import Undo
from tests.unit.worker.trees import same

CPU = torch.device("cpu")
WIDE = 160  # a square layer of this width counts as large state, which is learned about
LEARNT = 20  # blocks; the next one that copies everything in order to learn comes after 32
Action = Callable[[], Any]


def nothing() -> None:
    """The default action: changes nothing."""


class Script:
    """Tracked objects, and blocks that change them before and after their last collective."""

    def __init__(self, **tracked: Any) -> None:
        self.state = JobState()
        self.state.track(tracked)
        self.collectives = 0
        self.told: list[tuple[list[str], int]] = []
        self.copying_s: list[float] = []
        self.slow: list[list[str]] = []
        self.optimizers = Optimizers(self.state)
        self.undo = Undo(
            self.state,
            device=CPU,
            wait_for_device=nothing,
            on_costly=self.costly,
            on_slow=lambda names, _: self.slow.append(names),
        )
        for optimizer in self.state.optimizers():
            optimizer.register_step_post_hook(lambda o, *_: self.optimizers.stepped(o))

    def costly(self, names: list[str], size: int, copy_s: float) -> None:
        self.told.append((names, size))
        self.copying_s.append(copy_s)

    def reduce(self) -> None:
        """Report a complete reduction, as after a backward pass that averages gradients."""
        self.collectives += 1
        self.undo.reduced(self.collectives)

    def end(self) -> None:
        later = self.undo.collectives_since_reduction(self.collectives)
        self.undo.end(collectives_since_reduction=later)

    def block(self, before: Action = nothing, after: Action = nothing) -> None:
        self.undo.begin()
        before()
        self.reduce()
        after()
        self.end()

    def lost(self, before: Action = nothing, after: Action = nothing) -> bool:
        """Run a block and give it up. Returns whether it was undone; if so, asserts that it was."""
        self.undo.begin()
        at_begin = self.everything()
        before()
        if after is not nothing:
            self.reduce()
            after()
        undone = self.undo.put_back()
        if undone:
            assert same(self.everything(), at_begin)
        return undone

    def below_void_block(self, change: Action) -> None:
        """Run `change` below a block that does not count, and assert that the retry undoes it."""
        at_begin = self.everything()
        self.undo.keep_for_retry()
        change()
        assert not same(self.everything(), at_begin)
        assert self.undo.put_back_for_retry()
        assert same(self.everything(), at_begin)

    def learn(self, before: Action = nothing, after: Action = nothing) -> None:
        """Run LEARNT blocks, after which the next ones copy nothing just to learn."""
        for _ in range(LEARNT):
            self.block(before, after)

    def everything(self) -> Any:
        """The values of all that is tracked, and flags and modes, which state_dict() leaves out."""
        found = {
            name: copy.deepcopy(item.state_dict()) for name, item in self.state.everything.items()
        }
        flags = {n: [p.requires_grad for p in m.parameters()] for n, m in modules(self.state)}
        modes = {n: [each.training for each in m.modules()] for n, m in modules(self.state)}
        return found, flags, modes


def learn_by_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let large state be learned about as if it were too large to be copied for that."""
    monkeypatch.setattr(undo, "_QUICKLY_LEARNT_BYTES", 0)
    monkeypatch.setattr(undo, "_LEARNING_FACTOR", 0.0)


def modules(state: JobState) -> list[tuple[str, nn.Module]]:
    return list(state.modules().items())


def layer(width: int = WIDE) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width)


def tracking(width: int = WIDE) -> tuple[nn.Linear, Script]:
    net = layer(width)
    return net, Script(model=net)


def learnt() -> tuple[nn.Linear, Script]:
    """A tracked layer, and a script that has learned that no block changes it."""
    net, script = tracking()
    script.learn()
    return net, script


def trained(
    kind: type[torch.optim.Optimizer], width: int = WIDE, **options: Any
) -> tuple[nn.Linear, torch.optim.Optimizer, Script]:
    """A layer, the optimizer that trains it, and a script that tracks both."""
    net = layer(width)
    optimizer = kind(net.parameters(), **{"lr": 0.1, **options})  # type: ignore[call-arg]
    return net, optimizer, Script(model=net, optimizer=optimizer)


def scheduled() -> tuple[nn.Linear, Script, Action]:
    """A trained layer, its script, which also tracks a scheduler, and its action below blocks."""
    net, optimizer, script = trained(torch.optim.SGD, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    script.state.track({"scheduler": scheduler})
    return net, script, both(scheduler.step, write_data(net))


def add(module: nn.Module, amount: float = 0.5) -> Action:
    def change() -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(amount)

    return change


def write_data(module: nn.Module) -> Action:
    """Change parameters through `.data`, which moves no version counter."""

    def change() -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.99).add_(0.01)

    return change


def gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)


def step_of(optimizer: torch.optim.Optimizer, *of: nn.Module) -> Action:
    def change() -> None:
        for module in of:
            gradients(module)
        optimizer.step()
        optimizer.zero_grad()

    return change


def both(*actions: Action) -> Action:
    def change() -> None:
        for action in actions:
            action()

    return change
