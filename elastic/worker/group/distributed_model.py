"""Wraps a model in DDP again for each process group, so that the model outlives them."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from elastic.errors import ConfigurationError, StepMisused
from elastic.worker.group.process_group import Backend
from elastic.worker.unfit import unfit

_PREFIX = "module."
_MOST_WRAPPERS = 4
# Options of DDP that tie a model to one process group, or change it for good.
_REFUSED = {
    "process_group": "it changes with each group of the job; leave it out",
    "device_mesh": "it changes with each group of the job; leave it out",
    "mixed_precision": "it ties the parameters to one wrapper; use torch.autocast instead",
}

_HAS_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
"""torch 2.6 has no such option, and always begins by broadcasting rank 0's state."""
_TO_IGNORE = "_ddp_params_and_buffers_to_ignore"
_FIRST_SYNC = ("_verify_param_shape_across_processes", "_sync_module_states")

Flags = tuple[bool, ...]
_TRAINED = operator.attrgetter("requires_grad")


@dataclass(slots=True)
class Passes:
    """A distributed model's forward and backward passes in the present group and block.

    Kept apart from the model, because each assignment to an attribute of a module takes a
    microsecond, and the wrappers would become submodules.
    """

    parameters: list[nn.Parameter] = field(default_factory=list)
    """Looked up once for each group, not at every step."""
    wrappers: dict[Flags, DistributedDataParallel] = field(default_factory=dict)
    """Keyed by which parameters are trained."""
    wrapper: DistributedDataParallel | None = None
    """The wrapper in use; None if no parameter is trained, or there is no group."""
    flags: Flags = ()
    frozen: int = 0
    """A digest of which parameters are not trained. 0: all are."""
    sample: nn.Parameter | None = None
    """The first parameter that is trained."""
    reduces: bool = True
    learns_graph: bool = False
    begun: bool = False
    forwarded: bool = False
    """A forward pass with gradients has run through DDP in this block."""
    calls: int = 0
    """The number of these in the last micro-batch, since its last averaging pass."""
    together: bool = False
    """All members call the model now: in a step's block, or in `session.run`."""
    apart: bool = False
    """Members call the model different numbers of times, so DDP must not communicate."""
    broadcast: bool = False
    """Buffers were broadcast for all passes of this step, so wrappers need not do it first."""
    accumulated: list[tuple[nn.Parameter, torch.Tensor, int]] = field(default_factory=list)
    """Some of the gradients that the block's micro-batches have so far, with their versions."""


class DistributedModel(nn.Module):
    """Behaves like `DistributedDataParallel(module, **options)`, and survives changes of the group.

    Names of parameters, buffers and state are the module's own, without a "module." prefix, even if
    another module contains this one. Attributes that this class lacks are the module's: to read, to
    assign and to delete. Raises ConfigurationError for options that fit only one group.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        for name, advice in _REFUSED.items():
            if options.get(name) is not None:
                raise ConfigurationError(f"session.distribute(..., {name}=...): {advice}")
        _require_ordinary_tensors(module)
        self._options = dict(options)
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._backend: Backend | None = None
        self._caches: list[str] = []
        self._has_trained = False
        """It has been in a group, so DDP, or other members, know its parameters and buffers."""
        self.passes = Passes()
        self.on_failure: Callable[[Exception], None] = lambda _: None
        """Called with what a forward pass through DDP raises, or `broadcast_first`."""
        self.on_pass_outside: Callable[[], None] = lambda: None
        """Called before a forward pass outside of blocks and of `session.run`."""
        self.apart: Callable[[Callable[[], Any]], Any] = lambda function: function()
        """Calls its argument, a forward pass in which DDP agrees on buckets by collectives."""
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        self.module = module  # at last: from now on, other attributes are the module's
        for registry in ("_parameters", "_buffers"):
            vars(self)[registry] = _Inner(module, registry)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run DDP's forward if all members call the model now, else the module's."""
        passes = self.passes
        if self._backend is None or not passes.together:
            if not passes.together:
                self.on_pass_outside()
            return self.module(*inputs, **named)  # DDP would broadcast buffers with no peer
        if passes.apart:
            return self.module(*inputs, **named)
        if not passes.begun:
            self._begin_pass()
        ddp = passes.wrapper
        if ddp is None:
            return self.module(*inputs, **named)
        try:
            if torch.is_grad_enabled():
                passes.forwarded = True
                passes.calls += passes.reduces
                if not ddp._has_rebuilt_buckets and not ddp.find_unused_parameters:
                    return self.apart(functools.partial(ddp, *inputs, **named))
            return ddp(*inputs, **named)
        except Exception as error:
            self.on_failure(error)
            raise

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook as in DDP (fp16, bf16, PowerSGD...), and again in each group.

        Each group begins with a copy of `state` as it is now. Members that have counted different
        numbers of iterations, as PowerSGD does, would run different collectives.
        """
        self._hook = (state, hook)
        for ddp in self.passes.wrappers.values():
            self._register_hook(ddp)

    def no_sync(self) -> NoReturn:
        """Raise StepMisused: the step decides which backward pass averages."""
        raise StepMisused(
            "model.no_sync() cannot be used: the last backward pass of a step averages the "
            "gradients of all its micro-batches; for N micro-batches per step write "
            "elastic.DataLoader(..., accumulate=N) and call step.backward(loss) in "
            "`for ... in step.batches():`"
        )

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigurationError: the loader already gives each rank a batch in each step."""
        raise unfit("Join")

    join_hook = join

    # ---- for the training loop

    def wrap(self, backend: Backend, caches: Collection[tuple[int, str]] = ()) -> None:
        """Put DDP around the module in the present group. Its members are known to be alike, except
        for buffers that are caches: pairs of a module's id and the buffer's name in that module."""
        self.unwrap()
        self._caches = [
            f"{path}.{key}" if path else key
            for path, inner in (self.module.named_modules() if caches else ())
            for key in inner._buffers
            if (id(inner), key) in caches
        ]
        self._backend, self._has_trained = backend, True
        self.passes.parameters = list(self.module.parameters())
        self.passes.learns_graph = bool(self._options.get("static_graph"))
        self._use_wrapper()

    def unwrap(self) -> None:
        """Forget the group. The caller puts gradients back, or drops them."""
        self._backend = None
        self.passes.wrappers, self.passes.wrapper = {}, None
        self.passes.begun = self.passes.broadcast = False

    def leave_behind(self) -> Passes:
        """Forget the group while the script's thread is stuck in a pass. The caller must keep the
        result, since DDP must not be destroyed while a pass is in it."""
        passes, self.passes = self.passes, Passes()
        self._backend = None
        return passes

    def begin_block(self) -> None:
        """Forget the passes of the last step: the training loop calls this as a block begins."""
        passes = self.passes
        passes.begun = passes.forwarded = passes.broadcast = False
        passes.calls = 0

    def broadcast_first(self) -> None:
        """Do now what DDP's wrappers would do by collectives in their first forward pass of the
        step: agree on buckets, and broadcast buffers. Then no collective of the script's own in a
        micro-batch can hide among these."""
        passes = self.passes
        try:
            for ddp in passes.wrappers.values():
                if ddp.reducer._rebuild_buckets():
                    ddp._has_rebuilt_buckets = True
            self.broadcast_buffers()
        except Exception as error:
            self.on_failure(error)
            raise
        passes.broadcast = True
        for ddp in passes.wrappers.values():
            ddp.require_forward_param_sync = False

    def broadcast_buffers(self) -> None:
        """Give all members the buffers of rank 0, as DDP does before a forward pass."""
        now: Any = self.passes.wrapper
        if now is not None and now.will_sync_module_buffers():
            now._sync_buffers()

    def communicates_in_passes(self) -> bool:
        """Whether the module communicates in the passes of every micro-batch."""
        return any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())

    def has_gradients(self) -> bool:
        """Whether there are gradients other than zero."""
        gradients = (p.grad for p in self.passes.parameters)
        return any(g is not None and bool(g.any()) for g in gradients)

    def multiply_gradients(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a number, which may still be on its way on the device."""
        dense: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.passes.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient.mul_(factor.to(gradient.dtype))
            else:
                dense.setdefault(gradient.dtype, []).append(gradient)
        for dtype, gradients in dense.items():
            torch._foreach_mul_(gradients, factor.to(dtype))

    def keep_accumulated(self, *, ends_only: bool = False) -> None:
        """Remember some gradients, to notice if the script discards them: a first and a last one,
        because to look at all would take too long. ends_only: if the first and the last parameter
        have any, since most scripts have none at that moment."""
        parameters = self.passes.parameters
        if ends_only:
            parameters = [parameters[0], parameters[-1]] if parameters else []
        found = [
            next((p for p in of if p.grad is not None), None)
            for of in (parameters, parameters[::-1])
        ]
        self.passes.accumulated = [
            (p, p.grad, p.grad._version) for p in found if p is not None and p.grad is not None
        ]

    def has_lost_accumulated(self) -> bool:
        """Whether a gradient that was remembered is gone, or was zeroed."""
        return any(
            p.grad is None
            or ((p.grad is not gradient or gradient._version != version) and not bool(p.grad.any()))
            for p, gradient, version in self.passes.accumulated
        )

    def reduce_gradients(self, reduce: bool) -> None:
        """Set whether the next backward all-reduces, as DDP's no_sync() does.

        DDP learns a static graph in the first step and must all-reduce in it. The result is the
        same, because gradients that were reduced before are the same everywhere.
        """
        passes = self.passes
        passes.reduces = reduce
        passes.begun = False  # requires_grad may have changed since then
        wanted = reduce or passes.learns_graph
        ddp = passes.wrapper
        if ddp is not None and ddp.require_backward_grad_sync != wanted:
            ddp.require_backward_grad_sync = wanted
        if reduce:
            passes.learns_graph = False

    def require_same_layers(self) -> None:
        """Raise StepMisused if the module's parameters are not those that DDP was given."""
        known = {id(p) for p in self.passes.parameters}
        present = {id(p): name for name, p in self.module.named_parameters()}
        if self._backend is None or present.keys() == known:
            return
        new = [name for key, name in present.items() if key not in known]
        what = f"new: {', '.join(new[:3])}" if new else "some are gone"
        raise StepMisused(
            f"the parameters of {type(self.module).__name__} have changed since it was given to "
            f"session.distribute() ({what}), and DDP averages only those that it had then; build "
            "the whole model first, and freeze what is trained later with requires_grad_(False)"
        )

    # ---- inside

    def _begin_pass(self) -> None:
        """The block's first forward pass: choose the wrapper for what is trained now."""
        passes = self.passes
        passes.begun = True
        if passes.flags != tuple(map(_TRAINED, passes.parameters)):
            self._use_wrapper()

    def _use_wrapper(self) -> None:
        """Use the wrapper for the parameters that are trained now; none if no parameter is.

        Each wrapper learns its own buckets. A script that freezes and unfreezes parameters in every
        step (GANs) alternates between two of them.
        """
        assert self._backend is not None
        passes = self.passes
        passes.flags = tuple(map(_TRAINED, passes.parameters))
        passes.frozen = 0 if all(passes.flags) else zlib.crc32(bytes(passes.flags))
        passes.sample = next((p for p in passes.parameters if p.requires_grad), None)
        if passes.sample is None:
            passes.wrapper = None
            return
        wrappers = passes.wrappers
        if passes.flags not in wrappers:
            if len(wrappers) == _MOST_WRAPPERS:
                wrappers.pop(next(iter(wrappers)))
            wrappers[passes.flags] = self._wrapped(self._backend)
        passes.wrapper = wrappers[passes.flags]
        if passes.broadcast:
            passes.wrapper.require_forward_param_sync = False
        passes.wrapper.require_backward_grad_sync = passes.reduces or passes.learns_graph

    def _wrapped(self, backend: Backend) -> DistributedDataParallel:
        options = dict(self._options)
        if _HAS_INIT_SYNC:
            options.setdefault("init_sync", False)
        if backend.device.index is not None:
            options.setdefault("device_ids", [backend.device.index])
        with (
            contextlib.nullcontext() if _HAS_INIT_SYNC else _without_first_sync(),
            _ignoring(self.module, self._caches),
        ):
            ddp = DistributedDataParallel(self.module, **options)
        self._register_hook(ddp)
        return ddp

    def _register_hook(self, ddp: DistributedDataParallel) -> None:
        if self._hook is not None:
            state, hook = self._hook
            try:
                ddp.register_comm_hook(_fresh(state), hook)
            except (TypeError, ValueError) as error:  # torch: not for this backend or device
                name = getattr(hook, "__name__", repr(hook))
                raise ConfigurationError(
                    f"model.register_comm_hook(..., {name}): {error}; choose another hook, or none"
                ) from error

    # ---- what other code sees of the module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, then the wrapped one's modules under their own names."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return self.module.state_dict(*args, **named)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the module, unless the name is this class's own.

        Raises StepMisused for `module`, and for a parameter, buffer or layer once the model has
        been in a group, unless the same object is assigned again, as by `model.scale *= 2`.
        """
        if name in vars(self) or hasattr(type(self), name) or "module" not in self._modules:
            super().__setattr__(name, value)
            return
        registers = isinstance(value, (nn.Module, nn.Parameter, nn.Buffer))
        self._require_fixed(name, value, registers=registers)
        setattr(_uncompiled(self.module), name, value)
        if registers:
            _require_ordinary_tensors(self.module)

    def __delattr__(self, name: str) -> None:
        if name in vars(self) or hasattr(type(self), name):
            super().__delattr__(name)
            return
        self._require_fixed(name, None, registers=False)
        delattr(_uncompiled(self.module), name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register it in the module. Raises StepMisused as an assignment does."""
        self._require_fixed(name, param, registers=True)
        _uncompiled(self.module).register_parameter(name, param)
        _require_ordinary_tensors(self.module)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Register it in the module. Raises StepMisused as an assignment does."""
        self._require_fixed(name, tensor, registers=True)
        _uncompiled(self.module).register_buffer(name, tensor, persistent)
        _require_ordinary_tensors(self.module)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register it in the module. Raises StepMisused as an assignment does."""
        self._require_fixed(name, module, registers=True)
        _uncompiled(self.module).add_module(name, module)
        _require_ordinary_tensors(self.module)

    def _require_fixed(self, name: str, value: Any, *, registers: bool) -> None:
        """Raise StepMisused if this assignment, or removal, would replace what DDP and the other
        members know. registers: it makes a parameter, a buffer or a layer."""
        kind = type(self.module).__name__
        if name == "module":
            raise StepMisused(
                f"model.module of a distributed {kind} cannot be replaced; change the module "
                "before session.distribute(), or distribute the other one"
            )
        if not self._has_trained:
            return
        held = _registered(self.module, name)
        if (held is None and not registers) or (held is not None and held is value):
            return
        raise StepMisused(
            f"model.{name} of a distributed {kind} was replaced or removed after the loop over "
            "session.steps() had begun: DDP and workers that join would not follow. Build the "
            "whole model above the loop, freeze what is trained later with requires_grad_(False), "
            f"and change tensors in place, as in `with torch.no_grad(): model.{name}.copy_(...)`"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a model that belongs to no group, as a deep copy does."""
        return _unpickled, (self.module, self._options, self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModel:
        """Return a copy that belongs to no group, such as an averaged model."""
        twin = DistributedModel(copy.deepcopy(self.module, memo), self._options)
        twin.training = self.training  # train() would undo the script's eval()
        memo[id(self)] = twin
        return twin


class _Inner(dict[str, Any]):
    """The parameters or buffers of the module inside of a distributed model, by name.

    functional_call() and torch.export replace them there for a while. To iterate over, it is empty,
    because whoever iterates over a model comes to the module inside, too.
    """

    def __init__(self, module: nn.Module, registry: str) -> None:
        super().__init__()
        self._module, self._registry = module, registry

    def __contains__(self, name: object) -> bool:
        return name in self._inner()

    def __getitem__(self, name: str) -> Any:
        return self._inner()[name]

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._inner()[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._inner()[name]

    def _inner(self) -> dict[str, Any]:
        inner: dict[str, Any] = getattr(_uncompiled(self._module), self._registry)
        return inner


def _unpickled(module: nn.Module, options: Mapping[str, Any], training: bool) -> DistributedModel:
    model = DistributedModel(module, options)
    model.training = training  # train() would undo the script's eval()
    return model


def _require_ordinary_tensors(module: nn.Module) -> None:
    """Raise ConfigurationError for tensors that DDP, or a worker that joins, cannot fill."""
    kind = type(module).__name__
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            why = "has no shape yet; run one batch through the module first (a lazy layer)"
        elif tensor.layout is not torch.strided:
            why = (
                f"has the layout {tensor.layout}, and DDP exchanges dense tensors only; keep a "
                "sparse matrix as an ordinary attribute, on session.device"
            )
        elif tensor.is_inference():
            why = "was made in torch.inference_mode(); register a clone() that was made outside"
        elif tensor.is_conj() or tensor.is_neg():
            why = "is a lazy conjugate or negative of other memory; register its resolve_conj()"
        elif any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            why = "has elements that share memory, as expand() makes them; register its clone()"
        else:
            continue
        raise ConfigurationError(f"session.distribute({kind}): {name} {why}")


def _registered(module: nn.Module, name: str) -> object:
    """The module's parameter, buffer or layer of this name, or None."""
    inner = _uncompiled(module)
    registries: tuple[Mapping[str, object], ...] = (
        inner._parameters,
        inner._buffers,
        inner._modules,
    )
    return next((r[name] for r in registries if r.get(name) is not None), None)


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module inside, if torch.compile() has wrapped it in another one."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def _with_prefix(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename entries before another module loads this one: torch looks for them below "module."."""
    for name in [n for n in state_dict if n.startswith(prefix)]:
        state_dict[prefix + _PREFIX + name[len(prefix) :]] = state_dict.pop(name)
    del model


def _fresh(state: object) -> object:
    """Copy a hook's state, attribute by attribute: PowerSGD's own copy is meant for saving and logs
    warnings. A process group, or a state without attributes such as None, is not copied."""
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


@contextlib.contextmanager
def _ignoring(module: nn.Module, buffers: list[str]) -> Iterator[None]:
    """Within, new DDP wrappers do not broadcast these buffers, nor those that the script lists."""
    if not buffers:
        yield
        return
    own = module.__dict__.get(_TO_IGNORE)
    told = getattr(module, _TO_IGNORE, None)  # its class may have one
    module.__dict__[_TO_IGNORE] = [*(told or ()), *buffers]
    try:
        yield
    finally:
        del module.__dict__[_TO_IGNORE]
        if own is not None:
            module.__dict__[_TO_IGNORE] = own


@contextlib.contextmanager
def _without_first_sync() -> Iterator[None]:
    """Within, new DDP wrappers send nothing: rank 0 of a new group may be a newcomer, whose weights
    do not count. For a torch that has no option for this."""
    module: Any = sys.modules[DistributedDataParallel.__module__]
    kept = {name: getattr(module, name) for name in _FIRST_SYNC}
    for name in _FIRST_SYNC:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(module, name, function)
