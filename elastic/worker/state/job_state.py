"""The replicated state of a worker: the job's progress, and everything that the script tracks."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import nn

from elastic.checkpoint import documents
from elastic.checkpoint.documents import Json
from elastic.core.data_order import DataPosition
from elastic.core.learning_rate import Ramp
from elastic.core.worker.participation import Progress
from elastic.errors import CheckpointDamaged, CheckpointMismatch, ConfigurationError
from elastic.worker.state.backlog import (
    MOST_POINTS,
    Backlog,
    CurvePoints,
    LedgerBacklog,
    LedgerRecord,
    curve_from_json,
    curve_to_json,
)
from elastic.worker.state.buffers import (
    BuiltBuffers,
    as_built,
    reshaped_from_json,
    reshaped_to_json,
)
from elastic.worker.state.cells import Gradients
from elastic.worker.state.digest import ReadBefore, combined, digest_by_name, digest_of
from elastic.worker.state.references import has_own_state, kept_in_place, optimizers_inside
from elastic.worker.state.tensor_specs import (
    TensorSpec,
    describe,
    first_differences,
    signature,
)
from elastic.worker.state.tree import (
    Filling,
    FlatState,
    copy_tree,
    fill,
    flatten,
    memory_of,
    relink,
    same_tensor,
    tensors_of,
    unflatten,
)

_VALUES = "session.state."
_DEEPEST_STATES = 3  # levels in the state that an optimizer's class defines
_MOST_NAMED = 5  # parameters, in a warning
_MOST_GROUPS = 20  # of an optimizer, whose learning rates are reported


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be tracked: models, optimizers, schedulers, scalers, averages..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Values(dict[str, Any]):
    """`session.state`: the script's dictionary, which is tracked like any other object.

    Lists, dictionaries, sets and tensors in it stay the same objects, since a script may keep a
    reference: `history = session.state.setdefault("history", [])`.
    """

    await_state: Callable[[], bool] = staticmethod(lambda: False)
    """Returns whether the script passes loops that are done. It gets the job's values
    afterwards."""

    def __missing__(self, key: str) -> Any:
        if not self.await_state():
            raise KeyError(key)
        raise KeyError(
            f"session.state has no {key!r} yet: this worker has joined, or the job continues from "
            "a checkpoint, and this worker is still skipping finished loops over session.steps(); "
            "the job's values arrive with its current loop and replace what the script does until "
            f"then. Write session.state.get({key!r}, ...), or put it inside of "
            "`if not session.catching_up:`"
        )

    def __getstate__(self) -> None:
        """`torch.save` and others pickle only the values."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the values, in the objects that are there as far as these can hold them."""
        filling = Filling()
        values = {key: fill(self.get(key), item, filling) for key, item in state_dict.items()}
        self.clear()
        self.update(values)


class JobSoFar(Protocol):
    """How far the job is. A member's Participation keeps this."""

    @property
    def here(self) -> Progress:
        """The progress at this place of the script."""
        ...

    @property
    def position(self) -> DataPosition:
        """How much of the present loader's data is consumed."""
        ...


class _JustBegun:
    here, position = Progress(), DataPosition()


class JobState:
    """The replicated state: the job's progress, its ledger, and tracked objects.

    The session's own objects are tracked under names with a dot, which a script cannot use.

    job: keeps the progress.
    """

    def __init__(self, job: JobSoFar | None = None) -> None:
        self.job = job or _JustBegun()
        self.ledger = LedgerBacklog()
        self.curve: CurvePoints = Backlog(most=MOST_POINTS)
        """What the script reported of each step, if the coordinator keeps it."""
        self.values = Values()
        self.results = Values()
        """Results of `session.run` calls between two loops, for workers that skip these."""
        self.gradients = Gradients()
        self.buffers = BuiltBuffers(self._grew)
        self._scripts: dict[str, Stateful] = {}
        self._rank_local: set[str] = set()
        self.means = Values()
        """Results of `step.mean` in the last committed step."""
        self._own: dict[str, Stateful] = {
            "session.state": self.values,
            "session.results": self.results,
            "session.means": self.means,
            "session.gradients": self.gradients,
        }
        self._modes_after_loop: dict[str, Json] = {}
        self._received_early: dict[str, Any] = {}
        """States of own objects that the script has not made yet, by name."""
        self.late: dict[str, Any] = {}
        """First states of own objects that came to be tracked since the block's start."""
        self.version = 0
        """Grows with each object that is tracked, and with each buffer that a script registers
        later, as in a first forward pass."""

    def track(self, objects: Mapping[str, Stateful], *, rank_local: bool = False) -> None:
        """Add the script's objects. rank_local: members may differ. Raises ConfigurationError."""
        for name, tracked in objects.items():
            if "." in name:
                raise ConfigurationError(
                    f"session.track: {name!r} has a dot, which is reserved for elastic's "
                    "own objects; choose another name"
                )
            if not isinstance(tracked, Stateful):
                raise ConfigurationError(
                    f"session.track({name}=...): a {type(tracked).__name__} has no state_dict() "
                    "and load_state_dict(); wrap it in an object that has them"
                )
            if self._scripts.get(name, tracked) is not tracked:
                raise ConfigurationError(
                    f"session.track({name}=...): another object is tracked under this name; "
                    "choose another one"
                )
            self._scripts[name] = tracked
            if isinstance(tracked, nn.Module):
                self.gradients.watch(name, tracked)
                self.buffers.watch(name, tracked)
            if rank_local:
                self._rank_local.add(name)
            self.version += 1

    def replace(self, name: str, tracked: Stateful) -> None:
        """Track another object by a known name, as for another phase of the script with an
        optimizer of its own. Members that skip earlier phases know the name from the beginning."""
        if self._scripts[name] is not tracked:
            self._scripts[name] = tracked
            self.version += 1

    def follow_rebuilt(self) -> None:
        """Follow parameters and layers that the script has replaced since it tracked their module.
        Call it before the first group forms: all members must build them alike."""
        for name, module in self.modules().items():
            other_parameters = self.gradients.watch(name, module)
            if self.buffers.watch_again(name) or other_parameters:
                self.version += 1

    def track_own(self, name: str, tracked: Stateful) -> None:
        """Track an object of the session's own, whose name has a dot. It takes over the state that
        was received for it, since a script may make a generator only inside its loop."""
        self._own[name] = tracked
        if name in self._received_early:
            tracked.load_state_dict(self._received_early.pop(name))
        self.late[name] = copy_tree(tracked.state_dict())
        self.version += 1

    def _grew(self, by: int) -> None:
        self.version += by

    def put_back_late(self) -> None:
        """Undo changes to objects that came to be tracked in a block that is given up."""
        for name, state in self.late.items():
            self._own[name].load_state_dict(copy_tree(state))

    @property
    def progress(self) -> Progress:
        return self.job.here

    @property
    def committed(self) -> int:
        return self.job.here.committed

    @property
    def position(self) -> DataPosition:
        """Position in the present loader's data."""
        return self.job.position

    @property
    def tracked(self) -> Mapping[str, Stateful]:
        """The script's tracked objects by name."""
        return self._scripts

    @property
    def undoable(self) -> Mapping[str, Stateful]:
        """What a block may change: all but what the session itself keeps with a commit."""
        kept = (self.means, self.results)
        return {n: item for n, item in self.everything.items() if not any(item is k for k in kept)}

    @property
    def everything(self) -> Mapping[str, Stateful]:
        """All tracked objects by name, including the session's own."""
        return {**self._scripts, **self._own}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [t for t in self._scripts.values() if isinstance(t, torch.optim.Optimizer)]

    def learning_rates(self) -> dict[str, Any]:
        """Return the tracked optimizers' rates, as numbers or tensors: by name, or by name/index if
        an optimizer has several groups. Other threads call this."""
        found: dict[str, Any] = {}
        for name, item in list(self._scripts.items()):
            if isinstance(item, torch.optim.Optimizer):
                groups = item.param_groups[:_MOST_GROUPS]
                for index, group in enumerate(groups):
                    key = f"{name}/{index}" if len(groups) > 1 else name
                    found[key] = group.get("lr")
        return found

    def modules(self) -> dict[str, nn.Module]:
        return {n: t for n, t in self._scripts.items() if isinstance(t, nn.Module)}

    # ---- comparing

    def structure(self) -> tuple[TensorSpec, ...]:
        """Return the tensors that all members must have alike: the parameters and buffers of
        tracked modules, as built.

        An optimizer's are not among them, because it makes them at its first step. Nor are other
        tensors in a module's state_dict(): a metric collects predictions there.
        """
        tensors, grown = self._module_tensors()
        built = {name: t for name, t in tensors.items() if name not in grown}
        return as_built(describe(built), self.buffers.reshaped())

    def arrangement(self) -> tuple[TensorSpec, ...]:
        """Return the parameters of tracked modules in their order, by number: DDP averages them,
        and optimizers keep their state, in that order."""
        return tuple(
            TensorSpec(
                name=f"parameter {number} of {name}", dtype=key, shape=tuple(parameter.shape)
            )
            for name, module in self.modules().items()
            for number, (key, parameter) in enumerate(module.named_parameters(), 1)
        )

    def _module_tensors(self) -> tuple[Mapping[str, torch.Tensor], set[str]]:
        """Return the tensors in the state_dict() of tracked modules, and the names of those that
        are neither parameters nor buffers."""
        modules = self.modules()
        tensors = flatten({name: m.state_dict() for name, m in modules.items()}).tensors
        names, places = set[str](), set[tuple[object, ...]]()
        for name, module in modules.items():
            for key, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ):
                names.add(f"{name}.{key}")
                places.add(memory_of(tensor))
        return tensors, {
            n
            for n, t in tensors.items()
            if n not in names and (not t.numel() or memory_of(t) not in places)
        }

    def signature(self) -> int:
        """63 bits, equal for what all members must have alike."""
        return signature(self.common()) & (2**63 - 1)

    def common(self) -> tuple[TensorSpec, ...]:
        """Return what all members must have alike: structure, arrangement, and the names of tracked
        objects with the kinds of optimizers, whose states are of no use to another kind."""
        kinds = (
            TensorSpec(name=name, dtype=_kind_of(item), shape=())
            for name, item in self._scripts.items()
        )
        return *self.structure(), *self.arrangement(), *kinds

    def digest(self) -> int:
        """Return 63 bits that are equal for equal replicated state, without rank-local state."""
        tensors, rest = self.replicated()
        return combined(digest_by_name(tensors), rest)

    def replicated(self) -> tuple[dict[str, torch.Tensor], int]:
        """Return the tensors that are equal on all members, by name, and a digest of the rest."""
        flat = self._replicated()
        local = self.local_names(flat)
        tensors = {name: t for name, t in flat.tensors.items() if name not in local}
        flags = {n: flag for n, flag in self._flags().items() if n not in self._rank_local}
        document = {"state": flat.skeleton, "flags": flags, "job": self._position()}
        return tensors, digest_of([], documents.encode(document))

    def digests(self) -> dict[str, int]:
        """Return a digest of each tensor and of the rest, to find what differs between members."""
        flat = self._replicated()
        local = self.local_names(flat)
        found = {n: digest_of([t]) for n, t in flat.tensors.items() if n not in local}
        skeletons = cast("Any", flat.skeleton)["dict"]
        for name, skeleton in skeletons:
            found[f"{name} (numbers)"] = digest_of([], documents.encode({"state": skeleton}))
        flags = {n: flag for n, flag in self._flags().items() if n not in self._rank_local}
        job = {"flags": flags, "job": self._position()}
        return {**found, "the job's counters": digest_of([], documents.encode(job))}

    def compared_digest(self, before: ReadBefore | None = None) -> int:
        """Return a digest of what members compare while they train: the parameters of the tracked
        modules, and `session.state`. before: what need not be read again."""
        values = documents.encode({"values": sorted(self._value_digests().items())})
        return combined(digest_by_name(self._parameters(), before), digest_of([], values))

    def compared_digests(self) -> dict[str, int]:
        """Return a digest of each of these parameters and values."""
        parameters = {name: digest_of([p]) for name, p in self._parameters().items()}
        return parameters | self._value_digests()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{path}": parameter
            for name, module in self._replicated_modules().items()
            for path, parameter in module.named_parameters()
        }

    def _value_digests(self) -> dict[str, int]:
        """Return a digest of each value. Buffers in a state_dict() that the script keeps may differ
        between members, as those of the module do."""
        if not self.values:
            return {}
        modules = self.modules().values()
        buffers = {name: b.shape for m in modules for name, b in m.named_buffers()}
        found = {}
        for key, value in self.values.items():
            flat = flatten({"": value})
            document = documents.encode({"": flat.skeleton})
            tensors = [
                tensor
                for name, tensor in sorted(flat.tensors.items())
                if not any(_is_copy(name, tensor, *buffer) for buffer in buffers.items())
            ]
            found[f"session.state[{key!r}]"] = digest_of(tensors, document)
        return found

    def saved_shapes(self) -> dict[str, int]:
        """Return types and shapes, as numbers, of the tensors that all members save a part of. They
        must be the same everywhere, or the parts do not fit."""
        flat = self.capture()
        own = self.declared_local(flat)
        specs = describe({n: t for n, t in flat.tensors.items() if n not in own})
        return {spec.name: signature([spec]) & (2**63 - 1) for spec in specs}

    def local_names(self, flat: FlatState) -> frozenset[str]:
        """Return the names in `flat` of rank-local tensors: buffers, such as the statistics of
        BatchNorm between two broadcasts, and what the script has declared rank-local.

        Buffers are found by their memory: a tensor that is tracked twice has one name in `flat`.
        """
        buffers = {memory_of(b) for module in self.modules().values() for b in module.buffers()}
        return self.declared_local(flat) | {
            name
            for name, tensor in flat.tensors.items()
            if tensor.numel() and memory_of(tensor) in buffers
        }

    def declared_local(self, flat: FlatState) -> frozenset[str]:
        """Return the names of tensors that may differ between members: what the script has declared
        rank-local, and what its calls of `session.run` have returned."""
        owners = (
            f"{at}{n}." for n in self._rank_local for at in ("", "session.gradients.gradients.")
        )
        prefixes = ("session.results.", *owners)
        return frozenset(name for name in flat.tensors if name.startswith(prefixes))

    # ---- capturing and restoring

    def capture(self) -> FlatState:
        """Return the tracked objects' state; its tensors share memory with the live ones."""
        return self._flatten(self._states())

    def receivable(self) -> dict[str, torch.Tensor]:
        """Return tensors that may be overwritten before restoring: those of modules and optimizers.
        Another object's load_state_dict() may clear its own tensor if it is given that."""
        return self._of_modules_and_optimizers(self.capture())

    def comparable(self) -> dict[str, torch.Tensor]:
        """Return parameters by their names in `capture`, if restoring them from themselves leaves
        them as they are: they are loaded before any code of the script's can write to them, and
        nothing else has their memory."""
        first = itertools.takewhile(lambda item: _loads_plainly(item[1]), self._scripts.items())
        found = {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": parameter
            for name, module in first
            if isinstance(module, nn.Module)
            for path, inner in module.named_modules()
            for key, parameter in inner.named_parameters(recurse=False)
            if _has_plain_memory(parameter)
        }
        others = filter(_has_plain_memory, tensors_of(self.values.state_dict()))
        users = Counter(t.untyped_storage().data_ptr() for t in (*found.values(), *others))
        return {n: p for n, p in found.items() if users[p.untyped_storage().data_ptr()] == 1}

    def extra(self, progress: Progress | None = None) -> dict[str, Json]:
        """Return everything else, as JSON, with `progress` in place of the present one if given."""
        progress = progress or self.progress
        return {
            **self._position(progress),
            "committed": progress.committed,
            "committed_in": progress.committed_in,
            "loop": progress.loop,
            "requires_grad": self._flags(),
            "modes": self._modes_after_loop or self._modes(),
            "parameter_groups": self._parameter_groups(),
            "shared_values": self._shared_values(),
            "caches": cast("list[Json]", self.buffers.caches),
            "reshaped_buffers": reshaped_to_json(self.buffers.reshaped()),
            "removed_buffers": cast("list[Json]", self.buffers.removed()),
            "beyond_modules": cast("list[Json]", sorted(self._module_tensors()[1])),
            "ledger": [record._asdict() for record in self.ledger.since(0)],
            "curve": curve_to_json(self.curve),
        }

    def loop_begins(self) -> None:
        self._modes_after_loop = {}

    def loop_ended(self) -> None:
        """Note the modes of modules as the loop ends. Below it, the script may evaluate in eval(),
        which says nothing about its next steps."""
        self._modes_after_loop = self._modes()

    def restore(
        self, skeleton: Json, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Json]
    ) -> None:
        """Replace everything but the progress. Raises CheckpointMismatch or CheckpointDamaged."""
        states = cast("dict[str, Any]", unflatten(skeleton, tensors))
        self._require_same_objects(states)
        reshaped = reshaped_from_json(extra.get("reshaped_buffers", {}))
        grown = _names(extra.get("beyond_modules", []), "tensors")
        built = {name: tensor for name, tensor in tensors.items() if name not in grown}
        self._require_same_structure(as_built(describe(built), reshaped))
        removed = _names(extra.get("removed_buffers", []), "buffers")
        self.buffers.make_room(states, reshaped, removed)
        self.buffers.receive_caches(_names(extra.get("caches", []), "caches"))
        self._unshare_values()
        # The script's values first: another object may hold a tensor that is among them.
        in_order = sorted(self.everything.items(), key=lambda n: n[0] in self._scripts)
        with kept_in_place(self._scripts.values()):
            for name, tracked in in_order:
                if name not in states:
                    continue
                if isinstance(tracked, torch.optim.Optimizer):
                    self._regroup_parameters(name, tracked, extra)
                    if has_own_state(tracked):
                        tracked.load_state_dict(states[name])
                        _keep_types(tracked, states[name])
                    else:
                        _load_optimizer(tracked, states[name])
                    _lay_out(tracked)
                else:
                    tracked.load_state_dict(states[name])
        self._share_values(states, tensors, extra)
        self._received_early = {n: s for n, s in states.items() if "." in n and n not in self._own}
        self._restore_flags(extra)
        self._restore_modes(extra)
        try:
            records = cast("list[dict[str, Any]]", extra["ledger"])
            self.ledger = LedgerBacklog(LedgerRecord(**record) for record in records)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"the job's ledger cannot be read: {error!r}") from error
        self.curve.replace(curve_from_json(extra.get("curve", [])))

    # ---- inside

    def _replicated(self) -> FlatState:
        left_out = {*self._rank_local, "session.gradients", "session.means", "session.results"}
        return self._flatten({n: s for n, s in self._states().items() if n not in left_out})

    def _of_modules_and_optimizers(self, flat: FlatState) -> dict[str, torch.Tensor]:
        kinds = (nn.Module, torch.optim.Optimizer)
        prefixes = tuple(f"{n}." for n, item in self._scripts.items() if isinstance(item, kinds))
        return {name: tensor for name, tensor in flat.tensors.items() if name.startswith(prefixes)}

    def _shared_values(self) -> dict[str, Json]:
        """Return tensors in `session.state` that modules or optimizers train with: name to name
        there. They come from a state_dict() that was not copied, or that an optimizer loaded."""
        if not tensors_of(self.values.state_dict()):
            return {}
        flat = self.capture()
        live = self._of_modules_and_optimizers(flat).items()
        names = {memory_of(tensor): name for name, tensor in live if tensor.numel()}
        values = {n: memory_of(t) for n, t in flat.tensors.items() if n.startswith(_VALUES)}
        return {name: names[memory] for name, memory in values.items() if memory in names}

    def _unshare_values(self) -> None:
        """Copy values that share memory with modules or optimizers here. Those of the sender may
        not share: a script may begin with a model's state_dict() and later replace it by a copy."""
        if tensors_of(self.values.state_dict()):
            live = self._of_modules_and_optimizers(self.capture()).values()
            memory = {memory_of(tensor) for tensor in live if tensor.numel()}
            shared = [t for t in tensors_of(self.values.state_dict()) if memory_of(t) in memory]
            relink(self.values, self.values, {id(t): t.detach().clone() for t in shared})

    def _share_values(
        self,
        states: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        extra: Mapping[str, Json],
    ) -> None:
        """Make `session.state` share with modules and optimizers what it shares on the member whose
        state this is. Otherwise its values would not follow theirs."""
        shared = cast("Mapping[str, str]", extra.get("shared_values", {}))
        if not shared:
            return
        live = self.capture().tensors
        try:
            by_id = {id(tensors[n]): live[there] for n, there in shared.items() if there in live}
            relink(self.values, states["session.state"], by_id)
        except (AttributeError, LookupError, TypeError) as error:
            raise CheckpointDamaged(
                f"the list of what values share cannot be read: {error!r}"
            ) from error

    def _flatten(self, states: Mapping[str, Any]) -> FlatState:
        """Flatten states. What modules share, such as tied weights, they share on every member. Of
        other objects only the names of tensors are certainly the same everywhere."""
        return flatten(states, apart=frozenset(states.keys() - self.modules().keys()))

    def _states(self) -> dict[str, Any]:
        """Return states by name, in an order that does not depend on when generators are made."""
        scripts = {name: tracked.state_dict() for name, tracked in self._scripts.items()}
        own = {name: tracked.state_dict() for name, tracked in self._own.items()}
        return {**scripts, **dict(sorted({**own, **self._received_early}.items()))}

    def _replicated_modules(self) -> dict[str, nn.Module]:
        return {n: m for n, m in self.modules().items() if n not in self._rank_local}

    def _position(self, progress: Progress | None = None) -> dict[str, Json]:
        at = progress or self.progress
        return {
            "positions": [[p.epoch, p.cursor] for p in at.positions],
            "ramps": {name: dataclasses.asdict(ramp) for name, ramp in at.ramps.items()},
        }

    def _flags(self) -> dict[str, Json]:
        """Return which parameters of each module are trained, as a string of 0 and 1."""
        return {
            name: "".join("01"[p.requires_grad] for p in module.parameters())
            for name, module in self.modules().items()
        }

    def _restore_flags(self, extra: Mapping[str, Json]) -> None:
        flags = cast("Mapping[str, str]", extra.get("requires_grad", {}))
        for name, module in self.modules().items():
            for parameter, flag in zip(module.parameters(), flags.get(name, ""), strict=False):
                if parameter.requires_grad != (flag == "1"):
                    parameter.requires_grad_(flag == "1")

    def _modes(self) -> dict[str, Json]:
        """Return which modules inside each module are in training mode, as a string of 0 and 1."""
        return {
            name: "".join("01"[bool(m.training)] for m in module.modules())
            for name, module in self.modules().items()
        }

    def _restore_modes(self, extra: Mapping[str, Json]) -> None:
        """Set modes: the script may have called eval() at a step that did not run here."""
        modes = cast("Mapping[str, str]", extra.get("modes", {}))
        for name, module in self.modules().items():
            inside, wanted = list(module.modules()), modes.get(name, "")
            if len(inside) != len(wanted):  # built in another way, such as compiled
                continue
            for each, mode in zip(inside, wanted, strict=True):
                if each.training != (mode == "1"):
                    each.training = mode == "1"

    def _parameter_groups(self) -> dict[str, Json]:
        """Return each optimizer's groups of parameters, by name; None: not in a tracked module."""
        names = {id(p): name for name, p in reversed(self._named_parameters())}
        return {
            name: [[names.get(id(p)) for p in group["params"]] for group in item.param_groups]
            for name, item in self._scripts.items()
            if isinstance(item, torch.optim.Optimizer)
        }

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        modules = self.modules().items()
        return [(f"{n}.{path}", p) for n, m in modules for path, p in m.named_parameters()]

    def _regroup_parameters(
        self, name: str, optimizer: torch.optim.Optimizer, extra: Mapping[str, Json]
    ) -> None:
        """Form groups as the script does in the course of the job; here it has not come to that."""
        saved = _groups_of(name, extra)
        groups = optimizer.param_groups
        here = cast("Any", self._parameter_groups()[name])
        if not saved or saved == here:
            return
        parameters = dict(self._named_parameters())
        named = bool(groups) and "param_names" in groups[0]  # then torch wants names in all groups
        # Groups that are the same here stay as they are, even with parameters that are not tracked.
        same = [paths == mine for paths, mine in zip(saved, here, strict=False)]
        changed = [paths for i, paths in enumerate(saved) if i >= len(same) or not same[i]]
        if not all(path in parameters for paths in changed for path in paths):
            if len(saved) == len(groups):
                return
            raise CheckpointMismatch(
                f"{name} has {len(saved)} parameter groups in the saved state and "
                f"{len(groups)} here, and some of their parameters belong to "
                "no tracked module; pass these modules to session.track()"
            )
        del groups[len(saved) :]
        for group, paths, stays in zip(groups, saved, same, strict=False):
            if not stays:
                group["params"][:] = [parameters[path] for path in paths]
        for paths in saved[len(groups) :]:
            added = [(path, parameters[path]) for path in paths]
            optimizer.add_param_group({"params": added if named else [p for _, p in added]})
        trained = {path for paths in saved for path in paths}
        if out := [path for paths in here for path in paths if path and path not in trained]:
            names = ", ".join(out[:_MOST_NAMED] + ["..."] * (len(out) > _MOST_NAMED))
            warnings.warn(
                f"{name} no longer trains {names}, because the loaded state does not; if these are "
                "new in the script, add them to the optimizer after the first step, with "
                "add_param_group(), or use another checkpoint directory",
                stacklevel=2,
            )

    def _require_same_objects(self, states: Mapping[str, Any]) -> None:
        saved = {name for name in states if "." not in name}
        if saved != self._scripts.keys():
            raise CheckpointMismatch(
                f"the saved state contains {sorted(saved)}, but the script tracks "
                f"{sorted(self._scripts)}; track the same names, or use another checkpoint "
                "directory"
            )

    def _require_same_structure(self, saved: tuple[TensorSpec, ...]) -> None:
        prefixes = tuple(f"{name}." for name in self.modules())
        saved_modules = [s for s in saved if s.name.startswith(prefixes)]
        differences = first_differences(self.structure(), saved_modules)
        if differences:
            raise CheckpointMismatch(
                f"the saved state is of another model: {'; '.join(differences)} (here: the "
                "script's model, there: the saved one); build the model it was saved from, or use "
                "another checkpoint directory"
            )


def _kind_of(tracked: Stateful) -> str:
    return type(tracked).__name__ if isinstance(tracked, torch.optim.Optimizer) else "object"


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type != "meta"


def _loads_plainly(tracked: Stateful) -> bool:
    """Return whether only torch's own code loads the object's state."""
    if isinstance(tracked, nn.Module):
        return not any(map(_loads_in_its_own_way, tracked.modules()))
    return type(tracked).__module__.startswith("torch.")


def _loads_in_its_own_way(module: nn.Module) -> bool:
    kind, plain = type(module), nn.Module
    if kind.__module__.startswith("elastic."):  # DistributedModel passes everything on
        return False
    if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
        return True
    return not kind.__module__.startswith("torch.nn.") and (
        kind.load_state_dict is not plain.load_state_dict
        or kind._load_from_state_dict is not plain._load_from_state_dict
        or kind.set_extra_state is not plain.set_extra_state
    )


def _is_copy(name: str, tensor: torch.Tensor, of: str, shape: torch.Size) -> bool:
    return name.endswith(f".{of}") and tensor.shape == shape


def progress_of(extra: Mapping[str, Json]) -> Progress:
    """Read the progress that `JobState.extra` wrote. Raises CheckpointDamaged."""
    found = cast("Mapping[str, Any]", extra)
    try:
        positions = found.get("positions")
        if positions is None:  # written before scripts could have several loops
            positions = [[found["epoch"], found["cursor"]]]
        return Progress(
            committed=int(found["committed"]),
            committed_in=int(found["committed_in"]),
            loop=int(found.get("loop", 0)),
            positions=tuple(DataPosition(epoch=epoch, cursor=c) for epoch, c in positions),
            ramps={name: Ramp(**ramp) for name, ramp in found["ramps"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the job's counters cannot be read: {error!r}") from error


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the state, then undo what Optimizer.load_state_dict() changes. It casts each state to
    its parameter's type, even if the optimizer keeps another (NAdam's products, ASGD's rates, lists
    of others), makes every dictionary a plain one, and cannot read strings or arrays."""
    states: Mapping[Any, Any] = saved["state"]
    known = {index: _for_torch(state) for index, state in states.items()}
    optimizer.load_state_dict({**saved, "state": known})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    for parameter, index in zip(parameters, indices, strict=True):
        state = states.get(index)
        if not isinstance(state, dict):
            continue
        loaded = optimizer.state[parameter]
        before = dict(loaded)
        loaded.clear()  # so what was left out gets its place in the order
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                loaded[key] = copy_tree(value, operator.methodcaller("to", parameter.device))
            elif isinstance(now := before.get(key), torch.Tensor) and now.dtype != value.dtype:
                loaded[key] = value.to(now.device)
            elif key in before:
                loaded[key] = before[key]
        loaded.update({key: value for key, value in before.items() if key not in loaded})


def _keep_types(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Undo casts by an optimizer's own load_state_dict(), in it or in an optimizer inside of it."""
    contents = list(_states_in(saved))
    for each in (optimizer, *optimizers_inside(optimizer)):
        parameters = [p for group in each.param_groups for p in group["params"]]
        for index, content in contents:
            loaded: Any = each.state.get(parameters[index]) if index < len(parameters) else None
            for key in content.keys() & loaded.keys() if isinstance(loaded, dict) else ():
                value, now = content[key], loaded[key]
                if _is_cast(now, value):
                    loaded[key] = value.to(now.device)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's tensors the memory layout of their parameters, as it made them. States
    come row by row. A fused step goes through the memory of all of them side by side."""
    for each in (optimizer, *optimizers_inside(optimizer)):
        for parameter, state in each.state.items():
            if not (isinstance(state, dict) and isinstance(parameter, torch.Tensor)):
                continue
            strides = torch.empty_like(parameter, device="meta").stride()
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.layout is torch.strided
                    and value.shape == parameter.shape
                    and value.stride() != strides
                ):
                    room = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    state[key] = room.detach().copy_(value)


def _is_cast(now: Any, value: Any) -> bool:
    if not (isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    return now.dtype != value.dtype and same_tensor(now, value.to(now))


def _states_in(saved: Any, depth: int = 0) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield parameters' states by index, wherever a class puts what torch gives it."""
    if isinstance(saved, dict) and depth <= _DEEPEST_STATES:
        for key, value in saved.items():
            if type(key) is int and key >= 0 and isinstance(value, dict):
                yield key, value
            else:
                yield from _states_in(value, depth + 1)


def _for_torch(state: Any) -> Any:
    """Return the part of a parameter's state that Optimizer.load_state_dict() can read."""
    if not isinstance(state, dict):
        return state
    return {k: v for k, v in state.items() if not isinstance(v, (str, bytes, np.ndarray))}


def _groups_of(name: str, extra: Mapping[str, Json]) -> list[list[Any]]:
    """Return what each group trained when the state was saved; empty if that is not recorded."""
    groups = cast("Any", extra.get("parameter_groups", {}))
    saved = groups.get(name, []) if isinstance(groups, dict) else None
    if not isinstance(saved, list) or not all(map(_is_group, saved)):
        raise CheckpointDamaged(f"the parameter groups of {name} cannot be read: {saved!r}")
    return saved


def _is_group(paths: Any) -> bool:
    return isinstance(paths, list) and all(path is None or isinstance(path, str) for path in paths)


def _names(saved: Json, whose: str) -> list[str]:
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise CheckpointDamaged(f"the names of {whose} cannot be read: {saved!r}")
    return cast("list[str]", saved)
