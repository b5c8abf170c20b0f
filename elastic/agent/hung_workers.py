"""What the failure of a worker that was looked at before it was ended says of where it hung."""

from __future__ import annotations

import dataclasses

from elastic.core.diagnosis import doing, where_it_hangs
from elastic.core.membership import Failure, FailureKind
from elastic.rpc.stacks import stack_lines, whereabouts_from_pb
from elastic.v1 import stacks_pb2 as pb

_MOST_LINES = 40


def with_place(failure: Failure, stacks: pb.WorkerStacks) -> Failure:
    """The same with the place at which the script hung, if the coordinator has not told it, and
    with a signature that is equal for all workers that hang there."""
    rank = whereabouts_from_pb(stacks, rank=0, node="")
    place, message = failure.place, failure.message
    if not place:
        frame = where_it_hangs(rank)
        place = frame.place if frame is not None else ""
        message = f"{message}: it {doing(rank)}"
    signature = failure.signature
    if place and failure.kind is FailureKind.LEFT_OUT:
        signature = f"hung at {place}"
    return dataclasses.replace(failure, message=message, place=place, signature=signature)


def main_stacks(stacks: pb.WorkerStacks) -> str:
    """Those of the main threads, as lines of which not too many are."""
    brief = pb.WorkerStacks()
    brief.CopyFrom(stacks)
    for process in brief.processes:
        del process.threads[1:]
    lines = list(stack_lines(brief))
    return "\n".join(lines[:_MOST_LINES])
