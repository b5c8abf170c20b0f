"""A driver of a `Participation` that carries out its actions as the test says, and logs them.

The membership machine is the real one. An action for which the test gives no answer gets a default,
mostly None. An answer that is an exception is thrown into the protocol.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.core.data_order import SampleRange
from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase
from elastic.core.recovery import Declaration, Mark
from elastic.core.worker import participation as act
from elastic.core.worker.machine import Worker
from elastic.core.worker.participation import Participation, Progress, Steps
from elastic.errors import GroupLost

DIGEST = 42
LOST = GroupLost("a peer is gone")


class ByWorld:
    """A loader whose global batch grows with the group."""

    def batch_ratio(self, world_size: int, reference_world: int) -> float:
        return world_size / reference_world


def generation(number: int, *workers: str, **fields: Any) -> Generation:
    """A generation of these workers, in the order of their ranks."""
    members = tuple(Member(worker=w, node=w, slot=0, endpoint=f"{w}:1") for w in workers)
    known: dict[str, Any] = {"incarnation": "i", "reason": ChangeReason.STARTED}
    return Generation(number=number, members=members, **{**known, **fields})


class Driver:
    """Drives the participation of one worker."""

    def __init__(self, worker: str = "a", *, save_every: int = 0) -> None:
        self.machine = Worker(worker)
        self.machine.attached()
        self.machine.assigned(0)
        self.machine.prepared(f"{worker}:1")
        self.part = Participation(self.machine, save_every=save_every)
        self.log: list[str] = []
        self._answers: defaultdict[type, deque[Any]] = defaultdict(deque)
        self._seat: act.Seat | None = None

    # ---- what the test says

    def announce(self, number: int, *workers: str, **fields: Any) -> None:
        self.machine.generation_announced(generation(number, *workers, **fields))

    def answer(self, kind: type, *answers: Any) -> None:
        """Set the results of the next actions of this kind: values, exceptions, or functions of
        the action."""
        self._answers[kind].extend(answers)

    def peers(self, *declared: Declaration | None) -> None:
        """Set what the next group declares, in the order of ranks; None: this member's own."""
        self.answer(act.Declare, lambda mine: tuple(d if d is not None else mine for d in declared))

    def meets(self, number: int, **declared: Declaration | None) -> None:
        """Announce a generation of these workers, in the order of ranks, that declare this."""
        self.announce(number, *declared)
        self.peers(*declared.values())

    def lose_at(self, kind: type, number: int, *workers: str, **fields: Any) -> None:
        """Lose the group in the next action of this kind, with this generation to follow."""

        def lose(_: Any) -> None:
            self.announce(number, *workers, **fields)
            raise LOST

        self.answer(kind, lose)

    # ---- what the script does

    def drive(self, protocol: Steps) -> Any:
        """Carry out the actions of the protocol, and return its result."""
        resume: Callable[[Any], act.Action] = protocol.send
        value: Any = None
        while True:
            try:
                action = resume(value)
            except StopIteration as end:
                return end.value
            self.log.append(described(action))
            try:
                resume, value = protocol.send, self._carry_out(action)
            except Exception as error:  # noqa: BLE001 - the protocol decides what follows
                resume, value = protocol.throw, error

    def begin_loop(self, loader: int = 0) -> None:
        self.drive(self.part.begin_loop(loader, ByWorld()))

    def boundary(self) -> None:
        if not self.part.passes_boundary():
            self.drive(self.part.boundary())

    def enter_block(self) -> None:
        """Pass the boundary and begin the block of the next step."""
        self.boundary()
        self.part.begin_block()

    def step(self) -> None:
        """Do a step of four samples."""
        self.enter_block()
        self.commit()

    def commit(self) -> None:
        start = self.part.progress.position(self.part.loader).cursor
        self.part.commit(SampleRange(epoch=0, start=start, stop=start + 4))

    def give_up(self) -> bool:
        """Lose the group in the block; return whether the block counts."""
        return bool(self.drive(self.part.give_up_block(LOST)))

    def call(self, name: str) -> Any:
        """Call session.run; return the name unless the test has given another answer."""
        return self.drive(self.part.run(name))

    def taken(self) -> list[str]:
        """Return the actions since the last call of this method."""
        log, self.log = self.log, []
        return log

    # ---- carrying out

    def _carry_out(self, action: act.Action) -> Any:
        answers = self._answers[type(action)]
        given = answers.popleft() if answers else None
        if isinstance(given, Exception):
            raise given
        match action:
            case act.Join():
                if given is not None:
                    given(action)
                return self._join()
            case act.Declare(mine=mine):
                mine = with_digests(mine)
                return given(mine) if given is not None else (mine,)
            case act.TellJoined(committed=committed):
                assert self._seat is not None
                self.machine.joined(self._seat.generation, committed)
            case act.DropState():
                self.machine.state_dropped()
            case act.Leave():
                self.machine.group_left(self.part.progress.committed)
            case act.Break(held=held):
                self._break(held)
            case act.PutBack() | act.PutBackForRetry():
                return True if given is None else given
            case act.AwaitSettlement():
                return given(action) if given is not None else False
            case act.Perform(call=call):
                return given(action) if given is not None else call
            case _:
                return given(action) if callable(given) else given
        if given is not None:
            given(action)
        return None

    def _join(self) -> act.Seat:
        found = self.machine.joinable()
        assert found is not None, "it would wait for ever"
        self.machine.join_began(found)
        rank = found.rank_of(self.machine.status.worker)
        assert rank is not None
        self._seat = act.Seat(generation=found, rank=rank)
        return self._seat

    def _break(self, held: bool) -> None:
        committed = self.part.progress.committed
        if self.machine.status.phase is WorkerPhase.READY:
            return  # lost before it had begun to join
        if self.machine.superseded():
            self.machine.group_left(committed, held=held)
        else:
            self.machine.group_broke(committed, "", held=held)


def with_digests(mine: Declaration) -> Declaration:
    """The declaration with the digests of a right state, if its state is intact."""
    if not mine.intact:
        return mine
    return replace(mine, commit_digest=DIGEST if mine.committed else 0, begin_digest=DIGEST)


def described(action: act.Action) -> str:
    """The action in one line: its name and the fields that matter."""
    words = [type(action).__name__]
    for field in dataclasses.fields(action):
        value = getattr(action, field.name)
        match value:
            case True:
                words.append(field.name)
            case Mark():
                words.append(value.name)
            case int() | tuple() | str() if value is not False:
                words.append(f"{field.name}={value}")
            case Progress():
                words.append(f"step={value.committed}")
            case act.Seat():
                words.append(f"generation={value.generation.number}")
    return " ".join(words)


def veteran(committed: int, committed_in: int = 1, **fields: Any) -> Declaration:
    """The declaration of an intact member that trains."""
    known: dict[str, Any] = {
        "intact": True,
        "signature": 0,
        "took_part": True,
        "commit_digest": DIGEST if committed else 0,
        "begin_digest": DIGEST,
    }
    return Declaration(committed=committed, committed_in=committed_in, **{**known, **fields})


NEWCOMER = Declaration(committed=0, intact=False, signature=0)
ME: Declaration | None = None
"""Stands for the declaration of the member under test."""


def begun(worker: str = "a", **options: int) -> Driver:
    driver = Driver(worker, **options)
    driver.announce(1, worker)
    driver.begin_loop()
    driver.taken()
    return driver


def trained(steps: int, worker: str = "a", **options: int) -> Driver:
    """A job of one worker that has committed this many steps."""
    driver = begun(worker, **options)
    for _ in range(steps):
        driver.step()
    driver.taken()
    return driver


def joined(number: int, *between: str, committed: int, marks: str = "") -> list[str]:
    """The actions on the way into a group; `between` follow the declarations."""
    return [
        f"Join {marks}".strip(),
        "Declare",
        *between,
        f"TellJoined committed={committed}",
        f"SetUp generation={number}",
        "Entered",
    ]


def struck(steps: int, *workers: str) -> Driver:
    """A worker in the next step's block that has been told of generation 2 of these workers."""
    driver = trained(steps)
    driver.enter_block()
    driver.announce(2, *workers)
    return driver
