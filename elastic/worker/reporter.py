"""Sends a worker's reports from a thread of its own: progress, the script's values, ledger, curve,
stacks on request, and signs of life.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from elastic.rpc.stacks import process_to_pb
from elastic.runtime.stack_file import stacks_of_threads
from elastic.v1 import job_pb2 as pb
from elastic.v1 import local_pb2, stacks_pb2
from elastic.worker.compilation import COMPILATIONS, Compilations
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import Group
from elastic.worker.link import Link
from elastic.worker.readings import Reader, Wanted, as_number, is_ready
from elastic.worker.state.backlog import Backlog, CurvePoint, CurvePoints
from elastic.worker.state.exchange import Outcome
from elastic.worker.state.job_state import JobState
from elastic.worker.steps_clock import StepsClock

INTERVAL_S = 0.2  # between reports of rank 0, which reports for the group
_MOST_FIGURES, _LONGEST_NAME = 100, 100
_MOST_RECORDS = 10_000  # of the ledger in one message
_MOST_POINTS = 200  # of the curve in one message, with _MOST_FIGURES values each
_MOST_UNSTORED = 20_000  # records in flight: more would only wait in the coordinator's memory
_POLL_S = 0.02
_STORING_S = 2.0  # if no record is stored for so long, nothing stores them
_LAST_REPORT_S = 0.5
_WAIT_S, _LAST_WAIT_S = 0.02, 0.25  # for values of the script that are on a device
_SIGN_OF_LIFE_S = 0.6  # between reports of other ranks, well below the agent's --silence-timeout-s


class Reports:
    """The reports of a worker on its training. This base class drops them, for a worker without an
    agent."""

    def publish(self, state: JobState, clock: StepsClock, answer: Callable[[], None]) -> None:
        """Set what to report on. `answer` is called at every interval, on the reporting thread."""

    def entered(self, group: Group, outcome: Outcome) -> None:
        """The group is ready to train."""

    def committed(self) -> None:
        """A step was committed."""

    def given_up(self, *, counts: bool) -> None:
        """A block was given up. counts: others have completed its step, so it counts."""

    def report(self, values: Mapping[str, Any], *, committed: bool) -> None:
        """Report values of the script. The newest value of a name replaces the one before; beyond
        _MOST_FIGURES names the oldest name is dropped. committed: the values are of the last
        committed step, not of the block under way."""

    def notice(self, name: str, fields: Mapping[str, str]) -> None:
        """Send an event for the operator."""

    def script_failed(self) -> None:
        """Send the last reports before the process ends."""


class Reporter(Reports):
    """Sends the reports at every interval, and at once when a group commits its first step.

    Training never waits for it: the script's thread only leaves values that this thread reads.
    """

    def __init__(
        self, link: Link, membership: Membership, compilations: Compilations = COMPILATIONS
    ) -> None:
        self._link = link
        self._compilations = compilations
        self._membership = membership
        self.state = JobState()
        """The script's state, once `publish` has set it."""
        self._answer: Callable[[], None] = lambda: None
        self._clock = StepsClock()
        self._reported: dict[str, Any] = {}
        self._reformed: pb.Reformed | None = None
        self._first_step_pending = False
        self._out_since: float | None = None
        self._wake = threading.Event()
        self._sending = threading.Lock()
        self._ledger_sent = self._curve_sent = 0
        self._send_whole_ledger = self._send_whole_curve = True
        self.curve = Curve()
        """What the script reports of each step."""
        self._told = False
        self._reader, self._curve_reader = Reader(), Reader()
        self._numbers_of_reports: dict[str, Any] = {}
        """The numbers of reported values that had to be waited for, by name."""
        self._numbers_of_rates: dict[str, Any] = {}
        self._newest_collective = (0, 0.0)  # the number of collectives, and since when it holds

    def start(self) -> None:
        threading.Thread(target=self._beat, name="elastic-pulse", daemon=True).start()

    # ---- on the script's thread

    @override
    def publish(self, state: JobState, clock: StepsClock, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._clock = clock
        self.state = state
        self.curve.backlog = state.curve
        clock.pace.on_window = self._wake.set

    @override
    def entered(self, group: Group, outcome: Outcome) -> None:
        durations = self._membership.durations
        self.report_again()  # another member may report in a new group
        self._reformed = pb.Reformed(
            worker=self._link.worker,
            generation=group.generation.number,
            committed=self.state.committed,
            abort_s=durations.abort_s,
            join_s=durations.join_s,
            sync_s=durations.sync_s,
            bytes_received=outcome.bytes_received,
            source=outcome.source,
        )
        self._first_step_pending = True
        self._out_since = self._clock.spent.out_since

    @override
    def committed(self) -> None:
        if self.curve.kept:
            self._add_to_curve()
        if self._first_step_pending:
            self._first_step_pending = False
            reformed = self._reformed
            if reformed is not None:
                reformed.first_step_s = self._membership.durations.since_ready_s()
                if self._out_since is not None:
                    reformed.out_s = time.monotonic() - self._out_since
                reformed.recomputed, self._clock.given_up = self._clock.given_up, 0
                reformed.spent.CopyFrom(self._clock.spent.to_pb())
                self._wake.set()

    @override
    def given_up(self, *, counts: bool) -> None:
        if counts and self.curve.kept:
            self._add_to_curve()
        else:
            self.curve.given_up()

    def _add_to_curve(self) -> None:
        state, group = self.state, self._membership.group
        if group is not None:
            step, run = state.committed - 1, group.generation.incarnation
            self.curve.committed(step, run, state.progress.committed_in)

    @override
    def report(self, values: Mapping[str, Any], *, committed: bool) -> None:
        if self.curve.kept:
            self.curve.report(values, committed=committed)
        for name, value in values.items():
            if name not in self._reported and len(self._reported) == _MOST_FIGURES:
                del self._reported[next(iter(self._reported))]
            self._reported[name] = value.detach() if isinstance(value, torch.Tensor) else value

    @override
    def notice(self, name: str, fields: Mapping[str, str]) -> None:
        self._link.notice(name, fields)

    @override
    def script_failed(self) -> None:
        # On another thread, since reading a value from a device may hang.
        last = threading.Thread(target=self.flush, name="elastic-last-report", daemon=True)
        last.start()
        last.join(_LAST_REPORT_S)

    def wait_for_ledger(self) -> None:
        """Return when the rest of the ledger is sent, or when nothing has been stored for 2 s."""
        ledger = self.state.ledger
        unstored, since = len(ledger), time.monotonic()
        while len(ledger) > _MOST_UNSTORED and time.monotonic() - since < _STORING_S:
            time.sleep(_POLL_S)
            self.flush()
            if len(ledger) < unstored:
                unstored, since = len(ledger), time.monotonic()

    # ---- on the link's thread

    def ledger_stored(self, committed: int, run: str, generation: int) -> None:
        """The coordinator has stored the entries of `run` for steps below `committed`, up to
        `generation`."""
        ledger = self.state.ledger
        ledger.stored(committed, run, generation)
        if len(ledger) >= _MOST_UNSTORED:
            self._wake.set()

    def keep_curve(self, keep: bool) -> None:
        self.curve.keep(keep)
        self._send_whole_curve = True

    def curve_stored(self, stored: local_pb2.LedgerStored) -> None:
        """Do for the curve what `ledger_stored` does for the ledger."""
        self.curve.backlog.stored(stored.committed, stored.run, stored.generation)
        if stored.send_again:
            self._send_whole_curve = True

    def answer_probe(self) -> None:
        progress = self._progress(self._membership.group)
        progress.probed = True
        self._link.send(progress=progress)

    def answer_stacks(self, request: stacks_pb2.StacksRequest) -> None:
        """Send the stacks of this process now, or, if asked for that, its newest time spans."""
        if request.stretches:
            newest = self._clock.spent.newest(request.stretches)
            told = stacks_pb2.WorkerStacks(
                worker=self._link.worker,
                request=request.request,
                answer=stacks_pb2.ANSWER_GIVEN,
                stretches=newest,
            )
            self._link.send(stacks=told)
            return
        place, place_s = self._clock.place.look()
        group = self._membership.group
        stacks = stacks_pb2.WorkerStacks(
            worker=self._link.worker,
            request=request.request,
            answer=stacks_pb2.ANSWER_GIVEN,
            place=stacks_pb2.Place.Name(place.value),
            place_s=place_s,
            committed=self.state.committed,
            generation=group.generation.number if group is not None else 0,
            processes=[own_stacks(brief=request.brief)],
        )
        before = self._clock.collectives_reduced
        with contextlib.suppress(RuntimeError):  # the group is being lost
            if group is not None and before is not None:
                since = group.collectives() - before
                stacks.collectives = max(since, 0) if group.counts_collectives else 0
        self._link.send(stacks=stacks)

    def report_again(self) -> None:
        """Send all of ledger and curve that is not stored: the coordinator may be new."""
        self._send_whole_ledger = self._send_whole_curve = True

    # ---- on its own thread

    def _beat(self) -> None:
        while True:
            group = self._membership.group
            leads = group is None or group.rank == 0
            self._wake.wait(INTERVAL_S if leads else _SIGN_OF_LIFE_S)
            self._wake.clear()
            self._clock.alive()
            self.flush(whole=False)
            self._answer_calls()

    def _answer_calls(self) -> None:
        try:
            with contextlib.suppress(RuntimeError, OSError):  # the store may end with its host
                self._answer()
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def flush(self, *, whole: bool = True) -> None:
        """Send everything now. Errors, as from a script's values, do not end the reports. whole: of
        the curve, include the newest step, for which the script may still report values."""
        try:
            with self._sending:
                group = self._membership.group
                self._send_progress(group, whole)
                if group is not None and group.rank == 0:
                    self._send_ledger(group)
                    if self.curve.kept:
                        self._send_curve(group, whole)
                if self._reformed is not None and not self._first_step_pending:
                    self._link.send(reformed=self._reformed)
                    self._reformed = None
        except Exception as error:  # noqa: BLE001 - a script's values may raise anything
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            traceback.print_exc()
            self.notice("report_failed", {"message": f"{type(error).__name__}: {error}"})

    def _send_progress(self, group: Group | None, whole: bool) -> None:
        self._compilations.watch()
        progress = self._progress(group)
        clock = self._clock
        progress.step_counts.extend(clock.durations.counts)
        progress.steps_total_s, progress.samples = clock.durations.total, clock.samples
        rates: dict[str, Any] = {}
        if group is not None and group.rank == 0:
            rates = self.state.learning_rates()
        reported, wait_s = dict(self._reported), _LAST_WAIT_S if whole else _WAIT_S
        known, known_rates = self._numbers_of_reports, self._numbers_of_rates
        for name in known.keys() - reported.keys():  # only the newest names are kept
            known.pop(name, None)
        self._reader.read([*_unread(reported, known), *_unread(rates, known_rates)], wait_s)
        progress.reported.update(_numbers(reported, known))
        progress.global_batch = clock.global_batch
        progress.learning_rates.update(_numbers(rates, known_rates))
        if (pace := clock.pace.to_pb()) is not None:
            progress.pace.CopyFrom(pace)
        self._link.send(progress=progress)

    def _progress(self, group: Group | None) -> pb.Progress:
        collectives, quiet_s = self._collectives(group)
        place, place_s = self._clock.place.look()
        return pb.Progress(
            worker=self._link.worker,
            generation=group.generation.number if group is not None else 0,
            committed=self.state.committed,
            epoch=self.state.position.epoch,
            step_s=self._clock.step_s,
            longest_step_s=self._clock.longest_s,
            samples_per_s=self._clock.samples_per_s,
            in_step_s=self._clock.under_way_s(),
            first_step=self._clock.first_step,
            compiling=self._compilations.under_way,
            waiting_s=self._clock.waiting_s(),
            collectives=collectives,
            quiet_s=quiet_s,
            place=stacks_pb2.Place.Name(place.value),
            place_s=place_s,
            spent=self._clock.spent.to_pb(),
        )

    def _collectives(self, group: Group | None) -> tuple[int, float]:
        """In a block or call: 1 + how many collectives the group has begun since the newest step
        was reduced, and the seconds since the last one."""
        if group is None or not self._clock.in_call:
            self._newest_collective = (0, 0.0)
            return 0, 0.0
        since = self._clock.collectives_reduced or 0  # totals differ, as members form a group
        count, now = max(1, 1 + group.collectives() - since), time.monotonic()
        if count != self._newest_collective[0]:
            self._newest_collective = (count, now)
        return count, now - self._newest_collective[1]

    def _send_ledger(self, group: Group) -> None:
        number = group.generation.number
        whole, self._send_whole_ledger = self._send_whole_ledger, False
        fresh = self.state.ledger.since(0 if whole else self._ledger_sent, of_oldest=_MOST_UNSTORED)
        if not fresh and not whole:
            return
        self._ledger_sent = fresh[-1].step + 1 if fresh else 0
        for begin in range(0, max(len(fresh), 1), _MOST_RECORDS):
            some, first = fresh[begin : begin + _MOST_RECORDS], begin == 0
            entries = [pb.LedgerEntry(**record._asdict()) for record in some]
            told = local_pb2.LedgerEntries(
                entries=entries, whole=whole and first, generation=number
            )
            self._link.send(ledger=told)

    def _send_curve(self, group: Group, whole: bool) -> None:
        number = group.generation.number
        again, self._send_whole_curve = self._send_whole_curve, False
        since = 0 if again else self._curve_sent
        fresh = self.curve.since(since, most=_MOST_UNSTORED, whole=whole)
        wanted = [each for point in fresh for each in _unread(point.values, point.values)]
        self._curve_reader.read(wanted, _LAST_WAIT_S if whole else _WAIT_S)
        for index, point in enumerate(fresh):  # later ones follow when this one can be read
            if any(not self._curve_reader.gives_up(v) for _, _, v in _unread(point.values, {})):
                del fresh[index:]
                break
        if fresh:
            self._curve_sent = fresh[-1].step + 1
        numbers = (point._replace(values=_numbers(point.values, {})) for point in fresh)
        # Points without values are sent too: they replace what a file may have of such a step from
        # before it was given up.
        points = [pb.CurvePoint(**point._asdict()) for point in numbers]
        for begin in range(0, max(len(points), int(again)), _MOST_POINTS):
            some, first = points[begin : begin + _MOST_POINTS], begin == 0
            told = local_pb2.CurvePoints(points=some, whole=again and first, generation=number)
            self._link.send(curve=told)


def _unread(values: Mapping[str, Any], numbers: dict[str, Any]) -> list[Wanted]:
    """The values that may have to be waited for."""
    return [Wanted(numbers, n, v) for n, v in list(values.items()) if not is_ready(v)]


def _numbers(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers. known: the newest numbers of those that are on a device."""
    numbers = {
        _name(name): as_number(value) if is_ready(value) else known.get(name)
        for name, value in list(values.items())
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _name(name: str) -> str:
    """The name as valid UTF-8 for protobuf: a name from `**values` may have lone surrogates."""
    return name.encode(errors="backslashreplace").decode()[:_LONGEST_NAME]


_MOST_THREADS = 64


def own_stacks(*, brief: bool) -> stacks_pb2.ProcessStacks:
    """The Python stacks of this process, the main thread's first. brief: only that one. Takes no
    lock, since a thread of the script may hold it."""
    running = stacks_of_threads()
    main = threading.main_thread().ident or 0
    names = {ident: thread.name for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]
    idents = [main] if brief else [main, *(i for i in running if i != main)]
    threads = [
        (names.get(ident, f"thread {ident}"), running[ident])
        for ident in idents[:_MOST_THREADS]
        if ident in running
    ]
    return process_to_pb(os.getpid(), sys.argv[0], threads)


_MOST_VALUES = 32


class Curve:
    """The values that the script reports of each step.

    The script's thread fills it, and the reporting thread reads it. Values are copied, since a
    script may change a tensor in place. Those of a block that is given up are dropped.
    """

    def __init__(self) -> None:
        self.kept = False
        """Whether the coordinator wants the curve."""
        self.backlog: CurvePoints = Backlog()
        """The points that are not stored yet. They are part of the job's state: a member that joins
        receives them, and checkpoints have them."""
        self._of_block: dict[str, Any] = {}
        self._newest: CurvePoint | None = None

    def keep(self, keep: bool) -> None:
        self.kept = keep
        if not keep:
            self._newest = None
            self.backlog.replace(())

    def report(self, values: Mapping[str, Any], *, committed: bool) -> None:
        """Add values of the block under way, or, if `committed`, of the last committed block."""
        newest = self._newest
        found = newest.values if committed and newest is not None else self._of_block
        for name, value in values.items():
            number, kept_as = _as_number(value), str(name)[:_LONGEST_NAME]
            if number is not None and (kept_as in found or len(found) < _MOST_VALUES):
                found[kept_as] = number

    def committed(self, step: int, run: str, generation: int) -> None:
        """Add the block's values as the point of its step."""
        values, self._of_block = self._of_block, {}
        point = CurvePoint(step, run, generation, time.time(), values)
        self._newest = point
        self.backlog.append(point)

    def given_up(self) -> None:
        """Drop the block's values: its step does not count."""
        self._of_block = {}

    def since(self, step: int, *, most: int, whole: bool) -> list[CurvePoint]:
        """The points of steps from `step` on, `most` of the oldest. The newest is among them only
        if `whole`: the script may still report values for it, below the block."""
        points = self.backlog.since(step, of_oldest=most)
        if points and not whole and points[-1] is self._newest:
            points.pop()
        return points


def _as_number(value: Any) -> float | torch.Tensor | None:
    """A number, or a tensor of one element that nothing else changes, to read on another thread.
    None for anything else."""
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and not value.is_complex() and not value.is_meta
        return value.detach().clone() if is_one else None
    return as_number(value)
