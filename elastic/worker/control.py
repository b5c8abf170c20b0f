"""Connects a session to the control plane, with an agent or without one."""

from __future__ import annotations

import atexit
import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

from elastic.checkpoint.directory import open_directory
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    WorkerStatus,
)
from elastic.core.worker.machine import Worker
from elastic.errors import ExitCode, Stranded
from elastic.rpc.codec import (
    failure_to_pb,
    generation_from_pb,
    generation_to_pb,
    status_to_pb,
)
from elastic.runtime.leave_signals import StraySignals
from elastic.runtime.process_title import set_worker_title
from elastic.runtime.training_lease import TrainingLease, WorkerLease
from elastic.v1 import job_pb2, local_pb2
from elastic.worker.group.membership import Membership
from elastic.worker.group.peer_names import never_look_up_peers
from elastic.worker.group.process_group import Backend, Group, StoreHost
from elastic.worker.group.stuck import words
from elastic.worker.link import Link
from elastic.worker.process.as_python import flush_output, name_of_program
from elastic.worker.process.children import keep_from_children
from elastic.worker.reporter import Reporter, Reports
from elastic.worker.script_thread import ScriptThread
from elastic.worker.state.checkpointing import Checkpointing

_LOOPBACK = "127.0.0.1"
_HAND_OVER_S = 60.0
"""The seconds that a worker whose script hangs waits for other members to give its state to."""


class Control(Protocol):
    """The session's view of the control plane."""

    slot: int
    local_world_size: int
    backend: Backend
    checkpoints: Checkpointing
    membership: Membership
    keeps_ledger: bool
    recovers: bool
    """Whether another group can follow a lost one."""
    lease: WorkerLease
    """Until when this worker may begin and commit steps."""
    hand_over_state: Callable[[], None]
    """Called when the script hangs in a lost group, before the process ends."""
    may_stop_script: Callable[[], bool]
    """Asked while the job stops and is out of time: whether the script's thread may be stopped for
    good where it is."""
    leave_early: Callable[[], bool]
    """Called once that thread has stopped, to save and leave in its place; returns whether it
    has."""

    @property
    def reports(self) -> Reports: ...

    def join(self) -> Group:
        """Block until there is a group to join, and build it; see Membership.join."""
        ...

    def finish(self) -> None:
        """Call this when the script has ended. Returns when the process may exit."""
        ...


_LAST_S = 1.0
_STOPS_WITHIN_S = 0.2
"""The seconds that a thread which runs or waits in Python code needs at most to notice a signal.
Longer on a busy machine, but it is asked again."""


def _await_own_threads() -> None:
    """Wait for elastic's daemon threads, for _LAST_S at most, before Python shuts down. If one
    frees a tensor during that, Python ends it in the middle of torch's code, which aborts the
    process. Workers with an agent need no such wait: they end without Python's shutdown."""
    ends_at = time.monotonic() + _LAST_S
    for thread in threading.enumerate():
        if thread.name.startswith("elastic-") and thread.daemon:
            thread.join(max(0.0, ends_at - time.monotonic()))


class LocalControl:
    """The control plane without an agent: a job of one worker, in a group of one."""

    keeps_ledger = False
    recovers = False

    def __init__(self) -> None:
        never_look_up_peers()
        atexit.register(_await_own_threads)
        self.slot, self.local_world_size = 0, 1
        self.backend = Backend.for_slot(0)
        self.reports = Reports()
        self.lease = TrainingLease.unlimited().share()
        self.hand_over_state: Callable[[], None] = _nothing
        self.may_stop_script: Callable[[], bool] = _never
        self.leave_early: Callable[[], bool] = _never
        self.checkpoints = Checkpointing()
        self.membership = Membership(
            Worker("local", pid=os.getpid()),
            report=lambda _status: None,
            committed=lambda: 0,
            join_timeout_s=60.0,
        )
        self.membership.attach()
        self.membership.assign(0)

    def join(self) -> Group:
        host = StoreHost(_LOOPBACK)
        self.membership.prepare(host.endpoint, self.backend)
        alone = Member(worker="local", node="local", slot=0, endpoint=host.endpoint)
        self.membership.announce(
            Generation(number=1, incarnation="local", members=(alone,), reason=ChangeReason.STARTED)
        )
        return self.membership.join(host, self.backend)

    def finish(self) -> None:
        """Return at once: there are no other workers to wait for."""


class AgentControl:
    """The control plane with an agent at the other end of `link`. The constructor blocks until the
    agent gives this worker a slot."""

    recovers = True

    def __init__(self, link: Link, lease: WorkerLease) -> None:
        self._link = link
        self.lease = lease
        self._assigned = threading.Event()
        self._dismissed = threading.Event()
        self._assignment = local_pb2.Assignment()
        self._host: StoreHost | None = None
        self._titled: int | None = None  # the rank in the process title
        self.hand_over_state: Callable[[], None] = _nothing
        self.may_stop_script: Callable[[], bool] = _never
        self.leave_early: Callable[[], bool] = _never
        self.checkpoints = Checkpointing()
        self.membership = Membership(
            Worker(link.worker, pid=os.getpid()),
            report=self._report_status,
            committed=lambda: self.reports.state.committed,
            give_up=self._give_up,
            leave_block=self._leave_block,
        )
        self.reports = Reporter(link, self.membership)
        keep_from_children(self._descriptors)
        self._stray_signals = StraySignals()
        self._stray_signals.take_over()
        self._script_thread = ScriptThread(lambda: self.may_stop_script())
        self._script_thread.take_over()
        self._leaving = threading.Lock()
        self._leaver: threading.Thread | None = None
        link.start(self._command, self._report_again, self._link_failed)
        self.membership.attach()
        self.reports.start()
        self._assigned.wait()
        self._take_up(self._assignment)

    def _take_up(self, assignment: local_pb2.Assignment) -> None:
        self.slot, self.local_world_size = assignment.slot, assignment.local_world_size
        self.keeps_ledger = assignment.ledger
        self.backend = Backend.for_slot(self.slot)
        self.membership.join_timeout_s = assignment.join_timeout_s
        if assignment.checkpoint_dir:
            self.checkpoints = Checkpointing(
                open_directory(assignment.checkpoint_dir),
                worker=self._link.worker,
                every=assignment.checkpoint_every,
                send=self._link.send,
            )
        self.membership.assign(self.slot)

    # ---- for the session

    def join(self) -> Group:
        """Block until there is a group to join, and build it; see Membership.join."""
        if self._host is None:
            ports = (self._assignment.first_port, self._assignment.last_port)
            self._host = StoreHost(self._assignment.host or _LOOPBACK, ports)
            self.membership.prepare(self._host.endpoint, self.backend)
        group = self.membership.join(self._host, self.backend)
        if group.rank != self._titled:
            self._titled = group.rank
            set_worker_title(self._link.worker, name_of_program(), group.rank)
        return group

    def finish(self) -> None:
        """Wait until this worker's saves and reports are done, and until the agent dismisses it
        because every member's script has ended."""
        self.checkpoints.wait_idle()
        self.reports.flush()
        self.reports.wait_for_ledger()
        self.membership.finish()
        self._dismissed.wait()

    # ---- on the link's thread

    def _command(self, command: local_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "assignment":
            self._assignment = command.assignment
            self.reports.keep_curve(command.assignment.curve)
            self._assigned.set()
        elif kind == "generation":
            self.membership.announce(generation_from_pb(command.generation))
        elif kind == "checkpoint":
            settled = command.checkpoint
            self.checkpoints.settle(
                settled.step, committed=not settled.abandoned, generation=settled.generation
            )
        elif kind == "ledger_stored":
            stored = command.ledger_stored
            self.reports.ledger_stored(stored.committed, stored.run, stored.generation)
            if stored.send_again:
                self.reports.report_again()
        elif kind == "keep_curve":
            self.reports.keep_curve(command.keep_curve.keep)
        elif kind == "curve_stored":
            self.reports.curve_stored(command.curve_stored)
        elif kind == "node_leaves":
            self._stray_signals.node_leaves()
        elif kind == "dismiss":
            self._dismissed.set()
        elif kind == "report_again":
            self._report_again()
        elif kind == "probe":
            self.reports.answer_probe()
        elif kind == "stacks":
            self.reports.answer_stacks(command.stacks)

    def _report_again(self) -> None:
        """Send everything again: a new agent or coordinator knows nothing about this worker."""
        newest, group = self.membership.announced, self.membership.group
        if newest is not None:
            known = job_pb2.Known(newest=generation_to_pb(newest))
            if group is not None and group.generation.number != newest.number:
                known.before.CopyFrom(generation_to_pb(group.generation))
            self._link.send(known=known)
        self.membership.report_again()
        self.reports.report_again()
        self.checkpoints.report_again()

    def _report_status(self, status: WorkerStatus) -> None:
        self._link.send(status=status_to_pb(status))

    def _link_failed(self, error: Exception) -> None:
        """End the process: the link's thread has failed, so nothing would free this worker from a
        lost group or tell it to leave one."""
        traceback.print_exception(error)
        self._end_with(
            FailureKind.EXCEPTION,
            f"{type(error).__name__}: {error} (it can no longer receive its agent's commands)",
            "".join(traceback.format_exception(error)),
        )

    def _give_up(self, stood_s: float) -> None:
        """End the process, after an attempt to give its state to others: its script will never
        return from a group that was aborted. See group/stuck.py.

        stood_s: seconds for which the script's thread has stood still.
        """
        faulthandler.dump_traceback(all_threads=True)
        message = words(stood_s)  # before its groups are discarded
        giver = threading.Thread(target=self.hand_over_state, name="elastic-bequeath", daemon=True)
        giver.start()
        giver.join(_HAND_OVER_S)
        self._end_with(FailureKind.LEFT_OUT, message)

    def _leave_block(self) -> bool:
        """Stop the script's thread in its block, which takes too long for the job's end, and have
        another thread save and leave. Returns False if that thread must not be stopped now."""
        with self._leaving:
            if self._leaver is None and self._script_thread.stop(_STOPS_WITHIN_S):
                self._leaver = threading.Thread(
                    target=self._save_and_end, name="elastic-leave", daemon=True
                )
                self._leaver.start()
            return self._leaver is not None

    def _save_and_end(self) -> NoReturn:
        message, trace, failure = "", "", FailureKind.LEFT_OUT
        try:
            if self.leave_early():
                flushes = threading.Thread(target=flush_output, daemon=True)
                flushes.start()  # the script's thread may have stopped while it was printing
                flushes.join(_LAST_S)
                os._exit(ExitCode.OK)
            message = "given up for the job's end, with no state that the others need to save"
        except BaseException as error:  # noqa: BLE001 - the process ends, since its script stands
            if not isinstance(error, Stranded):
                failure = FailureKind.EXCEPTION
            message = f"{type(error).__name__}: {error} (while it saved for the job's end)"
            trace = "".join(traceback.format_exception(error))
        self._end_with(failure, message, trace)

    def _end_with(self, kind: FailureKind, message: str, trace: str = "") -> NoReturn:
        """Report the failure and end the process, whatever its script is doing."""
        failure = Failure(
            worker=self._link.worker,
            kind=kind,
            signature=f"{kind.name}: {message}",
            message=message,
            traceback=trace,
        )
        self._link.send(failure=failure_to_pb(failure))
        os._exit(1)

    def _descriptors(self) -> list[int]:
        group = self.membership.group
        return [self._link.fileno(), *(group.descriptors() if group is not None else [])]


def _never() -> bool:
    """The answers of a worker that does not train yet."""
    return False


def _nothing() -> None:
    """The `hand_over_state` of a worker that does not train yet: it has no state to give."""
