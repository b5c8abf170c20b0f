"""A driver for a participation: carries its actions out as the test tells it, and writes them down.

The membership machine is the real one. What the driver does not know it answers with None, and
every answer may be an exception, which is thrown into the protocol.
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
    """One worker's participation and all that happens to it."""

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
        """The coordinator decided."""
        self.machine.generation_announced(generation(number, *workers, **fields))

    def answer(self, kind: type, *answers: Any) -> None:
        """The results of the next actions of this kind: values, exceptions, or functions of the
        action."""
        self._answers[kind].extend(answers)

    def peers(self, *declared: Declaration | None) -> None:
        """The next declarations are these, in the order of ranks; None stands for its own."""
        self.answer(act.Declare, lambda mine: tuple(d if d is not None else mine for d in declared))

    def meets(self, number: int, **declared: Declaration | None) -> None:
        """The coordinator decided on these workers, in the order of ranks, who declare that."""
        self.announce(number, *declared)
        self.peers(*declared.values())

    def lose_at(self, kind: type, number: int, *workers: str, **fields: Any) -> None:
        """The next action of this kind ends with the loss of the group: this generation follows."""

        def lose(_: Any) -> None:
            self.announce(number, *workers, **fields)
            raise LOST

        self.answer(kind, lose)

    # ---- what the script does

    def drive(self, protocol: Steps) -> Any:
        """Carry out what the protocol asks for, until it returns."""
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
        """Come to the next step's block."""
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
        """The group is lost in the block."""
        return bool(self.drive(self.part.give_up_block(LOST)))

    def call(self, name: str) -> Any:
        """session.run: returns the name unless the test has given another answer."""
        return self.drive(self.part.run(name))

    def taken(self) -> list[str]:
        """What was asked for since the last time."""
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
            case act.PutBack():
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
    """The declaration with the digests of a state that is what it should be."""
    if not mine.intact:
        return mine
    return replace(mine, commit_digest=DIGEST if mine.committed else 0, begin_digest=DIGEST)


def described(action: act.Action) -> str:
    """The action in one line: its name, and what tells it from others of the name."""
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
    """What an intact member that trains declares."""
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
    """A job of one worker that has begun."""
    driver = Driver(worker, **options)
    driver.announce(1, worker)
    driver.begin_loop()
    driver.taken()
    return driver


def trained(steps: int, worker: str = "a", **options: int) -> Driver:
    """The same after some steps."""
    driver = begun(worker, **options)
    for _ in range(steps):
        driver.step()
    driver.taken()
    return driver


def joined(number: int, *between: str, committed: int, marks: str = "") -> list[str]:
    """What is asked for on the way into a group: between the declarations and the news of it."""
    return [
        f"Join {marks}".strip(),
        "Declare",
        *between,
        f"TellJoined committed={committed}",
        f"SetUp generation={number}",
        "Entered",
    ]


def struck(steps: int, *workers: str) -> Driver:
    """In the block of the next step, where it hears that these are the next group."""
    driver = trained(steps)
    driver.enter_block()
    driver.announce(2, *workers)
    return driver
