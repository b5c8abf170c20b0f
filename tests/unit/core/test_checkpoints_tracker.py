"""A checkpoint is whole with its last part, and given up with a lost writer."""

from __future__ import annotations

from elastic.core.coordinator.checkpoints import CheckpointTracker
from tests.unit.core.cluster_views import generation

PAIR, NEXT = generation(3, "a0", "b0"), generation(4, "a0", "c0")


def test_whole_with_the_last_part_and_only_then() -> None:
    tracker = CheckpointTracker()
    assert not tracker.written(PAIR, 10, 0, 2)
    assert not tracker.written(PAIR, 10, 0, 2)  # reported twice
    assert tracker.written(PAIR, 10, 1, 2)


def test_parts_of_two_generations_do_not_mix() -> None:
    tracker = CheckpointTracker()
    assert not tracker.written(PAIR, 10, 0, 2)
    assert not tracker.written(NEXT, 10, 1, 2)


def test_nonsense_is_refused() -> None:
    tracker = CheckpointTracker()
    assert not tracker.written(PAIR, 10, 0, 1)
    assert not tracker.written(PAIR, 10, 2, 2)
    assert tracker.lost("a0") == []


def test_a_lost_writer_takes_with_it_what_it_has_not_written() -> None:
    tracker = CheckpointTracker()
    tracker.written(PAIR, 10, 0, 2)
    assert tracker.lost("a0") == []
    assert tracker.lost("b0") == [(10, 3)]
    assert tracker.abandoned
    assert tracker.lost("b0") == []


def test_a_commit_makes_up_for_what_was_abandoned() -> None:
    tracker = CheckpointTracker()
    tracker.written(PAIR, 10, 0, 2)
    tracker.lost("b0")
    tracker.written(NEXT, 12, 0, 2)
    assert tracker.written(NEXT, 12, 1, 2)
    assert not tracker.abandoned


def test_a_part_of_a_whole_save_that_is_reported_again_does_not_open_it_again() -> None:
    tracker = CheckpointTracker()
    tracker.written(PAIR, 10, 0, 2)
    assert tracker.written(PAIR, 10, 1, 2)
    assert not tracker.written(PAIR, 10, 0, 2)
    assert tracker.lost("b0") == []
    assert not tracker.abandoned


def test_a_save_that_nobody_is_told_is_given_up_can_be_completed_by_who_comes_back() -> None:
    tracker = CheckpointTracker(told=False)
    tracker.written(PAIR, 10, 0, 2)
    assert tracker.abandon(["b0"]) == []
    assert tracker.abandoned
    assert tracker.written(PAIR, 10, 1, 2)
    assert not tracker.abandoned
