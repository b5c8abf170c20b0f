"""NodeFailures: which nodes fail too often by no fault of the script."""

from __future__ import annotations

import pytest

from elastic.core.membership import Failure, FailureKind
from elastic.core.quarantine import NodeFailures


def failure(kind: FailureKind) -> Failure:
    return Failure(worker="n1-1", kind=kind)


SIGNAL = failure(FailureKind.SIGNAL)


def test_a_node_fails_too_often_once_its_failures_in_the_window_reach_the_limit() -> None:
    failures = NodeFailures(3, 60.0)
    assert not failures.worker_failed("n1", SIGNAL, 0.0, step=1)
    assert not failures.node_lost("n1", 1.0)
    assert not failures.worker_failed("n2", SIGNAL, 2.0, step=2)
    assert failures.worker_failed("n1", SIGNAL, 59.0, step=3)
    assert failures.failures("n1", 59.0) == 3
    assert failures.failures("n2", 59.0) == 1
    assert failures.failures("n3", 59.0) == 0


def test_each_failure_counts_only_for_the_window() -> None:
    failures = NodeFailures(2, 60.0)
    failures.worker_failed("n1", SIGNAL, 0.0, step=1)
    assert failures.failures("n1", 59.9) == 1
    assert failures.failures("n1", 60.0) == 0
    assert not failures.node_lost("n1", 60.0)
    assert failures.node_lost("n1", 61.0)


@pytest.mark.parametrize("kind", FailureKind)
def test_errors_of_the_script_do_not_count_against_its_node(kind: FailureKind) -> None:
    failures = NodeFailures(1, 60.0)
    scripts_own = kind in (FailureKind.EXCEPTION, FailureKind.EXIT_CODE)
    assert failures.worker_failed("n1", failure(kind), 0.0, step=1) is not scripts_own
    assert failures.failures("n1", 0.0) == (0 if scripts_own else 1)


def test_equal_failures_of_several_machines_at_one_step_do_not_count() -> None:
    failures = NodeFailures(3, 60.0)
    for attempt in range(4):
        for machine in ("n1", "n2"):
            for _ in range(4):  # workers of each
                at = 10.0 * attempt
                assert not failures.worker_failed(machine, SIGNAL, at, step=50)
    assert failures.failures("n1", 40.0) == failures.failures("n2", 40.0) == 0


def test_a_machine_alone_is_blamed_for_its_repeated_failures_at_one_step() -> None:
    failures = NodeFailures(3, 60.0)
    found = [failures.worker_failed("n1", SIGNAL, 10.0 * n, step=0) for n in range(3)]
    assert found == [False, False, True]


def test_failures_of_other_kinds_or_steps_have_no_common_cause() -> None:
    failures = NodeFailures(2, 60.0)
    failures.worker_failed("n1", SIGNAL, 0.0, step=5)
    failures.worker_failed("n2", failure(FailureKind.LEFT_OUT), 0.1, step=5)
    failures.worker_failed("n2", SIGNAL, 10.0, step=6)
    assert failures.failures("n1", 10.0) == 1
    assert failures.worker_failed("n1", SIGNAL, 20.0, step=7)


def test_workers_of_a_machine_that_fail_together_count_once() -> None:
    failures = NodeFailures(3, 60.0)
    assert not any(failures.worker_failed("n1", SIGNAL, n / 10, step=5) for n in range(8))
    assert failures.failures("n1", 1.0) == 1


def test_a_limit_of_0_allows_any_number_of_failures() -> None:
    failures = NodeFailures(0, 60.0)
    assert not any(failures.node_lost("n1", float(at)) for at in range(50))
    assert failures.failures("n1", 49.0) == 50


def test_a_forgiven_node_starts_again_without_failures() -> None:
    failures = NodeFailures(2, 60.0)
    failures.node_lost("n1", 0.0)
    failures.forgive("n1")
    failures.forgive("never failed")
    assert failures.failures("n1", 1.0) == 0
    assert not failures.node_lost("n1", 1.0)


def test_nodes_that_come_and_go_are_forgotten() -> None:
    failures = NodeFailures(3, 60.0)
    for number in range(1000):
        failures.node_lost(f"n{number}", float(number))
        assert failures.failures(f"asked-for-{number}", float(number)) == 0
        assert len(failures._failed_at) <= 60
