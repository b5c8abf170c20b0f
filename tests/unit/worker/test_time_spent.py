"""`TimeSpent` counts every second of a worker since its first group in one of its sums."""

from __future__ import annotations

import pytest

from elastic.v1 import timeline_pb2
from elastic.worker.steps_clock import MOST_STRETCHES, TimeSpent


def total_s(spent: TimeSpent) -> float:
    found = spent.to_pb()
    return found.steps_s + found.first_steps_s + found.given_up_s + found.regroup_s


def trained() -> TimeSpent:
    """Return the time of three steps from 10.0 on: the first took 3 s, the others 1 s."""
    spent = TimeSpent()
    spent.entered(10.0, 1, join_s=0.5, sync_s=0.5)
    spent.commit(13.0, 1.0, 1)
    spent.commit(14.0, 1.0, 2)
    spent.commit(15.0, 1.0, 3)
    return spent


def test_a_first_step_counts_as_a_usual_one_and_its_excess_separately() -> None:
    spent = trained()
    assert (spent.steps, spent.steps_s, spent.first_steps_s) == (3, 3.0, 2.0)
    assert total_s(spent) == 5.0


def test_saves_calls_and_data_are_part_of_a_steps_time() -> None:
    spent = trained()
    spent.saved(0.25)
    spent.called(0.5)
    spent.fetched(16.0, 16.5)
    spent.commit(17.0, 1.0, 4)
    assert (spent.steps_s, spent.saves_s, spent.calls_s, spent.data_s) == (5.0, 0.25, 0.5, 0.5)
    assert spent.own_s == pytest.approx(0.75), "from the commit to the samples, without the call"
    assert total_s(spent) == 7.0


def test_lost_time_is_reported_with_the_group_that_follows() -> None:
    spent = trained()
    spent.fetched(15.0, 15.5)
    spent.left(15.75, in_step=True)
    spent.left(16.0, in_step=False)
    assert total_s(spent) == 5.0
    spent.entered(17.0, 2, join_s=0.5, sync_s=0.25)
    found = spent.to_pb()
    assert (found.generation, found.given_up_s, found.regroup_s) == (2, 0.75, 1.25)
    assert (found.join_s, found.sync_s, found.data_s) == (0.5, 0.25, 0.0)
    assert total_s(spent) == 7.0


def test_a_worker_is_out_from_its_first_lost_group_until_a_committed_step() -> None:
    spent = trained()
    assert spent.out_since is None
    spent.left(15.75, in_step=True)
    spent.left(16.0, in_step=False)
    spent.entered(17.0, 2, join_s=0.0, sync_s=0.0)
    spent.left(18.0, in_step=True)
    spent.entered(19.0, 3, join_s=0.0, sync_s=0.0)
    assert spent.out_since == 15.75
    spent.commit(20.0, 1.0, 4)
    assert spent.out_since is None


def test_only_the_call_counts_as_given_up_if_the_group_is_lost_at_a_boundary() -> None:
    spent = trained()
    spent.called(2.0)
    spent.left(17.5, in_step=False)
    spent.entered(18.0, 2, join_s=0.0, sync_s=0.0)
    assert (spent.given_up_s, spent.regroup_s, spent.calls_s) == (2.0, 1.0, 0.0)


def test_settle_counts_the_last_save_although_no_step_follows() -> None:
    spent = trained()
    spent.saved(2.0)
    spent.settle(17.0)
    assert (spent.saves_s, spent.steps_s) == (2.0, 5.0)
    spent.left(18.0, in_step=False)
    spent.settle(19.0)
    assert total_s(spent) == 7.0


def test_newest_returns_the_last_stretches_in_order() -> None:
    spent = trained()
    spent.saved(0.25)
    spent.fetched(15.5, 15.6)
    spent.commit(16.0, 1.0, 4)
    spent.left(16.5, in_step=True)
    spent.entered(17.5, 2, join_s=0.25, sync_s=0.125)
    newest = spent.newest(3)
    what = timeline_pb2.Stretch.What.Name
    assert [(what(s.what), s.generation, s.step) for s in newest] == [
        ("WHAT_STEP", 1, 4),
        ("WHAT_GIVEN_UP", 1, 4),
        ("WHAT_REGROUP", 2, 4),
    ]
    assert [s.lasted_s for s in newest] == [1.0, 0.5, 1.0]
    step, given_up, regroup = newest
    assert (step.saves_s, step.data_s) == (0.25, pytest.approx(0.1))
    assert (regroup.join_s, regroup.sync_s) == (0.25, 0.125)
    assert given_up.began_unix_s == pytest.approx(step.began_unix_s + 1.0, abs=1e-3)


def test_only_the_newest_stretches_are_remembered() -> None:
    spent = trained()
    for step in range(2 * MOST_STRETCHES):
        spent.commit(16.0 + step, 1.0, step)
    assert len(spent.newest(10 * MOST_STRETCHES)) == MOST_STRETCHES
    assert spent.newest(1)[0].step == 2 * MOST_STRETCHES - 1
