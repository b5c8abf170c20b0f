"""A script's way through groups, as conversations with its driver: what it asks for, in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.learning_rate import LinearScaling, Ramp
from elastic.core.membership import Purpose
from elastic.core.recovery import Declaration
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Progress
from elastic.errors import StateLost, StateTorn, Stranded
from tests.unit.core.participating import LOST, NEWCOMER, Driver, veteran

ME: Declaration | None = None
"""Stands for the declaration of the member under test."""


class JobEnds(Exception):
    """What the driver raises to unwind the script."""


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


# ---- into a group


def test_a_job_of_one_begins() -> None:
    driver = Driver()
    driver.announce(1, "a")
    driver.begin_loop()
    assert driver.taken() == joined(1, "Restore loop=0", committed=0)
    driver.step()
    driver.boundary()
    assert driver.taken() == ["CompareReplicas"]
    assert driver.part.progress.committed == 1
    assert driver.part.progress.committed_in == 1
    assert driver.part.progress.position(0).cursor == 4


def test_a_job_goes_on_from_a_checkpoint_and_gives_it_to_the_others() -> None:
    driver = Driver()
    driver.announce(3, "a", "b")
    driver.answer(act.Restore, Progress(committed=9, committed_in=2))
    driver.peers(ME, NEWCOMER)
    driver.begin_loop()
    assert driver.taken() == joined(3, "Restore loop=0", "Send rank=1 step=9 BEGIN", committed=9)
    # A state that was restored is newer than what a member cut off since then may hold.
    assert driver.part.progress.committed_in == 3


def test_a_newcomer_receives_the_state() -> None:
    driver = Driver("b")
    driver.meets(2, a=veteran(5), b=ME)
    driver.answer(act.Receive, Progress(committed=5, committed_in=1))
    driver.begin_loop()
    assert driver.taken() == joined(2, "Receive rank=0 loop=0 BEGIN", committed=5)
    assert driver.part.intact
    assert driver.part.progress.committed_in == 1  # the state is as old as it was


def test_a_newcomer_is_set_up_only_when_all_of_the_state_is_there() -> None:
    driver = Driver("b")
    driver.meets(2, a=veteran(5), b=ME)
    driver.lose_at(act.Receive, 3, "a", "b")
    driver.peers(veteran(6), ME)
    driver.answer(act.Receive, Progress(committed=6, committed_in=1))
    declared: list[Declaration] = []
    driver._answers[act.Declare][1] = lambda mine: declared.append(mine) or (veteran(6), mine)
    driver.begin_loop()
    assert driver.taken() == [
        "Join",
        "Declare",
        "Receive rank=0 loop=0 BEGIN",
        "TearDown",
        "Break",
        *joined(3, "Receive rank=0 loop=0 BEGIN", committed=6),
    ]
    assert [(d.intact, d.took_part) for d in declared] == [(False, False)]


def test_a_member_that_tracks_another_model_is_told_and_the_group_given_up() -> None:
    driver = Driver()
    driver.meets(1, a=ME, b=replace(NEWCOMER, signature=9))
    driver.answer(act.ExplainMismatch, lambda _: driver.announce(2, "a"))
    driver.begin_loop()
    assert driver.taken()[:5] == [
        "Join",
        "Declare",
        "ExplainMismatch reference=0 odd=(1,)",
        "AwaitSuccessor",
        "TearDown",
    ]
    assert driver.part.seat is not None
    assert driver.part.seat.generation.number == 2


def test_members_that_differ_are_told_apart_and_only_they_receive() -> None:
    driver = trained(5)
    driver.meets(2, a=ME, b=veteran(5, begin_digest=7, commit_digest=8), c=veteran(5))
    driver.boundary()
    assert driver.taken() == [
        "TearDown",
        "Leave",
        *joined(
            2,
            "TellDifference ranks=(1,) right=0",
            "Send rank=1 step=5 BEGIN",
            committed=5,
            marks="held at_begin",
        ),
    ]


def test_a_member_that_is_outvoted_takes_over_the_state_of_the_majority() -> None:
    driver = trained(5)
    driver.announce(2, "a", "b", "c")
    other = veteran(5, begin_digest=7, commit_digest=8)
    driver.peers(ME, other, other)
    driver.answer(act.Receive, Progress(committed=5, committed_in=1))
    driver.boundary()
    assert driver.taken()[4:7] == [
        "TellDifference ranks=(0,) right=1",
        "DropState",
        "Receive rank=1 loop=0 BEGIN",
    ]
    assert driver.part.intact


# ---- a loss in a block


def test_a_block_that_does_not_count_is_undone_and_handed_out_again() -> None:
    driver = struck(3, "a")
    assert driver.give_up() is False
    assert driver.part.void
    assert driver.taken() == [
        "PutBack",
        "TearDown",
        "Break held",
        *joined(2, committed=3, marks="held at_begin"),
        "KeepForRetry",
    ]
    driver.boundary()
    assert driver.taken() == ["PutBackForRetry"]
    assert not driver.part.void
    driver.part.begin_block()
    driver.commit()
    assert driver.part.progress.committed == 4
    assert driver.part.progress.committed_in == 2


def test_a_block_that_others_completed_counts_with_their_state_of_its_end() -> None:
    driver = struck(3, "a", "b")
    driver.peers(ME, veteran(4))
    driver.answer(act.Receive, Progress(committed=4, committed_in=1))
    assert driver.give_up() is True
    assert not driver.part.void
    assert driver.taken() == [
        "PutBack",
        "TearDown",
        "Break held",
        *joined(2, "DropState", "Receive rank=1 loop=0 COMMIT", committed=4, marks="held at_begin"),
    ]
    # Its script runs what stands below the block, so it is not at the begin mark.
    driver.announce(3, "a")
    assert driver.call("evaluate") == "evaluate"
    driver.boundary()
    assert "Join held at_begin" in driver.taken()


def test_the_sender_gives_the_commit_mark_with_the_progress_of_the_commit() -> None:
    driver = trained(4)
    driver.announce(2, "a", "b")
    sent: list[act.Send] = []
    driver.answer(act.Send, sent.append)
    driver.peers(ME, veteran(3, in_block=True))
    driver.boundary()
    assert "Send rank=1 step=4 COMMIT" in driver.taken()
    assert [s.progress.loop for s in sent] == [0]


def test_what_could_not_be_undone_is_received_from_another_member() -> None:
    driver = struck(3, "a", "b")
    driver.answer(act.PutBack, False)
    holds_the_state: list[bool] = []
    driver.answer(act.Join, lambda _: holds_the_state.append(driver.machine.status.has_state))
    driver.peers(ME, veteran(3, in_block=True))
    driver.answer(act.Receive, Progress(committed=3, committed_in=1))
    assert driver.give_up() is False
    assert driver.part.intact
    assert holds_the_state == [False]  # so that others who do are waited for
    assert driver.machine.status.has_state
    log = driver.taken()
    assert log[:5] == ["PutBack", "DropState", "TearDown", "Break", "Join at_begin"]
    assert log[6:] == [
        "Receive rank=1 loop=0 BEGIN",
        "TellJoined committed=3",
        "SetUp generation=2",
        "Entered",
        "KeepForRetry",
    ]


def test_a_loss_while_the_next_group_agrees_leads_to_the_one_after_it() -> None:
    driver = struck(3, "a", "b")
    driver.lose_at(act.Declare, 3, "a")
    assert driver.give_up() is False
    log = driver.taken()
    assert log.count("PutBack") == 1
    assert log.count("Join held at_begin") == 2
    assert driver.part.seat is not None
    assert driver.part.seat.generation.number == 3


@pytest.mark.parametrize("torn_again", [False, True])
def test_a_member_lost_while_it_receives_stays_torn(torn_again: bool) -> None:
    driver = struck(3, "a", "b")
    driver.peers(ME, veteran(4))
    driver.lose_at(act.Receive, 3, "a", "b")
    if torn_again:
        driver.peers(ME, replace(veteran(4), intact=False))
        with pytest.raises(StateLost):
            driver.give_up()
    else:
        driver.peers(ME, veteran(4))
        driver.answer(act.Receive, Progress(committed=4, committed_in=1))
        assert driver.give_up() is True
    joins = [line for line in driver.taken() if line.startswith("Join")]
    assert joins == ["Join held at_begin", "Join at_begin"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_member_that_loses_its_group_says_whether_it_has_received_the_state(whole: bool) -> None:
    driver = struck(3, "a", "b")
    driver.peers(ME, veteran(4))
    if whole:
        driver.answer(act.Receive, Progress(committed=4, committed_in=1))
        driver.answer(act.TellJoined, LOST)
    else:
        driver.answer(act.Receive, LOST)
    said = []

    def follow(_: object) -> None:
        said.append(driver.machine.status)
        driver.announce(3, "a", "b")

    driver.answer(act.Break, None, follow)
    driver.peers(ME, veteran(4))
    driver.answer(act.Receive, Progress(committed=4, committed_in=1))
    driver.give_up()
    assert (said[0].has_state, said[0].in_run) == (whole, whole)


def test_a_member_whose_script_stands_still_gives_its_state_to_the_next_group() -> None:
    driver = struck(3, "a", "b")
    driver.peers(ME, NEWCOMER)
    driver.drive(driver.part.bequeath())
    assert driver.taken() == [
        "PutBack",
        "TearDown",
        "Break held",
        *joined(2, "Send rank=1 step=3 BEGIN", committed=3, marks="held at_begin"),
    ]


def test_alone_it_waits_for_a_group_of_several() -> None:
    driver = struck(3, "a")
    driver.answer(act.AwaitSuccessor, lambda _: driver.announce(3, "a", "b", leave_after=4))
    driver.answer(act.Break, None, lambda _: driver.announce(4, "a", "b"))
    driver.answer(act.Declare, lambda mine: (mine,), lambda mine: (mine, NEWCOMER))
    driver.drive(driver.part.bequeath())
    log = driver.taken()
    assert log.count("AwaitSuccessor") == 1
    assert "Send rank=1 step=3 BEGIN" in log


def test_a_torn_state_is_not_given_to_the_next_group() -> None:
    driver = struck(3, "a", "b")
    driver.answer(act.PutBack, False)
    driver.drive(driver.part.bequeath())
    assert driver.taken() == ["PutBack", "DropState", "TearDown", "Break"]


# ---- nobody holds the state


def test_a_torn_state_without_a_checkpoint_is_never_begun_from() -> None:
    driver = struck(3, "a")
    driver.answer(act.PutBack, False)
    with pytest.raises(StateLost, match="checkpoint"):
        driver.give_up()
    assert driver.taken()[-1] == "Restore loop=0"


def test_a_torn_state_is_replaced_by_the_checkpoint() -> None:
    driver = struck(3, "a")
    driver.answer(act.PutBack, False)
    driver.answer(act.Restore, Progress(committed=2, committed_in=1))
    assert driver.give_up() is False
    assert driver.part.intact
    assert driver.part.progress == Progress(committed=2, committed_in=2)


def test_a_worker_torn_in_the_first_step_of_the_job_is_replaced() -> None:
    driver = begun()
    driver.enter_block()
    driver.announce(2, "a")
    driver.answer(act.PutBack, False)
    with pytest.raises(Stranded, match="the first step was interrupted"):
        driver.give_up()


def test_a_job_torn_in_its_first_step_begins_again_where_a_newcomer_has_rank_0() -> None:
    """The newcomer's objects are as its script made them."""
    driver = Driver("n")
    driver.meets(2, n=ME, a=veteran(0, intact=False, in_block=True))
    driver.begin_loop()
    assert driver.taken()[2:4] == ["Restore loop=0", "Send rank=1 step=0 BEGIN"]


def test_a_newcomer_does_not_begin_a_job_whose_state_is_torn_everywhere() -> None:
    driver = Driver("n")
    driver.meets(2, n=ME, a=veteran(3, intact=False))
    with pytest.raises(StateLost):
        driver.begin_loop()


def test_an_overwritten_newcomer_is_no_beginning_either() -> None:
    """The transfer broke off: its parameters are partly another member's."""
    driver = Driver("b")
    driver.meets(2, a=veteran(0), b=ME)
    driver.lose_at(act.Receive, 3, "b")
    with pytest.raises(Stranded, match="every member that held the job's state was lost"):
        driver.begin_loop()


def test_a_member_that_no_state_fits_ends_and_the_others_go_on_without_it() -> None:
    behind = veteran(3, in_block=True)
    ahead = veteran(4, commit_digest=0)
    stranded = trained(3)
    stranded.enter_block()
    stranded.meets(2, a=ME, b=ahead)
    with pytest.raises(Stranded):
        stranded.give_up()
    other = trained(4, "b")
    other.announce(2, "a", "b")
    other.answer(act.Declare, lambda mine: (behind, replace(mine, commit_digest=0)))
    other.answer(act.Break, lambda _: other.announce(3, "b"))
    other.boundary()
    log = other.taken()
    assert not any(line.startswith("Send") for line in log)
    assert log.count("Declare") == 2


def test_a_group_stands_until_the_member_that_no_state_fits_can_have_heard_of_it() -> None:
    """If the others closed their connections at once, it might miss the last declarations, and the
    same members would meet again and again."""
    other = trained(4, "b")
    other.announce(2, "a", "b")
    behind = veteran(3, in_block=True)
    other.answer(act.Declare, lambda mine: (behind, replace(mine, commit_digest=0)))
    other.answer(act.AwaitSuccessor, lambda _: other.announce(3, "b"))
    other.boundary()
    log = other.taken()
    assert log[: log.index("TearDown", 1)][-2:] == ["Declare", "AwaitSuccessor"]
    assert other.part.seat is not None
    assert other.part.seat.generation.number == 3


# ---- what a generation derives


def scaled(driver: Driver) -> Driver:
    driver.part.rules.append(LinearScaling(warmup_steps=10))
    return driver


def test_a_ramp_begins_with_the_group_and_is_kept_with_the_commit() -> None:
    driver = scaled(Driver())
    driver.meets(1, a=ME, b=NEWCOMER, c=NEWCOMER)
    driver.begin_loop()
    expected = Ramp(start_factor=1.0, end_factor=3.0, start_step=0, steps=10)
    assert driver.part.ramps == {"0": expected}
    assert driver.part.progress.ramps == {}
    driver.step()
    assert driver.part.progress.ramps == {"0": expected}


def test_a_ramp_of_a_group_that_committed_nothing_leaves_no_trace() -> None:
    """The sender of a state and members that took no part in the transfer derive the same."""
    driver = scaled(Driver())
    driver.announce(1, "a")
    driver.begin_loop()
    for _ in range(4):
        driver.step()
    before = driver.part.progress
    driver.meets(2, a=ME, b=veteran(4), c=NEWCOMER)  # lost again before its first step
    driver.boundary()
    driver.part.begin_block()
    assert driver.part.ramps["0"].end_factor == 3.0
    assert driver.part.progress == before
    driver.meets(3, a=ME, b=veteran(4))
    driver.give_up()
    assert driver.part.ramps["0"] == Ramp(start_factor=1.0, end_factor=2.0, start_step=4, steps=10)


def test_a_receiver_derives_its_ramp_from_what_it_received() -> None:
    ramp = Ramp(start_factor=1.0, end_factor=3.0, start_step=0, steps=10)
    driver = scaled(Driver("b"))
    driver.meets(5, a=veteran(4), b=ME)
    driver.answer(act.Receive, Progress(committed=4, committed_in=1, ramps={"0": ramp}))
    driver.begin_loop()
    assert driver.part.ramps == {"0": ramp.retarget(4, end_factor=2.0, steps=10)}


# ---- calls of session.run


def test_a_call_is_met_for_and_made() -> None:
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


def test_a_call_that_lost_its_group_is_made_again_in_the_next() -> None:
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


def test_a_lost_call_whose_changes_cannot_be_undone_leaves_no_state_to_trust() -> None:
    driver = trained(2)

    def lose(_: object) -> None:
        driver.announce(2, "a")
        raise StateTorn("changed")

    driver.answer(act.Perform, lose)
    driver.answer(act.Restore, None)
    with pytest.raises(StateLost):  # nobody else has it, and no checkpoint
        driver.call("evaluate")
    assert driver.taken()[1:6] == [
        "Perform call=evaluate",
        "DropState",
        "TearDown",
        "Break",
        "Join",
    ]


def test_the_status_says_while_the_script_is_inside_a_call() -> None:
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


def test_a_member_that_completed_a_call_makes_it_again_for_one_that_did_not() -> None:
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


def test_a_call_above_a_block_that_does_not_count_is_still_to_be_made() -> None:
    """It is undone with the block; a member that was still inside of it waits there."""
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


def test_a_call_is_made_again_for_others_only_until_the_next_one_begins() -> None:
    """What the state was like when it began is kept no longer."""
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


def test_a_member_behind_a_call_that_all_others_completed_waits_for_no_one() -> None:
    """Both are at the same call: nothing is repeated."""
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


def test_a_group_with_a_newcomer_is_of_no_use_while_a_call_is_under_way() -> None:
    driver = trained(2)
    driver.lose_at(act.Perform, 2, "a", "b")
    driver.peers(ME, NEWCOMER)
    driver.answer(act.Break, None, lambda _: driver.announce(3, "a"))
    assert driver.call("evaluate") == "evaluate"
    log = driver.taken()
    assert log.count("Join held") == 2
    assert not any(line.startswith("Send") for line in log)


def test_a_call_below_a_block_that_does_not_count_is_made_without_newcomers() -> None:
    """Their scripts come to the block itself."""
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


# ---- several loops


def test_the_second_loop_goes_on_in_the_same_group() -> None:
    driver = trained(2)
    driver.begin_loop(1)
    assert driver.taken() == ["SetUp generation=1"]
    driver.step()
    assert driver.part.progress.loop == 1
    assert [p.cursor for p in driver.part.progress.positions] == [8, 4]


@pytest.mark.parametrize("waiting", [False, True])
def test_a_loss_while_a_later_loop_is_set_up_is_followed_by_the_next_group(waiting: bool) -> None:
    driver = held_back() if waiting else trained(2, "b")
    driver.taken()
    committed = driver.part.progress.committed
    driver.lose_at(act.SetUp, 3, "b")
    driver.begin_loop(1)
    assert driver.part.intact
    driver.step()
    assert driver.part.seat is not None
    assert driver.part.seat.generation.number == 3
    assert driver.part.progress.committed == committed + 1


def held_back() -> Driver:
    """A newcomer to a job that is at its second loop."""
    driver = Driver("b")
    driver.meets(2, a=veteran(5, loop=1), b=ME)
    driver.answer(act.Receive, Progress(committed=5, committed_in=1, loop=1))
    driver.begin_loop()
    return driver


def test_a_newcomer_holds_the_state_back_until_its_script_has_come_to_the_loop() -> None:
    driver = held_back()
    assert driver.part.skips
    assert driver.part.holds_back
    assert driver.taken() == [
        "Join",
        "Declare",
        "Receive rank=0 loop=0 BEGIN",
        "TellJoined committed=5",
        "Entered",
    ]
    driver.begin_loop(1)
    assert not driver.part.skips
    assert driver.part.intact
    assert driver.taken() == ["TakeHeld", "SetUp generation=2"]
    driver.step()
    assert driver.part.progress.committed == 6


def test_a_newcomer_that_holds_back_in_a_lost_group_gets_a_newer_state() -> None:
    driver = held_back()
    driver.begin_loop(1)
    driver.boundary()
    driver.taken()
    driver.meets(3, a=veteran(5, loop=1), b=ME)
    driver.boundary()
    assert "Receive" not in " ".join(driver.taken())  # it is as good as the other now


def test_the_last_member_alive_gives_the_state_that_it_held_back() -> None:
    """No step is lost while a member holds the last committed one, in whatever form."""
    driver = held_back()
    driver.meets(3, b=ME, c=NEWCOMER)
    driver.begin_loop(1)
    driver.boundary()
    log = driver.taken()
    assert "Send rank=1 step=5 BEGIN" in log
    assert "Restore" not in " ".join(log)


def test_a_checkpoint_of_a_later_loop_is_held_back_too() -> None:
    driver = Driver()
    driver.announce(1, "a")
    driver.answer(act.Restore, Progress(committed=7, committed_in=1, loop=2))
    driver.begin_loop()
    assert driver.part.skips
    driver.begin_loop()
    assert driver.part.skips
    assert "TakeHeld" not in driver.taken()
    driver.begin_loop()
    assert driver.taken() == ["TakeHeld", "SetUp generation=1"]


def test_a_veteran_cannot_go_back_to_a_loop_that_its_script_has_left() -> None:
    driver = trained(3)
    driver.begin_loop(1)
    driver.enter_block()
    driver.answer(act.PutBack, False)
    driver.announce(2, "a")
    driver.answer(act.Restore, Progress(committed=2, committed_in=1, loop=0))
    with pytest.raises(Stranded, match="loop"):
        driver.give_up()


# ---- leaving and saving


SAVE_AND_LEAVE = {"purpose": Purpose.SAVE_AND_LEAVE}


def leaves_at_boundary(driver: Driver) -> None:
    driver.answer(act.LeaveJob, JobEnds())
    with pytest.raises(JobEnds):
        driver.boundary()


def test_at_a_boundary_a_job_that_stops_is_saved_and_left() -> None:
    driver = trained(3)
    driver.announce(2, "a", **SAVE_AND_LEAVE)
    leaves_at_boundary(driver)
    assert driver.taken()[-3:] == ["Entered", "SaveAndWait step=3", "LeaveJob"]


def test_a_job_that_stops_in_a_block_is_left_at_the_next_boundary() -> None:
    """All members save the state of one place of the script."""
    driver = trained(3)
    driver.enter_block()
    driver.announce(2, "a", **SAVE_AND_LEAVE)
    assert driver.give_up() is False
    assert not any(line.startswith("Save") for line in driver.taken())
    leaves_at_boundary(driver)
    assert driver.taken() == ["PutBackForRetry", "SaveAndWait step=3", "LeaveJob"]


def test_a_job_that_stops_in_a_call_is_saved_and_left() -> None:
    driver = trained(3)
    driver.lose_at(act.Perform, 2, "a", **SAVE_AND_LEAVE)
    driver.answer(act.LeaveJob, JobEnds())
    with pytest.raises(JobEnds):
        driver.call("evaluate")
    assert driver.taken()[-3:] == ["Entered", "SaveAndWait step=3", "LeaveJob"]
    assert not driver.machine.status.in_run


def test_a_member_that_is_a_call_behind_makes_it_before_the_job_is_saved_and_left() -> None:
    """The others are past it: all members save the state of one place of the script."""
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


def test_a_generation_may_owe_a_save_at_its_first_boundary() -> None:
    driver = trained(3)
    driver.announce(2, "a", save_first=True)
    driver.boundary()
    assert driver.taken()[-1] == "Save step=3"
    driver.boundary()
    assert driver.taken() == []


def test_a_job_gone_back_saves_its_steps_again() -> None:
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


def test_a_provisional_change_is_awaited_at_its_step() -> None:
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


def test_a_provisional_change_that_nobody_settles_is_made() -> None:
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
    """Each member writes a part: of states that differ that would be a state of nobody."""
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
    """A newcomer that lacks what the script does not track differs after its first step."""
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


def test_an_error_that_is_no_loss_is_the_scripts_own() -> None:
    driver = trained(2)
    driver.answer(act.Perform, ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        driver.call("evaluate")
    assert "Break held" not in driver.taken()
