"""The state that a simulated job trains, and how its scripts change it.

The tracked state is a value: `Content`. Each function here makes the changes of one place of a
script. Scripts apply them with groups and faults in between; the checker of the state applies them
to an undisturbed job.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from elastic.core.data_order import (
    BatchPolicy,
    DataPosition,
    FixedGlobalBatch,
    PerWorkerBatch,
    SampleRange,
    next_range,
)
from elastic.core.learning_rate import LinearScaling
from elastic.core.worker.participation import Progress


class Style(NamedTuple):
    """How the script is written."""

    loops: str = "one"
    """"one", "per epoch" with one loader, or two "phases" with loaders of their own."""
    scheduler: str = "bottom"
    """Where it steps: "top" or "bottom" of the block, "below" it or "guarded" by step.committed."""
    average: str = "bottom"
    """Where the average of the weights is updated: "bottom", "below" or "guarded"."""
    early: bool = False
    """Something tracked changes before the block's last collective."""
    logs: bool = False
    """The script has a collective of its own after the optimizer's step."""
    evaluates: bool = False
    """The script calls session.run() after each epoch and keeps the result in its state."""
    between: int = 0
    """Calls of session.run() between two loops."""
    turns: bool = False
    """Something tracked changes between two loops, after the calls there."""
    scaling: LinearScaling | None = None
    misses_block: float = 0.0
    """Probability that a block makes a change that its undo misses."""
    misses_gap: float = 0.0
    """The same for the code between two blocks."""
    uneven: str = ""
    """A call that members make unevenly: "skipped" by some, or "other" calls by some."""

    @property
    def reads_later(self) -> bool:
        """Members compare large state while the next step is computed. Drawn with another choice,
        so that the histories of all seeds stay what they were."""
        return self.logs


class Loader(NamedTuple):
    """The source of a loop's samples."""

    length: int
    batch_size: int
    fixed: int = 0
    """Samples of a global batch of fixed size; 0: it grows with the group."""

    @property
    def policy(self) -> BatchPolicy:
        if self.fixed:
            return FixedGlobalBatch(batch_size=self.batch_size, size=self.fixed)
        return PerWorkerBatch(batch_size=self.batch_size)

    def batch_ratio(self, world_size: int, reference_world: int) -> float:
        return self._full_step(world_size) / self._full_step(reference_world)

    def _full_step(self, world_size: int) -> int:
        return min(self.policy.global_batch(world_size), self.length)

    @lru_cache(maxsize=4096)  # noqa: B019 - loaders are small, and members ask for the same
    def samples_after(
        self, position: DataPosition, world_size: int, epochs: int
    ) -> SampleRange | None:
        """The samples of the next step, or None after the last one."""
        batch = self.policy.global_batch(world_size)
        samples = next_range(position, length=self.length, global_batch=batch)
        return samples if samples.epoch < epochs else None


class Loop(NamedTuple):
    """One loop over the steps."""

    loader: int
    epochs: int


class Job(NamedTuple):
    """The training job: what every script knows."""

    length: int
    batch_size: int
    epochs: int
    save_every: int
    saves: bool = True
    """Checkpoints are saved now and then and at the end, not only when the job stops."""
    style: Style = Style()
    in_place: bool = True
    """A received state overwrites the member's own one from its first byte on."""
    queues: bool = False
    """Collectives are queued on a device, as with NCCL."""

    def loaders(self) -> tuple[Loader, ...]:
        return _loaders(self.style.loops, self.length, self.batch_size)

    def loops(self) -> tuple[Loop, ...]:
        return _loops(self.style.loops, self.epochs)


@lru_cache(maxsize=256)
def _loaders(loops: str, length: int, batch_size: int) -> tuple[Loader, ...]:
    first = Loader(length, batch_size)
    if loops != "phases":
        return (first,)
    return (first, Loader(length // 2 + 1, batch_size, fixed=3 * batch_size))


@lru_cache(maxsize=256)
def _loops(loops: str, epochs: int) -> tuple[Loop, ...]:
    if loops == "per epoch":
        return tuple(Loop(0, epoch + 1) for epoch in range(epochs))
    if loops == "phases":
        return (Loop(0, max(1, epochs - 1)), Loop(1, 1))
    return (Loop(0, epochs),)


class Samples(NamedTuple):
    """The samples that a step of a group consumes, and their loader."""

    loader: int
    range: SampleRange


class Content(NamedTuple):
    """The tracked state: numbers that encode the changes that led to them."""

    weights: int = 0
    momentum: int = 0
    scheduler: int = 0
    average: int = 0
    values: int = 0
    """A hash of the evaluations' results that the script keeps."""
    results: tuple[tuple[int, int, int], ...] = ()
    """The results of session.run() between loops: (loop, call, result)."""
    lineage: int = 0
    """Equal for equal histories of committed steps. The session keeps it, like the ledger."""
    committed_in: int = 0
    """The generation that committed the last step, whichever group has restored it since."""


_WEIGHTS, _MOMENTUM, _SCHEDULER, _AVERAGE, _VALUES, _RESULTS = range(6)


def _with(content: Content, place: int, value: object) -> Content:
    """Like content._replace() in a third of the time: each step of each worker calls it often."""
    parts = list(content)
    parts[place] = value
    return tuple.__new__(Content, parts)


BLANK = Content()
START = Progress()


class Replica(NamedTuple):
    """The state that a worker holds: how far the job is, and the tracked state."""

    progress: Progress = START
    content: Content = BLANK

    @property
    def committed(self) -> int:
        return self.progress.committed

    @property
    def lineage(self) -> int:
        return self.content.lineage

    @property
    def age(self) -> tuple[int, int]:
        """The one of two replicas with the higher age has the job's state."""
        return self.progress.committed_in, self.progress.committed

    @property
    def origin(self) -> tuple[int, int]:
        """The one of two checkpoints with the higher origin is the later one."""
        return self.content.committed_in, self.progress.committed

    def complete(self, job: Job) -> bool:
        """True if no step of the job is left."""
        loops = job.loops()
        loop = loops[-1]
        if self.progress.loop < len(loops) - 1:
            return False
        position = self.progress.position(loop.loader)
        return job.loaders()[loop.loader].samples_after(position, 1, loop.epochs) is None

    def __str__(self) -> str:
        return f"step {self.committed} of {self.content.committed_in} {tuple(self.content)}"


# ---- the script's changes to the state, in the order of its places


def at_top(style: Style, content: Content) -> Content:
    """Changes in the block, before its last collective."""
    if style.scheduler == "top":
        content = _scheduled(content)
    if style.early:
        content = _with(content, _MOMENTUM, hash((content.momentum, content.weights)))
    return content


def optimized(content: Content, loader: int, samples: SampleRange, factor: float) -> Content:
    step = (loader, samples.epoch, samples.start, samples.stop, factor, content.scheduler)
    return _with(content, _WEIGHTS, hash((content.weights, content.momentum, *step)))


def at_bottom(style: Style, content: Content) -> Content:
    """Changes in the block, after all of its collectives."""
    if style.scheduler == "bottom":
        content = _scheduled(content)
    if style.average == "bottom":
        content = averaged(content)
    return content


def stepped(content: Content, loader: int, generation: int, samples: SampleRange) -> Content:
    step = (content.lineage, generation, loader, samples.epoch, samples.start, samples.stop)
    return Content(*content[:-2], lineage=hash(step), committed_in=generation)


def below(style: Style, content: Content, *, committed: bool) -> Content:
    """Changes below the block."""
    if style.scheduler == "below" or (style.scheduler == "guarded" and committed):
        content = _scheduled(content)
    return content


def further_below(style: Style, content: Content, *, committed: bool) -> Content:
    """Changes below the evaluation, if there is one."""
    if style.average == "below" or (style.average == "guarded" and committed):
        content = averaged(content)
    return content


def _scheduled(content: Content) -> Content:
    return _with(content, _SCHEDULER, content.scheduler + 1)


def averaged(content: Content) -> Content:
    return _with(content, _AVERAGE, hash((content.average, content.weights)))


def evaluation(content: Content, what: int) -> int:
    return hash((content.weights, what))


def valued(content: Content, result: int) -> Content:
    """The script keeps the result of an evaluation."""
    return _with(content, _VALUES, hash((content.values, result)))


def kept(content: Content, loop: int, call: int, result: int) -> Content:
    """The session keeps the result of a call between two loops."""
    return _with(content, _RESULTS, (*content.results, (loop, call, result)))


def turned(style: Style, content: Content, loop: int) -> Content:
    """Changes at the end of a loop."""
    if style.turns:
        content = _with(content, _MOMENTUM, hash((content.momentum, loop)))
    return content


class Step(NamedTuple):
    """A step of an undisturbed job, with its learning rate's factor."""

    loop: int
    loader: int
    samples: SampleRange
    generation: int
    factor: float


def after_step(style: Style, content: Content, step: Step) -> Content:
    """All changes from the begin mark of a step to its commit mark."""
    content = at_top(style, content)
    content = optimized(content, step.loader, step.samples, step.factor)
    content = at_bottom(style, content)
    return stepped(content, step.loader, step.generation, step.samples)


def places_below(
    job: Job, content: Content, step: Step, *, ends_epoch: bool, loop_after: int
) -> Iterator[Content]:
    """The contents at the places of the script between the commit of `step` and the next step,
    which is in loop `loop_after`. The last one is the begin mark."""
    style = job.style
    yield content
    content = below(style, content, committed=True)
    yield content
    if style.evaluates and ends_epoch:
        content = valued(content, evaluation(content, 0))
        yield content
    content = further_below(style, content, committed=True)
    yield content
    for loop in range(step.loop, loop_after):
        for call in range(style.between):
            result = evaluation(content, call + 1)
            content = kept(content, loop, call, result)
            yield content
            content = valued(content, result)
            yield content
        content = turned(style, content, loop)
        yield content


def result_of(content: Content, loop: int, call: int) -> int | None:
    found: list[Any] = [r for at, n, r in content.results if (at, n) == (loop, call)]
    return found[0] if found else None
