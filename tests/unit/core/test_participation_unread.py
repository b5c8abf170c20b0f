"""Members that are at one step begin with the next one before they have compared all state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.invariants import InvariantBroken
from elastic.core.membership import Purpose
from elastic.core.recovery import Declaration
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Progress
from elastic.errors import GroupLost
from tests.unit.core.participating import ME, Driver, struck, trained, veteran


def unread(committed: int, **fields: Any) -> Declaration:
    return veteran(committed, unread=True, **fields)


def with_unread(driver: Driver, *others: Declaration) -> None:
    """The next group's members declare this, and the one under test leaves state unread, too."""
    driver.answer(act.Declare, lambda mine: (replace(mine, unread=True), *others))


def begins_unread(**fields: Any) -> Driver:
    """A member that has lost a group in its fourth block, and has not compared all in the next."""
    driver = struck(3, "a", "b")
    with_unread(driver, unread(3, **fields))
    driver.give_up()
    return driver


def test_members_at_one_step_compare_the_rest_when_the_block_is_computed() -> None:
    driver = begins_unread()
    assert [a for a in driver.taken() if a.startswith("Declare")] == ["Declare"]
    driver.enter_block()
    assert driver.part.unread
    driver.part.read(same=True)
    driver.commit()
    assert driver.part.progress.committed == 4
    driver.step()
    assert not driver.part.unread


def test_no_step_is_committed_before_all_is_compared() -> None:
    driver = begins_unread()
    driver.enter_block()
    with pytest.raises(InvariantBroken, match="before all members were known to agree"):
        driver.commit()


@pytest.mark.parametrize(
    "other",
    [
        unread(3, begin_digest=7, commit_digest=8),
        unread(4),
        replace(unread(3), intact=False, begin_digest=0, commit_digest=0),
    ],
    ids=["differs", "ahead", "torn"],
)
def test_state_moves_only_after_all_of_it_was_compared(other: Declaration) -> None:
    driver = struck(3, "a", "b")
    with_unread(driver, other)
    driver.peers(ME, replace(other, unread=False))
    driver.answer(act.Receive, Progress(committed=4, committed_in=1))
    driver.give_up()
    assert [a for a in driver.taken() if a.startswith("Declare")] == ["Declare", "Declare whole"]
    assert not driver.part.unread


def test_members_that_are_no_longer_found_to_differ_go_on_at_once() -> None:
    """What each leaves unread depends on what it has learnt."""
    driver = struck(3, "a", "b")
    with_unread(driver, unread(3, begin_digest=7, commit_digest=8))
    driver.peers(ME, veteran(3))
    driver.give_up()
    assert not any(a.startswith(("TellDifference", "Send")) for a in driver.taken())
    driver.enter_block()
    driver.commit()


@pytest.mark.parametrize("fields", [{"runs_done": 1, "repeats": True}, {"begin_digest": 0}])
def test_members_at_two_places_between_blocks_compare_all_at_once(fields: dict[str, Any]) -> None:
    driver = struck(3, "a", "b")
    with_unread(driver, unread(3, **fields))
    driver.peers(ME, veteran(3))
    driver.give_up()
    assert "Declare whole" in driver.taken()


def test_after_a_difference_the_next_group_compares_all_before_it_begins() -> None:
    driver = begins_unread()
    driver.enter_block()
    driver.announce(3, "a", "b")
    with pytest.raises(GroupLost, match="different states"):
        driver.part.read(same=False)
    driver.taken()
    driver.peers(ME, veteran(3))
    driver.give_up()
    assert driver.taken()[3:5] == ["Join held at_begin", "Declare whole"]
    driver.enter_block()
    driver.commit()
    driver.enter_block()
    driver.announce(4, "a", "b")
    with_unread(driver, unread(4, committed_in=3))
    driver.give_up()
    assert "Declare" in driver.taken()


def test_a_call_comes_after_the_comparison() -> None:
    driver = begins_unread()
    driver.taken()
    driver.answer(act.CompareUnread, True)
    driver.call("evaluates")
    assert [a.split()[0] for a in driver.taken()] == ["MeetForCall", "CompareUnread", "Perform"]
    assert not driver.part.unread


def test_a_call_is_made_in_the_next_group_if_members_differ() -> None:
    driver = begins_unread()
    driver.taken()
    driver.announce(3, "a", "b")
    driver.answer(act.CompareUnread, False)
    driver.peers(ME, veteran(3))
    assert driver.call("evaluates") == "evaluates"
    actions = [a.split()[0] for a in driver.taken()]
    assert actions.index("Break") < actions.index("Declare") < actions.index("Perform")
    assert actions.count("Perform") == 1


def test_a_save_that_is_owed_comes_after_the_comparison() -> None:
    driver = trained(3, save_every=100)
    driver.announce(2, "a", "b", save_first=True)
    with_unread(driver, unread(3))
    driver.answer(act.CompareUnread, True)
    driver.boundary()
    actions = [a.split()[0] for a in driver.taken()]
    assert actions.index("CompareUnread") < actions.index("Save")


def test_members_that_save_and_leave_compare_all_at_once() -> None:
    driver = trained(3)
    driver.announce(2, "a", "b", purpose=Purpose.SAVE_AND_LEAVE)
    driver.peers(ME, veteran(3))
    driver.boundary()
    assert "Declare whole" in driver.taken()


def test_a_member_that_has_saved_the_step_compares_where_one_saves_that_has_not() -> None:
    """One lost the group before its save, and the others in the block below theirs."""
    saved, behind = (trained(4, save_every=4) for _ in range(2))
    saved.enter_block()
    saved.announce(2, "a", "b")
    with_unread(saved, unread(4))
    saved.give_up()
    behind.lose_at(act.CompareReplicas, 2, "a", "b")
    with_unread(behind, unread(4))
    for driver in (saved, behind):
        driver.taken()
        driver.answer(act.CompareUnread, True)
        driver.boundary()
    assert [a for a in saved.taken() if a.startswith(("Compare", "Save"))] == ["CompareUnread"]
    assert behind.taken()[-2:] == ["CompareUnread", "Save step=4"]
