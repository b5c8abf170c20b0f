"""Reports from a thread of its own: progress, figures, ledger and curve, the stacks when they are
asked for, and that the process lives.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from elastic.v1 import job_pb2 as pb
from elastic.v1 import local_pb2, stacks_pb2
from elastic.worker.compilation import COMPILATIONS, Compilations
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import Group
from elastic.worker.link import Link
from elastic.worker.state.backlog import Backlog, CurvePoint, CurvePoints
from elastic.worker.state.job_state import JobState
from elastic.worker.steps_clock import StepsClock

if TYPE_CHECKING:
    from elastic.worker.training import Outcome


INTERVAL_S = 0.2  # of rank 0, which reports for the group
_MOST_FIGURES, _LONGEST_NAME = 100, 100
_MOST_RECORDS = 10_000  # in one message
_MOST_POINTS = 2_000  # of the curve, the same
_MOST_UNSTORED = 20_000  # records on their way: more would only wait in the coordinator's memory
_POLL_S = 0.02
_STORING_S = 2.0  # without any of them stored: nobody stores them
_LAST_REPORT_S = 0.5
_SIGN_OF_LIFE_S = 0.6  # of the others, well below the agent's patience with a silent process


class Reports:
    """What a worker tells of its training. Without an agent nobody hears it."""

    def publish(self, state: JobState, clock: StepsClock, answer: Callable[[], None]) -> None:
        """What to report; `answer` is called at every interval, on the reporting thread."""

    def entered(self, group: Group, outcome: Outcome) -> None:
        """The group is ready to train."""

    def committed(self) -> None:
        """A step was committed."""

    def given_up(self, *, counts: bool) -> None:
        """A block was given up; its step may count all the same."""

    def report(self, values: Mapping[str, Any], *, committed: bool) -> None:
        """Figures of the script, newest wins; of more names than are kept, the newest. committed:
        of the last committed step, and not of the block under way."""

    def notice(self, name: str, fields: Mapping[str, str]) -> None:
        """Something that an operator should know of, as an event."""

    def script_failed(self) -> None:
        """Tell what is left before the process ends."""


class Reporter(Reports):
    """Sends at every interval, and at once when a group has committed its first step.

    Training never waits for it: the script's thread only leaves values to be picked up.
    """

    def __init__(
        self, link: Link, membership: Membership, compilations: Compilations = COMPILATIONS
    ) -> None:
        self._link = link
        self._compilations = compilations
        self._membership = membership
        self.state = JobState()
        """The script's, once it is published."""
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
        self._newest_collective = (0, 0.0)  # how many there were, and since when

    def start(self) -> None:
        """Begin."""
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
        # On another thread, since a device of which a figure is read may hang.
        last = threading.Thread(target=self.flush, name="elastic-last-report", daemon=True)
        last.start()
        last.join(_LAST_REPORT_S)

    def wait_for_ledger(self) -> None:
        """Return when the rest of the ledger is sent, or nobody stores it."""
        ledger = self.state.ledger
        unstored, since = len(ledger), time.monotonic()
        while len(ledger) > _MOST_UNSTORED and time.monotonic() - since < _STORING_S:
            time.sleep(_POLL_S)
            self.flush()
            if len(ledger) < unstored:
                unstored, since = len(ledger), time.monotonic()

    # ---- on the link's thread

    def ledger_stored(self, committed: int, run: str, generation: int) -> None:
        """Entries of steps below `committed`, of no later generation of the run, are on storage."""
        ledger = self.state.ledger
        ledger.stored(committed, run, generation)
        if len(ledger) >= _MOST_UNSTORED:
            self._wake.set()

    def keep_curve(self, keep: bool) -> None:
        """Whether the coordinator wants what the script reports of each step."""
        self.curve.keep(keep)
        self._send_whole_curve = True

    def curve_stored(self, stored: local_pb2.LedgerStored) -> None:
        """As `ledger_stored`."""
        self.curve.backlog.stored(stored.committed, stored.run, stored.generation)
        if stored.send_again:
            self._send_whole_curve = True

    def answer_probe(self) -> None:
        """Send where this member is, at once and without the script's figures."""
        progress = self._progress(self._membership.group)
        progress.probed = True
        self._link.send(progress=progress)

    def answer_stacks(self, request: stacks_pb2.StacksRequest) -> None:
        """Send where this process is, at this instant; or what it did in the last minutes."""
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
        """The coordinator that stores ledger and curve may be new: send all that is not stored."""
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
            with contextlib.suppress(RuntimeError, OSError):  # the store ends with its host
                self._answer()
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def flush(self, *, whole: bool = True) -> None:
        """Send everything now. Whatever a script leaves to be reported, the reports go on."""
        try:
            with self._sending:
                group = self._membership.group
                self._send_progress(group)
                if group is not None and group.rank == 0:
                    self._send_ledger()
                    if self.curve.kept:
                        self._send_curve(whole)
                if self._reformed is not None and not self._first_step_pending:
                    self._link.send(reformed=self._reformed)
                    self._reformed = None
        except Exception as error:  # noqa: BLE001 - of a script's values too
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Say so once."""
        if not self._told:
            self._told = True
            traceback.print_exc()
            self.notice("report_failed", {"message": f"{type(error).__name__}: {error}"})

    def _send_progress(self, group: Group | None) -> None:
        self._compilations.watch()
        progress = self._progress(group)
        clock = self._clock
        progress.step_counts.extend(clock.durations.counts)
        progress.steps_total_s, progress.samples = clock.durations.total, clock.samples
        progress.reported.update(_numbers(dict(self._reported)))
        progress.global_batch = clock.global_batch
        if group is not None and group.rank == 0:
            progress.learning_rates.update(_numbers(self.state.learning_rates()))
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
        """How many there were, and how long ago the last one was, inside of a call."""
        if group is None or not self._clock.in_call:
            self._newest_collective = (0, 0.0)
            return 0, 0.0
        count, now = group.collectives(), time.monotonic()
        if count != self._newest_collective[0]:
            self._newest_collective = (count, now)
        return count, now - self._newest_collective[1]

    def _send_ledger(self) -> None:
        whole, self._send_whole_ledger = self._send_whole_ledger, False
        fresh = self.state.ledger.since(0 if whole else self._ledger_sent, of_oldest=_MOST_UNSTORED)
        if not fresh and not whole:
            return
        self._ledger_sent = fresh[-1].step + 1 if fresh else 0
        for begin in range(0, max(len(fresh), 1), _MOST_RECORDS):
            some, first = fresh[begin : begin + _MOST_RECORDS], begin == 0
            entries = [pb.LedgerEntry(**record._asdict()) for record in some]
            self._link.send(ledger=local_pb2.LedgerEntries(entries=entries, whole=whole and first))

    def _send_curve(self, whole: bool) -> None:
        again, self._send_whole_curve = self._send_whole_curve, False
        since = 0 if again else self._curve_sent
        fresh = self.curve.since(since, most=_MOST_UNSTORED, whole=whole)
        if fresh:
            self._curve_sent = fresh[-1].step + 1
        numbers = (point._replace(values=_numbers(point.values)) for point in fresh)
        # Also of steps without values: what a file has of them is of steps that were given up.
        points = [pb.CurvePoint(**point._asdict()) for point in numbers]
        for begin in range(0, max(len(points), int(again)), _MOST_POINTS):
            some, first = points[begin : begin + _MOST_POINTS], begin == 0
            self._link.send(curve=local_pb2.CurvePoints(points=some, whole=again and first))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What can be read as a number; reading a tensor waits for its device, here and not there."""
    numbers = {_name(name): _number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _name(name: str) -> str:
    """As protobuf takes it: names come from `**values`, and may be no text."""
    return name.encode(errors="backslashreplace").decode()[:_LONGEST_NAME]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - what a script's own object raises
        return None


_MOST_THREADS, _MOST_FRAMES, _LONGEST_PATH = 64, 60, 500


def own_stacks(*, brief: bool) -> stacks_pb2.ProcessStacks:
    """The main thread first; brief: it alone. Takes no lock, which a script's thread may hold."""
    running = sys._current_frames()
    main = threading.main_thread().ident or 0
    names = {ident: thread.name for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]
    idents = [main] if brief else [main, *(i for i in running if i != main)]
    threads = [
        _thread(names.get(ident, f"thread {ident}"), running[ident])
        for ident in idents[:_MOST_THREADS]
        if ident in running
    ]
    return stacks_pb2.ProcessStacks(pid=os.getpid(), name=_text(sys.argv[0]), threads=threads)


def _thread(name: str, frame: FrameType | None) -> stacks_pb2.ThreadStack:
    frames: list[stacks_pb2.Frame] = []
    left_out = 0
    while frame is not None:
        if len(frames) < _MOST_FRAMES:
            code = frame.f_code
            frames.append(
                stacks_pb2.Frame(
                    file=_text(code.co_filename),
                    line=max(frame.f_lineno or 0, 0),
                    function=_text(code.co_name),
                )
            )
        else:
            left_out += 1
        frame = frame.f_back
    return stacks_pb2.ThreadStack(name=_text(name), frames=frames, left_out=left_out)


def _text(name: str) -> str:
    """As protobuf takes it: paths may be no text."""
    return name.encode(errors="replace").decode()[-_LONGEST_PATH:]


_MOST_VALUES = 32


class Curve:
    """Filled by the script's thread, read by the one that reports.

    Values are copied, since a script may add to a tensor in place; those of a block that is given
    up are forgotten.
    """

    def __init__(self) -> None:
        self.kept = False
        """Whether anybody wants it."""
        self.backlog: CurvePoints = Backlog()
        """The job's: a member that joins gets that of another, and a checkpoint has one."""
        self._of_block: dict[str, Any] = {}
        self._newest: CurvePoint | None = None

    def keep(self, keep: bool) -> None:
        """The coordinator wants it, or does not."""
        self.kept = keep
        if not keep:
            self._newest = None
            self.backlog.replace(())

    def report(self, values: Mapping[str, Any], *, committed: bool) -> None:
        """The script's, of the block under way, or of the one that was committed last."""
        newest = self._newest
        found = newest.values if committed and newest is not None else self._of_block
        for name, value in values.items():
            number, kept_as = _as_number(value), str(name)[:_LONGEST_NAME]
            if number is not None and (kept_as in found or len(found) < _MOST_VALUES):
                found[kept_as] = number

    def committed(self, step: int, run: str, generation: int) -> None:
        """The block's step counts."""
        values, self._of_block = self._of_block, {}
        point = CurvePoint(step, run, generation, time.time(), values)
        self._newest = point
        self.backlog.append(point)

    def given_up(self) -> None:
        """It does not."""
        self._of_block = {}

    def since(self, step: int, *, most: int, whole: bool) -> list[CurvePoint]:
        """Points of steps from `step` on. The newest only if it is `whole`: the script may report
        more of it, below the block."""
        points = self.backlog.since(step, of_oldest=most)
        if points and not whole and points[-1] is self._newest:
            points.pop()
        return points


def _as_number(value: Any) -> float | torch.Tensor | None:
    """A number, or a tensor of one that nobody else changes, to be read on another thread; None for
    what is neither."""
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and not value.is_complex() and not value.is_meta
        return value.detach().clone() if is_one else None
    return _number(value)
