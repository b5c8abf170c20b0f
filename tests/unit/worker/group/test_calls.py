"""Members that make different calls, or none, get an error with both places; nobody hangs."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

from elastic.errors import GroupLost, StepMisused
from elastic.worker.group.membership import answer, meet
from elastic.worker.group.process_group import Group, is_group_loss
from tests.unit.worker.together import Seat, die, in_processes, run_together, stay_away
from tests.unit.worker.together import meet as all_reduce
from tests.waiting import eventually

PROMPT_S = 5.0


@dataclass(frozen=True)
class Call:
    what: str
    where: str = "train.py:1"


EVALUATE, SAVE = Call("calls session.run(evaluate)"), Call("calls session.run(save)", "train.py:2")


def expect_loss(group: Group, call: Call) -> None:
    """Assert that the group is lost while this member waits for the others in the call."""
    with pytest.raises((GroupLost, RuntimeError)) as caught:
        meet(group, 3, 0, call)
    assert is_group_loss(caught.value, group)


@in_processes(3)
def test_members_that_make_the_same_calls_meet_in_each_call(seat: Seat) -> None:
    group = seat.join()
    for committed in (3, 4):
        for number, call in enumerate((EVALUATE, SAVE, EVALUATE)):
            meet(group, committed, number, call)
            all_reduce()
    seat.exchange("done")


@in_processes(2)
def test_the_place_of_a_call_may_differ_between_members(seat: Seat) -> None:
    """A script may retry a call from another line: only what it calls must be the same."""
    meet(seat.join(), 3, 0, Call(EVALUATE.what, f"train.py:{seat.rank}"))
    seat.exchange("done")


@in_processes(3)
def test_different_calls_are_refused_on_all_members_with_both_places(seat: Seat) -> None:
    group = seat.join()
    meet(group, 3, 0, EVALUATE)
    with pytest.raises(StepMisused) as caught:
        meet(group, 3, 1, SAVE if seat.rank == 1 else EVALUATE)
    said = str(caught.value)
    for call in (EVALUATE, SAVE):
        assert call.what in said
        assert call.where in said
    assert "step 3" in said
    seat.exchange("done")


def test_a_call_is_refused_while_another_member_is_inside_a_block() -> None:
    """The script's thread in the block may wait in a collective, so another thread answers."""

    def call(seat: Seat) -> None:
        group = seat.join()
        began = time.monotonic()
        with pytest.raises(StepMisused) as caught:
            meet(group, 3, 0, EVALUATE)
        assert time.monotonic() - began < PROMPT_S
        said = str(caught.value)
        assert "rank 1" in said
        assert "inside the block of step 3 at train.py:9" in said
        assert EVALUATE.where in said
        seat.exchange("told")

    def train(seat: Seat) -> None:
        group = seat.join()
        done = threading.Event()

        def answers() -> None:
            doing = "inside the block of step 3 at train.py:9"
            while not done.wait(0.02):
                answer(group, 3, doing)

        thread = threading.Thread(target=answers)
        thread.start()
        seat.exchange("told")
        done.set()
        thread.join()

    run_together(call, train)


def test_an_answer_of_an_earlier_step_is_ignored() -> None:
    """The member is one step behind and will still come to the call."""

    def call(seat: Seat) -> None:
        meet(seat.join(), 3, 0, EVALUATE)
        seat.exchange("done")

    def come_late(seat: Seat) -> None:
        group = seat.join()
        store = group.store
        assert store is not None
        eventually(lambda: store.check(["asked/3"]), deadline_s=PROMPT_S)
        answer(group, 2, "inside the block of step 2")
        meet(group, 3, 0, EVALUATE)
        seat.exchange("done")

    run_together(call, come_late)


@in_processes(2)
def test_a_member_that_nobody_asks_gives_no_answer(seat: Seat) -> None:
    group = seat.join()
    answer(group, 3, "inside the block")
    seat.exchange("answered")
    assert group.store is not None
    assert not group.store.check([f"elsewhere/3/{rank}" for rank in range(2)])
    seat.exchange("done")


def test_an_abort_frees_a_member_that_waits_for_others() -> None:
    def wait(seat: Seat) -> None:
        group = seat.join()
        threading.Timer(0.2, group.abort).start()
        began = time.monotonic()
        expect_loss(group, EVALUATE)
        assert time.monotonic() - began < PROMPT_S
        seat.exchange("freed")

    run_together(wait, stay_away)


def test_meet_returns_at_once_for_a_single_member(alone: Group) -> None:
    meet(alone, 3, 0, EVALUATE)


@in_processes(2)
def test_calls_of_an_earlier_group_do_not_count(seat: Seat) -> None:
    first = seat.join(1)
    assert first.store is not None
    if seat.rank == 0:
        threading.Timer(0.05, first.abort).start()
        expect_loss(first, SAVE)
    seat.exchange("aborted")
    first.abort()
    first.close()
    meet(seat.join(2), 3, 0, EVALUATE)
    seat.exchange("done")


def test_a_waiting_member_loses_the_group_if_the_host_of_the_store_dies() -> None:
    """The peer hosted the store. If another member dies, an announcement aborts the group."""

    def die_early(seat: Seat) -> None:
        seat.join()
        seat.exchange("in")
        die()

    def wait(seat: Seat) -> None:
        group = seat.join()
        seat.exchange("in")
        expect_loss(group, EVALUATE)

    run_together(die_early, wait)


@in_processes(2)
def test_finished_calls_leave_no_keys_in_the_store(seat: Seat) -> None:
    """A script may evaluate a million times in one group."""
    group = seat.join()
    for number in range(3):
        meet(group, 3, number, EVALUATE)
    seat.exchange("met")
    before = group.store.num_keys() if group.store is not None else 0
    for number in range(3, 53):
        meet(group, 3, number, EVALUATE)
    seat.exchange("met again")
    assert group.store is not None
    assert before - 1 <= group.store.num_keys() <= before + 1
    seat.exchange("done")
