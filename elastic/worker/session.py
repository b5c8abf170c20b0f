"""The user's API: a worker's session, from elastic.init() to the end of the script."""

from __future__ import annotations

import numbers
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, TypeVar, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from elastic.core.learning_rate import ScalingRule
from elastic.errors import ConfigurationError, NotInGroup, StepMisused
from elastic.runtime.training_lease import WorkerLease
from elastic.worker import agreed_calls, script_checks
from elastic.worker.agreed_calls import AgreedCall, Compute
from elastic.worker.control import AgentControl, LocalControl
from elastic.worker.data_loader import DataLoader
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group
from elastic.worker.link import Link
from elastic.worker.optimizers import ScaledOptimizer
from elastic.worker.process.late_variables import LateVariables, told
from elastic.worker.script_calls import ScriptCall
from elastic.worker.script_place import place_of_script
from elastic.worker.state.cells import NumpyGenerator, PythonGenerator, TorchGenerator
from elastic.worker.state.job_state import Stateful, Values
from elastic.worker.state.tree import copy_tree, flatten, tensors_of
from elastic.worker.state.weights import load_into
from elastic.worker.step import ONE_LOOP, Step
from elastic.worker.training import Training
from elastic.worker.unfit import require_fit

T = TypeVar("T")

_LARGEST_RESULT_BYTES = 2**20


class Session:
    """A worker's part in the job. `elastic.init()` creates it.

    The group forms when the first loop over `steps` begins. Before that, a script builds its model,
    gives it to `distribute`, and gives all that has state to `track`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._generators: dict[str, tuple[str, Any]] = {}
        self._open_loop: object | None = None
        """Stands for the loop that the script is in. A loop that was left by `break` counts too, as
        long as a variable holds its iterator."""
        self._calls_between = 0
        self._step: Step | None = None
        """The one that was last handed out."""
        self._calls_in_step: dict[str, tuple[str, list[int]]] = {}
        """By place: the call in words, and the numbers of those since a step was last handed out:
        -1, -2... above its block, 0, 1... below it."""
        self._results_between: dict[str, Any] = {}
        self._finished_loops: WeakKeyDictionary[DataLoader, int] = WeakKeyDictionary()
        self._last_results: dict[tuple[str, int], Any] = {}
        """By place and number."""
        self._asked_catching_up = False
        """The script has read `catching_up` since its last loop."""
        self._is_closed = False
        self._pass_between = ""
        """Where a forward pass outside of `run` has come since the last loop, if one has."""

    # ---- this worker's place

    @property
    def rank(self) -> int:
        """This worker's rank in the present group, from 0. It may change with the group.

        Raises NotInGroup before the first loop over `steps` has begun.
        """
        return self._group("rank").rank

    @property
    def world_size(self) -> int:
        """The number of workers in the present group. Raises NotInGroup as `rank` does."""
        return self._group("world_size").world_size

    @property
    def generation(self) -> int:
        """The number of the present group, which grows with every change of group. Raises
        NotInGroup as `rank` does."""
        return self._group("generation").generation.number

    @property
    def local_rank(self) -> int:
        """This worker's slot on its node, from 0. It is known before the group forms."""
        return self._training.control.slot

    @property
    def local_world_size(self) -> int:
        """The workers that this node was started with. It is known before the group forms."""
        return self._training.control.local_world_size

    @property
    def device(self) -> torch.device:
        """The device for this worker's model and batches. It is known before the group forms."""
        return self._training.control.backend.device

    @property
    def committed(self) -> int:
        """The number of steps that the job has committed so far."""
        return self._training.state.committed

    @property
    def state(self) -> Values:
        """A tracked dictionary: the same on every worker, saved in checkpoints, and put back when a
        step is lost. Use it for values that decide what the script does next, such as the best loss
        so far or the present phase.

        While `catching_up`, it does not have the job's values yet, and a missing key raises a
        KeyError that explains this.
        """
        return self._training.state.values

    @property
    def catching_up(self) -> bool:
        """Whether the job is past this place of the script: this worker has joined, or the job goes
        on from a checkpoint, and the script passes loops that are done. Do not write results then:
        the script does not have the job's state yet, and a model does not have the job's weights:
        a forward pass between two loops must be inside of `run`, or skipped by this value."""
        self._asked_catching_up = True
        return self._training.part.holds_back

    # ---- setting up

    def distribute(self, module: nn.Module, **options: Any) -> DistributedModel:
        """Move the module to the session's device and train it data-parallel.

        Returns the model to call instead of the module. It behaves as DistributedDataParallel does,
        through all changes of group; the names in its state_dict() are those of the module.

        options: those of DistributedDataParallel (bucket_cap_mb, find_unused_parameters,
        static_graph, gradient_as_bucket_view, broadcast_buffers...).

        Raises ConfigurationError for options that tie the model to one group (process_group,
        device_mesh, mixed_precision), for SyncBatchNorm on a CPU, and for parameters or buffers
        that workers cannot fill (lazy, expanded, or made in inference mode).
        """
        training = self._training
        if self.device.type == "cpu" and any(
            isinstance(m, nn.SyncBatchNorm) for m in module.modules()
        ):
            raise ConfigurationError(
                f"session.distribute({type(module).__name__}): SyncBatchNorm works on GPUs only; "
                "use BatchNorm on CPUs"
            )
        model = DistributedModel(module.to(self.device), options)
        model.on_failure = training.note_failure
        model.on_pass_outside = self._passes_outside
        model.apart = training.reductions.apart
        training.models.append(model)
        if training.group is not None:
            model.wrap(training.control.backend)
        return model

    def track(self, *unnamed: object, **objects: Stateful) -> None:
        """Make the state of these objects part of the job's state: joining workers receive it, it
        is put back when a step is lost, and checkpoints save and restore it.

        objects: anything with state_dict() and load_state_dict(), by a name without a dot. Track
        each object above the loop over `steps`, even if only a later loop uses it.

        Raises ConfigurationError if an object lacks these methods, or if it has no name, one with a
        dot or another object's; StepMisused (a ConfigurationError) for a new name inside of a loop.
        """
        _require_names(unnamed, "track")
        self._require_known_in_loop(objects)
        for each in objects.values():
            require_fit(each)
        self._training.state.track(objects)

    def track_local(self, *unnamed: object, **objects: Stateful) -> None:
        """Track objects whose state may differ between workers, such as a rank's own statistics.

        This does what `track` does, but workers do not compare these objects. A worker that joins
        begins with rank 0's state of them, which is also the one that checkpoints hold.
        """
        _require_names(unnamed, "track_local")
        self._require_known_in_loop(objects)
        self._training.state.track(objects, rank_local=True)

    def load(
        self, path: str | os.PathLike[str], *, strict: bool = True, **models: nn.Module
    ) -> list[str]:
        """Load weights into models, as for fine-tuning: `session.load("base.safetensors",
        model=model)`. Call it above the first loop over `steps`, on every worker. In a job that
        goes on, its state replaces what was loaded.

        path: a safetensors file, or a checkpoint directory (path or fsspec URL), whose newest
        intact checkpoint counts. models: modules by the name in the file, where their entries begin
        with it and a dot (`model.fc.weight`), as `elastic export` writes them; a file without such
        entries is that of a single model. Types are converted, and of tied weights one is enough.
        strict: whether all names and shapes must fit. If not, what does not fit keeps its values.

        Returns the names of the tensors that keep their values.

        Raises CheckpointMismatch (a ConfigurationError) that names what does not fit, with shapes;
        ConfigurationError if there is no such file, checkpoint or name, or for an object that is no
        module; CheckpointDamaged; StepMisused if a loop has begun.
        """
        if self._training.part.loop >= 0:
            raise StepMisused(
                "session.load() was called after session.steps() had begun; load weights above the "
                "first loop, where a worker that joins can do the same"
            )
        if not models:
            raise ConfigurationError("session.load(path): name what to load, as in model=model")
        for name, model in models.items():
            if not isinstance(model, nn.Module):
                raise ConfigurationError(
                    f"session.load({name}=...): a {type(model).__name__} is no module; only the "
                    "weights of models are loaded. To go on with a job, give its --checkpoint-dir"
                )
        return load_into(models, os.fspath(path), strict=strict)

    def scale_lr(self, optimizer: torch.optim.Optimizer, rule: ScalingRule) -> None:
        """Scale all learning rates of the optimizer with the global batch, by `rule`.

        rule: LinearScaling, SqrtScaling or NoScaling. The factor applies only inside of
        `optimizer.step()`: the script and its schedulers always see the unscaled rates.
        """
        training = self._training
        number = len(training.scaled)
        training.scaled.append(ScaledOptimizer(optimizer, lambda: self.lr_factor(number)))
        training.part.rules.append(rule)

    def lr_factor(self, number: int = 0) -> float:
        """The factor that applies now to the learning rates of a scaled optimizer.

        number: the position of the optimizer among the calls of `scale_lr`, from 0. The factor is
        1.0 before the first loop over `steps`, and for a number without an optimizer.
        """
        part = self._training.part
        ramp = part.ramps.get(str(number))
        return ramp.factor(part.progress.committed) if ramp is not None else 1.0

    @overload
    def generator(
        self, name: str, *, kind: Literal["torch"] = "torch", seed: int = 0
    ) -> torch.Generator: ...
    @overload
    def generator(
        self, name: str, *, kind: Literal["numpy"], seed: int = 0
    ) -> np.random.Generator: ...
    @overload
    def generator(self, name: str, *, kind: Literal["python"], seed: int = 0) -> random.Random: ...

    def generator(
        self, name: str, *, kind: Literal["torch", "numpy", "python"] = "torch", seed: int = 0
    ) -> Any:
        """Return a tracked random generator: it gives the same numbers on every worker, and its
        state is put back when a step is lost.

        The first call with a name creates the generator with `seed`; later calls return the same
        object. kind: "torch" for a torch.Generator on the CPU, "numpy" for a
        numpy.random.Generator, "python" for a random.Random.

        Raises ConfigurationError for another kind, or if `name` is that of a generator of another
        kind.
        """
        if name in self._generators:
            known, generator = self._generators[name]
            if known != kind:
                raise ConfigurationError(
                    f"session.generator({name!r}, kind={kind!r}): a {known} generator already "
                    "has this name; choose another one"
                )
            return generator
        if kind == "torch":
            generator = torch.Generator().manual_seed(seed)
            tracked: Any = TorchGenerator(generator)
        elif kind == "numpy":
            generator = np.random.default_rng(seed)
            tracked = NumpyGenerator(generator)
        elif kind == "python":
            generator = random.Random(seed)
            tracked = PythonGenerator(generator)
        else:
            raise ConfigurationError(
                f"session.generator({name!r}, kind={kind!r}): choose torch, numpy or python"
            )
        self._generators[name] = kind, generator
        self._training.state.track_own(f"session.generator.{name}", tracked)
        return generator

    def warm_up(self, function: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Call `function(*args, **named)` and undo what it changes in tracked objects.

        Use it for a first forward and backward pass, so that compilation is done before other
        workers wait for this one. Call it after `track` and before `steps`: models are not
        distributed yet, so no gradients are averaged.

        Raises StepMisused if the group has formed.
        """
        if self._training.group is not None:
            raise StepMisused("session.warm_up() was called after session.steps() had begun")
        self._training.warm_up(lambda: function(*args, **named))

    # ---- training

    def steps(
        self,
        data: DataLoader,
        *,
        epochs: int | EllipsisType | None = ...,
        max_steps: int | None = None,
    ) -> Iterator[Step]:
        """Iterate over the remaining steps of the first `epochs` epochs of `data`, or over
        `max_steps` steps, through all changes of group. Use each Step in a `with step:` block.

        epochs: epochs of the whole job, at least 0, not those of this call. A script may have
        several such loops: one for each epoch (`epochs=epoch + 1`), or one for each phase with its
        own data. None, or left out with `max_steps`: the data is repeated without end.
        max_steps: the job's committed steps of this loop after which it ends on every worker, at
        least 1. With both, the loop ends with what comes first.

        A loop that the job has completed yields no steps to a worker that joins, or when the job
        goes on from a checkpoint.

        The iteration raises ConfigurationError if `data` is no elastic.DataLoader or its dataset
        has changed its length, if neither `epochs` nor `max_steps` is given, if one is no whole
        number or too small, if `epochs` are already done, if no model was distributed or one is not
        tracked, and if the loop follows a `run` whose result cannot be sent to workers that join.
        It raises StepMisused if the script misuses a step, begins the loop after a block that does
        not count, or has called a distributed model since the last loop outside of `run` without a
        look at `catching_up`.
        """
        if not isinstance(data, DataLoader):
            kind = f"{type(data).__module__}.{type(data).__qualname__}"
            raise ConfigurationError(
                f"session.steps({kind}): its samples cannot be divided again when the group "
                "changes; write data = elastic.DataLoader(dataset, batch_size=...), which takes "
                "the options of torch's DataLoader"
            )
        if epochs is ...:
            if max_steps is None:
                raise ConfigurationError(
                    "session.steps(data): give epochs=..., max_steps=... for a number of steps, or "
                    "both; with epochs=None the loop goes on until the script leaves it"
                )
            epochs = None
        _require_whole("epochs", epochs, at_least=0)
        _require_whole("max_steps", max_steps, at_least=1)
        if epochs is not None and self._finished_loops.get(data, -1) >= epochs:
            raise ConfigurationError(
                f"session.steps(data, epochs={epochs}) was called again after its {epochs} epochs "
                "were done; epochs counts those of the whole job: give the total to train up to, "
                "as in `for epoch in range(4): for step in session.steps(data, epochs=epoch + 1)`"
            )
        data.require_same_length()
        training = self._training
        if self._is_closed:
            raise ConfigurationError(
                "session.steps() was called after session.close(); elastic.init() returns a fresh "
                "session, for which the model and its optimizer are built again"
            )
        if training.in_block:
            raise StepMisused(
                "a loop over session.steps() begins inside of the `with step:` of another one; "
                f"{ONE_LOOP}"
            )
        if self._open_loop is not None:
            self._keep_calls_of_open_loop()
        self._require_no_pass_between()
        self._keep_results()
        self._calls_between = 0
        training.begin_loop(data, epochs, max_steps)
        if not training.part.skips:
            self._open_loop = this = object()
            try:
                yield from self._handed_out()
                training.end_loop()
            finally:
                if self._open_loop is this:
                    self._open_loop = self._step = None
                    self._asked_catching_up = False
                    training.state.loop_ended()
        if epochs is not None and max_steps is None:
            self._finished_loops[data] = epochs

    def on_group_change(self, callback: Callable[[Session], object]) -> None:
        """Have `callback(session)` called on each worker when it is in a new group, before that
        group's next block: `session.rank`, `world_size` and `generation` are the new ones. The
        first group counts, too, and so does the one in which a worker joins.

        Call this above the loop over `steps`. The callback runs where code above `with step:`
        would, but calls neither `session.run` nor its like, nor collectives of its own: of groups
        that follow each other quickly, some workers are told of the last one only. A callback that
        does so raises StepMisused.
        """
        self._training.on_group_change.append(lambda: callback(self))

    def run(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return `function(*args, **named)`, which may call collectives outside of a step, as an
        evaluation does. If the group is lost meanwhile, the function runs again in the next group.

        Every worker must call this at the same place of the script, in or after the loop over
        `steps`, and not inside of `with step:`. After a block that does not count, it returns the
        last result of this place, if there is one, without a call; several calls there, as in a
        helper function, count by their order below the block. Write `if step.committed:` above such
        calls: a worker whose first block was that one has no result, makes the call alone and
        fails. A call between two loops must
        return numbers, tensors, strings, or lists and dictionaries of them, with at most 1 MiB of
        tensors: a worker that joins later gets this result instead of a call. If it returns
        anything else, the next loop raises ConfigurationError.

        Raises ConfigurationError before the first loop, StepMisused inside of a block or if workers
        make different calls, and whatever `function` raises.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        result: T = self._call(f"session.run({name})", lambda: function(*args, **named))
        return result

    def mean(self, value: torch.Tensor | float, weight: float = 1) -> Any:
        """Return the mean of the workers' values, exact and the same on every worker: a float, or a
        tensor of float64 on the CPU if `value` is a tensor of several elements.

        value: a number or tensor, of the same shape on every worker. weight: how much this worker's
        value counts, such as the number of samples that it is the mean of. If all weights are 0,
        the result is NaN.

        Call it as `run`, on every worker at the same place, outside of blocks. In a step,
        `step.mean` gives means over the global batch for less.

        Raises ConfigurationError for other values and weights, and StepMisused as `run` does or if
        shapes differ.
        """
        return self._agree("session.mean()", agreed_calls.mean_of(value, weight))

    def gather(self, value: T) -> list[T]:
        """Return the values of all workers, in the order of their ranks.

        value: numbers, strings, tensors, or lists and dictionaries of them, of any size. Tensors
        come back on the CPU. Call it as `run`, on every worker at the same place, outside of
        blocks.

        Raises ConfigurationError for a value that cannot be sent, and StepMisused as `run` does.
        """
        found: list[T] = self._agree("session.gather()", agreed_calls.gathered(value))
        return found

    def on_rank0(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        """Let rank 0 alone call `function(*args, **named)`, as to write a file, and return the
        result on every worker. The others wait. If rank 0 is lost before all know that the function
        has returned, the next group's rank 0 calls it, so it must be safe to repeat.

        It may take as long as it likes: nobody counts it as a hang, so it must end by itself. Only
        while a change of group is pending, rank 0 is replaced after 5 minutes, as in `run`.

        Call it as `run`, on every worker at the same place, outside of blocks. The function calls
        no collectives, and changes nothing that is tracked. It returns None, or what `gather` can
        send.

        Raises ConfigurationError for a result that cannot be sent, StepMisused as `run` does, and
        on rank 0 whatever the function raises.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        training = self._training
        compute = agreed_calls.by_rank0(
            lambda: function(*args, **named),
            name,
            training.standing,
            lambda: training.part.runs_done,
        )
        result: T = self._agree(f"session.on_rank0({name})", compute)
        return result

    def evaluate(
        self,
        function: Callable[[Any], Any],
        dataset: torch.utils.data.Dataset[Any],
        *,
        batch_size: int = 1,
        **options: Any,
    ) -> Any:
        """Evaluate a map-style dataset, whose batches the workers divide, and return exact means
        over it, the same on every worker. Each sample counts once, and none is padded.

        function: called with each batch on `session.device`, as collate_fn returns it. It returns
        the mean over the batch's samples: a number, a tensor of any shape, or a dictionary of such
        by name. A pair (mean, weight) in place of a mean says what it is over if not the samples,
        as `step.backward` does: a number of tokens, say. options: those of torch's DataLoader.

        Returns what the function does, with floats for numbers and tensors of one element, and
        tensors of float64 on the CPU for others. No gradients are computed, distributed models are
        in evaluation mode meanwhile, with rank 0's buffers, and the function calls no collectives.
        If a worker is lost, the others evaluate only the batches that it had.

        Call it as `run`, on every worker at the same place, outside of blocks.

        Raises ConfigurationError for a dataset or result that does not fit, StepMisused as `run`
        does, and whatever the function raises.
        """
        training = self._training
        name = getattr(function, "__qualname__", type(function).__qualname__)
        evaluation = agreed_calls.Evaluation(
            function,
            dataset,
            batch_size,
            options,
            models=training.models,
            device=self.device,
            committed=lambda: training.part.progress.committed,
        )
        return self._agree(f"session.evaluate({name})", evaluation)

    def close(self) -> None:
        """End this session, so that `elastic.init()` returns a fresh one, as for another run in a
        notebook. Build the model and its optimizer again, too.

        Raises ConfigurationError in a worker with an agent, whose script's end ends its part.
        """
        global _current
        if _link is not None:
            raise ConfigurationError(
                "session.close() is for a job of one worker without an agent, as in a notebook; "
                "leave it out here: the end of the script ends this worker's part in the job"
            )
        if not self._is_closed:
            self._is_closed = True
            self._training.close()
        if _current is self:
            _current = None

    # ---- inside

    def _agree(self, what: str, compute: Compute) -> Any:
        """Make a call of a public method whose result all members agree on."""
        return self._call(what, AgreedCall(self._training.require_group, compute), depth=4)

    def _call(self, what: str, function: Callable[[], Any], *, depth: int = 3) -> Any:
        """Make a call together with the other members. what: the script's, in words. depth: the
        number of frames from the place in the script to `_calling_place`."""
        training = self._training
        if training.part.loop < 0:
            raise ConfigurationError(
                f"{what} was called before the first loop over session.steps(), in which the "
                "group forms. To evaluate before the training, call it in that loop above `with "
                "step:`, below `if step.index == 0:`. For other calls let an empty loop form it: "
                "`for _ in session.steps(data, epochs=0): pass`. What needs no other workers needs "
                "no such call"
            )
        if training.in_block:
            raise StepMisused(f"{what} was called inside of `with step:`; call it below the block")
        if training.tells_group_change:
            raise StepMisused(
                f"{what} was called by a callback of session.on_group_change(), but not every "
                "worker is told of each group; let the callback only note the change, and call "
                "this at a fixed place of the loop"
            )
        where = _calling_place(depth)
        key = ""
        if self._open_loop is None:
            script_checks.require_left_well(training.part)
            key = f"{training.part.loop}/{self._calls_between}"
            self._calls_between += 1
        if key and training.part.holds_back:
            keys = key, self._key_of_place(where)
            return copy_tree(training.exchange.postponed_result(*keys))
        call = ScriptCall(what=f"calls {what}", where=where, function=function)
        if key:
            result = training.call(call)
            self._results_between[key] = _for_newcomers(what, result)
            return result
        made = self._calls_in_step.get(where, (what, []))[1]
        is_below = self._step is not None and self._step.was_entered
        number = sum(n >= 0 for n in made) if is_below else -1 - len(made)
        if training.part.last_block_discarded and (where, number) in self._last_results:
            result = _copied(self._last_results[where, number])
        else:
            result = training.call(call)
            self._last_results[where, number] = _copied(result)  # the script may change its own
        self._calls_in_step[where] = what, [*made, number]
        return result

    def _handed_out(self) -> Iterator[Step]:
        training = self._training
        loop = training.part.loop
        while (found := training.next_plan()) is not None:
            planner, plan = found
            self._step = step = Step(training, planner, plan)
            self._calls_in_step.clear()
            training.tell_group_change()
            yield step
            if training.part.loop != loop:
                raise StepMisused(
                    f"another loop over session.steps() has begun since step {step.index} of this "
                    f"one (nested or interleaved); {ONE_LOOP}"
                )
            if not step.was_entered:
                raise StepMisused(
                    "a step was not used: write `for step in session.steps(...):` and directly "
                    "below it `with step:`"
                )
            if not step.committed and not training.part.last_block_discarded:
                raise StepMisused(
                    f"step {step.index} was left by an exception that the script then caught: its "
                    "samples would be lost; catch it inside of `with step:`, or not at all"
                )

    def _require_known_in_loop(self, objects: Mapping[str, Stateful]) -> None:
        """Raise StepMisused if an object is tracked for the first time inside of a loop."""
        known = self._training.state.tracked
        new = [name for name in objects if name not in known]
        if new and self._open_loop is not None:
            raise StepMisused(
                f"session.track({new[0]}=...) was called inside of the loop over session.steps(): "
                "a worker that joins later receives the others' state before it reaches that line, "
                "and has no object to load it into; create and track the object above the loop, "
                "even if it is used only later. Below a loop that was left by `break`, close() its "
                "iterator first if a variable holds it"
            )

    def _group(self, what: str) -> Group:
        group = self._training.group
        if group is None:
            raise NotInGroup(
                f"session.{what} is not known yet: the group forms when session.steps() begins, "
                "so that a joining worker can build its model before the others wait for it; use "
                f"{what} inside the loop, or session.local_rank outside"
            )
        return group

    def _passes_outside(self) -> None:
        """A distributed model is called outside of blocks and of `run`. Raises StepMisused if it
        does not have the job's weights."""
        part = self._training.part
        if self._open_loop is not None or part.loop < 0:
            return
        if part.holds_back:
            raise StepMisused(
                f"{_between_loops(place_of_script(sys._getframe(1)))} This worker passes loops "
                "that are done, and its model is not trained yet"
            )
        if not self._asked_catching_up and not self._pass_between:
            self._pass_between = place_of_script(sys._getframe(1))

    def _require_no_pass_between(self) -> None:
        """Raise StepMisused if a worker that joins would compute something else with its model
        since the last loop than this one. After the last loop, none will come."""
        where, self._pass_between = self._pass_between, ""
        if where:
            raise StepMisused(
                f"{_between_loops(where)} A worker that joins, or that begins from a checkpoint, "
                "passes that place with a model that is not trained yet"
            )

    def _key_of_place(self, where: str) -> str:
        return f"{self._training.part.loop}/{where}"

    def _keep_calls_of_open_loop(self) -> None:
        """Keep the results of `run` since the last step of a loop that counts as open, as another
        loop begins: it was left by `break`, and a variable holds its iterator. These calls may have
        come in that loop or after it. A worker that joins passes those after it, and finds their
        results by the place of the call. Raises StepMisused for a place with several calls."""
        for where, (what, made) in self._calls_in_step.items():
            if len(made) > 1:
                raise StepMisused(
                    f"{what} at {where} was called {len(made)} times after the last step "
                    "of a loop over session.steps() that was left by `break` while a variable "
                    "holds its iterator: it is unknown which of them came after the loop; write "
                    "`for step in session.steps(...):`, or close() the iterator below the loop"
                )
            key = self._key_of_place(where)
            result = self._last_results[where, made[0]]
            self._results_between[key] = _for_newcomers(what, result)
        self._calls_in_step.clear()

    def _keep_results(self) -> None:
        """A loop begins: keep the results of the calls before it for workers that join, which skip
        these calls. Raises ConfigurationError for a result that cannot be sent to them."""
        for key, result in self._results_between.items():
            if isinstance(result, ConfigurationError):
                raise result
            self._training.state.results[key] = result
        self._results_between.clear()


def _require_whole(name: str, value: object, *, at_least: int) -> None:
    """Raise ConfigurationError for a limit of a loop that is no whole number, or too small."""
    if value is None:
        return
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ConfigurationError(
            f"session.steps: {name}={value!r} is no whole number; epochs=... is the number of "
            "epochs to train, and max_steps=... that of steps"
        )
    if value < at_least:
        raise ConfigurationError(f"session.steps: {name}={value} must be at least {at_least}")


def _require_names(unnamed: tuple[object, ...], method: str) -> None:
    if unnamed:
        kinds = ", ".join(type(each).__name__ for each in unnamed)
        raise ConfigurationError(
            f"session.{method}() was given objects without names ({kinds}); name each, as in "
            f"session.{method}(model=model, optimizer=optimizer): workers and checkpoints know "
            "them by these names"
        )


def _between_loops(where: str) -> str:
    return (
        f"{where} calls a distributed model between two loops over session.steps(), outside of "
        "session.run(): call the function that does so with session.run(evaluate, model), which "
        "returns the earlier result while loops are skipped, or put it inside of "
        "`if not session.catching_up:`."
    )


def _copied(result: Any) -> Any:
    """A copy of a call's result, or the result itself if it is large or cannot be copied."""
    try:
        small = sum(t.numel() * t.element_size() for t in tensors_of(result))
        return copy_tree(result) if small <= _LARGEST_RESULT_BYTES else result
    except Exception:  # noqa: BLE001 - the script's own types may raise anything
        return result


def _for_newcomers(what: str, result: Any) -> Any:
    """A copy of the result of a call between two loops. If it cannot be sent to workers that join,
    the error that the next loop raises: after the last loop no worker needs the result."""
    try:
        flat = flatten({"result": result})
    except ConfigurationError as error:
        return ConfigurationError(
            f"{what} between two loops returned a value that cannot be sent to a "
            f"worker that joins later: {error}"
        )
    size_bytes = sum(t.numel() * t.element_size() for t in flat.tensors.values())
    if size_bytes > _LARGEST_RESULT_BYTES:
        return ConfigurationError(
            f"{what} between two loops returned {size_bytes} bytes, which would be "
            f"sent to every worker that joins later; return at most {_LARGEST_RESULT_BYTES}, and "
            "keep the rest inside of the function"
        )
    return copy_tree(result)


def _calling_place(depth: int) -> str:
    """The file name and line of the script's call of a method, `depth` frames above this one."""
    frame = sys._getframe(depth)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_current: Session | None = None
_link: tuple[Link, WorkerLease, LateVariables] | None = None
_refusal = ""


def refuse(why: str) -> None:
    """Make elastic.init() raise ConfigurationError with this text. Call it before the script."""
    global _refusal
    _refusal = why


def use_link(link: Link, lease: WorkerLease, variables: LateVariables) -> None:
    """Set the link to the agent, the worker's lease to train, and the environment with which the
    script begins, for elastic.init(). Call it before the script."""
    global _link
    _link = link, lease, variables


def current_training() -> Training | None:
    """The Training of this process. None before elastic.init()."""
    return _current._training if _current is not None else None


def init() -> Session:
    """Take part in the job and return this worker's Session. A spare waits here until it gets a
    slot.

    Without an agent (`python train.py`) the script is a job of one worker. Another call returns the
    same session. Raises ConfigurationError if another launcher has started several workers, since
    each would train a model of its own, or if the job runs the script as one for torchrun.
    """
    global _current
    if _refusal:
        raise ConfigurationError(_refusal)
    if _current is None:
        if _link is None:
            _require_one_worker()
            _current = Session(Training(LocalControl()))
        else:
            link, lease, variables = _link
            ignored = variables.obey()
            _current = Session(Training(AgentControl(link, lease)))
            if ignored and _current.local_rank == 0:
                link.notice("variables_ignored", {"message": told(ignored)})
    return _current


def _require_one_worker() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.strip() not in ("", "1"):
        raise ConfigurationError(
            f"elastic.init() was called in one of WORLD_SIZE={world_size} processes that another "
            "launcher started: each would train its own model; start the script with `elastic run "
            f"--nproc-per-node {world_size} train.py`, or unset WORLD_SIZE"
        )
