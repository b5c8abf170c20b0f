"""The auditor's checker accepts good ledgers and names what is wrong with bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.ledger_check import Audit, audit, cover
from tests.fuzzed_documents import documents, thoroughly

ROOT = Path(__file__).parent.parent.parent


def step(number: int, start: int, stop: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": number,
        "epoch": 0,
        "generation": 1,
        "world_size": 2,
        "start": start,
        "stop": stop,
    } | fields


GOOD = [
    {"incarnation": "a"},
    {"resume": 0, "generation": 1},
    step(0, 0, 4),
    step(1, 4, 6, generation=2, world_size=1),
    step(2, 6, 10, generation=3),
    step(3, 0, 4, epoch=1, generation=3),
    step(4, 4, 8, epoch=1, generation=3),
    step(5, 8, 10, epoch=1, generation=3),
]


def audited(records: list[Any], *, samples: int = 10, epochs: int | None = None) -> Audit:
    return audit((json.dumps(r) for r in records), samples=samples, epochs=epochs)


def without(number: int) -> list[Any]:
    return [r for r in GOOD if r.get("step") != number]


def replaced(number: int, **fields: Any) -> list[Any]:
    return [{**r, **fields} if r.get("step") == number else r for r in GOOD]


def test_a_good_ledger_has_no_problems() -> None:
    assert audited(GOOD, epochs=2) == Audit(6, 2, 3, 0, ())


TWO_LOADERS = [
    {"incarnation": "a"},
    step(0, 0, 6),  # no number: of a worker before loaders were recorded
    step(1, 6, 10, loader=0),
    step(2, 0, 4, loader=1),
    step(3, 0, 10, loader=0, epoch=1),
    step(4, 4, 6, loader=1),
]


def test_each_loader_has_epochs_and_a_length_of_its_own() -> None:
    lines = [json.dumps(r) for r in TWO_LOADERS]
    assert audit(lines, samples=[10, 6], epochs=[2, 1]) == Audit(5, 3, 1, 0, ())
    assert audit(lines[:-1], samples=[10, 6]) == Audit(4, 2, 1, 0, ())
    found = audit(lines[:-1], samples=[10, 6], epochs=[2, 1]).problems
    assert found == ("loader 1, epoch 0: 2 samples missing",)
    assert any("loader 1" in p for p in audit(lines, samples=[10]).problems)
    assert any("loader 1" in p for p in audit(lines, samples=10, epochs=1).problems)
    lost = audit(lines[:3], samples=[10, 6], epochs=[1, 1]).problems  # the second was never used
    assert lost == ("epoch 0: 6 samples missing",)


def test_the_last_epoch_may_be_under_way() -> None:
    assert audited(GOOD[:-1]) == Audit(5, 1, 3, 0, ())
    assert audited(GOOD[:-1], epochs=2).problems == ("epoch 1: 2 samples missing",)


def test_steps_that_were_lost_with_their_holders_do_not_count() -> None:
    again = [{"resume": 2, "generation": 4}, step(2, 6, 8, generation=4), step(3, 8, 10)]
    again[-1]["generation"] = 4
    result = audited([*GOOD, {"incarnation": "b"}, *again])
    assert result == Audit(4, 1, 3, 1, ())


def test_resuming_after_the_last_step_gives_up_no_step() -> None:
    assert audited([*GOOD[:4], {"resume": 2, "generation": 3}, *GOOD[4:]]).resumed == 0


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "there are no steps"),
        (without(1), "found step 2, expected step 1"),
        (without(1), "epoch 0: 2 samples missing"),
        ([*GOOD[:4], GOOD[3], *GOOD[4:]], "found step 1, expected step 2"),
        ([*GOOD[:4], GOOD[3], *GOOD[4:]], "epoch 0: 2 samples more than once"),
        (replaced(2, start=5), "epoch 0: 1 samples more than once"),
        (replaced(2, start=7), "epoch 0: 1 samples missing"),
        (replaced(2, stop=12), "epoch 0: 2 positions outside the 10 samples"),
        (replaced(1, generation=0), "step 1: generation 0 after 1"),
        (replaced(4, world_size=5), "step 4: generation 3 had world size 2, now 5"),
        (replaced(2, stop="ten"), "is not the record of a step"),
        ([*GOOD, [1]], "line 9 is not an object"),
        ([*GOOD, {"resume": 9, "generation": 4}, step(9, 0, 4, epoch=2)], "found step 9, expected"),
    ],
)
def test_the_problem_of_a_bad_ledger_is_named(records: list[Any], problem: str) -> None:
    assert any(problem in found for found in audited(records).problems)


def test_an_epoch_beyond_those_of_the_job_is_a_problem() -> None:
    assert audited(GOOD, epochs=1).problems == ("epoch 1 in a job of 1 epochs",)


def test_a_torn_line_is_a_problem() -> None:
    lines = [*(json.dumps(r) for r in GOOD), '{"step": 6, "epo']
    assert audit(lines, samples=10).problems == ('line 9 is not JSON: \'{"step": 6, "epo\'',)


def test_a_torn_line_is_no_problem_if_the_job_was_started_again() -> None:
    lines = [json.dumps(r) for r in GOOD]
    torn = [*lines[:5], '{"step": 3, "epo', json.dumps({"incarnation": "b"}), *lines[5:]]
    assert audit(torn, samples=10, epochs=2).problems == ()
    lacking = [*lines[:5], '{"step": 3, "epo', json.dumps({"incarnation": "b"}), *lines[6:]]
    assert audit(lacking, samples=10, epochs=2).problems


def test_cover_counts_repeated_missing_and_outside() -> None:
    assert cover([(0, 4), (4, 10)], 10) == (0, 0, 0)
    assert cover([(2, 4), (3, 6), (8, 9)], 10) == (1, 5, 0)
    assert cover([(0, 10), (2, 4), (3, 5)], 10) == (4, 0, 0)
    assert cover([(0, 10), (10, 12)], 10) == (0, 0, 2)
    assert cover([], 3) == (0, 3, 0)


def test_the_command_exits_with_the_verdict(tmp_path: Path) -> None:
    def run(records: list[Any]) -> subprocess.CompletedProcess[str]:
        ledger = tmp_path / "ledger.jsonl"
        ledger.write_text("".join(json.dumps(r) + "\n" for r in records))
        command = [sys.executable, "-m", "examples.ledger_check", str(ledger), "--samples", "10"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good, bad = run(GOOD), run(without(1))
    assert good.returncode == 0
    assert "GOOD" in good.stdout
    assert bad.returncode == 1
    assert "BAD   epoch 0: 2 samples missing" in bad.stdout


RESUMED = [  # the second run begins from a checkpoint of step 3, with records of the first
    {"incarnation": "a"},
    {"resume": 0, "run": "a", "generation": 1},
    step(0, 0, 2, run="a", world_size=3),
    step(1, 2, 4, run="a", generation=4),
    step(2, 4, 6, run="a", generation=4),
    step(3, 6, 9, run="a", generation=6, world_size=1),
    {"incarnation": "b"},
    {"resume": 1, "run": "a", "generation": 4},
    step(1, 2, 4, run="a", generation=4),
    step(2, 4, 6, run="a", generation=4),
    step(3, 6, 8, run="b", generation=1, world_size=5),
    step(4, 8, 10, run="b", generation=2),
]


def test_each_run_counts_its_own_generations() -> None:
    assert audited(RESUMED, epochs=1) == Audit(5, 1, 4, 1, ())


def test_steps_that_a_new_run_only_repeats_are_not_given_up() -> None:
    assert audited([*RESUMED[:5], *RESUMED[6:]], epochs=1).resumed == 0


def test_missing_steps_of_a_new_run_are_a_problem() -> None:
    assert audited(RESUMED[:10], epochs=1).problems == ("epoch 0: 4 samples missing",)


def test_a_step_of_a_run_after_another_run_has_begun_is_a_problem() -> None:
    mixed = [*RESUMED[:-1], step(4, 8, 10, run="a", generation=4)]
    assert audited(mixed, epochs=1).problems == ("step 4: run a comes back after run b",)


def test_generations_may_start_from_1_again_when_the_job_is_started_again() -> None:
    def record(step: int, generation: int, world_size: int) -> str:
        fields = {"step": step, "epoch": 0, "generation": generation, "world_size": world_size}
        return json.dumps({**fields, "start": 2 * step, "stop": 2 * step + 2})

    lines = ['{"incarnation": "a"}', record(0, 1, 2), record(1, 4, 3)]
    lines += ['{"incarnation": "b"}', '{"resume": 2, "generation": 1}', record(2, 1, 3)]
    assert not audit(lines, samples=6, epochs=1).problems


_LINES = st.one_of([documents(json.dumps(record).encode()) for record in GOOD[:4]])


@thoroughly
@given(place=st.integers(0, len(GOOD)), strange=_LINES)
def test_a_ledger_with_any_strange_line_is_audited(place: int, strange: bytes) -> None:
    lines = [json.dumps(record) for record in GOOD]
    lines[place : place + 1] = strange.decode(errors="replace").splitlines()
    assert audit(lines, samples=10).steps <= len(lines)


def test_a_ledger_that_is_not_valid_text_is_audited(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    no_text = [step(0, 0, 4, run="\ud800"), step(1, 4, 8, run="b"), step(2, 8, 10, run="\ud800")]
    lines = [json.dumps(GOOD[0]).encode(), b"\xff\xfe", *(json.dumps(r).encode() for r in no_text)]
    ledger.write_bytes(b"\n".join(lines))
    command = [sys.executable, "-m", "examples.ledger_check", str(ledger), "--samples", "10"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert "line 2 is not JSON" in checked.stdout
    assert "comes back after run b" in checked.stdout
    assert "Traceback" not in checked.stderr
