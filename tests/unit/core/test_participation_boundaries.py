"""Participation at step boundaries: saves, the end of the job, planned changes, comparisons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.membership import Purpose
from elastic.core.recovery import Declaration
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Progress
from tests.unit.core.participating import ME, NEWCOMER, Driver, begun, struck, trained, veteran


class JobEnds(Exception):
    """The driver raises this to unwind the script when the job is left."""


# ---- leaving and saving


SAVE_AND_LEAVE = {"purpose": Purpose.SAVE_AND_LEAVE}


def leaves_at_boundary(driver: Driver) -> None:
    driver.answer(act.LeaveJob, JobEnds())
    with pytest.raises(JobEnds):
        driver.boundary()


def test_a_job_that_stops_is_saved_and_left_at_a_boundary() -> None:
    driver = trained(3)
    driver.announce(2, "a", **SAVE_AND_LEAVE)
    leaves_at_boundary(driver)
    assert driver.taken()[-3:] == ["Entered", "SaveAndWait step=3", "LeaveJob"]


def test_a_job_that_stops_in_a_block_is_left_at_the_next_boundary() -> None:
    """All members must save the state of the same place in the script."""
    driver = trained(3)
    driver.enter_block()
    driver.announce(2, "a", **SAVE_AND_LEAVE)
    assert driver.give_up() is False
    assert not any(line.startswith("Save") for line in driver.taken())
    leaves_at_boundary(driver)
    assert driver.taken() == ["PutBackForRetry", "SaveAndWait step=3", "LeaveJob"]


def test_a_job_that_stops_in_a_call_is_saved_and_left_inside_the_call() -> None:
    driver = trained(3)
    driver.lose_at(act.Perform, 2, "a", **SAVE_AND_LEAVE)
    driver.answer(act.LeaveJob, JobEnds())
    with pytest.raises(JobEnds):
        driver.call("evaluate")
    assert driver.taken()[-3:] == ["Entered", "SaveAndWait step=3", "LeaveJob"]
    assert not driver.machine.status.in_run


def test_a_member_that_is_a_call_behind_completes_it_before_the_job_is_saved_and_left() -> None:
    """The others are past the call, and all must save the state of the same place in the script."""
    driver = trained(3)
    driver.lose_at(act.Perform, 2, "a", "b", **SAVE_AND_LEAVE)
    driver.peers(ME, veteran(3, runs_done=1, repeats=True))
    assert driver.call("evaluate") == "evaluate"
    assert not any(line.startswith("Save") for line in driver.taken())
    leaves_at_boundary(driver)
    assert driver.taken() == ["SaveAndWait step=3", "LeaveJob"]


def test_a_group_lost_while_it_saves_is_followed_by_another_that_saves() -> None:
    driver = trained(3)
    driver.announce(2, "a", "b", **SAVE_AND_LEAVE)
    driver.peers(ME, veteran(3))
    driver.lose_at(act.SaveAndWait, 3, "a", **SAVE_AND_LEAVE)
    leaves_at_boundary(driver)
    assert driver.taken().count("SaveAndWait step=3") == 2


def test_checkpoints_are_saved_once_at_their_steps() -> None:
    driver = trained(3, save_every=3)
    driver.boundary()
    driver.boundary()
    assert driver.taken() == ["CompareReplicas", "Save step=3"]


def test_a_generation_with_save_first_saves_at_its_first_boundary() -> None:
    driver = trained(3)
    driver.announce(2, "a", save_first=True)
    driver.boundary()
    assert driver.taken()[-1] == "Save step=3"
    driver.boundary()
    assert driver.taken() == []


def test_a_job_that_went_back_to_a_checkpoint_saves_its_steps_again() -> None:
    driver = trained(5, save_every=3)
    driver.enter_block()
    driver.announce(2, "a")
    driver.answer(act.PutBack, False)
    driver.answer(act.Restore, Progress(committed=2, committed_in=1))
    driver.give_up()
    driver.step()
    driver.boundary()
    assert driver.taken()[-1] == "Save step=3"


# ---- changes that are planned


def test_a_group_is_left_at_the_step_of_a_planned_change() -> None:
    driver = trained(2)
    driver.announce(2, "a", leave_after=3)
    driver.enter_block()
    assert driver.taken() == ["CompareReplicas"]
    driver.commit()
    driver.boundary()
    assert driver.taken()[:3] == ["TearDown", "Leave", "Join held at_begin"]


def test_a_member_waits_at_the_step_of_a_provisional_change_until_it_is_settled() -> None:
    driver = trained(3)
    driver.announce(2, "a", leave_after=3, provisional=True)

    def settle(_: object) -> bool:
        driver.announce(2, "a", leave_after=5)
        return True

    driver.answer(act.AwaitSettlement, settle)
    driver.boundary()
    assert driver.taken() == ["AwaitSettlement committed=3"]
    driver.part.begin_block()
    driver.commit()


def test_a_provisional_change_that_is_never_settled_takes_effect() -> None:
    driver = trained(3)
    driver.announce(2, "a", leave_after=3, provisional=True)
    driver.boundary()
    assert driver.taken()[:3] == ["AwaitSettlement committed=3", "TearDown", "Leave"]


# ---- replicas


def test_replicas_are_compared_after_1_2_4_8_steps_and_once_each() -> None:
    driver = begun()
    compared = []
    for _ in range(9):
        driver.step()
        driver.boundary()
        driver.boundary()
        if "CompareReplicas" in driver.taken():
            compared.append(driver.part.progress.committed)
    assert compared == [1, 2, 4, 8]


def test_replicas_are_compared_before_each_save_too() -> None:
    """Each member writes a part. Parts of states that differ would make a state that nobody had."""
    driver = begun(save_every=3)
    compared = []
    for _ in range(9):
        driver.step()
        driver.boundary()
        taken = driver.taken()
        if "CompareReplicas" in taken:
            compared.append(driver.part.progress.committed)
        if driver.part.progress.committed % 3 == 0:
            assert taken[-2:] == ["CompareReplicas", f"Save step={driver.part.progress.committed}"]
    assert compared == [1, 2, 3, 4, 6, 8, 9]


def test_replicas_are_compared_after_1_2_4_steps_of_each_group() -> None:
    """A newcomer that lacks state which the script does not track differs after its first step."""
    driver = trained(5)
    driver.meets(2, a=ME, b=NEWCOMER)
    compared = []
    for _ in range(6):
        driver.boundary()
        if "CompareReplicas" in driver.taken():
            compared.append(driver.part.progress.committed)
        driver.part.begin_block()
        driver.commit()
    assert compared == [6, 7, 9]


def test_a_loss_at_a_boundary_is_followed_by_the_next_group() -> None:
    driver = trained(1)
    driver.lose_at(act.CompareReplicas, 2, "a")
    driver.boundary()
    assert driver.taken()[:4] == ["CompareReplicas", "TearDown", "Break held", "Join held at_begin"]


# ---- a job that stops without time for the script


def left_early(driver: Driver, *, whole: bool = True) -> bool:
    return bool(driver.drive(driver.part.leave_early("ends", whole=whole)))


def test_a_block_without_time_is_put_back_and_what_it_began_from_is_saved() -> None:
    driver = trained(3)
    driver.enter_block()
    driver.announce(2, "a", "b", **SAVE_AND_LEAVE)
    driver.peers(ME, veteran(3))
    assert left_early(driver)
    log = driver.taken()
    assert log[:3] == ["PutBack", "TearDown", "Break held"]
    assert log[-3:] == [
        "SaveAndWait step=3",
        "MeetForCall committed=3 number=0 call=ends",
        "Perform call=ends",
    ]


def saves_nothing(driver: Driver, *, whole: bool = True) -> bool:
    return not left_early(driver, whole=whole) and not any("Save" in a for a in driver.taken())


def test_a_block_that_others_have_committed_or_that_cannot_be_put_back_is_not_saved() -> None:
    for others, is_back in ((4, True), (3, False)):
        driver = trained(3)
        driver.enter_block()
        driver.announce(2, "a", "b", **SAVE_AND_LEAVE)
        driver.answer(act.Receive, Progress(committed=4, committed_in=1))
        driver.answer(act.PutBack, is_back)
        driver.peers(ME, veteran(others))
        assert saves_nothing(driver)


def test_a_block_is_not_saved_in_a_group_that_trains() -> None:
    driver = struck(3, "a")
    assert saves_nothing(driver)


def below_a_block(**declared: Any) -> Driver:
    """A member that has stopped below a block, with another one that declares this."""
    driver = trained(3)
    driver.announce(2, "a", "b", **SAVE_AND_LEAVE)
    driver.answer(act.Declare, lambda mine: (at_commit(mine), veteran(3, **declared)))
    return driver


def at_commit(mine: Declaration) -> Declaration:
    return replace(mine, begin_digest=0)


def test_the_state_of_a_commit_is_saved_if_all_members_have_it() -> None:
    driver = below_a_block(begin_digest=0)
    assert left_early(driver)
    assert "PutBack" not in driver.log
    assert "SaveAndWait step=3" in driver.taken()
    assert saves_nothing(below_a_block(begin_digest=0), whole=False)


def test_the_state_of_a_commit_is_not_saved_with_that_of_members_past_it() -> None:
    """They have changed their state below the block, or in a call there."""
    assert saves_nothing(below_a_block(in_block=True))
    assert saves_nothing(below_a_block())
    assert saves_nothing(below_a_block(begin_digest=0, in_run=True))


def test_a_call_without_time_is_left_with_those_that_wait_for_it() -> None:
    driver = trained(3)

    def leaves(_: object) -> None:
        driver.announce(2, "a", "b", **SAVE_AND_LEAVE)
        driver.answer(
            act.Declare, lambda mine: (at_commit(mine), veteran(3, in_run=True, begin_digest=0))
        )
        assert left_early(driver)
        raise JobEnds

    driver.answer(act.Perform, leaves)
    with pytest.raises(JobEnds):
        driver.call("evaluate")
    assert "SaveAndWait step=3" in driver.taken()
