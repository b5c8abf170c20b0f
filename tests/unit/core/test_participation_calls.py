"""Calls of `session.run`: which actions the participation of a script asks of its driver."""

from __future__ import annotations

import pytest

from elastic.core.recovery import Declaration
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Progress
from elastic.errors import StateTorn, Stranded
from tests.unit.core.participating import ME, NEWCOMER, Driver, joined, struck, trained, veteran


def test_members_meet_for_a_call_before_they_make_it() -> None:
    driver = trained(2)
    assert driver.call("evaluate") == "evaluate"
    assert driver.call("report") == "report"
    assert driver.taken() == [
        "MeetForCall committed=2 number=0 call=evaluate",
        "Perform call=evaluate",
        "MeetForCall committed=2 number=1 call=report",
        "Perform call=report",
    ]
    driver.step()
    driver.taken()
    driver.call("evaluate")
    assert driver.taken()[0] == "MeetForCall committed=3 number=0 call=evaluate"


def test_a_call_that_lost_its_group_is_repeated_in_the_next_group() -> None:
    driver = trained(2)
    driver.lose_at(act.Perform, 2, "a")
    assert driver.call("evaluate") == "evaluate"
    assert driver.taken() == [
        "MeetForCall committed=2 number=0 call=evaluate",
        "Perform call=evaluate",
        "TearDown",
        "Break held",
        *joined(2, committed=2, marks="held"),
        "MeetForCall committed=2 number=0 call=evaluate",
        "Perform call=evaluate",
    ]


def test_a_lost_call_whose_changes_cannot_be_undone_drops_the_state() -> None:
    driver = trained(2)

    def lose(_: object) -> None:
        driver.announce(2, "a")
        raise StateTorn("changed")

    driver.answer(act.Perform, lose)
    with pytest.raises(Stranded):  # no state that it could get belongs inside of this call
        driver.call("evaluate")
    assert driver.taken()[1:6] == [
        "Perform call=evaluate",
        "DropState",
        "TearDown",
        "Break",
        "Join",
    ]


def test_the_status_says_in_run_only_while_the_script_is_inside_a_call() -> None:
    driver = trained(2)
    seen: list[bool] = []
    driver.answer(act.Perform, lambda _: seen.append(driver.machine.status.in_run))
    driver.call("evaluate")
    assert seen == [True]
    assert not driver.machine.status.in_run
    driver.answer(act.Perform, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        driver.call("evaluate")
    assert not driver.machine.status.in_run


def test_a_member_that_completed_a_call_repeats_it_for_one_that_did_not() -> None:
    driver = trained(3)
    driver.call("evaluate")
    driver.meets(2, a=ME, b=veteran(3, in_run=True, runs_done=0))
    driver.taken()
    driver.boundary()
    log = driver.taken()
    assert log[-4:] == [
        "SetUp generation=2",
        "MeetForCall committed=3 number=0 call=evaluate",
        "Perform call=evaluate",
        "Entered",
    ]
    assert driver.part.runs_done == 1


def test_a_call_above_a_block_that_does_not_count_is_made_again() -> None:
    """The call is undone with the block, and a member that was still inside it waits there."""
    driver = trained(3)
    driver.call("below")
    driver.boundary()
    driver.call("above")
    driver.part.begin_block()
    driver.meets(2, a=ME, b=veteran(3, in_run=True, runs_done=1))
    driver.taken()
    assert driver.give_up() is False
    assert not any(line.startswith(("Meet", "Perform")) for line in driver.taken())
    assert driver.part.runs_done == 1
    driver.boundary()
    assert driver.call("above") == "above"
    assert "MeetForCall committed=3 number=1 call=above" in driver.taken()


def test_a_call_can_be_repeated_for_others_only_until_the_next_one_begins() -> None:
    """The state as of the start of the earlier call is discarded then."""
    driver = trained(3)
    driver.call("first")

    driver.lose_at(act.Perform, 2, "a")
    declared: list[Declaration] = []

    def declare(mine: Declaration) -> tuple[Declaration, ...]:
        declared.append(mine)
        return (mine,)

    driver.answer(act.Declare, declare)
    driver.call("second")
    assert [(mine.runs_done, mine.repeats) for mine in declared] == [(1, False)]


def test_a_call_that_all_members_completed_is_not_repeated() -> None:
    driver = trained(2)
    driver.call("evaluate")
    driver.meets(2, a=ME, b=veteran(2, runs_done=1))
    driver.taken()
    driver.boundary()
    assert not any(line.startswith(("Meet", "Perform")) for line in driver.taken())


def test_a_newcomer_takes_over_the_count_of_calls() -> None:
    driver = Driver("b")
    driver.meets(2, a=veteran(2, runs_done=1), b=ME)
    driver.answer(act.Receive, Progress(committed=2, committed_in=1))
    driver.begin_loop()
    assert driver.part.runs_done == 1
    assert "Perform" not in " ".join(driver.taken())


def test_a_group_with_a_newcomer_is_given_up_while_a_call_is_under_way() -> None:
    driver = trained(2)
    driver.lose_at(act.Perform, 2, "a", "b")
    driver.peers(ME, NEWCOMER)
    driver.answer(act.Break, None, lambda _: driver.announce(3, "a"))
    assert driver.call("evaluate") == "evaluate"
    log = driver.taken()
    assert log.count("Join held") == 2
    assert not any(line.startswith("Send") for line in log)


def test_a_call_below_a_block_that_does_not_count_is_made_without_newcomers() -> None:
    """The scripts of newcomers come to the block itself, not to the call below it."""
    driver = struck(2, "a", "b")
    driver.peers(ME, NEWCOMER)
    assert driver.give_up() is False
    driver.taken()
    driver.answer(act.Break, lambda _: driver.announce(3, "a"))
    assert driver.call("evaluate") == "evaluate"
    assert driver.taken() == [
        "TearDown",
        "Break held",
        *joined(3, committed=2, marks="held"),
        "MeetForCall committed=2 number=0 call=evaluate",
        "Perform call=evaluate",
    ]


def test_a_commit_forgets_the_calls_before_it() -> None:
    driver = trained(2)
    driver.call("evaluate")
    driver.step()
    assert driver.part.runs_done == 0
    driver.meets(2, a=ME, b=veteran(3))
    driver.taken()
    driver.boundary()
    assert "Perform" not in " ".join(driver.taken())


def test_an_error_in_a_call_that_is_no_loss_of_the_group_is_raised_in_the_script() -> None:
    driver = trained(2)
    driver.answer(act.Perform, ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        driver.call("evaluate")
    assert "Break held" not in driver.taken()
