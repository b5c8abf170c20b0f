"""A model under DDP that outlives its process group: wrapped anew for each one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from elastic.worker.group.process_group import Backend


class DistributedModel(nn.Module):
    """Behaves as `DistributedDataParallel(module, **options)` does, through changes of group.

    Its state_dict is the module's own, without a "module." prefix, and attributes that it does
    not have are looked up in the module.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._options = dict(options)
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._hidden: list[DistributedDataParallel] = []  # a list: not a submodule
        self._learning = False
        self._module_buffers: list[torch.Tensor] | None = None
        self._buffers_before: list[torch.Tensor] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Forward through DDP while in a group, else through the module."""
        target = self._hidden[0] if self._hidden else self.module
        return target(*inputs, **named)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As DDP's; registered again in each group (fp16, bf16 and PowerSGD hooks...).

        Each group begins with a copy of `state` as it is now: members that have counted different
        numbers of iterations, as PowerSGD does, would not run the same collectives.
        """
        self._hook = (state, hook)
        for ddp in self._hidden:
            self._register_hook(ddp)

    # ---- for the session

    def wrap(self, backend: Backend) -> None:
        """Put DDP around the module in the present group. Members are known to be alike."""
        options = {"init_sync": False, **self._options}
        if backend.device.type == "cuda":
            options.setdefault("device_ids", [backend.device.index])
        ddp = DistributedDataParallel(self.module, **options)
        self._register_hook(ddp)
        self._hidden = [ddp]
        self._learning = bool(options.get("static_graph"))
        self._module_buffers = None

    def unwrap(self) -> None:
        """Throw DDP away, and gradients that an interrupted reduction may have left half-done."""
        self._hidden = []
        for parameter in self.module.parameters():
            parameter.grad = None

    def reduce_gradients(self, reduce: bool) -> None:
        """What DDP's no_sync() sets: whether the next backward all-reduces.

        A static graph is learnt in the first step, in which DDP can not go without: the result is
        the same, since what was reduced before is the same everywhere.
        """
        wanted = reduce or self._learning
        for ddp in self._hidden:
            if ddp.require_backward_grad_sync != wanted:  # setting it costs microseconds
                ddp.require_backward_grad_sync = wanted
        if reduce and self._learning:
            self._learning = False

    def save_buffers(self) -> None:
        """Remember the buffers: a step that is computed again must not count twice in them."""
        if self._module_buffers is None:  # looked up once in each group, not at every step
            self._module_buffers = list(self.module.buffers())
            self._buffers_before = [b.detach().clone() for b in self._module_buffers]
        elif self._module_buffers:
            torch._foreach_copy_(self._buffers_before, self._module_buffers)

    def restore_buffers(self) -> None:
        """Undo what the interrupted step did to the buffers."""
        if self._module_buffers:
            torch._foreach_copy_(self._module_buffers, self._buffers_before)

    def _register_hook(self, ddp: DistributedDataParallel) -> None:
        if self._hook is not None:
            state, hook = self._hook
            ddp.register_comm_hook(_fresh(state), hook)

    # ---- the module's own face

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """The module's."""
        return self.module.state_dict(*args, **named)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        """The module's."""
        return self.module.load_state_dict(state_dict, *args, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _fresh(state: object) -> object:
    """A copy of a hook's state, attribute by attribute: PowerSGD's own way of being copied is for
    saving and logs warnings. A state that is None or a process group stays itself."""
    slots = getattr(type(state), "__slots__", ())
    names = [*([slots] if isinstance(slots, str) else slots), *getattr(state, "__dict__", {})]
    if not names or isinstance(state, ProcessGroup):
        return state
    fresh = object.__new__(type(state))
    for name in names:
        value = getattr(state, name)
        same = isinstance(value, ProcessGroup)
        setattr(fresh, name, value if same else copy.deepcopy(value))
    return fresh
