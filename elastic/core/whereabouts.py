"""Where the script of each worker is: the part of the training, and its Python stack."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elastic.core.membership import NodeId, WorkerId

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/lib64/python")
_ELASTIC = "/elastic/"
_OURS = ("worker/", "runtime/", "core/", "rpc/", "checkpoint/", "settings/", "errors.py")


class Place(enum.Enum):
    """The part of the training that the script's thread is in; numbers as in stacks.proto."""

    UNKNOWN = 0
    STARTING = 1
    """It has not come to session.steps() yet."""
    JOINING = 2
    """It forms a group with the others, and comes to one state with them."""
    BOUNDARY = 3
    """elastic's own work between two steps."""
    BETWEEN = 4
    """The script, between two steps."""
    DATA = 5
    FORWARD = 6
    """The step's block, up to the backward pass."""
    BACKWARD = 7
    OPTIMIZER = 8
    """The step's block, after the backward pass."""
    COMMIT = 9
    """The end of the step's block."""
    MEETING = 10
    """It waits for the others to come to a session.run, or to the script's end."""
    RUN = 11
    SAVING = 12


class Answer(enum.Enum):
    """How the stack of a worker could be had; numbers as in stacks.proto."""

    GIVEN = 1
    SIGNALLED = 2
    """The process does not answer; a signal had it write the stack of its main thread."""
    STOPPED = 3
    NONE = 4
    ABSENT = 5
    """Its agent is out of contact, or does not answer."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        """It is of elastic."""
        rest = self.file.rpartition(_ELASTIC)[2]
        return rest != self.file and rest.startswith(_OURS)

    @property
    def is_scripts(self) -> bool:
        """It is of neither elastic nor Python nor an installed package."""
        is_code = self.file.startswith("/") or self.file.endswith(".py")
        return is_code and not self.is_ours and not any(p in self.file for p in _LIBRARIES)

    @property
    def place(self) -> str:
        """The file and line: "/job/train.py:47"."""
        return f"{self.file}:{self.line}"

    @property
    def short_place(self) -> str:
        """The file's name and line: "train.py:47"."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    def __str__(self) -> str:
        inside = f"`{self.function}`, " if self.function != "<module>" else ""
        return f"{inside}{self.short_place}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildStack:
    """What the main thread of a process does that a worker has forked."""

    pid: int
    frames: tuple[Frame, ...]
    """Innermost first, as everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """What is known of one rank at one instant."""

    rank: int
    worker: WorkerId
    node: NodeId
    """The name that people know it by."""
    answer: Answer = Answer.GIVEN
    place: Place = Place.UNKNOWN
    place_s: float = 0.0
    """How long it has been there."""
    committed: int = 0
    collectives: int = 0
    """Collectives begun since the last reduction of its group; 0: not known."""
    frames: tuple[Frame, ...] = ()
    """The stack of its main thread."""
    children: tuple[ChildStack, ...] = ()
