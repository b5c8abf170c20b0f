"""Cells: the parts of the tracked state that `Undo` copies, compares and puts back as one."""

from __future__ import annotations

import enum
import functools
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType, NoneType
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from torch import nn

from elastic.errors import ConfigurationError
from elastic.worker.state.copied_tensors import CopiedTensors, all_same, has_layout_of
from elastic.worker.state.copy_on_write import CopyOnWrite, HeldTensors
from elastic.worker.state.digest import digest_of
from elastic.worker.state.references import has_own_state, kept_in_place, optimizers_inside
from elastic.worker.state.signs import (
    VERSION,
    Walk,
    address_of,
    present,
    signs_of,
    steps_of,
)
from elastic.worker.state.tree import (
    UNCHANGING,
    Copies,
    copy_tree,
    keep,
    parts_of,
    refill,
    same_tensor,
    tensors_of,
    trees_equal,
    unchanged,
)

_Item = TypeVar("_Item")
Copy = Any
Digest: TypeAlias = tuple[int, Any]
"""A digest of tensors' content, and what else tells states apart. Compare by `trees_equal`."""
Turn: TypeAlias = int | None
SMALL_BYTES = 2**16
_GOLDEN = (5**0.5 - 1) / 2
_FEW = 32
"""Up to so many tensors of a cell, or states of parameters, a sign looks at all."""
_LOOKED_AT = 8
"""Of more of them, about so many in one turn. A look at one takes several microseconds, since
nothing of it is in a cache, and code that writes to one in a cell mostly writes to all."""
# map() with these takes half as long as a loop, and every block pays for it.
_TRAINED = operator.attrgetter("requires_grad")
_MODE = operator.itemgetter("training")
_OTHER_MODE = operator.attrgetter("training")
_GRADIENT = operator.attrgetter("grad")
_MEMBERS = operator.itemgetter("params")
_VALUES = operator.methodcaller("values")
_STAGES = "_per_optimizer_states"  # of a GradScaler
_EXTRA_STATE = "_extra_state"  # of which ExtraState takes care


class Cell(Protocol):
    """A part of the tracked state."""

    name: str

    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def copy(self) -> Copy:
        """Return its present content, in memory of its own."""
        ...

    def put_back(self, copy: Copy) -> None:
        """Restore the content of a copy."""
        ...

    def differs(self, copy: Copy) -> bool:
        """Compare the content itself with a copy."""
        ...

    def sign(self, turn: Turn = None) -> object:
        """Return a cheap sign. Signs of the same turn are equal as long as no change is noticed.

        turn: which of many tensors to look at; None: all.
        """
        ...


class _Small(Cell):
    """A cell that is always small: every block copies it, and nobody asks for its sign."""

    def size_bytes(self) -> int:
        return 0

    def differs(self, copy: Copy) -> bool:
        return bool(self.copy() != copy)

    def sign(self, turn: Turn = None) -> object:
        del turn
        return None


def is_large(cell: Cell) -> bool:
    """Return whether copying the cell at every block would take noticeable time."""
    return cell.size_bytes() > SMALL_BYTES


def is_written_by_operations(cell: Cell) -> TypeGuard[ModuleTensors | OptimizerState]:
    """Return whether only operations of torch change the cell. BatchNorm in eager mode changes
    buffers by one that does not say so, and objects may do anything."""
    return isinstance(cell, OptimizerState) or (
        isinstance(cell, ModuleTensors) and not cell.are_buffers
    )


# ---- tensors of modules

Slot = tuple[dict[str, Any], str]
"""A module's dictionary of parameters or buffers, and a name in it."""


class ModuleTensors:
    """The parameters, or the buffers, of a module and of those inside of it.

    A script may assign another tensor to a buffer (`self.n = self.n + 1`), or None, and to a
    parameter's `.data`. So the tensor objects that were there are put back, with their content.

    attributes: those of modules with buffers that are not part of their state. Such a buffer may be
    replaced, for example by a cache for longer sequences, and a number such as `self.longest` then
    says how far it reaches. These numbers are put back with the buffer.
    """

    def __init__(
        self,
        name: str,
        slots: Iterable[Slot],
        *,
        are_buffers: bool = False,
        attributes: Iterable[dict[str, Any]] = (),
    ) -> None:
        self.name = name
        self._attributes = {id(each["_buffers"]): each for each in attributes}
        self.are_buffers = are_buffers
        self._slots = list(slots)
        self._owners = [owner for owner, _ in self._slots]
        self._names = [name for _, name in self._slots]
        held = {id(owner): owner for owner in self._owners}
        self._held = [owner.values() for owner in held.values()]  # views, so always current

    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in present(self.tensors()))

    def copy(
        self, reuse: Copy | None = None, *, on_host: bool = False, writes: CopyOnWrite | None = None
    ) -> Copy:
        tensors = self.tensors()
        numbers = {key: _numbers(attributes) for key, attributes in self._attributes.items()}
        content = _kept(present(tensors), reuse[1] if reuse else None, on_host, writes)
        return tensors, content, numbers

    def put_back(self, copy: Copy) -> None:
        tensors, copied, numbers = copy
        for (owner, name), tensor in zip(self._slots, tensors, strict=True):
            if owner.get(name) is not tensor:
                owner[name] = tensor
                if id(owner) in numbers:
                    self._attributes[id(owner)].update(numbers[id(owner)])
        for tensor, memory in zip(present(tensors), copied.data, strict=True):
            if tensor.layout is torch.strided and (
                tensor.data_ptr() != memory.data_ptr() or not has_layout_of(memory, tensor)
            ):
                tensor.data = memory
        copied.put_back()

    def differs(self, copy: Copy) -> bool:
        tensors, copied, _ = copy
        now = self.tensors()
        if any(a is not b for a, b in zip(now, tensors, strict=True)):
            return True
        return not all(map(same_tensor, present(now), copied.content))

    def digest(self) -> Digest:
        found = present(self.tensors())
        return _digest(found, list(map(id, found)))

    def sign(self, turn: Turn = None) -> object:
        """Return signs of tensors, and of many how many there are beside each: others may come."""
        if len(self._names) <= _FEW:
            owners: list[dict[str, Any]] = []
            seen = list(chain.from_iterable(self._held))
        else:
            owners, names = _in_turn(self._owners, turn), _in_turn(self._names, turn)
            seen = [owner.get(name) for owner, name in zip(owners, names, strict=True)]
        if NoneType in map(type, seen):
            seen = present(seen)
        return signs_of(seen), list(map(len, owners))

    def tensors(self) -> list[torch.Tensor | None]:
        try:
            return [owner[name] for owner, name in self._slots]
        except KeyError:
            return [owner.get(name) for owner, name in self._slots]


class RequiresGrad(_Small):
    """Which parameters of a module are trained: GANs and gradual unfreezing change that."""

    def __init__(self, name: str, slots: Iterable[Slot]) -> None:
        self.name = name
        self._slots = list(slots)
        self._parameters: list[nn.Parameter] = []
        self.look_up()

    def look_up(self) -> None:
        """Look up the parameters: the script may have replaced some. Raises ConfigurationError if
        there are fewer than when training began."""
        gone = [name for owner, name in self._slots if owner.get(name) is None]
        if gone:
            raise ConfigurationError(
                f"{self.name} has lost parameters that it had when training began ({gone[0]}, as "
                "by pruning, or `layer.bias = None`): a worker that joins builds it with them; "
                "change a module's parameters before session.distribute() and session.track()"
            )
        self._parameters = [owner[name] for owner, name in self._slots]

    def copy(self) -> Copy:
        return self._parameters, list(map(_TRAINED, self._parameters))

    def put_back(self, copy: Copy) -> None:
        for parameter, flag in zip(*copy, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def differs(self, copy: Copy) -> bool:
        return bool(self.copy()[1] != copy[1])


class Modes(_Small):
    """Which modules of a model are in training mode. One that is set to eval() inside of a block is
    in its old mode again when the block is handed out again.

    Layers that do nothing with their mode, such as nn.Linear, follow the module that they are in:
    of a thousand, a look at each would take a third of a millisecond.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        inside = {id(m): m for m in module.modules()}
        followers = {
            id(child): parent
            for parent in inside.values()
            for child in parent.children()
            if _ignores_its_mode(child)
        }
        looked_at = [m for key, m in inside.items() if key not in followers]
        self._attributes = [own for m in looked_at if "training" in (own := vars(m))]
        self._followers: dict[int, list[dict[str, Any]]] = {}
        """Attributes of the layers that follow, by the id of those of the module they are in."""
        for key, parent in followers.items():
            self._followers.setdefault(id(vars(parent)), []).append(vars(inside[key]))
        # torch.compile() returns a module whose mode is a property; a script may write such a one.
        self._others = [m for m in looked_at if "training" not in vars(m)]

    def copy(self) -> Copy:
        return list(map(_MODE, self._attributes)), list(map(_OTHER_MODE, self._others))

    def put_back(self, copy: Copy) -> None:
        modes, others = copy
        for attributes, mode in zip(self._attributes, modes, strict=True):
            if attributes["training"] != mode:
                attributes["training"] = mode
                for follower in self._followers.get(id(attributes), ()):
                    follower["training"] = mode
        for module, mode in zip(self._others, others, strict=True):
            if module.training != mode:
                module.training = mode


@functools.cache
def _reads_its_mode(kind: type[Any]) -> bool:
    """Whether the code of one of torch's own layers names `training`."""
    functions = [
        value
        for each in kind.__mro__
        if each is not nn.Module
        for value in vars(each).values()
        if isinstance(value, FunctionType)
    ]
    return any("training" in function.__code__.co_names for function in functions)


def _ignores_its_mode(module: nn.Module) -> bool:
    """Whether the module is one of torch's own layers, with none inside, in which nothing reads its
    mode. Hooks may: those of spectral_norm do."""
    kind: Any = type(module)
    own = vars(module)
    return (
        kind.__module__.startswith("torch.nn.modules.")
        and "training" in own
        and "forward" not in own  # a script's
        and not (module._modules or module._forward_hooks or module._forward_pre_hooks)
        and not _reads_its_mode(kind)
    )


class ExtraState:
    """A module's `get_extra_state` and `set_extra_state`, as `state_dict` and `load_state_dict`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> Any:
        return self._module.get_extra_state()

    def load_state_dict(self, state_dict: Any) -> None:
        self._module.set_extra_state(state_dict)


class OwnContent:
    """What a module's own state_dict() has beside parameters and buffers, such as the predictions
    that a metric collects; as `state_dict` and `load_state_dict`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        self._names = tensors.keys()
        self._places = set(map(address_of, tensors.values()))

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self._module.state_dict().items() if self._is_own(k, v)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        whole = self._module.state_dict()
        others = {k: v for k, v in whole.items() if not self._is_own(k, v)}
        self._module.load_state_dict({**others, **state_dict})

    def _is_own(self, key: str, value: Any) -> bool:
        if key in self._names or key.rpartition(".")[2] == _EXTRA_STATE:
            return False
        return not (isinstance(value, torch.Tensor) and address_of(value) in self._places)


# ---- optimizers


class ParameterGroups(_Small):
    """An optimizer's parameter groups: their parameters, and settings such as rates that a
    scheduler changes."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self._optimizer = optimizer

    def copy(self) -> Copy:
        groups = list(self._optimizer.param_groups)
        return (
            groups,
            [_settings(group) for group in groups],
            list(map(list, map(_MEMBERS, groups))),
        )

    def put_back(self, copy: Copy) -> None:
        groups, settings, members = copy
        self._optimizer.param_groups[:] = groups
        for group, values, parameters in zip(groups, settings, members, strict=True):
            held = {key: _held(group.get(key), value) for key, value in values.items()}
            if [key for key in group if key != "params"] != list(held):
                own = group["params"]
                group.clear()
                group["params"] = own
            if not all_same(group["params"], parameters):
                group["params"] = list(parameters)
            group.update(held)

    def differs(self, copy: Copy) -> bool:
        groups, settings, members = copy
        now = self._optimizer.param_groups
        return not (
            all_same(now, groups)
            and all(all_same(g["params"], ps) for g, ps in zip(now, members, strict=True))
            and trees_equal([_settings(group) for group in now], settings)
        )


class OptimizerState:
    """What an optimizer keeps for each parameter. Its step count shows what versions do not."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self._optimizer = optimizer
        self._keys: list[torch.Tensor] = []
        """Those of its state: to list them at each look takes longer than the look."""

    def size_bytes(self) -> int:
        """At least the size of its parameters: most states are that large after a step."""
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        held = [t for state in self._optimizer.state.values() for t in tensors_of(state)]
        return max(sum(t.numel() * t.element_size() for t in each) for each in (parameters, held))

    def copy(
        self, reuse: Copy | None = None, *, on_host: bool = False, writes: CopyOnWrite | None = None
    ) -> Copy:
        keys: list[tuple[Any, dict[str, Any]]] = []
        tensors: list[torch.Tensor] = []
        for parameter, state in self._optimizer.state.items():
            keys.append((parameter, _containers(state)))
            tensors += tensors_of(state)
        return keys, _kept(tensors, reuse[1] if reuse else None, on_host, writes)

    def put_back(self, copy: Copy) -> None:
        keys, copied = copy
        state = self._optimizer.state
        for parameter in state.keys() - {parameter for parameter, _ in keys}:
            del state[parameter]
        for parameter, values in keys:
            if isinstance(values, dict):
                kept = state[parameter]
                kept.clear()
                kept.update(_containers(values))
            else:
                state[parameter] = _containers(values)
        copied.put_back()

    def tensors(self) -> list[torch.Tensor]:
        return [t for state in self._optimizer.state.values() for t in tensors_of(state)]

    def differs(self, copy: Copy) -> bool:
        keys, copied = copy
        state = self._optimizer.state
        if state.keys() != {parameter for parameter, _ in keys}:
            return True
        now = self.tensors()
        if len(now) != len(copied.data) or not all(map(same_tensor, now, copied.content)):
            return True
        return any(
            not trees_equal(_without_tensors(state[p]), _without_tensors(v)) for p, v in keys
        )

    def digest(self) -> Digest:
        state = self._optimizer.state
        return _digest(self.tensors(), [(id(p), _without_tensors(s)) for p, s in state.items()])

    def sign(self, turn: Turn = None) -> object:
        """Return the step count and, for a script that changes the state itself, signs of what is
        kept for each parameter."""
        state = self._optimizer.state
        if len(state) != len(self._keys):
            self._keys = list(state)
        keys = self._keys if len(self._keys) <= _FEW else _in_turn(self._keys, turn)
        seen = list(map(state.get, keys))
        if NoneType in map(type, seen):  # kept for others by now
            self._keys = list(state)
            seen = [state[key] for key in _in_turn(self._keys, turn)]
        rest: object = None
        try:
            held = list(chain.from_iterable(map(_VALUES, seen)))
        except AttributeError:  # an optimizer of the script's keeps something else
            held = seen
        if not {torch.Tensor}.issuperset(map(type, held)):
            walk = Walk()
            rest = _Sign(walk.sign([v for v in held if not isinstance(v, torch.Tensor)]), walk)
            held = [v for v in held if isinstance(v, torch.Tensor)]
        return steps_of(self._optimizer), signs_of(held), len(state), rest

    def shows_step(self, now: Any, before: Any) -> bool:
        """Whether two signs show that the optimizer has stepped, or something wrote to its state
        as a step does: then it has changed what it trains, too."""
        return bool(now[0] != before[0] or now[1][0] != before[1][0])

    def trained(self) -> Iterator[torch.Tensor]:
        """Yield the parameters: they change with its steps, but a fused step moves no version."""
        return (p for group in self._optimizer.param_groups for p in group["params"])


# ---- schedulers, and anything else with a state_dict


class Scheduler(_Small):
    """A learning-rate scheduler: all of its attributes but the optimizer."""

    def __init__(self, name: str, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.name = name
        self._scheduler = scheduler

    def copy(self) -> Copy:
        copy = dict(self._scheduler.__dict__)
        del copy["optimizer"]
        for name, value in copy.items():
            if type(value) not in UNCHANGING:
                copy[name] = copy_tree(value)
        return copy

    def put_back(self, copy: Copy) -> None:
        attributes = self._scheduler.__dict__
        for name in attributes.keys() - copy.keys() - {"optimizer"}:
            del attributes[name]
        attributes.update(copy_tree(copy))

    def differs(self, copy: Copy) -> bool:
        return not trees_equal(self.copy(), copy)


class Object:
    """Any other tracked object, through its state_dict().

    elsewhere: ids of tensors that belong to other cells.
    """

    def __init__(self, name: str, tracked: Any, elsewhere: Collection[int] = ()) -> None:
        self.name = name
        self._tracked = tracked
        self._elsewhere = elsewhere
        self._walk: Walk | None = None
        hides = isinstance(tracked, (ExtraState, OwnContent))
        self._looks_at = _Looks.AT_STATE_DICT if hides else _Looks.AT_OBJECT

    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in tensors_of(self._tracked.state_dict()))

    def copy(self) -> Copy:
        return copy_tree(self._tracked.state_dict(), Copies())

    def put_back(self, copy: Copy) -> None:
        if self.differs(copy):
            self._tracked.load_state_dict(copy_tree(copy, Copies()))

    def differs(self, copy: Copy) -> bool:
        return not trees_equal(self._tracked.state_dict(), copy)

    def sign(self, turn: Turn = None) -> object:
        """Return signs of its attributes and of the objects in them. If these hide something,
        return signs of its state_dict(), which may take longer, because many make clones for it. If
        that is too large, return a sign that is equal to no other: every block copies it then."""
        del turn  # an object may change in any of its parts
        if self._looks_at is _Looks.AT_OBJECT:
            walk = Walk(self._elsewhere, known=self._walk)
            sign, self._walk = _Sign(walk.sign(self._object()), walk), walk
            if walk.complete:
                return sign
            self._looks_at, self._walk = _Looks.AT_STATE_DICT, None
        if self._looks_at is _Looks.AT_STATE_DICT:
            walk = Walk()
            sign = _Sign(walk.sign(self._tracked.state_dict()), walk)
            if walk.complete:
                return sign
            self._looks_at = _Looks.NOWHERE
        return object()

    def _object(self) -> object:
        """What to sign: all that its state_dict() may take something from."""
        return self._tracked


class _Sign:
    """What a walk has returned, with the walk: its signs are unique as long as that lives."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object, walk: Walk) -> None:
        self._value, self._walk = value, walk

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sign) and bool(self._value == other._value)


class _Looks(enum.Enum):
    """What an object is signed by."""

    AT_OBJECT = "the object and what it refers to"
    AT_STATE_DICT = "its state_dict()"
    NOWHERE = "nothing"


class ScriptValues(Object):
    """`session.state`: the objects that were in it are put back with their content."""

    def copy(self) -> Copy:
        return [(key, keep(value)) for key, value in self._tracked.items()]

    def put_back(self, copy: Copy) -> None:
        values = {key: refill(kept) for key, kept in copy}
        self._tracked.clear()
        self._tracked.update(values)

    def differs(self, copy: Copy) -> bool:
        return list(self._tracked) != [key for key, _ in copy] or not all(
            unchanged(value, kept)
            for value, (_, kept) in zip(self._tracked.values(), copy, strict=True)
        )


class Scaler(Object):
    """A GradScaler, with each optimizer's stage since `update()`, absent from its state_dict().

    That reads the scale, for which the host would wait for the device; its attributes are copied on
    the device.
    """

    def copy(self) -> Copy:
        return copy_tree(self._attributes()), self._stages()

    def put_back(self, copy: Copy) -> None:
        attributes, stages = copy
        for name, value in attributes.items():
            held = getattr(self._tracked, name, None)
            if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
                held.copy_(value)
            else:
                setattr(self._tracked, name, copy_tree(value))
        states = self._states()
        states.clear()
        for optimizer, stage in stages.items():
            states[optimizer].update(stage)

    def differs(self, copy: Copy) -> bool:
        attributes, stages = copy
        return not (
            trees_equal(self._attributes(), attributes) and trees_equal(self._stages(), stages)
        )

    def _attributes(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self._tracked).items() if k != _STAGES}

    def _stages(self) -> dict[int, dict[str, Any]]:
        states = self._states()
        return {optimizer: copy_tree(dict(stage)) for optimizer, stage in states.items()}

    def _states(self) -> dict[int, Any]:
        """Return the scaler's own record; a scaler that is not enabled has none."""
        return getattr(self._tracked, _STAGES, {})


class OwnState(Object):
    """An optimizer, through its class's own state, which may have more than torch's: slow weights,
    counters, the state of an optimizer inside of it."""

    def put_back(self, copy: Copy) -> None:
        with kept_in_place([self._tracked]):
            super().put_back(copy)

    def sign(self, turn: Turn = None) -> object:
        return steps_of(self._tracked), super().sign(turn)

    def _object(self) -> object:
        return vars(self._tracked)


# ---- gradients that a script accumulates over several steps by hand


class Gradients:
    """Gradients that outlive a step: tracked and put back where a script accumulates them.

    A gradient that is still there when a block begins may be left over, to be zeroed before the
    first backward pass, or may be meant to grow. `before_backward` finds out which, for each
    module. Gradients that have grown once may do so again, whatever happens in the blocks between:
    a script may zero them at the start of every fourth. Until this is known, they are assumed to be
    meant to grow.
    """

    name = "session.gradients"

    def __init__(self) -> None:
        self._modules: dict[str, dict[str, nn.Parameter]] = {}
        self._accumulates: dict[str, bool] = {}
        self._at_begin: dict[str, bool] = {}
        self._left: dict[str, tuple[list[int], list[int]]] = {}
        """By module: ids and versions of the gradients at the block's start."""

    def watch(self, name: str, module: nn.Module) -> bool:
        """Track the gradients of this module's parameters. Returns whether these are others than
        before."""
        before = list(map(id, self._modules.get(name, {}).values()))
        self._modules[name] = dict(module.named_parameters())
        return before != list(map(id, self._modules[name].values()))

    def begin(self) -> Copy:
        """A block begins: return a copy of the gradients that may be meant to grow."""
        self._at_begin = dict(self._accumulates)
        self._left = {}
        for name, parameters in self._modules.items():
            gradients = list(map(_GRADIENT, parameters.values()))
            if not {NoneType}.issuperset(map(type, gradients)):
                left = present(gradients)
                self._left[name] = list(map(id, left)), list(map(VERSION, left))
        return self.copy() if self._left else []

    def before_backward(self) -> bool:
        """The block's first backward pass: return whether gradients unexpectedly grow."""
        if not self._left:
            return False
        surprised = False
        for name, left in self._left.items():
            expected = self._accumulates.get(name, True)
            grows = self._unchanged(name, left)
            surprised = surprised or (grows and not expected)
            self._accumulates[name] = grows or self._accumulates.get(name, False)
        self._left = {}
        return surprised

    def copy(self) -> Copy:
        """Copy the gradients that may be meant to grow."""
        return [
            (p, p.grad.clone())
            for name, parameters in self._modules.items()
            if self._accumulates.get(name, True)
            for p in parameters.values()
            if p.grad is not None
        ]

    def put_back(self, copies: Copy) -> None:
        """Restore the gradients of the block's start, and forget what the block has found out:
        members that did not come as far must expect the same."""
        self._accumulates = dict(self._at_begin)
        for parameters in self._modules.values():
            for parameter in parameters.values():
                parameter.grad = None
        for parameter, gradient in copies:
            parameter.grad = gradient.clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that may be meant to grow, by module and parameter, and what is
        known of each module. Every member has the same: their shares of a checkpoint must fit."""
        return {
            "accumulates": dict(self._accumulates),
            "gradients": {
                module: {n: _stored(p.grad) for n, p in parameters.items() if p.grad is not None}
                for module, parameters in self._modules.items()
                if self._accumulates.get(module, True)
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accumulates = dict(state_dict["accumulates"])
        self._at_begin = dict(self._accumulates)
        for module, parameters in self._modules.items():
            gradients = state_dict["gradients"].get(module, {})
            for name, parameter in parameters.items():
                gradient = _from_stored(gradients.get(name))
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _unchanged(self, name: str, left: tuple[list[int], list[int]]) -> bool:
        """True if a gradient of the block's start is still there, unchanged, and is not zero. A
        script may zero those of one optimizer only."""
        now = present(map(_GRADIENT, self._modules[name].values()))
        if not now:
            return False
        was_there = frozenset(zip(*left, strict=True))
        there = [_dense(g) for g in now if (id(g), g._version) in was_there]
        ends = there[:1] + there[-1:]  # they nearly always tell
        return any(bool(g.any()) for g in chain(ends, there[1:-1]))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of an embedding's sparse gradient, another gradient as it is."""
    return gradient._values() if gradient.is_sparse else gradient


def _stored(gradient: torch.Tensor) -> Any:
    """Return a sparse gradient as the tensors that it is made of."""
    if not gradient.is_sparse:
        return gradient
    coalesced = gradient.detach().coalesce()
    return {
        "indices": coalesced.indices(),
        "values": coalesced.values(),
        "size": gradient.shape,
    }


def _from_stored(gradient: Any) -> torch.Tensor | None:
    if gradient is None or isinstance(gradient, torch.Tensor):
        return gradient
    indices, values = gradient["indices"], gradient["values"]
    return torch.sparse_coo_tensor(indices, values, gradient["size"], check_invariants=True)


# ---- generators


class DefaultGenerators(_Small):
    """torch's generators that a script uses without naming one (dropout). They are this worker's
    own, and members do not exchange them. A copy may be None: then they stay as they are."""

    name = "torch's default generators"

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def copy(self) -> Copy:
        host = torch.default_generator.get_state()
        return host, torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None

    def put_back(self, copy: Copy) -> None:
        if copy is None:
            return
        host, device = copy
        torch.default_generator.set_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device, self._cuda or "cuda")

    def differs(self, copy: Copy) -> bool:
        del copy
        return False


class TorchGenerator:
    """`session.generator(name)`: a `torch.Generator`, tracked by its state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.set_state(state_dict["state"].cpu())


class NumpyGenerator:
    """`session.generator(name, kind="numpy")`: on PCG64, whose state is numbers."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return dict(self.generator.bit_generator.state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = dict(state_dict)


class PythonGenerator:
    """`session.generator(name, kind="python")`: a `random.Random`."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self.generator.getstate()
        return {"version": version, "numbers": torch.tensor(numbers, device="cpu"), "gauss": gauss}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        numbers = tuple(state_dict["numbers"].tolist())
        self.generator.setstate((state_dict["version"], numbers, state_dict["gauss"]))


# ---- the cells of a script


# Schedulers that keep only numbers and lists of them; others are copied by their state_dict().
_PLAIN_SCHEDULERS = {
    kind
    for name in (
        *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR"),
        *("CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    )
    if (kind := getattr(torch.optim.lr_scheduler, name, None)) is not None
}


def cells_of(tracked: Mapping[str, Any], device: torch.device) -> tuple[list[Cell], list[Cell]]:
    """Return (large, small) cells. What two tracked objects share belongs to the first."""
    cells: list[Cell] = [DefaultGenerators(device)]
    seen: set[int] = set()
    modules = [item for item in tracked.values() if isinstance(item, nn.Module)]
    in_modules = {id(t) for m in modules for t in chain(m.parameters(), m.buffers())}
    for name, item in tracked.items():
        if isinstance(item, nn.Module):
            cells += _of_module(name, item, seen)
        elif isinstance(item, torch.optim.Optimizer):
            cells += _of_optimizer(name, item, tracked.values())
        elif isinstance(item, torch.amp.GradScaler):
            cells.append(Scaler(name, item))
        elif type(item) in _PLAIN_SCHEDULERS:
            cells.append(Scheduler(name, item))
        elif name == "session.state":
            cells.append(ScriptValues(name, item))
        elif not isinstance(item, Gradients):
            cells.append(Object(name, item, in_modules))
    kinds = (OptimizerState, OwnState)  # both large, in order: an OwnState makes new tensors
    large = [c for c in cells if isinstance(c, kinds) or is_large(c)]
    return large, [c for c in cells if c not in large]


def _of_optimizer(
    name: str, optimizer: torch.optim.Optimizer, tracked: Collection[Any]
) -> Iterator[Cell]:
    inside: list[torch.optim.Optimizer] = []
    if has_own_state(optimizer):
        yield OwnState(f"{name}'s own state", optimizer)
        inside += [o for o in optimizers_inside(optimizer) if not any(o is t for t in tracked)]
    yield from (ParameterGroups(name, optimizer), OptimizerState(name, optimizer))
    for inner in inside:
        at = f"the {type(inner).__name__} inside of {name}"
        yield from (ParameterGroups(at, inner), OptimizerState(at, inner))


def _of_module(name: str, module: nn.Module, seen: set[int]) -> Iterator[Cell]:
    yield Modes(f"{name}'s modes", module)
    slots = _slots(module, lambda m: m._parameters, seen)
    parameters = [(owner, key) for owner, key in slots if owner[key] is not None]
    if parameters:
        yield ModuleTensors(name, parameters)
        yield RequiresGrad(name, parameters)
    buffers = list(_slots(module, lambda m: m._buffers, seen))
    if buffers:
        attributes = [
            vars(inner) for inner in module.modules() if inner._non_persistent_buffers_set
        ]
        yield ModuleTensors(f"{name}'s buffers", buffers, are_buffers=True, attributes=attributes)
    for path, inner in module.named_modules(prefix=name):
        if type(inner).get_extra_state is not nn.Module.get_extra_state and id(inner) not in seen:
            seen.add(id(inner))
            yield Object(f"{path}'s extra state", ExtraState(inner), seen)
    for path, content in _own_contents(name, module):
        yield Object(f"{path}'s own content", content, seen)


def _own_contents(name: str, module: nn.Module) -> Iterator[tuple[str, OwnContent]]:
    """Yield the content of the outermost modules that have their own, with their paths. A metric
    may have collected nothing when training begins; a module with others inside is asked at each
    block only if it has content of its own then."""
    kind, plain = type(module), nn.Module
    inner = list(module.named_children())
    if (
        kind.state_dict is not plain.state_dict
        or kind._save_to_state_dict is not plain._save_to_state_dict
        or module._state_dict_hooks
    ):
        content = OwnContent(module)
        if not inner or content.state_dict():
            yield name, content
            return
    for child, each in inner:
        yield from _own_contents(f"{name}.{child}", each)


def _slots(
    module: nn.Module, owners: Callable[[nn.Module], dict[str, Any]], seen: set[int]
) -> Iterator[Slot]:
    for inner in module.modules():
        for name, tensor in owners(inner).items():
            if tensor is None or id(tensor) not in seen:
                if tensor is not None:
                    seen.add(id(tensor))
                yield owners(inner), name


# ---- content


def _in_turn(items: list[_Item], turn: Turn) -> list[_Item]:
    """Return the items that a look in this turn sees: each is among them now and then, also in
    every tenth turn, say."""
    if turn is None or len(items) <= _FEW:
        return items
    every = -(-len(items) // _LOOKED_AT)
    return items[int(turn * _GOLDEN % 1 * every) :: every]


def _kept(
    tensors: list[torch.Tensor],
    reuse: CopiedTensors | None,
    on_host: bool,
    writes: CopyOnWrite | None,
) -> CopiedTensors | HeldTensors:
    if writes is not None:
        return writes.hold(tensors)
    if reuse is not None:
        return reuse.fill(tensors, on_host=on_host)
    return CopiedTensors(tensors, on_host=on_host)


def _digest(tensors: list[torch.Tensor], more: list[Any]) -> Digest:
    layouts = [(tuple(t.shape), str(t.dtype), str(t.layout)) for t in tensors]
    return digest_of(chain.from_iterable(map(parts_of, tensors))), [layouts, more]


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if type(value) in UNCHANGING}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group without its parameters: rates, and whatever else an optimizer keeps there."""
    settings = dict(group)
    del settings["params"]
    for key, value in settings.items():
        kind = type(value)
        if kind in UNCHANGING or key == "param_names":
            continue
        if kind is not tuple or not UNCHANGING.issuperset(map(type, value)):
            settings[key] = copy_tree(value)
    return settings


def _held(live: Any, value: Any) -> Any:
    """Return the copied value, a tensor in the live one if it fits: others may refer to that."""
    if not (isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)):
        return copy_tree(value)
    if not has_layout_of(value, live):
        return value.clone()
    with torch.no_grad():
        return live.copy_(value)


def _containers(value: Any) -> Any:
    """Copy dictionaries and lists, not the tensors in them: L-BFGS keeps a history in lists."""
    return copy_tree(value, lambda tensor: tensor)


def _without_tensors(value: Any) -> Any:
    return copy_tree(value, lambda _: None)
