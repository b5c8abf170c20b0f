"""The data types that say where each worker's script is: part of the training, Python stack."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elastic.core.membership import NodeId, WorkerId

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")
_ELASTIC = "/elastic/"
_OURS = ("worker/", "runtime/", "core/", "rpc/", "checkpoint/", "settings/", "errors.py")


class Place(enum.Enum):
    """The part of the training that the script's thread is in, with the numbers of stacks.proto."""

    UNKNOWN = 0
    STARTING = 1
    """Before session.steps()."""
    JOINING = 2
    """It forms a group with the others, and agrees with them on one state."""
    BOUNDARY = 3
    """elastic's own work between two steps."""
    BETWEEN = 4
    """The script's code between two steps."""
    DATA = 5
    FORWARD = 6
    """The step's block, up to the backward pass."""
    BACKWARD = 7
    OPTIMIZER = 8
    """The step's block, after the backward pass."""
    COMMIT = 9
    """The end of the step's block."""
    MEETING = 10
    """It waits for the others to come to a session.run or to the script's end."""
    RUN = 11
    SAVING = 12


class Answer(enum.Enum):
    """How the stack of a worker was obtained, with the numbers of stacks.proto."""

    GIVEN = 1
    SIGNALLED = 2
    """The process did not answer, and a signal made it write the stack of its main thread."""
    STOPPED = 3
    NONE = 4
    ABSENT = 5
    """The worker's agent is out of contact or does not answer."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether the code is elastic's own."""
        rest = self.file.rpartition(_ELASTIC)[2]
        return rest != self.file and rest.startswith(_OURS)

    @property
    def is_scripts(self) -> bool:
        """Whether the code is the script's: not of elastic, Python or an installed package."""
        is_code = self.file.startswith("/") or self.file.endswith(".py")
        return is_code and not self.is_ours and not any(p in self.file for p in _LIBRARIES)

    @property
    def place(self) -> str:
        """The path and line: "/job/train.py:47"."""
        return f"{self.file}:{self.line}"

    @property
    def short_place(self) -> str:
        """The file name and line: "train.py:47"."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    def __str__(self) -> str:
        inside = f"`{self.function}`, " if self.function != "<module>" else ""
        return f"{inside}{self.short_place}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildStack:
    """The stack of the main thread of a process that a worker has forked."""

    pid: int
    frames: tuple[Frame, ...]
    """Innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """What is known about one rank at one instant."""

    rank: int
    worker: WorkerId
    node: NodeId
    """The name of its node that is shown to people."""
    answer: Answer = Answer.GIVEN
    place: Place = Place.UNKNOWN
    place_s: float = 0.0
    """How long it has been in `place`, in seconds."""
    committed: int = 0
    """The number of committed steps."""
    collectives: int = 0
    """Collectives begun since the last reduction of its group. 0: not known."""
    frames: tuple[Frame, ...] = ()
    """The stack of its main thread, innermost first."""
    children: tuple[ChildStack, ...] = ()


MOST_STACKS = 4
"""Ranks of one hang whose stacks are recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStacks:
    """The stacks of the main threads of one rank's processes, as text."""

    rank: int
    node: str
    worker: WorkerId
    doing: str
    text: str
