"""`session.on_group_change` tells each worker of each group before that group's next block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.errors import StepMisused
from elastic.worker.control import LocalControl
from elastic.worker.session import Session
from elastic.worker.training import Training
from tests.unit.worker.together import Seat, die, run_together
from tests.unit.worker.training_together import Peer, in_sessions, numbers


def told_of(peer: Peer) -> list[Any]:
    """A list to which each group is added that the script is told of."""
    told: list[Any] = []

    def callback(session: Session) -> None:
        told.append([session.generation, session.world_size, session.rank])

    peer.session.on_group_change(callback)
    return told


def step_through(peer: Peer, told: list[Any], at_second: Any) -> None:
    """Train, and check that each block is one of the group that was told of last."""
    for step in peer.session.steps(numbers(24, batch_size=1), epochs=1):
        if step.index == 1:
            at_second()
        with step:
            assert told[-1][0] == peer.session.generation
            for (inputs,) in step.batches():
                step.backward(peer.model(inputs).mean())
            peer.update()


@in_sessions(3)
def test_a_loss_is_told_before_the_next_block(peer: Peer) -> None:
    told = told_of(peer)

    def lose() -> None:
        if peer.session.world_size == 3:
            peer.seat.exchange("all are here")
            if peer.seat.rank == 0:
                die()
            peer.announce(2, 1, 2)

    step_through(peer, told, lose)
    assert told == [[1, 3, peer.seat.rank], [2, 2, peer.seat.rank - 1]]
    peer.seat.exchange("done")


@in_sessions(2)
def test_a_change_in_a_call_above_the_block_is_told_before_the_block(peer: Peer) -> None:
    told = told_of(peer)
    done: list[bool] = []

    def change() -> None:
        if not done:
            done.append(True)
            peer.announce(2)
            peer.session.run(lambda: None)

    step_through(peer, told, change)
    assert [number for number, _, _ in told] == [1, 2]
    peer.seat.exchange("done")


def test_a_newcomer_and_those_that_it_joins_are_told() -> None:
    def veteran(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(1, 0, 1)
        told = told_of(peer)
        step_through(peer, told, lambda: peer.announce(2))
        assert told == [[1, 2, seat.rank], [2, 3, seat.rank]]
        seat.exchange("done")

    def newcomer(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(2)
        told = told_of(peer)
        step_through(peer, told, lambda: None)
        assert told == [[2, 3, 2]]
        seat.exchange("done")

    run_together(veteran, veteran, newcomer)


def test_a_callback_makes_no_calls_that_others_make_at_another_group() -> None:
    """Workers are told of different groups if several follow each other quickly."""
    session = Session(Training(LocalControl()))
    model = session.distribute(torch.nn.Linear(1, 1))
    session.track(model=model)
    session.on_group_change(lambda session: session.gather(session.rank))
    with pytest.raises(StepMisused, match=r"session\.gather\(\) was called by a callback"):
        next(iter(session.steps(numbers(4), epochs=1)))
    session.close()
