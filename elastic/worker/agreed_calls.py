"""Calls outside of steps whose result is the same on every member: means, gathered values, work of
rank 0, evaluations.

If the group is lost in such a call, members may be left of which some have the result and others do
not. The next group makes the call again, and takes the result of a member that has it: computed
again, by fewer members, it would be another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import data as torch_data

from elastic.errors import ConfigurationError, StepMisused
from elastic.worker.data_loader import length_of, to_device
from elastic.worker.group import membership
from elastic.worker.group.membership import Standing
from elastic.worker.group.models import Models
from elastic.worker.group.process_group import Group
from elastic.worker.group.transfer import gather_bytes, pack, unpack
from elastic.worker.script_calls import ScriptCall

Number: TypeAlias = "torch.Tensor | float"
Compute: TypeAlias = Callable[[Group, Callable[[bytes], None]], bytes]


class AgreedCall:
    """A call whose result all members agree on: the first that has one gives it to the others. If
    none has, all call `compute`, with what keeps a result that is there before all have it."""

    def __init__(self, group: Callable[[], Group], compute: Compute) -> None:
        self._group = group
        self._compute = compute
        self._held = b""
        """The result, from when this member has it."""

    def __call__(self) -> Any:
        group = self._group()
        held = next(filter(None, gather_bytes(group, self._held)), b"")
        self._held = held or self._compute(group, self._keep)
        return unpack(self._held)

    def _keep(self, result: bytes) -> None:
        self._held = result


def mean_of(value: object, weight: object) -> Compute:
    """Compute the mean over the members, of numbers or of tensors of one shape. Raises
    ConfigurationError for another value or weight."""
    if not isinstance(value, (torch.Tensor, int, float)):
        raise ConfigurationError(
            f"session.mean({value!r:.60}): give a number or a tensor; call it once for each value"
        )
    total = Weighted()
    total.add(value, _checked_weight(weight, "session.mean"))

    def compute(group: Group, _: object) -> bytes:
        found = [unpack(each) for each in gather_bytes(group, pack([total.sum, total.weight]))]
        shapes = [tuple(each.shape) for each, _ in found]
        if len({*shapes}) > 1:
            odd = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
            raise StepMisused(
                f"session.mean() was given a value of shape {shapes[odd]} on rank {odd} and "
                f"{shapes[0]} on rank 0; give values of one shape, or use session.gather()"
            )
        return pack(_combined(found))

    return compute


def gathered(value: object) -> Compute:
    """Collect the members' values, in the order of ranks. Raises ConfigurationError for a value
    that cannot be sent."""
    mine = _packed(value, "session.gather() was given")

    def compute(group: Group, _: object) -> bytes:
        return pack([unpack(each) for each in gather_bytes(group, mine)])

    return compute


def by_rank0(
    function: Callable[[], Any],
    name: str,
    standing: Callable[[], Standing],
    number: Callable[[], int],
) -> Compute:
    """Call `function` on rank 0 alone, whose result all get. The others wait at the group's store,
    not in a collective: so nobody takes rank 0 for one that hangs."""

    def compute(group: Group, keep: Callable[[bytes], None]) -> bytes:
        result = b""
        if group.rank == 0:
            result = _packed(function(), f"session.on_rank0({name}): the function returned")
            keep(result)  # if another member is lost meanwhile, it is not called again
        done = ScriptCall(what=f"waits for session.on_rank0({name})", where="", function=_nothing)
        membership.meet(group, standing(), f"{number()}/rank 0", done)
        return gather_bytes(group, result)[0]

    return compute


class Evaluation:
    """An evaluation whose batches the members divide. What a member has computed is kept if the
    group is lost: the next one computes only what the lost members had.

    The batches do not depend on the group. Only the order in which their sums are added does.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        dataset: torch_data.Dataset[Any],
        batch_size: int,
        options: Mapping[str, Any],
        *,
        models: Models,
        device: torch.device,
        committed: Callable[[], int],
    ) -> None:
        """Raises ConfigurationError for a dataset, batch size or option that does not fit."""
        self._function, self._dataset = function, dataset
        self._batch_size, self._options = batch_size, dict(options)
        if not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                f"session.evaluate needs a dataset, not a {type(dataset).__name__}; it makes "
                "batches itself: session.evaluate(function, dataset, batch_size=...)"
            )
        self._length = length_of(dataset, "session.evaluate")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigurationError(
                f"session.evaluate: batch_size={batch_size!r} is no number of samples, at least 1"
            )
        self._models, self._device, self._committed = models, device, committed
        self._loader([])  # refuses bad options before any member waits for another
        self._done: list[int] = []
        self._totals: dict[str, Weighted] = {}
        self._of = -1

    def __call__(self, group: Group, _: object) -> bytes:
        if self._of != self._committed():  # the job has gone back to a checkpoint meanwhile
            self._of, self._done, self._totals = self._committed(), [], {}
        self._models.broadcast_buffers()
        done = {batch for each in gather_bytes(group, pack(self._done)) for batch in unpack(each)}
        count = math.ceil(self._length / self._batch_size)
        left = [batch for batch in range(count) if batch not in done]
        self._compute(left[group.rank :: group.world_size], group)
        mine = {name: [total.sum, total.weight] for name, total in self._totals.items()}
        found = [unpack(each) for each in gather_bytes(group, pack(mine))]
        names = dict.fromkeys(name for each in found for name in each)
        totals = {n: [each[n] for each in found if n in each] for n in names}
        for name, parts in totals.items():
            _require_one_shape(name, [part for part, _ in parts])
        means = {name: _combined(parts) for name, parts in totals.items()}
        return pack(means[_ONLY] if [*means] == [_ONLY] else means)

    def _compute(self, batches: Sequence[int], group: Group) -> None:
        with torch.no_grad(), self._models.apart_in_eval():
            for number, batch in zip(batches, self._loader(batches), strict=True):
                self._add(self._function(to_device(batch, self._device)), len(self._span(number)))
                self._done.append(number)
                group.check()

    def _add(self, result: Any, samples: int) -> None:
        """Take the result of a batch, whole or not at all."""
        named = result if isinstance(result, Mapping) else {_ONLY: result}
        pairs = {
            name: value if isinstance(value, tuple) and len(value) == 2 else (value, samples)
            for name, value in named.items()
        }
        for name, (value, weight) in pairs.items():
            if not isinstance(name, str) or not isinstance(value, (torch.Tensor, int, float)):
                raise ConfigurationError(
                    "session.evaluate: the function returned "
                    f"{type(value).__name__} for {name!r}; return a number or tensor, the mean "
                    "over the batch's samples, or a dictionary of such by name; for a mean over "
                    "something else, the pair (mean, weight)"
                )
            batch = Weighted()
            batch.add(value, _checked_weight(weight, "session.evaluate"))
            total = self._totals.setdefault(name, batch)
            if total is not batch:
                _require_one_shape(name, [total.sum, batch.sum])
                total.sum, total.weight = total.sum + batch.sum, total.weight + batch.weight

    def _span(self, batch: int) -> range:
        begin = batch * self._batch_size
        return range(begin, min(begin + self._batch_size, self._length))

    def _loader(self, batches: Sequence[int]) -> torch_data.DataLoader[Any]:
        """torch's loader of these batches. It draws its seed from a generator of its own."""
        options = {"generator": torch.Generator().manual_seed(0), **self._options}
        spans = [list(self._span(batch)) for batch in batches]
        try:
            return torch_data.DataLoader(self._dataset, batch_sampler=spans, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"session.evaluate: {error}") from error


_ONLY = ""
"""The name of a result that has none."""


class Weighted:
    """A sum of values, each times its weight, in float64 on the CPU."""

    def __init__(self) -> None:
        self.sum = torch.zeros((), dtype=torch.float64)
        self.weight = 0.0

    def add(self, value: Number, weight: float) -> None:
        number = torch.as_tensor(value).detach().to("cpu", torch.float64)
        if number.numel() == 1:
            number = number.reshape(())
        part = number * weight if weight else torch.zeros_like(number)  # it may be NaN then
        self.sum = self.sum + part
        self.weight += weight


def _require_one_shape(name: str, sums: Sequence[torch.Tensor]) -> None:
    """Raise ConfigurationError for sums that only broadcasting could add."""
    shapes = list(dict.fromkeys(tuple(each.shape) for each in sums))
    if len(shapes) > 1:
        raise ConfigurationError(
            f"session.evaluate: the function returned tensors of shapes {shapes[0]} and "
            f"{shapes[1]}{f' for {name!r}' if name else ''}; return the mean over the batch's "
            "samples, such as losses.mean(), whose shape is the same for every batch"
        )


def _combined(found: Sequence[Sequence[Any]]) -> Number:
    """The mean, of the members' sums and weights, which are added in the order of ranks."""
    total, weight = found[0]
    for other, more in found[1:]:
        total, weight = total + other, weight + more
    mean = total / weight if weight else torch.full_like(total, math.nan)
    return float(mean) if mean.numel() == 1 else mean


def _checked_weight(weight: object, what: str) -> float:
    try:
        number = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise ConfigurationError(
            f"{what}: the weight {weight!r:.60} must be a number that is finite and not negative"
        )
    return number


def _packed(value: object, what: str) -> bytes:
    try:
        return pack(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{what} a value that cannot be sent to other workers; use numbers, strings, tensors, "
            f"or lists and dictionaries of them: {error}"
        ) from error


def _nothing() -> None:
    """The call at which members wait for rank 0."""
