"""Loads the samples of the steps: torch's DataLoader, in an order that survives group changes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice, tee
from numbers import Integral
from typing import Any, NoReturn, TypeAlias, cast

import torch
import torch.distributed as dist
import xxhash
from torch.utils import data as torch_data

from elastic.core.data_order import (
    BatchPolicy,
    DataPosition,
    FixedGlobalBatch,
    MicroBatch,
    Permutation,
    PerWorkerBatch,
    SampleRange,
    advance,
    epoch_key,
    loss_weight,
    micro_batches,
    next_range,
    numbers_of_passes,
    steps_in_epoch,
)
from elastic.errors import ConfigurationError, StepMisused

_OURS = ("batch_sampler", "sampler")
_OPTIONS = (
    *("num_workers", "pin_memory", "collate_fn", "worker_init_fn", "timeout", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
"""Options of torch's loader. Without any of them, its batches of a TensorDataset are plain rows."""
_FIXED = frozenset(
    {
        *("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers"),
        *("seed", "shuffle", "accumulate", "global_batch", "equal_passes"),
    }
)
"""Attributes that cannot be set later: those that torch's loader refuses, and this one's own."""
_ROW_TYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
_AT_ONCE = 2048  # samples whose order is evaluated at once: one by one it takes 20 times as long


class DataLoader:
    """Loads a map-style dataset (one with len() and indices) for `session.steps`.

    batch_size: the maximum number of samples in a micro-batch, at least 1.
    seed: the order of an epoch depends only on the seed and the epoch's number.
    shuffle: whether an epoch has a random order instead of the dataset's own.
    accumulate: micro-batches per step and worker, at least 1. The global batch is
    batch_size * accumulate * world size, so it grows with the group.
    global_batch: fixes the samples per step, at least 1, instead of `accumulate`. Shares and
    accumulation then follow the world size, and the learning rate stays unscaled.
    drop_last: skip an epoch's remainder that does not fill a global batch. A group whose global
    batch is larger than the dataset takes a whole epoch in each step.
    equal_passes: give every rank the same number of micro-batches in each step, where some would
    have fewer, by stand-ins of weight zero (`step.counts` is False for them). Only a script that
    calls collectives of its own for each micro-batch needs it.
    options: those of torch's DataLoader (num_workers, pin_memory, collate_fn, prefetch_factor...),
    other than `sampler` and `batch_sampler`.

    Raises ConfigurationError for a dataset that is empty, iterable or without len(), for arguments
    that are out of range, that contradict each other or that torch refuses, and if `drop_last`
    would drop all samples of one worker. Assigning to an argument's attribute later raises it too.

    A script passes the loader to `session.steps` and uses at most its len() and `steps_per_epoch`.
    The other methods are for the session.
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        accumulate: int = 1,
        global_batch: int | None = None,
        drop_last: bool = False,
        equal_passes: bool = False,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.length = length_of(dataset)
        self.policy = _policy(batch_size, accumulate, global_batch)
        self.drop_last = drop_last
        self.equal_passes = equal_passes
        self._seed = seed
        self._shuffle = shuffle
        _require_options(dataset, options)
        _require_enough(self.length, self.policy, drop_last)
        self._options = options  # last: from here on, __setattr__ refuses the names in _FIXED

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and "_options" in vars(self):
            raise ConfigurationError(
                f"{name} of an elastic.DataLoader cannot be changed, because its order and "
                "position depend on it; create another elastic.DataLoader for a separate loop over "
                "session.steps()"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """The steps of a whole epoch in the present group, so another number after a change of its
        size, unless `global_batch` fixes it. TypeError without that before the group has formed."""
        if isinstance(self.policy, FixedGlobalBatch):
            return self.steps_per_epoch(1)
        if not dist.is_initialized():
            raise TypeError(
                "the number of steps in an epoch depends on the world size, so an "
                "elastic.DataLoader has no len() before the group forms in session.steps(); write "
                "data.steps_per_epoch(N) for N workers, fix the number with "
                "elastic.DataLoader(..., global_batch=...), or end the loop and its schedules "
                "after a number of steps, with session.steps(data, max_steps=...)"
            )
        return self.steps_per_epoch(dist.get_world_size())

    def steps_per_epoch(self, world_size: int) -> int:
        """The steps of a whole epoch with a group of `world_size` workers.

        Raises ConfigurationError unless that is a whole number, at least 1.
        """
        if not isinstance(world_size, Integral) or isinstance(world_size, bool) or world_size < 1:
            raise ConfigurationError(
                f"data.steps_per_epoch({world_size!r}): give the number of workers, at least 1"
            )
        return steps_in_epoch(
            length=self.length,
            global_batch=self.policy.global_batch(int(world_size)),
            drop_last=self.drop_last,
        )

    def __bool__(self) -> bool:
        return True  # without this, bool() would call len(), which may raise

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "an elastic.DataLoader cannot be iterated over: session.steps(data, epochs=...) "
            "divides its samples among all workers; for another pass over a dataset, such as an "
            "evaluation, use torch.utils.data.DataLoader"
        )

    @property
    def order(self) -> str:
        """What decides which samples each rank takes in each step: the same on every rank."""
        policy = ", ".join(f"{name}={value}" for name, value in asdict(self.policy).items())
        policy = policy.replace(", size=", ", global_batch=")
        return (
            f"{self.length} samples, {policy}, shuffle={self._shuffle}, "
            + f"seed={self._seed}, " * self._shuffle
            + f"drop_last={self.drop_last}, equal_passes={self.equal_passes}"
        )

    def require_same_length(self) -> None:
        """Raise ConfigurationError if the dataset's number of samples has changed."""
        length = length_of(self.dataset)
        if length != self.length:
            raise ConfigurationError(
                f"the dataset ({type(self.dataset).__name__}) had {self.length} samples when its "
                f"elastic.DataLoader was created, and has {length} now, so an epoch would not "
                "cover all of them; create another elastic.DataLoader after the dataset has "
                "changed, and use that one in a separate loop over session.steps()"
            )

    def position_to_index(self, epoch: int) -> Permutation | range:
        """The order of an epoch: maps a position in it to an index of the dataset."""
        if not self._shuffle:
            return range(self.length)
        return Permutation(self.length, key=epoch_key(self._seed, epoch))

    def next_range(self, position: DataPosition, world_size: int) -> SampleRange:
        """The samples of the step after `position`, for a group of `world_size` workers. Raises
        ConfigurationError if the position lies outside of the dataset."""
        if position.cursor > self.length:
            raise ConfigurationError(
                f"the saved position is sample {position.cursor} of an epoch, but the dataset has "
                f"{self.length}; use the dataset that the job began with, or another checkpoint "
                "directory"
            )
        return next_range(
            position,
            length=self.length,
            global_batch=self.policy.global_batch(world_size),
            drop_last=self.drop_last,
        )

    def ends_epoch(self, position: DataPosition, world_size: int) -> bool:
        """Whether no step of this epoch follows `position`."""
        return self.next_range(position, world_size).epoch > position.epoch

    def batch_ratio(self, world_size: int, reference_world: int) -> float:
        """Samples of a full step with `world_size` workers / those with `reference_world`."""
        return self._full_step(world_size) / self._full_step(reference_world)

    @property
    def divides(self) -> bool:
        """Whether a rank can have several micro-batches in a step, in this or a later group."""
        return self._full_step(1) > self.policy.batch_size

    def batches(
        self, sections: Iterator[_Section], *, position: DataPosition, rank: int
    ) -> Iterator[Any]:
        """The collated micro-batch of each span of positions in `sections`. `position` and `rank`
        seed what torch's loader draws. The loader's processes start here."""
        if self._is_in_memory():
            return _rows(self.dataset, sections)
        loader = self._torch_loader(_indices(sections), position=position, rank=rank)
        if torch.empty(0).device.type == "cpu":
            return iter(loader)
        with torch.device("cpu"):  # on the script's default device it would refuse our generator
            return iter(loader)

    @property
    def loads_by_epoch(self) -> bool:
        """Whether each epoch has another loader of torch's, as in a loop over torch's DataLoader:
        its processes know what the script has changed in the dataset before."""
        return not (self._is_in_memory() or self._options.get("persistent_workers"))

    @property
    def has_processes(self) -> bool:
        """Whether other processes than this one load the samples."""
        return bool(self._options.get("num_workers"))

    def _is_in_memory(self) -> bool:
        """Whether batches are plain rows of tensors, which need no loader of torch's: taking single
        samples and stacking them, as it does, would take most of a small step's time."""
        options = self._options.items()
        return _is_of_rows(self.dataset) and all(n in _OPTIONS and not v for n, v in options)

    def _torch_loader(
        self, batches: Iterator[list[int]], *, position: DataPosition, rank: int
    ) -> torch_data.DataLoader[Any]:
        """Create torch's loader, which seeds its processes from the place in the data.

        By default it draws that seed from torch's default generator, which would change the
        script's own random numbers with every change of group.
        """
        place = f"{self._seed}/{position.epoch}/{position.cursor}/{rank}"
        seed = xxhash.xxh3_64_intdigest(place.encode()) & (2**63 - 1)
        options: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(seed),
            **self._options,
        }
        return torch_data.DataLoader(self.dataset, batch_sampler=_Once(batches), **options)

    def _full_step(self, world_size: int) -> int:
        """The samples of a step that is not an epoch's remainder: at most the whole dataset."""
        return min(self.policy.global_batch(world_size), self.length)


_Section: TypeAlias = tuple[Permutation | range, list[range]]
"""An epoch's order, and the positions of some micro-batches in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """A step's samples, and this rank's micro-batches of them."""

    samples: SampleRange
    micro_batches: tuple[MicroBatch, ...]
    weights: tuple[float, ...]
    """The factors on the losses of the micro-batches: see `loss_weight`."""
    ends_epoch: bool
    """Whether this is the epoch's last step."""
    fewest: int
    """The fewest micro-batches that a rank of the group has in this step."""
    most: int
    """The most micro-batches that a rank of the group has in this step."""
    quiet: bool
    """Ranks may have different numbers of micro-batches, so only the last one communicates."""


class BatchPlanner:
    """Plans one rank's steps from a position on, and loads their micro-batches.

    After a change of group there is a new planner: what the old one prefetched was for the old
    ranks.
    """

    def __init__(
        self,
        loader: DataLoader,
        position: DataPosition,
        *,
        rank: int,
        world_size: int,
        epochs: int | None,
        steps: int | None = None,
        equal: bool = False,
        equal_at_first: bool = False,
    ) -> None:
        """epochs, steps: plan up to the end of so many epochs of the job, and at most so many steps
        from `position` on; None: no such limit. equal: every rank has the same number of
        micro-batches, because each communicates. equal_at_first: so it is in the first step."""
        self._loader = loader
        self._equal, self._equal_at_first = equal, equal_at_first
        self.divides = loader.divides
        self._rank, self._world_size = rank, world_size
        self._epochs = epochs
        self._plans, ahead = tee(islice(self._plans_from(position), steps))
        self._has_failed = False
        self._batches: Iterator[Any] = chain.from_iterable(self._loads(ahead, position))

    def next_plan(self) -> BatchPlan | None:
        """The plan of the next step. None after the last one."""
        return next(self._plans, None)

    def fetch(self) -> Any:
        """The collated samples of the next micro-batch, in the order of the plans. Raises
        StepMisused if one could not be loaded before: torch's loader goes on with the one after it.
        """
        if self._has_failed:
            raise StepMisused(
                "a batch was taken from step.batches() after one could not be loaded, so it would "
                "have the samples of another step; let that error end the script, or handle it "
                "where samples are loaded (`__getitem__` of the dataset, collate_fn)"
            )
        try:
            return next(self._batches)
        except Exception:
            self._has_failed = True
            raise

    def indices(self, epoch: int, positions: range) -> list[int]:
        """The dataset's indices of these positions in the epoch's order."""
        order = self._loader.position_to_index(epoch)
        return [order[p] for p in positions]

    def close(self) -> None:
        """End the loader's processes, without waiting for the batches that they are loading."""
        abandoned = [self._batches]
        self._batches = iter(())
        if self._loader.has_processes:
            close = abandoned.clear
            threading.Thread(target=close, name="elastic-close-loader", daemon=True).start()

    def _plans_from(self, position: DataPosition) -> Iterator[BatchPlan]:
        batch_size = self._loader.policy.batch_size
        equal = self._equal or self._equal_at_first
        length = fewest = most = 0
        samples = self._loader.next_range(position, self._world_size)
        while self._epochs is None or samples.epoch < self._epochs:
            position = advance(position, samples)
            following = self._loader.next_range(position, self._world_size)
            batches = micro_batches(
                samples,
                rank=self._rank,
                world_size=self._world_size,
                batch_size=batch_size,
                equal=equal,
            )
            if samples.stop - samples.start != length:  # of most steps it is the same
                length = len(samples)
                fewest, most = numbers_of_passes(
                    length, world_size=self._world_size, batch_size=batch_size
                )
            yield BatchPlan(
                samples=samples,
                micro_batches=batches,
                weights=tuple(
                    loss_weight(batch, samples, world_size=self._world_size) for batch in batches
                ),
                ends_epoch=following.epoch > samples.epoch,
                fewest=most if equal else fewest,
                most=most,
                quiet=most > 1 and not equal,
            )
            samples, equal = following, self._equal

    def _loads(self, plans: Iterator[BatchPlan], position: DataPosition) -> Iterator[Iterator[Any]]:
        """The micro-batches of each epoch, or of all. The processes of torch's loader start only
        when the first of them is taken: a planner may be made while the loss of a group is handled,
        and each error in a process that starts there would also show that loss."""
        loader, rank = self._loader, self._rank
        if not loader.loads_by_epoch:
            yield loader.batches(self._sections(plans), position=position, rank=rank)
            return
        for epoch, in_epoch in groupby(plans, key=lambda plan: plan.samples.epoch):
            if epoch != position.epoch:
                position = DataPosition(epoch=epoch)
            yield loader.batches(self._sections(in_epoch), position=position, rank=rank)

    def _sections(self, plans: Iterator[BatchPlan]) -> Iterator[_Section]:
        for epoch, in_epoch in groupby(plans, key=lambda plan: plan.samples.epoch):
            self._loader.require_same_length()
            order = self._loader.position_to_index(epoch)
            yield from ((order, spans) for spans in _spans(in_epoch))


def _indices(sections: Iterator[_Section]) -> Iterator[list[int]]:
    """The dataset's indices of each span."""
    for order, spans in sections:
        if isinstance(order, range):
            yield from (list(order[span.start : span.stop]) for span in spans)
        else:
            yield from order.take(spans)


def _spans(plans: Iterator[BatchPlan]) -> Iterator[list[range]]:
    """The positions of the plans' micro-batches, grouped into lists of about _AT_ONCE samples."""
    spans: list[range] = []
    size = 0
    for plan in plans:
        for batch in plan.micro_batches:
            spans.append(range(batch.start, batch.stop))
            size += len(batch)
        if size >= _AT_ONCE:
            yield spans
            spans, size = [], 0
    if spans:
        yield spans


class _Once:
    """A batch sampler for torch's DataLoader, made of an iterator."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def _is_of_rows(dataset: Any) -> bool:
    """Whether samples are plain rows of tensors, and no method of the script's makes them."""
    return type(dataset) is torch_data.TensorDataset and all(
        type(t) is torch.Tensor and t.dtype in _ROW_TYPES and t.is_contiguous()
        for t in dataset.tensors
    )


def _rows(dataset: Any, sections: Iterator[_Section]) -> Iterator[list[torch.Tensor]]:
    """The batches that torch's loader would give for a dataset of rows."""
    for order, spans in sections:
        if isinstance(order, range):
            indices = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        else:
            indices = torch.from_numpy(order.take_flat(spans))
        for rows in indices.split([len(span) for span in spans]):  # type: ignore[no-untyped-call]
            yield [tensor.index_select(0, rows.to(tensor.device)) for tensor in dataset.tensors]


def _mover(kind: type) -> Callable[..., Any] | None:
    """The `to` method of a class, if it moves objects to a device. Another `to` may convert units,
    be a field, or be a key of a dictionary that has attributes for its keys."""
    move = getattr(kind, "to", None)
    if not callable(move):
        return None
    try:
        parameters = list(inspect.signature(move).parameters.values())[1:]  # without self
    except (TypeError, ValueError):
        return None
    if not parameters:
        return None
    first = parameters[0]
    takes_any = first.kind is inspect.Parameter.VAR_POSITIONAL
    takes_one = first.kind is not inspect.Parameter.KEYWORD_ONLY and "device" in first.name
    return move if takes_any or takes_one else None


def to_device(value: Any, device: torch.device) -> Any:
    """Return a collated batch with its tensors moved to `device`. Copies from pinned memory do not
    block. Objects with a fitting `to`, such as packed sequences, graphs and tokenized texts, move
    themselves."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if (move := _mover(type(value))) is not None:
        moved = move(value, device)
        return value if moved is None else moved
    if isinstance(value, MutableMapping):
        items = {k: to_device(v, device) for k, v in value.items()}
        try:
            twin = copy.copy(value)  # value may be a defaultdict, or have attributes
        except KeyError:  # its attributes are its keys, and the one that copy() needs is missing
            return cast("Any", type(value))(items)
        twin.update(items)
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(v, device) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)  # without its __init__, which may need more or change the fields
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                inside = to_device(getattr(value, field.name), device)
                object.__setattr__(moved, field.name, inside)  # it may be frozen
        return moved
    return value


def length_of(dataset: torch_data.Dataset[Any], reader: str = "elastic.DataLoader") -> int:
    """The number of samples of a dataset that `reader` reads. Raises ConfigurationError if it has
    none, or no length."""
    needs = f"{reader} needs a dataset with a length and indices"
    name = type(dataset).__name__
    if isinstance(dataset, torch_data.IterableDataset):
        raise ConfigurationError(
            f"{needs}; {name} is an IterableDataset, whose samples cannot be divided again when "
            "the group changes: make it a Dataset with __len__ and __getitem__"
        )
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(f"{needs}; a {name} has no len()") from None
    if length == 0:
        raise ConfigurationError(
            f"the dataset ({type(dataset).__name__}) is empty; check the path or filter it is "
            "made from"
        )
    return length


def _policy(batch_size: int, accumulate: int, global_batch: int | None) -> BatchPolicy:
    if batch_size is None:
        raise ConfigurationError(
            "elastic.DataLoader: batch_size=None, for a dataset whose items are whole batches: "
            "those cannot be divided among workers. Let the dataset return single samples; or, if "
            "all items have as many samples, give batch_size=1, collate_fn=lambda items: items[0]"
        )
    for name, value in {"batch_size": batch_size, "accumulate": accumulate}.items():
        if not isinstance(value, Integral):
            raise ConfigurationError(f"elastic.DataLoader: {name}={value!r} is not an integer")
    try:
        if global_batch is None:
            return PerWorkerBatch(batch_size=batch_size, accumulate=accumulate)
        if accumulate != 1:
            raise ConfigurationError(
                f"elastic.DataLoader: accumulate={accumulate} and global_batch={global_batch} "
                "contradict each other; with a fixed global batch, accumulation follows the group"
            )
        return FixedGlobalBatch(batch_size=batch_size, size=global_batch)
    except ValueError as error:
        raise ConfigurationError(f"elastic.DataLoader: {error}") from None


def _require_options(dataset: torch_data.Dataset[Any], options: dict[str, Any]) -> None:
    """Raise ConfigurationError for options that a script cannot choose, and now already for those
    that torch would refuse only when the group has formed."""
    for name in _OURS:
        if name in options:
            raise ConfigurationError(
                f"elastic.DataLoader: {name} cannot be given, because elastic orders the "
                "samples so that each counts exactly once; use seed, shuffle, or a dataset in the "
                "order you want"
            )
    try:
        torch_data.DataLoader(dataset, batch_sampler=_Once(iter(())), **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"elastic.DataLoader: {error}") from error


def _require_enough(length: int, policy: BatchPolicy, drop_last: bool) -> None:
    """Raise ConfigurationError if drop_last drops all samples of a group of one worker: that is a
    mistake. A group that is too large for the data is not: it takes a whole epoch a step."""
    least = policy.global_batch(1)
    if not drop_last or length >= least:
        return
    if isinstance(policy, FixedGlobalBatch):
        size = f"global_batch={least}"
    else:
        size = f"the {least} of one worker's step (batch_size x accumulate)"
    raise ConfigurationError(
        f"the dataset has {length} samples, fewer than {size}, and drop_last=True drops them all; "
        "make the batch smaller or leave drop_last out"
    )
