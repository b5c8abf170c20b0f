"""What a worker replicates: how far the job is, and everything the script tracks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from elastic.checkpoint.documents import Json
from elastic.core.data_order import DataPosition
from elastic.core.learning_rate import Ramp
from elastic.errors import CheckpointDamaged, CheckpointMismatch, ConfigurationError
from elastic.worker.state.ledger import LedgerBacklog, LedgerRecord
from elastic.worker.state.tensor_specs import TensorSpec, describe, first_differences, signature
from elastic.worker.state.tree import FlatState, flatten, unflatten


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be tracked: models, optimizers, schedulers, scalers, averages..."""

    def state_dict(self) -> Any:
        """The object's state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Replace the object's state."""
        ...


class JobState:
    """The replicated state: counters, data position, learning-rate ramps, tracked objects."""

    def __init__(self) -> None:
        self.committed = 0
        self.committed_in = 0
        """The generation that committed the last step: tells apart equal counts after a fork."""
        self.position = DataPosition()
        self.ramps: dict[str, Ramp] = {}
        self.ledger = LedgerBacklog()
        self._tracked: dict[str, Stateful] = {}

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """Add objects by name. Raises ConfigurationError."""
        for name, tracked in objects.items():
            if not isinstance(tracked, Stateful):
                raise ConfigurationError(
                    f"session.track({name}=...): a {type(tracked).__name__} has no state_dict() "
                    "and load_state_dict(); wrap it in an object that has them"
                )
            if self._tracked.get(name, tracked) is not tracked:
                raise ConfigurationError(
                    f"session.track({name}=...): another object is tracked under this name; "
                    "choose another one"
                )
            self._tracked[name] = tracked

    @property
    def tracked(self) -> Mapping[str, Stateful]:
        """The tracked objects by name."""
        return self._tracked

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those among the tracked objects."""
        return [t for t in self._tracked.values() if isinstance(t, torch.optim.Optimizer)]

    def modules(self) -> dict[str, nn.Module]:
        """Those among the tracked objects, by name."""
        return {n: t for n, t in self._tracked.items() if isinstance(t, nn.Module)}

    # ---- comparing

    def structure(self) -> tuple[TensorSpec, ...]:
        """The tensors that every member must have alike: those of the tracked modules.

        An optimizer's are not among them: it makes them at its first step.
        """
        flat = flatten({name: m.state_dict() for name, m in self.modules().items()})
        return describe(flat.tensors)

    def signature(self) -> int:
        """63 bits that are equal for equal structures and names of tracked objects."""
        names = [TensorSpec(name=n, dtype="object", shape=()) for n in self._tracked]
        return signature([*self.structure(), *names]) & (2**63 - 1)

    # ---- taking out and putting in

    def capture(self) -> FlatState:
        """The tracked objects' state; tensors share memory with the live ones."""
        return flatten({name: tracked.state_dict() for name, tracked in self._tracked.items()})

    def local_names(self, flat: FlatState) -> frozenset[str]:
        """The names of what may differ between members: the buffers of tracked modules.

        Found by their memory: a tensor that is tracked twice has one name in `flat`.
        """
        buffers = {
            _place(buffer) for module in self.modules().values() for buffer in module.buffers()
        }
        return frozenset(n for n, t in flat.tensors.items() if t.numel() and _place(t) in buffers)

    def extra(self) -> dict[str, Json]:
        """Everything else, as JSON."""
        return {
            "committed": self.committed,
            "committed_in": self.committed_in,
            "epoch": self.position.epoch,
            "cursor": self.position.cursor,
            "ramps": {name: dataclasses.asdict(ramp) for name, ramp in self.ramps.items()},
            "ledger": [dataclasses.asdict(record) for record in self.ledger.since(0)],
        }

    def restore(
        self, skeleton: Json, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Json]
    ) -> None:
        """Replace everything. Raises CheckpointMismatch or CheckpointDamaged."""
        states = cast("dict[str, Any]", unflatten(skeleton, tensors))
        self._require_same_objects(states)
        self._require_same_structure(describe(tensors))
        for name, tracked in self._tracked.items():
            tracked.load_state_dict(states[name])
        self._restore_extra(cast("Mapping[str, Any]", extra))

    def _restore_extra(self, extra: Mapping[str, Any]) -> None:
        try:
            self.committed = int(extra["committed"])
            self.committed_in = int(extra["committed_in"])
            self.position = DataPosition(epoch=extra["epoch"], cursor=extra["cursor"])
            self.ramps = {name: Ramp(**ramp) for name, ramp in extra["ramps"].items()}
            self.ledger = LedgerBacklog(LedgerRecord(**record) for record in extra["ledger"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"the job's counters can not be read: {error!r}") from error

    def _require_same_objects(self, states: Mapping[str, Any]) -> None:
        if states.keys() != self._tracked.keys():
            raise CheckpointMismatch(
                f"the saved state is of {sorted(states)}, but the script tracks "
                f"{sorted(self._tracked)}; track the same names, or use another checkpoint "
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


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape
