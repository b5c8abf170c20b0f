"""Converts the core's dataclasses to messages on the wire, and back."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    Purpose,
    WorkerPhase,
    WorkerStatus,
)
from elastic.v1 import job_pb2 as pb

_MOST_OF_A_LINE = 10_000  # characters of text from a script
_MOST_OF_A_TEXT = 100_000

# The enums of core/membership.py and job.proto carry equal numbers; a test checks that.


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(
        worker=member.worker, node=member.node, slot=member.slot, endpoint=member.endpoint
    )


def generation_to_pb(generation: Generation) -> pb.Generation:
    return pb.Generation(
        number=generation.number,
        incarnation=generation.incarnation,
        members=[member_to_pb(m) for m in generation.members],
        reason=pb.ChangeReason.Name(generation.reason.value),
        leave_after=generation.leave_after,
        purpose=pb.Purpose.Name(generation.purpose.value),
        save_first=generation.save_first,
        provisional=generation.provisional,
        begun=generation.begun,
        restart_count=generation.restart_count,
        max_restarts=generation.max_restarts,
    )


def generation_from_pb(message: pb.Generation) -> Generation:
    """Raises ValueError for a reason or purpose of a newer version."""
    return Generation(
        number=message.number,
        incarnation=message.incarnation,
        members=tuple(
            Member(worker=m.worker, node=m.node, slot=m.slot, endpoint=m.endpoint)
            for m in message.members
        ),
        reason=ChangeReason(message.reason),
        leave_after=message.leave_after if message.HasField("leave_after") else None,
        purpose=Purpose(message.purpose),
        save_first=message.save_first,
        provisional=message.provisional,
        begun=message.begun,
        restart_count=message.restart_count,
        max_restarts=message.max_restarts,
    )


def status_to_pb(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker=status.worker,
        phase=pb.WorkerPhase.Name(status.phase.value),
        slot=status.slot,
        generation=status.generation,
        acknowledged=status.acknowledged,
        broken=status.broken,
        detail=status.detail,
        committed=status.committed,
        endpoint=status.endpoint,
        pid=status.pid,
        has_state=status.has_state,
        trained_in=status.trained_in,
        in_run=status.in_run,
        compiling=status.compiling,
    )


def status_from_pb(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker=message.worker,
        phase=WorkerPhase(message.phase),
        slot=message.slot if message.HasField("slot") else None,
        generation=message.generation,
        acknowledged=message.acknowledged,
        broken=message.broken,
        detail=message.detail,
        committed=message.committed,
        endpoint=message.endpoint,
        pid=message.pid,
        has_state=message.has_state,
        trained_in=message.trained_in,
        in_run=message.in_run,
        compiling=message.compiling if message.HasField("compiling") else None,
    )


def statuses_from_pb(messages: Iterable[pb.WorkerStatus]) -> tuple[WorkerStatus, ...]:
    return tuple(status_from_pb(m) for m in messages)


def failure_to_pb(failure: Failure) -> pb.Failure:
    return pb.Failure(
        worker=failure.worker,
        kind=pb.FailureKind.Name(failure.kind.value),
        code=failure.code,
        signature=_text(failure.signature, _MOST_OF_A_LINE),
        message=_text(failure.message, _MOST_OF_A_LINE),
        traceback=_text(failure.traceback),
        log_tail=_text(failure.log_tail),
        retryable=failure.retryable,
        state_lost=failure.state_lost,
        log=failure.log,
        place=_text(failure.place),
        kernel=_text(failure.kernel),
    )


def _text(text: str, most: int = _MOST_OF_A_TEXT) -> str:
    """Replace lone surrogates, which an exception's text may hold and a message may not; cut the
    middle out of text that is too long for a message."""
    if len(text) > most:
        left_out = f"[{len(text) - most} characters are left out here]"
        text = f"{text[: most // 2]}\n{left_out}\n{text[-(most // 2) :]}"
    return text.encode(errors="replace").decode()


def failure_from_pb(message: pb.Failure) -> Failure:
    return Failure(
        worker=message.worker,
        kind=FailureKind(message.kind),
        code=message.code,
        signature=message.signature,
        message=message.message,
        traceback=message.traceback,
        log_tail=message.log_tail,
        retryable=message.retryable,
        state_lost=message.state_lost,
        log=message.log,
        place=message.place,
        kernel=message.kernel,
    )
