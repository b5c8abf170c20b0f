"""The environment variables of scripts written for torchrun."""

from __future__ import annotations

import pytest

from elastic.core.membership import ChangeReason, Generation, Member
from elastic.worker.process.torchrun import torchrun_environment

MEMBERS = (("a-1", "a", 0), ("a-3", "a", 2), ("b-1", "b", 1))
GENERATION = Generation(
    number=7,
    incarnation="i",
    members=tuple(Member(worker=w, node=n, slot=s, endpoint=f"{n}:{s}") for w, n, s in MEMBERS),
    reason=ChangeReason.STARTED,
    restart_count=3,
    max_restarts=5,
)


def variables(worker: str, generation: Generation = GENERATION) -> dict[str, str]:
    return torchrun_environment(generation, worker, job="digits", error_file="/tmp/e.json")


def test_ranks_are_dense_in_the_job_and_on_each_node() -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [[variables(w)[n] for n in names] for w, _, _ in MEMBERS] == [
        ["0", "0", "2", "0", "2"],
        ["1", "1", "2", "0", "2"],  # though it has slot 2
        ["2", "0", "1", "1", "2"],
    ]


def test_job_wide_variables_are_the_same_for_all_workers() -> None:
    for worker, _, _ in MEMBERS:
        found = variables(worker)
        assert found["WORLD_SIZE"] == found["ROLE_WORLD_SIZE"] == "3"
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("a", "0")
        assert found["TORCHELASTIC_RESTART_COUNT"] == "3"
        assert found["TORCHELASTIC_MAX_RESTARTS"] == "5"
        assert found["TORCHELASTIC_RUN_ID"] == "digits"
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert found["TORCHELASTIC_ERROR_FILE"] == "/tmp/e.json"


def test_an_ipv6_master_address_is_given_without_brackets() -> None:
    alone = Member(worker="a-1", node="a", slot=0, endpoint="[fd00::1]:29500")
    generation = Generation(
        number=1, incarnation="i", members=(alone,), reason=ChangeReason.STARTED
    )
    found = variables("a-1", generation)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("fd00::1", "29500")


def test_a_worker_outside_the_generation_is_refused() -> None:
    with pytest.raises(ValueError, match="c-1"):
        variables("c-1")
