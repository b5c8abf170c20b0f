"""Keeps what a script may refer to, such as parameter groups, in place when a state is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_DEEPEST = 3


def optimizers_inside(item: Any, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that an object contains. A scheduler's is left out, because the
    scheduler's state does not contain it."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler) or depth > _DEEPEST:
        return
    if depth and isinstance(item, torch.optim.Optimizer):
        yield item
    if isinstance(item, dict):
        inner: Any = item.values()
    elif isinstance(item, (list, tuple)):
        inner = item
    elif isinstance(item, (torch.Tensor, torch.nn.Module, str, int, float)) or item is None:
        return
    else:
        inner = getattr(item, "__dict__", {}).values()
    for value in inner:
        yield from optimizers_inside(value, depth + 1)


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """True if its class defines its own state_dict(), as a wrapper of another optimizer does."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


@contextlib.contextmanager
def kept_in_place(tracked: Iterable[Any]) -> Iterator[None]:
    """Within, states may be loaded into the tracked objects. Afterwards their optimizers, and those
    inside, have the same lists and dictionaries of groups and states as before, with new content.

    Optimizer.load_state_dict() makes new ones. A script may refer to the old ones (`body, head =
    optimizer.param_groups`), and so does an optimizer around another one, such as SAM or Lookahead.
    """
    items = list(tracked)
    optimizers = {
        id(o): o
        for item in items
        for o in (
            *([item] if isinstance(item, torch.optim.Optimizer) else []),
            *optimizers_inside(item),
        )
    }
    held = [(o, o.param_groups, list(o.param_groups), o.state) for o in optimizers.values()]
    yield
    for optimizer, groups, each, state in held:
        loaded, loaded_state = optimizer.param_groups, optimizer.state
        if loaded is not groups:
            # The list itself also has groups that were added meanwhile.
            old = [*each, *groups[len(each) :]]
            for kept, new in zip(old, loaded, strict=False):
                if kept is not new:
                    _refill(kept, new)
            groups[:] = [*old[: len(loaded)], *loaded[len(old) :]]
            optimizer.param_groups = groups
        if loaded_state is not state and type(loaded_state) is type(state):
            _refill(state, loaded_state)
            optimizer.state = state


def _refill(kept: Any, new: Any) -> None:
    if kept is not new:
        kept.clear()
        kept.update(new)
