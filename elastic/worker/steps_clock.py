"""Measures how long steps take on this rank and where the time goes: the place of the script's
thread, the parts of a step, the arrival of the last gradient, the total by kind.

The script's thread adds up differences of clock readings, which takes about two microseconds a step
with the hook of `Arrival`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from elastic.core.histogram import STEP_BOUNDS_S, Histogram
from elastic.core.whereabouts import Place
from elastic.v1 import job_pb2 as pb
from elastic.v1 import timeline_pb2
from elastic.worker.compilation import COMPILATIONS, Compilations

_SMOOTHING = 0.1  # weight of the newest step in the usual duration
_FADING = 0.01  # in each step, by which the longest recent duration approaches the usual one
_STANDSTILL_S = 1.5  # without a beat; there is at least one every 0.6 s
_MOST_STOPS = 1000  # in one step
_MOST = 10.0  # a step counts for at most so many usual durations


class StepsClock:
    """Measures the durations of steps.

    The usual duration leaves out the first step of a group and steps that compile. This rank also
    waits while a peer compiles, which is not known here: so no step counts for more than ten.
    """

    def __init__(self, compilations: Compilations = COMPILATIONS) -> None:
        self.place = CurrentPlace()
        self.collectives_reduced: int | None = None
        """How many collectives the group had begun when the newest step was reduced, or else when
        the group was set up. None before: members send each other different numbers of messages."""
        self._compilations = compilations
        self._compiled = compilations.count
        self._began: float | None = None
        self._last_commit: float | None = None
        self._sets_up_since: float | None = None
        self._waits_since: float | None = None
        self._alive_at: float | None = None
        self._stopped: deque[tuple[float, float]] = deque(maxlen=_MOST_STOPS)
        """When the process was stopped, and when it went on."""
        self.in_call = False
        """The script is inside a block or call that all members make together."""
        self.step_s = 0.0
        """The usual time from one commit to the next, exponentially averaged. 0 while unknown."""
        self.longest_s = 0.0
        """The longest such time among the recent steps; 0 while unknown."""
        self.samples_per_s = 0.0
        self.durations = Histogram(STEP_BOUNDS_S)
        """The times from one commit to the next, for all steps but the first of each group."""
        self.samples = 0
        """The samples committed while this process was a member."""
        self.spent = TimeSpent()
        self.pace = Pace(self.spent)
        self.world_size = 1
        self.global_batch = 0
        """The samples of the newest step, over the whole group."""
        self.given_up = 0
        """Steps that were begun, do not count and are computed again, since the reporter last read
        and reset this count."""

    def begin(self) -> None:
        """A step begins."""
        self._compilations.watch()
        now = self._began = time.monotonic()
        last = self._last_commit
        if last is not None:
            self.pace.between_s += now - last

    def entered(
        self, generation: int, *, join_s: float, sync_s: float, world_size: int = 1
    ) -> None:
        """The group can train. join_s: building it took so long; sync_s: agreeing on one state."""
        self.world_size = world_size
        self.spent.entered(time.monotonic(), generation, join_s=join_s, sync_s=sync_s)

    def commit(self, samples: int, committed: int = 0) -> None:
        """A step was committed. samples: those of the whole group. committed: the number of
        committed steps, this one included."""
        now = time.monotonic()
        self.spent.commit(now, self.step_s, committed)
        compiled, self._compiled = self._compiled, self._compilations.count
        self.samples += samples
        self.global_batch = samples
        if self._last_commit is not None:
            self.durations.observe(now - self._last_commit)
            if compiled == self._compiled:
                self._note(now - self._last_commit, samples)
        self._last_commit = now
        self._began = None
        pace = self.pace
        if pace.arrival.learning:
            pace.arrival.learned()
        if not committed & pace.mask:
            pace.put_down(committed, self.step_s, self.world_size)

    def setup_began(self) -> None:
        """The set-up of a new group begins. It counts as time under way, because all members wait
        there for one that hangs."""
        self._sets_up_since = time.monotonic()

    def setup_ended(self) -> None:
        """The set-up has ended. Until it begins a step, the script may take its time."""
        self._sets_up_since = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this, the script waits for the others to come to a call."""
        since = self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None
            self.spent.called(time.monotonic() - since)

    def called(self, began: float) -> None:
        """A call that all members make together has ended."""
        self.spent.called(time.monotonic() - began)

    def saved(self, began: float) -> None:
        """A save has held up the script. Inside of a call, its time does not count for the call."""
        elapsed_s = time.monotonic() - began
        self.spent.saved(elapsed_s)
        if self.in_call:
            self.spent.called(-elapsed_s)

    def alive(self) -> None:
        """The reporting thread beats. Missing beats show that the process was stopped."""
        now, before = time.monotonic(), self._alive_at
        if before is not None and now - before > _STANDSTILL_S:
            self._stopped.append((before, now))
        self._alive_at = now

    def waiting_s(self) -> float:
        """How long the script has waited for the others to come to a call. 0: it does not wait."""
        return self._lasts_s(self._waits_since)

    def interrupt(self) -> None:
        """The group was lost or is left: the time until the next commit is not that of a step."""
        self.spent.left(time.monotonic(), in_step=self._began is not None)
        self._began = self._sets_up_since = None
        self._last_commit = self.collectives_reduced = None

    def in_step_s(self) -> float:
        """How long the step under way has lasted. 0 between steps."""
        return self._lasts_s(self._began)

    def under_way_s(self) -> float:
        """How long the set-up of a group has lasted, during one; otherwise `in_step_s`."""
        since = self._sets_up_since
        return self._lasts_s(since) if since is not None else self.in_step_s()

    @property
    def first_step(self) -> bool:
        """Whether this process has committed no step in its present group."""
        return self._last_commit is None

    def _lasts_s(self, since: float | None) -> float:
        """The time since then, without the time in which the process was stopped, as in a paused
        container: that is no hang."""
        if since is None:
            return 0.0
        now, alive_at, stopped = time.monotonic(), self._alive_at, tuple(self._stopped)
        lasts_s = now - since - sum(max(0.0, end - max(begin, since)) for begin, end in stopped)
        if alive_at is not None and now - alive_at > _STANDSTILL_S:  # no beat yet since the stop
            lasts_s -= now - max(alive_at, since)
        return max(lasts_s, 0.0)

    def _note(self, duration_s: float, samples: int) -> None:
        rate = samples / max(duration_s, 1e-9)
        if self.step_s == 0.0:
            self.step_s, self.samples_per_s, self.longest_s = duration_s, rate, duration_s
            return
        counted_s = min(duration_s, _MOST * self.step_s)
        self.step_s += _SMOOTHING * (counted_s - self.step_s)
        faded_s = self.longest_s + _FADING * (self.step_s - self.longest_s)
        self.longest_s = counted_s if counted_s > faded_s else faded_s
        self.samples_per_s += _SMOOTHING * (rate - self.samples_per_s)


_FEWEST_STEPS, _MOST_STEPS = 8, 1 << 20
_INTERVAL_S = 0.5  # at least, between two instants at which sums are put down
_INTERVAL_PER_RANK_S = 0.005  # so that a coordinator receives at most 200 sums a second


def window_steps(step_s: float, world_size: int) -> int:
    """The number of steps after which sums are put down: a power of two, so that ranks that compute
    different numbers still have common instants. step_s: the usual duration of a step. 0: not
    known."""
    wanted_s = max(_INTERVAL_S, world_size * _INTERVAL_PER_RANK_S)
    steps = _FEWEST_STEPS
    while 0.0 < steps * step_s < wanted_s and steps < _MOST_STEPS:
        steps *= 2
    return steps


class Pace:
    """Sums of the parts of steps on this rank, for a comparison of ranks (core/stragglers.py).

    The sums count from the start of the process; only their differences within one group have a
    meaning. A comparison needs sums over the same steps on all ranks, so they are put down after
    fixed numbers of committed steps, for the reporting thread to send.
    """

    def __init__(self, spent: TimeSpent) -> None:
        self.arrival = Arrival()
        self.mask = _FEWEST_STEPS - 1
        """Sums are put down when the number of committed steps has none of these bits."""
        self.wait_s = self.transfer_s = self.after_s = self.between_s = 0.0
        self.reduced_at = 0.0
        self.arrivals = 0
        """Backward passes for which the arrival of the last local gradient is known."""
        self.reductions = 0
        self.on_window: Callable[[], None] = _nothing
        """Called on the script's thread when new sums are put down."""
        self._spent = spent
        self._core_wait = CoreWait()
        self._missed = 0
        self._newest: tuple[Any, ...] | None = None  # in the order of _PACE

    def reduced(self, began: float, now: float) -> None:
        """A backward pass that averages gradients lasted from `began` to `now`."""
        at = self.arrival.at
        self.arrival.reduced()
        if at > began:
            self.wait_s += now - at
            self.arrivals += 1
        self.reductions += 1
        self.reduced_at = now

    def put_down(self, committed: int, step_s: float, world_size: int) -> None:
        """Put down the sums after the last committed step."""
        spent = self._spent
        self.mask = window_steps(step_s, world_size) - 1
        aside_s = spent.calls_s + spent.saves_s
        self._newest = (
            spent.generation,
            committed,
            spent.steps,
            spent.steps_s - aside_s,
            spent.data_s,
            self.transfer_s,
            self.wait_s,
            self.after_s,
            self.between_s - aside_s,
            self._core_wait.seconds(),
            self.arrivals,
            self.reductions,
        )
        missed, self._missed = self._missed, self.reductions - self.arrivals
        if self._missed > missed:
            self.arrival.look_again()
        self.on_window()

    def to_pb(self) -> pb.Pace | None:
        """The sums that were put down last. None: none were."""
        newest = self._newest
        return None if newest is None else pb.Pace(**dict(zip(_PACE, newest, strict=True)))


_PACE = (
    *("generation", "committed", "steps", "total_s", "data_s", "transfer_s", "wait_s", "after_s"),
    *("between_s", "no_core_s", "arrivals", "reductions"),
)
"""The fields of the message, in the order of `Pace._newest`."""


def _nothing() -> None:
    """The `on_window` of a clock without a reporter."""


_MOST_LOOKS = 8
"""The most attempts to learn which gradient comes last: in some models it is another one in each
step."""


class Arrival:
    """Notices when the last local gradient of a step is ready, in distributed models.

    DDP's all-reduce makes the backward pass equally long on all ranks, so only this tells a slow
    rank from those that wait for it. A hook on the parameter whose gradient comes last costs about
    a microsecond a step. To learn which parameter that is, one step has a hook on each parameter.
    Where a step has several backward passes, as with several models, each of them has a last
    gradient and waits for the other ranks.
    """

    def __init__(self) -> None:
        self.at = 0.0
        """When a watched gradient was last ready, in monotonic seconds. 0: never."""
        self.learning = False
        """Every parameter has a hook, up to the next commit."""
        self._parameters: list[torch.Tensor] = []
        self._hooks: dict[int, Any] = {}
        """The hooks, by the id() of the parameter."""
        self._newest: torch.Tensor | None = None
        self._last: dict[int, torch.Tensor] = {}
        """The parameter with the last gradient of each backward pass, by its id()."""
        self._looks = 0

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Learn in the next step which gradient of these comes last, unless that is known."""
        known = self._parameters
        if len(known) != len(parameters) or any(
            a is not b for a, b in zip(known, parameters, strict=True)
        ):
            self._parameters = list(parameters)
            self.look_again()

    def look_again(self) -> None:
        """Learn again which gradient comes last: the one that did so no longer comes."""
        self._remove()
        self._newest, self._last = None, {}
        self.learning = self._looks < _MOST_LOOKS
        if self.learning:
            self._looks += 1
            self._hooks = {
                id(p): p.register_post_accumulate_grad_hook(self._seen)  # type: ignore[no-untyped-call]
                for p in self._parameters
                if p.requires_grad and p.is_leaf
            }

    def reduced(self) -> None:
        """A backward pass is over."""
        if self._newest is not None:
            self._last[id(self._newest)], self._newest = self._newest, None

    def learned(self) -> None:
        """A step was committed: keep one hook for each backward pass. The hook is not registered
        again: a parameter whose requires_grad a script toggles may not accept one now."""
        self.learning = False
        self.reduced()
        kept = {key: hook for key, hook in self._hooks.items() if key in self._last}
        self._remove(except_for=kept)
        self._hooks = kept

    def _seen(self, parameter: torch.Tensor) -> None:
        self.at, self._newest = time.monotonic(), parameter

    def _remove(self, except_for: Collection[int] = ()) -> None:
        for key, hook in self._hooks.items():
            if key not in except_for:
                hook.remove()
        self._hooks = {}


class CoreWait:
    """How long the main thread was ready to run and had no core, as the kernel counts it.

    Any thread may ask. It is 0 if the kernel does not provide the count (schedstat).
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._tried = False

    def seconds(self) -> float:
        """The seconds since the thread began. The call takes a microsecond."""
        if not self._tried:
            self._tried = True
            path = "/proc/self/schedstat"  # of the main thread
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor is None:
            return 0.0
        try:
            return int(os.pread(self._descriptor, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


class CurrentPlace:
    """The place of the script's thread. That thread sets it some ten times a step, without a call.
    Other threads read it."""

    def __init__(self) -> None:
        self.now = (Place.STARTING, time.monotonic())
        """The place, and since when the thread is there, in monotonic seconds."""

    def look(self) -> tuple[Place, float]:
        """The place, and for how many seconds the thread has been there."""
        place, since = self.now
        return place, time.monotonic() - since


MOST_STRETCHES = 1000
"""The maximum number of stretches kept: with steps of 0.1 s, those of the last minutes."""
_Stretch = tuple[int, int, int, float, float, float, float, float, float, float]
"""The fields of the message in order, but with begin and end as instants of time.monotonic."""
_PARTS_OF_STRETCH = ("data_s", "calls_s", "saves_s", "join_s", "sync_s")


class TimeSpent:
    """The time since the first group by kind, up to the newest commit or entry into a group.

    The fields are those of core.book.accounting.TimeSpent. The script's thread adds to them, other
    threads read them. Time that was lost with a group is added when the next group is entered,
    since its cause is known only then.
    """

    def __init__(self) -> None:
        self.generation = 0
        """The group that was entered last. 0: there was none."""
        self.out_since: float | None = None
        """When the group was left, in monotonic seconds. Later groups without a committed step do
        not change it; the next commit sets it to None."""
        self.committed = 0
        self.steps = 0
        self.steps_s = self.data_s = self.calls_s = self.saves_s = self.own_s = 0.0
        self.first_steps_s = self.given_up_s = self.regroup_s = self.join_s = self.sync_s = 0.0
        self._at = 0.0  # all time up to here is counted
        self._in_group = False
        self._first = True
        self._given_up_s = self._left_s = 0.0  # added when the next group is entered
        self._data_s = self._calls_s = self._saves_s = 0.0  # since `_at`
        self._fetched_at = 0.0
        self._stretches: deque[_Stretch] = deque(maxlen=MOST_STRETCHES)

    def entered(self, now: float, generation: int, *, join_s: float, sync_s: float) -> None:
        """The group can train. join_s, sync_s: see `StepsClock.entered`."""
        if self.generation:
            kind = timeline_pb2.Stretch.WHAT_REGROUP
            steps = (kind, generation, self.committed, self._at, now, 0.0, 0.0, 0.0)
            self._stretches.append((*steps, join_s, sync_s))
            self.given_up_s += self._given_up_s
            self.regroup_s += self._left_s + now - self._at
            self.join_s += join_s
            self.sync_s += sync_s
        self._given_up_s = self._left_s = 0.0
        self.generation, self._at = generation, now
        self._in_group = self._first = True
        self._begin()

    def fetched(self, began: float, now: float, *, counts: bool = True) -> None:
        """Samples have come from the loader, after a wait since `began`. counts: False for those
        of a micro-batch that other ranks do not have: they do not make this rank a late one."""
        self._data_s += now - began
        if counts:
            self._fetched_at = now

    def called(self, seconds: float) -> None:
        """The script was in a call that all members make together."""
        self._calls_s += seconds

    def saved(self, seconds: float) -> None:
        """A save held up training."""
        self._saves_s += seconds

    def commit(self, now: float, usual_s: float, committed: int) -> None:
        """A step was committed. usual_s: the usual duration of a step. 0 while unknown."""
        elapsed_s, beside_s = now - self._at, self._calls_s + self._saves_s
        self._stretches.append(
            (
                *(timeline_pb2.Stretch.WHAT_STEP, self.generation, committed, self._at, now),
                *(self._data_s, self._calls_s, self._saves_s, 0.0, 0.0),
            )
        )
        if self._first:
            beyond_s = max(0.0, elapsed_s - usual_s - beside_s)
            self.first_steps_s += beyond_s
            self.steps_s += elapsed_s - beyond_s
            self._first, self.out_since = False, None
        else:
            self.steps_s += elapsed_s
            self.data_s += self._data_s
            self.own_s += max(0.0, self._fetched_at - self._at - beside_s)
        self.steps += 1
        self.calls_s += self._calls_s
        self.saves_s += self._saves_s
        self.committed = committed
        self._at = now
        self._begin()

    def settle(self, now: float) -> None:
        """Count the time since the last step too: perhaps no step follows."""
        if self._in_group:
            self.steps_s += now - self._at
            self.calls_s += self._calls_s
            self.saves_s += self._saves_s
            self._at = now
            self._begin()

    def left(self, now: float, *, in_step: bool) -> None:
        """The group is lost, or left at a boundary. in_step: a step had begun."""
        if self._in_group:
            if self.out_since is None:
                self.out_since = now
            elapsed_s = now - self._at
            given_up_s = elapsed_s if in_step else min(elapsed_s, self._calls_s)
            if given_up_s > 0.0:
                kind, began = timeline_pb2.Stretch.WHAT_GIVEN_UP, now - given_up_s
                this = (kind, self.generation, self.committed, began, now)
                self._stretches.append((*this, 0.0, 0.0, 0.0, 0.0, 0.0))
            self._given_up_s += given_up_s
            self._left_s += elapsed_s - given_up_s
            self._in_group, self._at = False, now
            self._begin()

    def newest(self, most: int) -> list[timeline_pb2.Stretch]:
        """The newest stretches, oldest first. Called on another thread."""
        ahead_s = time.time() - time.monotonic()
        return [
            timeline_pb2.Stretch(
                what=timeline_pb2.Stretch.What.Name(what),
                generation=generation,
                step=step,
                began_unix_s=began + ahead_s,
                lasted_s=ended - began,
                **dict(zip(_PARTS_OF_STRETCH, parts_s, strict=True)),
            )
            for what, generation, step, began, ended, *parts_s in list(self._stretches)[-most:]
        ]

    def to_pb(self) -> pb.TimeSpent:
        """The sums so far."""
        fields = pb.TimeSpent.DESCRIPTOR.fields
        return pb.TimeSpent(**{field.name: getattr(self, field.name) for field in fields})

    def _begin(self) -> None:
        self._data_s = self._calls_s = self._saves_s = 0.0
