"""The last message of a job names what happened, to which worker, and what to do."""

from __future__ import annotations

import pytest

from elastic.coordinator.wording import ending, refusal
from elastic.core.coordinator.effects import EndJob, RefuseNewcomers
from elastic.core.membership import Failure, FailureKind
from elastic.core.restarts import Verdict

FAILURE = Failure(
    worker="local-3", kind=FailureKind.EXCEPTION, message="ValueError: no labels", log="/l/3.log"
)


def words(verdict: Verdict, failure: Failure = FAILURE) -> str:
    effect = EndJob(exit_code=1, verdict=verdict, failure=failure)
    return ending(effect, max_restarts=7, window_s=90.0)


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.RESTART])
def test_every_verdict_names_the_failure_and_its_log(verdict: Verdict) -> None:
    for part in ("local-3", "ValueError: no labels", "/l/3.log"):
        assert words(verdict).count(part) == 1


def test_a_spent_budget_names_the_setting() -> None:
    for part in ("7 workers", "90 s", "--max-restarts"):
        assert part in words(Verdict.BUDGET_SPENT)


def test_every_verdict_has_a_text_of_its_own() -> None:
    texts = {words(v) for v in Verdict if v is not Verdict.RESTART}
    assert len(texts) == len(Verdict) - 1


def test_a_hang_on_several_nodes_is_told_with_its_place_and_verdict() -> None:
    failure = Failure(
        worker="w",
        kind=FailureKind.LEFT_OUT,
        message="hung 20 s in train.py:47",
        place="/job/train.py:47",
    )
    seen = "rank 1 (node b) has not entered the all-reduce of step 5"
    effect = EndJob(
        exit_code=1, verdict=Verdict.SAME_FAILURE_NO_PROGRESS, failure=failure, message=seen
    )
    text = ending(effect, max_restarts=7, window_s=90.0)
    for part in ("(/job/train.py:47) on different nodes", "hung 20 s in train.py:47", seen):
        assert part in text


def test_an_unknown_log_is_not_mentioned() -> None:
    failure = Failure(worker="w", kind=FailureKind.SIGNAL, message="killed")
    assert "log" not in words(Verdict.NOT_RETRYABLE, failure)


def test_an_end_without_a_failure_has_only_the_message_of_its_effect() -> None:
    assert ending(EndJob(exit_code=0), 1, 1.0) == ""
    assert ending(EndJob(exit_code=143, message="drained"), 1, 1.0) == "drained"


def test_a_refusal_names_the_failure_and_when_the_next_newcomer_is_admitted() -> None:
    text = refusal(RefuseNewcomers(node="b", failure=FAILURE, retry_s=75.4))
    for part in ("local-3", "ValueError: no labels", "75 s"):
        assert text.count(part) == 1
