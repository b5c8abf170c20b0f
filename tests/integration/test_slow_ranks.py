"""A rank that delays the others in every step is named, with the part that is slow."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.integration.running import Place

SINCE, WITHIN = 24, 30
STATUS = ("status", "--output", "json")


AGAIN = 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "rank", "how", "step_s"),
    [
        ("data", 1, "sleep", 0.15),
        *(
            pytest.param(part, number % 3, how, 0.075, marks=pytest.mark.long)
            for part in ("compute", "optimizer", "data")
            for number, how in enumerate(("sleep", "work") * (AGAIN // 2))
        ),
        pytest.param("between_steps", 0, "sleep", 0.075, marks=pytest.mark.long),
    ],
)
def test_a_slow_rank_is_named_within_30_steps(
    place: Place, part: str, rank: int, how: str, step_s: float
) -> None:
    job = place.start("slow_rank.py", SINCE + 60, step_s, part, rank, SINCE, how, nproc=3)
    assert job.wait() == 0, job.story()
    (named,) = job.named("straggler")
    assert (named["rank"], named["slow_in"], named["action"]) == (rank, part, "report")
    assert SINCE < named["step"] <= SINCE + WITHIN
    assert named["late_s"] > 0.14 * named["step_s"]
    assert f"rank {rank} (node local) holds up every step by" in named["verdict"]


@pytest.mark.long
def test_a_slow_rank_is_named_where_a_step_has_two_backward_passes(place: Place) -> None:
    script = ("slow_rank.py", SINCE + 60, 0.06, "compute", 1, SINCE, "sleep", "two")
    job = place.start(*script, nproc=3)
    assert job.wait() == 0, job.story()
    (named,) = job.named("straggler")
    assert (named["rank"], named["slow_in"]) == (1, "compute")
    assert SINCE < named["step"] <= SINCE + WITHIN


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_rank_is_named_in_2000_steps_on_shared_cores(place: Place) -> None:
    job = place.start("slow_rank.py", 2000, 0.02, "none", 0, 0, "work", nproc=3)
    assert job.wait(360) == 0, job.story()
    assert not job.named("straggler")


@pytest.mark.long
def test_status_and_metrics_show_a_slow_rank(place: Place) -> None:
    options = ["--http-address", "127.0.0.1:0"]
    job = place.start(
        "slow_rank.py", 100_000, 0.05, "compute", 2, 24, "sleep", nproc=3, options=options
    )
    job.wait_for_event("straggler")
    (slow,) = json.loads(place.elastic(*STATUS).stdout)["slow"]
    assert (slow["rank"], slow["slow_in"]) == (2, "compute")
    assert "slow: rank 2 (node local)" in place.elastic("status").stdout
    address = job.wait_for_event("http_started")["address"]
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'elastic_straggler{job="job",kind="compute",node="local",slot="2"} 0.' in text
    assert 'elastic_stragglers_total{job="job",kind="compute"} 1.0' in text


@pytest.mark.long
def test_a_slow_rank_is_replaced_twice_and_then_only_reported(place: Place) -> None:
    """The script is slow in one slot, no matter which worker has it."""
    options = ["--straggler-action", "replace"]
    job = place.start("slow_rank.py", 400, 0.05, "data", 1, 24, "sleep", nproc=3, options=options)
    assert job.wait(120) == 0, job.story()
    named = job.named("straggler")
    assert [n["action"] for n in named[:3]] == ["replace", "replace", "report"]
    failed = job.named("worker_failed")
    assert [f["worker"] for f in failed] == [n["worker"] for n in named[:2]]
    assert {f["kind"] for f in failed} == {"slow"}
    assert "was slow: rank 1 (node local) holds up every step" in failed[0]["message"]
