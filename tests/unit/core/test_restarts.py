"""Which failures end the job, and how long a restart is delayed after the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.membership import Failure, FailureKind
from elastic.core.restarts import Backoff, RestartPolicy, Verdict

RAISED = Failure(worker="a-1", kind=FailureKind.EXCEPTION, signature="ValueError train.py:7")


def failure(worker: str, kind: FailureKind = FailureKind.EXCEPTION, at: str = "7") -> Failure:
    return Failure(worker=worker, kind=kind, signature=f"ValueError train.py:{at}")


@pytest.mark.parametrize(
    ("again", "committed", "expected"),
    [
        (failure("a-2"), 5, Verdict.SAME_FAILURE_NO_PROGRESS),
        (failure("a-2"), 6, Verdict.RESTART),  # the job has moved on in between
        (failure("a-2", at="8"), 5, Verdict.RESTART),  # a different error
        (failure("b-1"), 5, Verdict.RESTART),  # b-1 ran when a-1 failed: the same incident
        (failure("a-2", FailureKind.SIGNAL), 5, Verdict.RESTART),  # not the script's fault
    ],
)
def test_a_recurring_error_ends_the_job(again: Failure, committed: int, expected: Verdict) -> None:
    policy = RestartPolicy(max_restarts=10, window_s=60.0)
    running = frozenset({"a-1", "b-1"})
    first = policy.judge(failure("a-1"), now=0.0, committed=5, running=running)
    assert first is Verdict.RESTART
    assert policy.judge(again, now=1.0, committed=committed, running=running) is expected


def test_temporary_failures_are_retried_until_the_budget_is_spent() -> None:
    policy = RestartPolicy(max_restarts=2, window_s=60.0)
    verdicts = [
        policy.judge(
            replace(failure(f"a-{number}"), code=75), now=0.0, committed=0, running=frozenset()
        )
        for number in range(3)
    ]
    assert verdicts == [Verdict.RESTART, Verdict.RESTART, Verdict.BUDGET_SPENT]


@pytest.mark.parametrize(
    ("at", "expected"), [(59.0, Verdict.BUDGET_SPENT), (61.0, Verdict.RESTART)]
)
def test_only_failures_in_the_window_count_towards_the_budget(at: float, expected: Verdict) -> None:
    policy = RestartPolicy(max_restarts=2, window_s=60.0)
    for now in (0.0, 30.0):
        killed = failure("a-1", FailureKind.SIGNAL)
        policy.judge(killed, now=now, committed=0, running=frozenset())
    killed = failure("a-2", FailureKind.SIGNAL)
    assert policy.judge(killed, now=at, committed=0, running=frozenset()) is expected


def test_a_configuration_error_is_not_retried() -> None:
    wrong = Failure(worker="a-1", kind=FailureKind.EXCEPTION, retryable=False)
    policy = RestartPolicy(max_restarts=10, window_s=60.0)
    verdict = policy.judge(wrong, now=0.0, committed=0, running=frozenset())
    assert verdict is Verdict.NOT_RETRYABLE


def test_backoff_doubles_up_to_its_cap_after_an_immediate_start() -> None:
    delays = [Backoff(base_s=1.0, cap_s=8.0, seed=3).delay_s(n) for n in range(8)]
    assert delays[:2] == [0.0, 0.0]
    bounds = [(1.0, 2.0), (2.0, 4.0), (4.0, 8.0), (4.0, 8.0), (4.0, 8.0), (4.0, 8.0)]
    assert all(low <= d < high for d, (low, high) in zip(delays[2:], bounds, strict=True))
    assert delays == [Backoff(base_s=1.0, cap_s=8.0, seed=3).delay_s(n) for n in range(8)]
    assert delays != [Backoff(base_s=1.0, cap_s=8.0, seed=4).delay_s(n) for n in range(8)]


def test_errors_from_before_the_last_progress_are_forgotten() -> None:
    policy = RestartPolicy(max_restarts=10**6, window_s=60.0)
    for number in range(1000):
        raised = failure(f"a-{number}", at=str(number))
        policy.judge(raised, now=float(number), committed=number, running=frozenset())
        assert len(policy._incidents) == 1


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("members", [("a-1", "b-1"), ("b-1",)])
def test_an_error_of_all_members_ends_a_job_that_saves_no_checkpoints(
    saves: bool, members: tuple[str, ...]
) -> None:
    """Without a checkpoint a restart repeats it. One member's error may be its machine's fault."""
    policy = RestartPolicy(max_restarts=10, window_s=60.0, saves=saves)
    running = frozenset({"a-1", "b-1"})

    def judge(worker: str, left: frozenset[str]) -> Verdict:
        return policy.judge(failure(worker), now=0.0, committed=5, running=running, members=left)

    assert judge("a-1", running) is Verdict.RESTART
    expected = Verdict.RESTART if saves else Verdict.SAME_FAILURE_NO_PROGRESS
    assert judge("b-1", frozenset(members)) is expected


def test_the_first_error_of_a_lone_worker_is_retried() -> None:
    policy = RestartPolicy(max_restarts=10, window_s=60.0, saves=False)
    own = frozenset({"a-1"})
    verdict = policy.judge(failure("a-1"), now=0.0, committed=5, running=own, members=own)
    assert verdict is Verdict.RESTART


def hung(worker: str, place: str = "/job/data.py:41") -> Failure:
    return Failure(
        worker=worker, kind=FailureKind.LEFT_OUT, signature=f"hung at {place}", place=place
    )


@pytest.mark.parametrize(
    ("again", "node", "generation", "committed", "expected"),
    [
        (hung("a-1"), "a", 2, 5, Verdict.SAME_FAILURE_NO_PROGRESS),
        (hung("b-2"), "b", 2, 5, Verdict.RESTART),  # the same machine: it may be at fault
        (hung("a-1"), "a", 1, 5, Verdict.RESTART),  # the same group: shared storage may hang
        (hung("a-1"), "a", 2, 6, Verdict.RESTART),  # the job has moved on in between
        (hung("a-1", "/job/data.py:42"), "a", 2, 5, Verdict.RESTART),
        (hung("a-1", ""), "a", 2, 5, Verdict.RESTART),  # the place is unknown
    ],
)
def test_a_later_groups_hang_at_the_same_place_on_another_node_ends_the_job(
    again: Failure, node: str, generation: int, committed: int, expected: Verdict
) -> None:
    policy = RestartPolicy(max_restarts=10, window_s=60.0)
    running = frozenset({"a-1", "b-1"})

    def judge(failure: Failure, node: str, generation: int, committed: int) -> Verdict:
        return policy.judge(
            failure,
            now=0.0,
            committed=committed,
            running=running,
            node=node,
            generation=generation,
        )

    assert judge(hung("b-1"), "b", 1, 5) is Verdict.RESTART
    assert judge(again, node, generation, committed) is expected


def test_nodes_that_hang_together_twice_do_not_end_the_job() -> None:
    """Their shared storage may be unavailable for longer than a restart takes."""
    policy = RestartPolicy(max_restarts=10, window_s=60.0)
    for generation in (1, 3):
        for node in ("a", "b"):
            verdict = policy.judge(
                hung(f"{node}-{generation}"),
                now=0.0,
                committed=5,
                running=frozenset(),
                node=node,
                generation=generation,
            )
            assert verdict is Verdict.RESTART
