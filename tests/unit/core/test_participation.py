"""A script's way through the groups: which actions its participation asks for, in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.learning_rate import LinearScaling, Ramp
from elastic.core.membership import Generation
from elastic.core.recovery import Declaration
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Participation, Progress
from elastic.errors import StateLost, StepMisused, Stranded
from tests.unit.core.participating import (
    LOST,
    ME,
    NEWCOMER,
    Driver,
    begun,
    generation,
    joined,
    struck,
    trained,
    veteran,
)

# ---- into a group


def test_a_job_of_one_worker_begins_and_commits_a_step() -> None:
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


def test_a_restored_checkpoint_is_sent_to_the_other_members() -> None:
    driver = Driver()
    driver.announce(3, "a", "b")
    driver.answer(act.Restore, Progress(committed=9, committed_in=2))
    driver.peers(ME, NEWCOMER)
    driver.begin_loop()
    assert driver.taken() == joined(3, "Restore loop=0", "Send rank=1 step=9 BEGIN", committed=9)
    # A restored state counts as newer than that of a member that was cut off before.
    assert driver.part.progress.committed_in == 3


def on_one_node(number: int, *workers: str) -> Generation:
    apart = generation(number, *workers)
    return replace(apart, members=tuple(replace(m, node="n") for m in apart.members))


def test_a_member_on_the_node_of_rank_0_reads_the_checkpoint_that_rank_0_restores() -> None:
    driver = Driver("b")
    driver.machine.generation_announced(on_one_node(3, "a", "b"))
    driver.peers(NEWCOMER, ME)
    driver.answer(act.ReadCheckpoint, True)
    driver.answer(act.Receive, Progress(committed=9, committed_in=3))
    driver.begin_loop()
    receives = "Receive rank=0 loop=0 BEGIN"
    assert driver.taken() == joined(3, "ReadCheckpoint loop=0", receives, committed=9)


def test_a_member_elsewhere_reads_nothing() -> None:
    driver = Driver("b")
    driver.meets(3, a=NEWCOMER, b=ME)
    driver.answer(act.Receive, Progress(committed=9, committed_in=3))
    driver.begin_loop()
    assert driver.taken() == joined(3, "Receive rank=0 loop=0 BEGIN", committed=9)


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_job_begins_only_from_a_member_that_has_read_no_part_of_a_checkpoint(
    overwritten: bool,
) -> None:
    driver = Driver("b")
    driver.part = Participation(driver.machine, receives_in_place=False)
    driver.machine.generation_announced(on_one_node(2, "a", "b"))
    driver.peers(NEWCOMER, ME)
    driver.answer(act.ReadCheckpoint, overwritten)
    driver.lose_at(act.Receive, 3, "b")
    if overwritten:
        with pytest.raises(Stranded, match="was lost while this worker received"):
            driver.begin_loop()
    else:
        driver.begin_loop()
        assert driver.part.progress == Progress(committed_in=3)


def test_a_job_does_not_begin_from_a_member_that_has_lost_its_group_while_it_restored() -> None:
    """The checkpoint is gone by then."""
    driver = Driver()
    driver.announce(1, "a")
    driver.lose_at(act.Restore, 2, "a")
    with pytest.raises(Stranded):
        driver.begin_loop()


def test_a_newcomer_receives_the_state() -> None:
    driver = Driver("b")
    driver.meets(2, a=veteran(5), b=ME)
    driver.answer(act.Receive, Progress(committed=5, committed_in=1))
    driver.begin_loop()
    assert driver.taken() == joined(2, "Receive rank=0 loop=0 BEGIN", committed=5)
    assert driver.part.intact
    assert driver.part.progress.committed_in == 1  # a received state is as old as it was


def test_a_newcomer_is_set_up_only_once_it_has_received_all_of_the_state() -> None:
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


def test_a_mismatch_of_models_is_explained_and_the_group_is_given_up() -> None:
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


def test_no_state_is_taken_if_members_have_not_made_the_same_reductions() -> None:
    """The most advanced member is the one that has left a reduction out."""
    driver = trained(8)
    driver.part.reduced = driver.part.begun = 8
    driver.step()
    driver.meets(2, a=ME, b=veteran(8, group=1, reduced=8, begun=10))
    with pytest.raises(StepMisused, match=r"same reductions.*rank 0 9 steps.*rank 1 8 steps"):
        driver.boundary()


def test_a_step_in_doubt_is_computed_again_if_another_member_has_not_committed_it() -> None:
    driver = trained(8)
    driver.step()
    driver.part.doubtful = True
    driver.meets(2, a=ME, b=veteran(8, group=1))
    driver.answer(act.Receive, Progress(committed=8, committed_in=1))
    driver.boundary()
    assert "Receive rank=1 loop=0 BEGIN" in driver.taken()
    assert driver.part.progress.committed == 8
    assert not driver.part.doubtful


def test_a_step_in_doubt_that_all_have_committed_counts() -> None:
    driver = trained(8)
    driver.step()
    driver.part.doubtful = True
    driver.meets(2, a=ME, b=veteran(9, group=1, doubtful=True))
    driver.boundary()
    assert not any(action.startswith("Receive") for action in driver.taken())
    assert driver.part.progress.committed == 9


def test_only_members_that_differ_receive_the_state_and_the_difference_is_told() -> None:
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
    assert driver.part.last_block_discarded
    assert driver.taken() == [
        "PutBack",
        "TearDown",
        "Break held",
        *joined(2, committed=3, marks="held at_begin"),
        "KeepForRetry",
    ]
    driver.boundary()
    assert driver.taken() == ["PutBackForRetry"]
    assert not driver.part.last_block_discarded
    driver.part.begin_block()
    driver.commit()
    assert driver.part.progress.committed == 4
    assert driver.part.progress.committed_in == 2


def test_a_member_that_cannot_undo_what_stands_below_a_void_block_receives_the_state() -> None:
    driver = struck(3, "a", "b")
    driver.peers(ME, veteran(3, begin_digest=7))
    assert driver.give_up() is False
    driver.taken()
    driver.answer(act.PutBackForRetry, False)
    driver.announce(3, "a", "b")
    driver.peers(ME, veteran(3, begin_digest=7))
    driver.answer(act.Receive, Progress(committed=3, committed_in=1))
    driver.boundary()
    assert driver.taken() == [
        "PutBackForRetry",
        "DropState",
        "TearDown",
        "Break",
        *joined(3, "Receive rank=1 loop=0 BEGIN", committed=3, marks="at_begin"),
    ]
    assert driver.part.intact


def test_a_block_that_others_completed_counts_with_their_state_of_its_end() -> None:
    driver = struck(3, "a", "b")
    driver.peers(ME, veteran(4))
    driver.answer(act.Receive, Progress(committed=4, committed_in=1))
    assert driver.give_up() is True
    assert not driver.part.last_block_discarded
    assert driver.taken() == [
        "PutBack",
        "TearDown",
        "Break held",
        *joined(2, "DropState", "Receive rank=1 loop=0 COMMIT", committed=4, marks="held at_begin"),
    ]
    # The script runs what stands below the block, so the member is not at the begin mark.
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


def test_a_state_that_could_not_be_undone_is_received_from_another_member() -> None:
    driver = struck(3, "a", "b")
    driver.answer(act.PutBack, False)
    holds_the_state: list[bool] = []
    driver.answer(act.Join, lambda _: holds_the_state.append(driver.machine.status.has_state))
    driver.peers(ME, veteran(3, in_block=True))
    driver.answer(act.Receive, Progress(committed=3, committed_in=1))
    assert driver.give_up() is False
    assert driver.part.intact
    assert holds_the_state == [False]  # so that other holders are waited for
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
def test_a_member_that_loses_its_group_while_it_receives_stays_torn(torn_again: bool) -> None:
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
    driver.drive(driver.part.hand_over_state())
    assert driver.taken() == [
        "PutBack",
        "TearDown",
        "Break held",
        *joined(2, "Send rank=1 step=3 BEGIN", committed=3, marks="held at_begin"),
    ]


def test_a_member_that_stands_still_alone_waits_for_a_group_of_several() -> None:
    driver = struck(3, "a")
    driver.answer(act.AwaitSuccessor, lambda _: driver.announce(3, "a", "b", leave_after=4))
    driver.answer(act.Break, None, lambda _: driver.announce(4, "a", "b"))
    driver.answer(act.Declare, lambda mine: (mine,), lambda mine: (mine, NEWCOMER))
    driver.drive(driver.part.hand_over_state())
    log = driver.taken()
    assert log.count("AwaitSuccessor") == 1
    assert "Send rank=1 step=3 BEGIN" in log


def test_a_torn_state_is_not_given_to_the_next_group() -> None:
    driver = struck(3, "a", "b")
    driver.answer(act.PutBack, False)
    driver.drive(driver.part.hand_over_state())
    assert driver.taken() == ["PutBack", "DropState", "TearDown", "Break"]


# ---- nobody holds the state


def test_a_torn_state_without_a_checkpoint_raises_state_lost() -> None:
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


def test_a_job_does_not_begin_from_a_newcomer_that_is_partly_overwritten() -> None:
    """The transfer broke off, so its parameters are partly those of another member."""
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


def test_a_group_with_a_member_that_no_state_fits_stands_until_its_successor_is_known() -> None:
    """If the others closed their connections at once, that member might miss the last
    declarations, and the same members would meet again and again."""
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
    assert driver.taken() == ["TakePostponed", "SetUp generation=2"]
    driver.step()
    assert driver.part.progress.committed == 6


def test_a_newcomer_that_has_taken_its_held_state_receives_nothing_in_the_next_group() -> None:
    driver = held_back()
    driver.begin_loop(1)
    driver.boundary()
    driver.taken()
    driver.meets(3, a=veteran(5, loop=1), b=ME)
    driver.boundary()
    assert "Receive" not in " ".join(driver.taken())  # it holds the same state as the other


def test_the_last_member_alive_sends_the_state_that_it_held_back() -> None:
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
    assert "TakePostponed" not in driver.taken()
    driver.begin_loop()
    assert driver.taken() == ["TakePostponed", "SetUp generation=1"]


def test_a_veteran_cannot_go_back_to_a_loop_that_its_script_has_left() -> None:
    driver = trained(3)
    driver.begin_loop(1)
    driver.enter_block()
    driver.answer(act.PutBack, False)
    driver.announce(2, "a")
    driver.answer(act.Restore, Progress(committed=2, committed_in=1, loop=0))
    with pytest.raises(Stranded, match=r"goes back to loop 1 over .* has left for loop 2;"):
        driver.give_up()


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_job_that_has_begun_does_not_begin_with_the_initial_state(has_checkpoint: bool) -> None:
    """All members have ended, so only the coordinator knows that steps were committed."""
    driver = Driver()
    driver.announce(2, "a", begun=True)
    if has_checkpoint:
        driver.answer(act.Restore, Progress(committed=2, committed_in=1))
        driver.begin_loop()
        assert driver.part.progress.committed == 2
    else:
        with pytest.raises(StateLost, match="--checkpoint-dir"):
            driver.begin_loop()
