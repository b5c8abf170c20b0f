"""What is remembered of generations, and which failures count where all workers restart."""

from __future__ import annotations

from elastic.core.coordinator.decisions import Form
from elastic.core.coordinator.generations import PastGenerations
from elastic.core.membership import ChangeReason, Failure, FailureKind
from tests.unit.core.cluster_views import generation, member

FORMS = Form(members=(member("a0"),), reason=ChangeReason.STARTED)
DISSOLVES = Form(members=(), reason=ChangeReason.MEMBER_LOST)


def past(*generations: tuple[str, ...]) -> PastGenerations:
    found = PastGenerations()
    for number, workers in enumerate(generations, 1):
        found.remember(generation(number, *workers))
    return found


def failed(worker: str, kind: FailureKind = FailureKind.EXCEPTION) -> Failure:
    return Failure(worker=worker, kind=kind)


def test_one_failure_of_a_group_counts() -> None:
    found = past(("a0", "b0"))
    assert found.breaks_another(failed("b0"))
    assert not found.breaks_another(failed("a0")), "it failed of that"
    found.remember(generation(2))
    found.remember(generation(3, "a1", "b1"))
    assert found.breaks_another(failed("a1"))


def test_the_end_of_members_of_a_group_that_is_no_more_does_not_count() -> None:
    assert not past(("a0", "b0"), ()).breaks_another(failed("a0"))


def test_what_never_was_a_member_and_what_never_arrived_counts() -> None:
    found = past(("a0", "b0"), ())
    assert found.breaks_another(failed("c0"))
    assert found.breaks_another(failed("a0", FailureKind.LEFT_OUT))


def test_every_group_but_the_first_is_a_restart() -> None:
    assert PastGenerations().restart_count(FORMS) == 0
    found = past(("a0",))
    assert found.restart_count(DISSOLVES) == 0
    found.remember(generation(2, restart_count=0))
    assert found.restart_count(FORMS) == 1
    found.remember(generation(3, "a1", restart_count=1))
    assert found.restart_count(DISSOLVES) == 1


def test_only_so_many_are_remembered() -> None:
    found = past(*[(f"a{n}",) for n in range(20)])
    assert found.get(4) is None
    assert found.get(5) is not None
    assert found.spent() == {f"a{n}" for n in range(4, 20)}
    assert [m.worker for m in found.last_members()] == ["a19"]
