"""Converts workers' stacks from and to the wire, for the verdict and as text for people."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from elastic.core.whereabouts import Answer, ChildStack, Frame, Place, Whereabouts
from elastic.v1 import stacks_pb2 as pb

# Place and Answer carry the numbers of stacks.proto; a test checks that.
_Enum = TypeVar("_Enum", bound=enum.Enum)
_MOST_FRAMES = 60
_LONGEST_NAME = 500


def whereabouts_from_pb(stacks: pb.WorkerStacks, *, rank: int, node: str) -> Whereabouts:
    """What the verdict needs to know of a worker; values of a newer version become unknown."""
    own, children = stacks.processes[:1], stacks.processes[1:]
    return Whereabouts(
        rank=rank,
        worker=stacks.worker,
        node=node,
        answer=_known(Answer, stacks.answer, Answer.NONE),
        place=_known(Place, stacks.place, Place.UNKNOWN),
        place_s=stacks.place_s,
        committed=stacks.committed,
        collectives=stacks.collectives,
        frames=_main_frames(own),
        children=tuple(ChildStack(pid=c.pid, frames=_main_frames([c])) for c in children),
    )


def process_to_pb(
    pid: int, name: str, threads: Iterable[tuple[str, tuple[Frame, ...]]]
) -> pb.ProcessStacks:
    """threads: headings and frames as a process has written them, the main thread first."""
    return pb.ProcessStacks(
        pid=pid,
        name=_text(name),
        threads=[
            pb.ThreadStack(
                name=_text(heading),
                frames=[
                    pb.Frame(file=_text(f.file), line=f.line, function=_text(f.function))
                    for f in frames[:_MOST_FRAMES]
                ],
                left_out=max(0, len(frames) - _MOST_FRAMES),
            )
            for heading, frames in threads
        ],
    )


def stack_lines(stacks: pb.WorkerStacks, indent: str = "") -> Iterator[str]:
    """The text of each thread of each process, main threads first, and innermost frames first as
    faulthandler writes them."""
    for number, process in enumerate(stacks.processes):
        whose = "child" if number else "process"
        yield f"{indent}{whose} {process.pid}: {process.name}"
        for thread in process.threads:
            yield f"{indent}  {thread.name} (most recent call first):"
            for frame in thread.frames:
                yield f'{indent}    File "{frame.file}", line {frame.line} in {frame.function}'
            if thread.left_out:
                yield f"{indent}    and {thread.left_out} more"


def _main_frames(processes: Sequence[pb.ProcessStacks]) -> tuple[Frame, ...]:
    if not processes or not processes[0].threads:
        return ()
    return frames_from_pb(processes[0].threads[0])


def frames_from_pb(thread: pb.ThreadStack) -> tuple[Frame, ...]:
    """The frames, innermost first."""
    return tuple(Frame(f.file, f.line, f.function) for f in thread.frames)


def _known(kind: type[_Enum], number: int, otherwise: _Enum) -> _Enum:
    try:
        return kind(number)
    except ValueError:
        return otherwise


def _text(name: str) -> str:
    return name.encode(errors="replace").decode()[-_LONGEST_NAME:]
