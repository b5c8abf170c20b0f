"""Hooks around each optimizer's steps: they require that it is tracked, and scale its rates.

With an optimizer that is not tracked, workers would drift apart. A scaling rule's factor applies
only during a step of the optimizer: the rates that the script and its schedulers see are always the
unscaled ones, so a scheduler that multiplies the rate it finds cannot compound the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from elastic.errors import CheckpointMismatch, StepMisused
from elastic.worker.state.job_state import JobState
from elastic.worker.state.references import optimizers_inside
from elastic.worker.state.signs import steps_of
from elastic.worker.state.tree import same_tensor, tensors_of
from elastic.worker.unfit import require_fit

_WATCHED_BLOCKS = 64  # the first steps show where a script calls its optimizers


class Optimizers:
    """Checks that each optimizer of the script steps in the right place, and that the tracked
    objects hold its state and its parameters."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._known: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """How many parameters each optimizer had when it was checked."""
        self._of_block: list[torch.Tensor] = []
        self._blocks = 0

    @property
    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped inside of a block."""
        return len(self._known) > 0

    def block_ended(self) -> None:
        """The script has left a step's block: remember gradients that are left, to detect their use
        outside of it."""
        self._blocks += 1
        if self._blocks > _WATCHED_BLOCKS:
            return
        self._of_block = [
            g for o in self._state.optimizers() for g in _some_gradients(o) if g is not None
        ]

    def block_begins(self) -> None:
        self._of_block = []

    def steps_below(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step outside of a block. Raises StepMisused if it uses gradients
        of the block above: a worker that takes over the others' state of the block's end does not
        have these gradients."""
        mine = [g for g in _some_gradients(optimizer) if g is not None]
        if any(g is of_block for g in mine for of_block in self._of_block):
            raise StepMisused(
                f"{type(optimizer).__name__}.step() was called below `with step:` with the "
                "gradients of the block; call it inside of the block, which is applied "
                "completely or not at all"
            )

    @staticmethod
    def count(optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer, in or outside of a block. `steps_of` returns the count."""
        optimizer._elastic_steps = steps_of(optimizer) + 1  # type: ignore[attr-defined]

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer has stepped inside of a block. Raises StepMisused unless it and the
        parameters that it trains are tracked. Returns whether that had to be checked, because the
        optimizer or its number of parameters is new."""
        self.count(optimizer)
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if self._known.get(optimizer) == count:
            return False
        self._require_tracked(optimizer)
        self._require_parameters_tracked(optimizer)
        self._known[optimizer] = count
        return True

    def _require_tracked(self, optimizer: torch.optim.Optimizer) -> None:
        require_fit(optimizer)
        tracked = self._state.tracked
        if any(item is optimizer for item in tracked.values()):
            return
        kind = type(optimizer).__name__
        holders = [
            n for n, item in tracked.items() if any(o is optimizer for o in optimizers_inside(item))
        ]
        if not holders:
            raise StepMisused(
                f"an optimizer ({kind}) stepped that is not tracked: a worker that joins would "
                "continue with a different optimizer state; write session.track(optimizer=...)"
            )
        held = [t for name in holders for t in tensors_of(tracked[name].state_dict())]
        pointers = {t.data_ptr() for t in held}
        for tensor in tensors_of(list(optimizer.state.values())):
            if tensor.data_ptr() not in pointers and not any(same_tensor(tensor, t) for t in held):
                raise StepMisused(
                    f"the {kind} inside of {holders[0]} has a state that {holders[0]}.state_dict() "
                    "does not contain: a worker that joins would continue without it; track it "
                    f"too: session.track({holders[0]}_inner=...)"
                )

    def _require_parameters_tracked(self, optimizer: torch.optim.Optimizer) -> None:
        modules = self._state.modules().values()
        known = {p.data_ptr() for module in modules for p in module.parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.numel() and p.data_ptr() not in known for p in trained):
            known |= {t.data_ptr() for t in self._state.capture().tensors.values()}
        missing = [p for p in trained if p.numel() and p.data_ptr() not in known]
        if missing:
            shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
            raise StepMisused(
                f"{type(optimizer).__name__} trains {len(missing)} of its {len(trained)} "
                f"parameters (of shapes {shapes}) that no tracked object contains: a worker that "
                "joins would continue with other values. Give the module that they belong to to "
                "session.distribute() and session.track(). A bare nn.Parameter, as a weight of "
                "losses, must be one of such a module, whose forward() uses it: otherwise its "
                "gradient is not averaged"
            )


def require_same_kind(tracked: Mapping[str, object], states: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if a checkpoint has the state of another kind of optimizer than the
    one that is tracked by that name. torch would take over its hyperparameters, and raise a
    KeyError for one of the present kind in the first step.

    Each kind must have a hyperparameter that the other lacks: a newer torch adds some.
    """
    for name, optimizer in tracked.items():
        saved, groups = states.get(name), getattr(optimizer, "param_groups", None)
        if not isinstance(optimizer, torch.optim.Optimizer) or not groups:
            continue
        before = saved.get("param_groups") if isinstance(saved, dict) else None
        if not before:
            continue
        lacking, foreign = groups[0].keys() - before[0].keys(), before[0].keys() - groups[0].keys()
        if lacking and foreign:
            raise CheckpointMismatch(
                f"session.track({name}=...): the checkpoint's optimizer has {_listed(foreign)}, "
                f"and this {type(optimizer).__name__} has {_listed(lacking)} instead; use the "
                "optimizer of the script that saved the checkpoint, or another checkpoint directory"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _some_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    """The gradients of the first and the last parameter: looking at all would take too long."""
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    return [groups[0][0].grad, groups[-1][-1].grad] if groups else []


class ScaledOptimizer:
    """Hooks on one optimizer that scale its rates during each step by `factor()`."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._unscaled: list[tuple[dict[str, Any], Any]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def restore(self) -> None:
        """Put the unscaled rates back. A step that raised needs this, too."""
        for group, rate in self._unscaled:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._unscaled = []

    def _before(self, *_: Any) -> None:
        self.restore()  # has an effect only if the previous step raised and the script went on
        factor = self._factor()
        if factor == 1.0:
            return
        groups = _with_own_rate(self._optimizer)
        self._unscaled = [(group, _copied(group["lr"])) for group in groups]
        for group in groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] = group["lr"] * factor

    def _after(self, *_: Any) -> None:
        self.restore()


def _with_own_rate(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameter groups, without those that share the rate's tensor with an earlier one: torch gives
    the same tensor to all groups that have no rate of their own."""
    seen: set[int] = set()
    groups = []
    for group in optimizer.param_groups:
        rate = group["lr"]
        if isinstance(rate, torch.Tensor) and id(rate) in seen:
            continue
        seen.add(id(rate))
        groups.append(group)
    return groups


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
