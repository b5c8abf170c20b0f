"""How long steps take on this rank, and where the time goes: in which place the script's thread is,
what each part of a step takes, when the last gradient arrives, what is spent on what in all.

The script's thread adds a difference of clock readings here and there, about two microseconds a
step with the hook of `Arrival`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from elastic.core.histogram import STEP_BOUNDS_S, Histogram
from elastic.core.whereabouts import Place
from elastic.v1 import job_pb2 as pb
from elastic.v1 import timeline_pb2
from elastic.worker.compilation import COMPILATIONS, Compilations

_SMOOTHING = 0.1  # weight of the newest step in the usual duration
_STANDSTILL_S = 1.5  # without a beat, of which there is one in 0.6 s at least
_MOST = 10.0  # times the usual duration is the most that one step counts for


class StepsClock:
    """Times steps from their begin to their commit.

    The usual duration leaves out the first step of a group and those that compile. A peer's step
    that compiles is not known here, and makes this one wait: no step counts for more than ten.
    """

    def __init__(self, compilations: Compilations = COMPILATIONS) -> None:
        self.place = CurrentPlace()
        """Where the script's thread is."""
        self.collectives_reduced: int | None = None
        """How many collectives the group had begun when the newest step was reduced; None in a new
        group, in which members have sent each other different numbers of messages."""
        self._compilations = compilations
        self._compiled = compilations.count
        self._began: float | None = None
        self._last_commit: float | None = None
        self._sets_up_since: float | None = None
        self._waits_since: float | None = None
        self._alive_at: float | None = None
        self._stood = (0.0, 0.0)
        self.in_call = False
        """The script is inside a call that it makes together with the others."""
        self.step_s = 0.0
        """Usual time from one commit to the next, exponentially averaged; 0 while unknown."""
        self.samples_per_s = 0.0
        self.durations = Histogram(STEP_BOUNDS_S)
        """From one commit to the next, of all steps but the first ones of a group."""
        self.samples = 0
        """Committed while this process was a member."""
        self.spent = TimeSpent()
        """What all of the time since the first group went into."""
        self.pace = Pace(self.spent)
        """What each part of a step takes here, for a comparison of ranks."""
        self.world_size = 1
        self.global_batch = 0
        """Samples of the newest step, of the whole group."""
        self.given_up = 0
        """Steps that were begun and do not count, but are computed again, since somebody has taken
        the count."""

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
        """The group can train, after so long a time for its parts."""
        self.world_size = world_size
        self.spent.entered(time.monotonic(), generation, join_s=join_s, sync_s=sync_s)

    def commit(self, samples: int, committed: int = 0) -> None:
        """It was committed, with this many samples of the whole group: so many steps are."""
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

    def sets_up(self) -> None:
        """A new group is set up for training: all wait there for one that hangs."""
        self._sets_up_since = time.monotonic()

    def is_set_up(self) -> None:
        """Now a script may do as it likes until it begins a step."""
        self._sets_up_since = None

    def waits(self) -> None:
        """For the others to come to a call of the script."""
        self._waits_since = time.monotonic()

    def is_met(self) -> None:
        """They have come, or the group is lost."""
        since, self._waits_since = self._waits_since, None
        if since is not None:
            self.spent.called(time.monotonic() - since)

    def called(self, began: float) -> None:
        """The script has made a call together with the others."""
        self.spent.called(time.monotonic() - began)

    def saved(self, began: float) -> None:
        """A save has held it up; inside of a call it is no time of that."""
        elapsed_s = time.monotonic() - began
        self.spent.saved(elapsed_s)
        if self.in_call:
            self.spent.called(-elapsed_s)

    def alive(self) -> None:
        """A beat of the reporting thread: of a process that was stopped there is none."""
        now, before = time.monotonic(), self._alive_at
        if before is not None and now - before > _STANDSTILL_S:
            self._stood = before, now
        self._alive_at = now

    def waiting_s(self) -> float:
        """How long it has waited for them; 0 if it does not."""
        return self._lasts_s(self._waits_since)

    def interrupt(self) -> None:
        """The group was lost or changes: the time until the next commit is no usual step."""
        self.spent.left(time.monotonic(), in_step=self._began is not None)
        self._began = self._sets_up_since = None
        self._last_commit = self.collectives_reduced = None

    def in_step_s(self) -> float:
        """How long the step under way has lasted; 0 between steps."""
        return self._lasts_s(self._began)

    def under_way_s(self) -> float:
        """The same, and before the first step of a group how long setting it up has lasted."""
        since = self._sets_up_since
        return self._lasts_s(since) if since is not None else self.in_step_s()

    @property
    def first_step(self) -> bool:
        """This process has committed no step in its present group."""
        return self._last_commit is None

    def _lasts_s(self, since: float | None) -> float:
        """The time since then in which the process was not stopped, as by a paused container: that
        is no hang."""
        if since is None:
            return 0.0
        now, alive_at, (began, ended) = time.monotonic(), self._alive_at, self._stood
        lasts_s = now - since - max(0.0, ended - max(began, since))
        if alive_at is not None and now - alive_at > _STANDSTILL_S:  # and has not beaten yet
            lasts_s -= now - max(alive_at, since)
        return max(lasts_s, 0.0)

    def _note(self, duration_s: float, samples: int) -> None:
        rate = samples / max(duration_s, 1e-9)
        if self.step_s == 0.0:
            self.step_s, self.samples_per_s = duration_s, rate
            return
        counted_s = min(duration_s, _MOST * self.step_s)
        self.step_s += _SMOOTHING * (counted_s - self.step_s)
        self.samples_per_s += _SMOOTHING * (rate - self.samples_per_s)


_FEWEST_STEPS, _MOST_STEPS = 8, 1 << 20
_INTERVAL_S = 0.5  # at least, between two reports of this kind
_INTERVAL_PER_RANK_S = 0.005  # so that a coordinator hears 200 of them a second at most


def window_steps(step_s: float, world_size: int) -> int:
    """After how many steps sums are put down: a power of two, so that ranks which find different
    numbers have half of their instants in common. step_s: how long steps usually take; 0: not
    known."""
    wanted_s = max(_INTERVAL_S, world_size * _INTERVAL_PER_RANK_S)
    steps = _FEWEST_STEPS
    while 0.0 < steps * step_s < wanted_s and steps < _MOST_STEPS:
        steps *= 2
    return steps


class Pace:
    """What each part of a step takes on this rank, as sums that all ranks take at the same steps.

    Sums since the process began; only their differences within one group mean anything.

    A comparison of ranks needs sums over the same steps, so they are put down after every so many
    committed steps, for the reporting thread to send.
    """

    def __init__(self, spent: TimeSpent) -> None:
        self.arrival = Arrival()
        self.mask = _FEWEST_STEPS - 1
        """Sums are put down where the number of committed steps has none of these bits."""
        self.wait_s = self.transfer_s = self.after_s = self.between_s = 0.0
        self.reduced_at = 0.0
        self.arrivals = 0
        """Backward passes of which it is known when the last local gradient was ready."""
        self.reductions = 0
        self.on_window: Callable[[], None] = _nothing
        """Called by the script's thread when there is more to send."""
        self._spent = spent
        self._core_wait = CoreWait()
        self._missed = 0
        self._newest: tuple[Any, ...] | None = None  # in the order of _PACE

    def reduced(self, began: float, now: float) -> None:
        """A backward pass that averages gradients has lasted from `began` to `now`."""
        at = self.arrival.at
        self.arrival.reduced()
        if at > began:
            self.wait_s += now - at
            self.arrivals += 1
        self.reductions += 1
        self.reduced_at = now

    def put_down(self, committed: int, step_s: float, world_size: int) -> None:
        """A step was committed after which sums are wanted."""
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
        """What was put down last; None before."""
        newest = self._newest
        return None if newest is None else pb.Pace(**dict(zip(_PACE, newest, strict=True)))


_PACE = (
    *("generation", "committed", "steps", "total_s", "data_s", "transfer_s", "wait_s", "after_s"),
    *("between_s", "no_core_s", "arrivals", "reductions"),
)
"""Fields of the message."""


def _nothing() -> None:
    """Nobody sends it."""


_MOST_LOOKS = 8
"""A model whose last gradient is another one in each step is not looked at for ever."""


class Arrival:
    """When the last local gradient of a step is ready: what tells a slow rank from those that wait.

    Watches the parameters of the distributed models.

    DDP's all-reduce makes the backward pass equally long everywhere. A hook on the parameter whose
    gradient comes last costs about a microsecond a step; which one that is, one step with a hook on
    each parameter tells. Where a step has several backward passes, as of several models, each of
    them has a last gradient, and waits for the others.
    """

    def __init__(self) -> None:
        self.at = 0.0
        """When a watched gradient was ready last, in monotonic seconds; 0: never."""
        self.learning = False
        """Every parameter has a hook, up to the next commit."""
        self._parameters: list[torch.Tensor] = []
        self._hooks: dict[int, Any] = {}
        """By the identity of the parameter."""
        self._newest: torch.Tensor | None = None
        self._last: dict[int, torch.Tensor] = {}
        """Of each backward pass, by its identity."""
        self._looks = 0

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Of these the next step tells which gradient comes last, unless it is known."""
        known = self._parameters
        if len(known) != len(parameters) or any(
            a is not b for a, b in zip(known, parameters, strict=True)
        ):
            self._parameters = list(parameters)
            self.look_again()

    def look_again(self) -> None:
        """The gradient that came last comes no more: learn which one does now."""
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
        """A step was committed: one hook for each backward pass is enough. It stays as it is: a
        parameter that a script toggles may take no new one now."""
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
    """For how long the script's thread was ready to run and had no core: the kernel's own count.

    Of the main thread, from any thread; 0 where the kernel does not tell (schedstat).
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._tried = False

    def seconds(self) -> float:
        """Since the thread began. Takes a microsecond."""
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
    """Set by the script's thread, without a call: some ten times a step. Read by others."""

    def __init__(self) -> None:
        self.now = (Place.STARTING, time.monotonic())
        """Where it is, and since when."""

    def look(self) -> tuple[Place, float]:
        """Where it is, and for how many seconds."""
        place, since = self.now
        return place, time.monotonic() - since


MOST_STRETCHES = 1000
"""That are remembered: of steps of 0.1 s, those of the last minutes."""
_Stretch = tuple[int, int, int, float, float, float, float, float, float, float]
"""In the order of the message, with the instants of its begin and end on the clock of
time.monotonic."""
_PARTS_OF_STRETCH = ("data_s", "calls_s", "saves_s", "join_s", "sync_s")


class TimeSpent:
    """All of the time since the first group, up to the newest commit or entry into a group.

    The script's thread adds to it, others read it. What was lost with a group is told together
    with the group that follows, since that is when its cause is known.
    """

    def __init__(self) -> None:
        self.generation = 0
        """The group that was entered last; 0: there was none."""
        self.out_since: float | None = None
        """When it was left, or the first of several in which no step was committed; None: since
        then one was."""
        self.committed = 0
        self.steps = 0
        self.steps_s = self.data_s = self.calls_s = self.saves_s = self.own_s = 0.0
        self.first_steps_s = self.given_up_s = self.regroup_s = self.join_s = self.sync_s = 0.0
        self._at = 0.0  # up to which all is counted
        self._in_group = False
        self._first = True
        self._given_up_s = self._left_s = 0.0  # not told before the next group
        self._data_s = self._calls_s = self._saves_s = 0.0  # since `_at`
        self._fetched_at = 0.0
        self._stretches: deque[_Stretch] = deque(maxlen=MOST_STRETCHES)

    def entered(self, now: float, generation: int, *, join_s: float, sync_s: float) -> None:
        """The group can train."""
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

    def fetched(self, began: float, now: float) -> None:
        """Samples have come from the loader."""
        self._data_s += now - began
        self._fetched_at = now

    def called(self, seconds: float) -> None:
        """The script was in a call that it makes together with the others."""
        self._calls_s += seconds

    def saved(self, seconds: float) -> None:
        """Training was held up to save."""
        self._saves_s += seconds

    def commit(self, now: float, usual_s: float, committed: int) -> None:
        """A step was committed. usual_s: how long steps last; 0 while unknown."""
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
        """No step may follow: what there was since the last one is told all the same."""
        if self._in_group:
            self.steps_s += now - self._at
            self.calls_s += self._calls_s
            self.saves_s += self._saves_s
            self._at = now
            self._begin()

    def left(self, now: float, *, in_step: bool) -> None:
        """The group is lost, or left at a boundary. in_step: a step was begun."""
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
        """The newest stretches of it, oldest first; asked for on another thread."""
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
        """As it is now."""
        fields = pb.TimeSpent.DESCRIPTOR.fields
        return pb.TimeSpent(**{field.name: getattr(self, field.name) for field in fields})

    def _begin(self) -> None:
        self._data_s = self._calls_s = self._saves_s = 0.0
