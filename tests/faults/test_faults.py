"""A job in which a system call fails once reaches its right end, or ends and names the cause."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import etcd_cluster
from tests.faults.campaign import Campaign
from tests.faults.library import build, require_compiler
from tests.faults.long_running import ClusterJob, LongOutcome
from tests.faults.points import ERRORS, FUNCTIONS, ROLES, Point, drawn
from tests.faults.reference import Reference
from tests.faults.running import Outcome, attempt, new_place, undisturbed
from tests.waiting import eventually

_WHOLE_JOBS = 8
_POINTS = 120  # in jobs that train on
_SEED = int(os.environ.get("SEED", "0"))
# Each of these points once found a defect, which must not come back.
_FOUND = (
    "run:connect:2:EADDRNOTAVAIL",
    "run:fork:1:ENOMEM",
    "run:pipe:1:EMFILE",
    "run:socket:8:ENFILE",
    "run:accept:7:ENFILE",
    "zygote:send:1:ECONNRESET",
)


# The same in a job that trains: each once left it waiting for ever, or cost its state.
_FOUND_LATER = (
    "zygote:recv:+1:ECONNRESET",
    "worker:send:2:ECONNRESET",
    "zygote:send:+2:ECONNRESET",
    "worker:open:1:EIO",
    "worker:recv:1:ECONNRESET",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require_compiler()
    return build(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def truth(library: Path) -> Outcome:
    return undisturbed(library)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", range(_WHOLE_JOBS))
def test_a_job_survives_one_failing_call_or_names_the_cause(
    library: Path, truth: Outcome, index: int
) -> None:
    point = next(itertools.islice(drawn(truth.counts, _SEED), index, None))
    outcome = attempt(library, point, truth.weights)
    assert not outcome.wrong, f"{outcome.line}\n{outcome.wrong}\n{outcome.story}"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("found", _FOUND)
def test_a_failing_call_that_was_once_reported_badly_is_reported_well(
    library: Path, truth: Outcome, found: str
) -> None:
    outcome = attempt(library, Point.parse(found), truth.weights)
    assert not outcome.wrong, f"{outcome.line}\n{outcome.wrong}\n{outcome.story}"


@pytest.mark.long
def test_a_training_job_survives_failing_calls_that_once_broke_it(library: Path) -> None:
    points = [Point.parse(text) for text in _FOUND_LATER]
    outcomes = [*Campaign(library, "", _SEED).several(points)]
    assert not (found := _wrong(outcomes)), found
    assert sum(outcome.fired is not None for outcome in outcomes) == len(points)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_coordinator_that_accepts_no_more_connections_makes_way(
    library: Path, number: int
) -> None:
    """gRPC closes its acceptor for good if the machine has no file left for a moment (ENFILE)."""
    point = Point.parse(f"coordinator:accept:{number}:ENFILE")
    with etcd_cluster(size=1) as etcd:
        outcomes = [*Campaign(library, etcd.endpoints(), _SEED).several([point])]
    assert not (found := _wrong(outcomes)), found


@pytest.mark.long
def test_a_process_that_ends_later_is_judged_by_its_own_failing_call(library: Path) -> None:
    """A coordinator notices only after some seconds that it accepts no more connections, and all
    train on meanwhile. The next point, in another process, is not the cause that it must name."""
    earlier = Point.parse("coordinator:accept:+1:ENFILE")
    never_reached = Point.parse("agent:open:1000000000:EIO")
    with (
        etcd_cluster(size=1) as etcd,
        new_place() as place,
        contextlib.closing(ClusterJob(library, place, Reference(), _SEED, etcd.endpoints())) as job,
    ):
        assert not job.settle().wrong
        job.armed.arm(earlier, job.processes()["coordinator"].process.pid)
        with socket.create_connection(("127.0.0.1", job.port)):
            eventually(lambda: job.armed.fired, "the connection was not refused")
        outcomes = [job.settle(earlier), job.attempt(never_reached)]
    assert not (found := _wrong(outcomes)), found
    assert "coordinator ends 75" in [outcome.ended for outcome in outcomes]


@pytest.mark.long
def test_an_agent_whose_first_send_fails_starts_or_names_the_cause(library: Path) -> None:
    """gRPC's thread does not check whether it has woken the event loop for an answer."""
    with etcd_cluster(size=1) as etcd:
        campaign = Campaign(library, etcd.endpoints(), _SEED)
        outcomes = [*campaign.several([Point.parse("agent:send:1:ECONNRESET")])]
    assert not (found := _wrong(outcomes)), found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_jobs_survive_many_drawn_failing_calls_or_name_the_cause(library: Path) -> None:
    with etcd_cluster(size=1) as etcd:
        campaign = Campaign(library, etcd.endpoints(), _SEED)
        outcomes = [*itertools.islice(campaign.outcomes(of_each_kind=_POINTS // 4), _POINTS)]
    assert not (found := _wrong(outcomes)), found
    assert sum(outcome.fired is not None for outcome in outcomes) > _POINTS / 2


@pytest.mark.long
def test_every_role_calls_something_that_can_fail(truth: Outcome) -> None:
    """Otherwise the library counts nothing, and every point passes."""
    assert {role for (role, _), count in truth.counts.items() if count} == set(ROLES)
    assert truth.counts["zygote", "fork"] >= 3
    assert truth.counts["run", "fsync"] > 0
    assert truth.counts["worker", "fsync"] > 0


def _wrong(outcomes: list[LongOutcome]) -> str:
    return "\n".join(f"{o.line}\n{o.wrong}\n{o.story}" for o in outcomes if o.wrong)


def test_points_are_spread_over_roles_functions_and_calls() -> None:
    counts = {("run", "open"): 1000, ("zygote", "fork"): 3, ("keeper", "fork"): 0}
    points = list(itertools.islice(drawn(counts, 1), 200))
    assert points == list(itertools.islice(drawn(counts, 1), 200))
    assert points != list(itertools.islice(drawn(counts, 2), 200))
    by_role = {role: [p for p in points if p.role == role] for role in ROLES}
    assert (len(by_role["run"]), len(by_role["zygote"]), len(by_role["keeper"])) == (100, 100, 0)
    assert {p.number for p in by_role["zygote"]} == {1, 2, 3}
    assert max(p.number for p in by_role["run"]) > 900
    assert sum(p.number <= 24 for p in by_role["run"]) > 30
    assert {p.error for p in by_role["run"]} == set(ERRORS["open"])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_point_is_read_as_it_is_written(function: str) -> None:
    for error in ERRORS[function]:
        point = Point(role="worker", function=function, number=7, error=error)
        assert Point.parse(str(point)) == point
