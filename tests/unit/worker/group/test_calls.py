"""Members that make different calls, or none, get an error with both places; nobody hangs."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

from elastic.errors import GroupLost, StepMisused
from elastic.worker.group.losses import is_group_loss
from elastic.worker.group.membership import Standing, answer, compare_reductions, meet
from elastic.worker.group.process_group import Group
from tests.unit.worker.together import Seat, die, in_processes, run_together, stay_away
from tests.unit.worker.together import meet as all_reduce
from tests.waiting import eventually

PROMPT_S = 5.0


@dataclass(frozen=True)
class Call:
    what: str
    where: str = "train.py:1"


def at(
    committed: int, *, in_block: bool = False, reductions: int = 0, collectives: int = 0
) -> Standing:
    return Standing(
        committed=committed, in_block=in_block, reductions=reductions, collectives=collectives
    )


EVALUATE, SAVE = Call("calls session.run(evaluate)"), Call("calls session.run(save)", "train.py:2")


def expect_loss(group: Group, call: Call) -> None:
    """Assert that the group is lost while this member waits for the others in the call."""
    with pytest.raises((GroupLost, RuntimeError)) as caught:
        meet(group, at(3), "0", call)
    assert is_group_loss(caught.value, group)


@in_processes(3)
def test_members_that_make_the_same_calls_meet_in_each_call(seat: Seat) -> None:
    group = seat.join()
    for committed in (3, 4):
        for number, call in enumerate((EVALUATE, SAVE, EVALUATE)):
            meet(group, at(committed), str(number), call)
            all_reduce()
    seat.exchange("done")


@in_processes(2)
def test_the_place_of_a_call_may_differ_between_members(seat: Seat) -> None:
    """A script may retry a call from another line: only what it calls must be the same."""
    meet(seat.join(), at(3), "0", Call(EVALUATE.what, f"train.py:{seat.rank}"))
    seat.exchange("done")


@in_processes(3)
def test_different_calls_are_refused_on_all_members_with_both_places(seat: Seat) -> None:
    group = seat.join()
    meet(group, at(3), "0", EVALUATE)
    with pytest.raises(StepMisused) as caught:
        meet(group, at(3), "1", SAVE if seat.rank == 1 else EVALUATE)
    said = str(caught.value)
    for call in (EVALUATE, SAVE):
        assert call.what in said
        assert call.where in said
    assert "step 3" in said
    seat.exchange("done")


def answering(seat: Seat, group: Group, here: Standing, *, waits: bool = False) -> None:
    """Answer as a member whose script's thread is elsewhere, until the others have been told."""
    done = threading.Event()

    def answers() -> None:
        while not done.wait(0.02):
            answer(group, here, "at train.py:9", waits=waits)

    thread = threading.Thread(target=answers)
    thread.start()
    seat.exchange("told")
    done.set()
    thread.join()


REFUSED = {
    "in the block behind the call": (at(3), at(3, in_block=True), False),
    "a step ahead": (at(3), at(4, in_block=True), False),
    "one reduction too many": (at(3, reductions=3), at(2, in_block=True, reductions=4), False),
    "one collective too many, in which it waits": (
        at(3, reductions=3, collectives=5),
        at(2, in_block=True, reductions=3, collectives=6),
        True,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_is_refused_while_another_member_is_where_it_will_not_come(case: str) -> None:
    """The script's thread in the block may wait in a collective, so another thread answers."""
    calls, elsewhere, waits = REFUSED[case]

    def call(seat: Seat) -> None:
        group = seat.join()
        with pytest.raises(StepMisused) as caught:
            meet(group, calls, "0", EVALUATE)
        said = str(caught.value)
        for part in ("rank 1", "at train.py:9", EVALUATE.where):
            assert part in said
        seat.exchange("told")

    def train(seat: Seat) -> None:
        answering(seat, seat.join(), elsewhere, waits=waits)

    run_together(call, train)


COMES_LATE = {
    "it is a step behind": (at(2, in_block=True, reductions=3, collectives=9), False),
    "it has sent more messages to single members": (
        at(2, in_block=True, reductions=3, collectives=99),
        False,
    ),
    "it waits in a slow network": (at(2, in_block=True, reductions=3, collectives=9), True),
}


@pytest.mark.parametrize("case", COMES_LATE)
def test_a_member_that_is_slow_in_the_step_before_is_awaited(case: str) -> None:
    slow, waits = COMES_LATE[case]

    def call(seat: Seat) -> None:
        meet(seat.join(), at(3, reductions=3, collectives=9), "0", EVALUATE)
        seat.exchange("done")

    def come_late(seat: Seat) -> None:
        group = seat.join()
        store = group.store
        assert store is not None
        eventually(lambda: store.check(["asked"]), deadline_s=PROMPT_S)
        answer(group, slow, "inside the block of step 2", waits=waits)
        meet(group, at(3), "0", EVALUATE)
        seat.exchange("done")

    run_together(call, come_late)


@in_processes(2)
def test_members_that_wait_for_each_other_at_two_meetings_are_told_so(seat: Seat) -> None:
    """Whichever asks first sees that the other asks, too. The test frees the other one."""
    group = seat.join()
    threading.Timer(1.5, group.abort).start()
    told = False
    try:
        if seat.rank == 0:
            meet(group, at(3), "0", EVALUATE)
        else:
            compare_reductions(group, at(3, in_block=True), ((1, 0),))
    except StepMisused as error:
        told = all(part in str(error) for part in (EVALUATE.where, "1 reductions in step 3"))
    except (GroupLost, RuntimeError):
        assert group.lost
    assert any(seat.exchange(told))


@in_processes(3)
def test_unequal_numbers_of_reductions_are_refused_with_the_numbers_and_ranks(seat: Seat) -> None:
    group = seat.join()
    compare_reductions(group, at(3, in_block=True), ((2, 0), (2, 0)))
    made = ((1, 0), (2, 0)) if seat.rank == 1 else ((2, 0), (1, 0))
    with pytest.raises(StepMisused, match=r"made (1[+]2|2[+]1) reductions in step 4, rank"):
        compare_reductions(group, at(4, in_block=True), made)
    seat.exchange("done")


@in_processes(2)
def test_a_member_that_nobody_asks_gives_no_answer(seat: Seat) -> None:
    group = seat.join()
    answer(group, at(3, in_block=True), "inside the block", waits=False)
    seat.exchange("answered")
    assert group.store is not None
    assert not group.store.check([f"call/3/0/elsewhere/{seat.rank}"])
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
    meet(alone, at(3), "0", EVALUATE)


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
    meet(seat.join(2), at(3), "0", EVALUATE)
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
        meet(group, at(3), str(number), EVALUATE)
    seat.exchange("met")
    before = group.store.num_keys() if group.store is not None else 0
    for number in range(3, 53):
        meet(group, at(3), str(number), EVALUATE)
    seat.exchange("met again")
    assert group.store is not None
    assert before - 1 <= group.store.num_keys() <= before + 1
    seat.exchange("done")
