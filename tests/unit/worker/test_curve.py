"""What a member sends of the curve (the script's figures of each step), and when it repeats it."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.v1 import local_pb2 as pb
from elastic.worker.reporter import Reporter
from elastic.worker.state.backlog import (
    MOST_POINTS,
    Backlog,
    LedgerBacklog,
    curve_from_json,
    curve_to_json,
)
from elastic.worker.steps_clock import StepsClock


class Member:
    """A member of rank 0 that records the messages it sends."""

    def __init__(self, *, kept: bool = True) -> None:
        self.sent: list[pb.CurvePoints] = []
        self.generation = SimpleNamespace(number=3, incarnation="i")
        membership = SimpleNamespace(group=SimpleNamespace(rank=0, generation=self.generation))
        self.reporter = Reporter(
            cast(Any, SimpleNamespace(worker="w", send=self._send)), cast(Any, membership)
        )
        self.state = SimpleNamespace(
            ledger=LedgerBacklog(),
            curve=Backlog(most=MOST_POINTS),
            committed=0,
            progress=SimpleNamespace(committed_in=3),
            position=SimpleNamespace(epoch=0),
            learning_rates=dict,
        )
        self.reporter.publish(cast(Any, self.state), StepsClock(), lambda: None)
        self.reporter.keep_curve(kept)
        self.told()

    def step(self, **values: Any) -> None:
        """Run a block that reports `values`, and commit its step."""
        self.reporter.report(values, committed=False)
        self.state.committed += 1
        self.reporter.committed()

    def told(self, *, whole: bool = False) -> list[tuple[bool, dict[int, dict[str, float]]]]:
        """Return (everything not stored?, values by step) of each report since the last call."""
        self.reporter.flush(whole=whole)
        said, self.sent = self.sent, []
        return [(s.whole, {p.step: dict(p.values) for p in s.points}) for s in said]

    def _send(self, **kind: Any) -> None:
        if "curve" in kind:
            self.sent.append(kind["curve"])


def test_each_step_is_sent_once_and_the_newest_waits_for_the_next_step() -> None:
    member = Member()
    member.step(loss=0.5)
    assert member.told() == []
    member.step(loss=torch.tensor(0.25), accuracy=1)
    member.step()
    assert member.told() == [(False, {0: {"loss": 0.5}, 1: {"loss": 0.25, "accuracy": 1.0}})]
    member.step(loss=0.125)
    assert member.told() == [(False, {2: {}})]  # it replaces what the file has of this step
    assert member.told(whole=True) == [(False, {3: {"loss": 0.125}})]


def test_figures_reported_below_a_block_belong_to_its_step() -> None:
    member = Member()
    member.step(loss=0.5)
    member.told()
    member.reporter.report({"val_loss": 0.75}, committed=True)
    member.step(loss=0.25)
    assert member.told() == [(False, {0: {"loss": 0.5, "val_loss": 0.75}})]


def test_a_reported_tensor_keeps_its_value_when_the_script_changes_it_later() -> None:
    member, total = Member(), torch.zeros(())
    for _ in range(3):
        total += 1
        member.step(total=total)
    assert member.told() == [(False, {0: {"total": 1.0}, 1: {"total": 2.0}})]


def test_a_retry_replaces_the_values_of_a_block_that_was_given_up() -> None:
    member = Member()
    member.reporter.report({"loss": 9.0, "only_then": 1.0}, committed=False)
    member.reporter.given_up(counts=False)
    member.step(loss=0.5)
    assert member.told(whole=True) == [(False, {0: {"loss": 0.5}})]


def test_a_given_up_block_keeps_its_values_if_other_members_completed_the_step() -> None:
    member = Member()
    member.reporter.report({"loss": 0.5}, committed=False)
    member.state.committed, member.state.progress.committed_in = 1, 2
    member.reporter.given_up(counts=True)
    (_, points), *_ = member.told(whole=True)
    assert points == {0: {"loss": 0.5}}


def test_all_points_that_are_not_stored_are_sent_again_on_request() -> None:
    member = Member()
    for n in range(4):
        member.step(n=n)
    assert member.told() == [(False, {n: {"n": n} for n in range(3)})]
    member.reporter.curve_stored(pb.LedgerStored(committed=2, run="i", generation=3))
    member.reporter.report_again()
    assert member.told() == [(True, {2: {"n": 2}})]
    member.reporter.curve_stored(pb.LedgerStored(send_again=True))
    assert member.told() == [(True, {2: {"n": 2}})]


def test_a_failing_script_sends_every_step_including_the_newest() -> None:
    member = Member()
    member.step(loss=0.5)
    member.step(loss=math.inf)
    member.reporter.script_failed()
    (said,) = member.sent
    assert {p.step: dict(p.values) for p in said.points} == {
        0: {"loss": 0.5},
        1: {"loss": math.inf},
    }


@pytest.mark.timeout(20)
def test_a_figure_that_hangs_when_it_is_read_does_not_delay_the_end() -> None:
    class Hangs:
        def __float__(self) -> float:
            forever.wait()
            return 0.0

    member, forever = Member(kept=False), threading.Event()
    member.reporter.report({"loss": Hangs()}, committed=False)
    member.reporter.script_failed()
    assert member.sent == []
    forever.set()


def test_points_are_kept_only_while_the_coordinator_wants_the_curve() -> None:
    member = Member(kept=False)
    for n in range(3):
        member.step(n=n)
    assert member.told(whole=True) == []
    assert len(member.reporter.curve.backlog) == 0
    member.reporter.keep_curve(True)
    member.step(n=3)
    assert member.told(whole=True) == [(True, {3: {"n": 3}})]
    member.reporter.keep_curve(False)
    assert len(member.reporter.curve.backlog) == 0


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1_000_000), torch.tensor(1j), "0.5 or so", object(), None, [1.0], 10**400],
    ids=["a tensor of a million", "complex", "text", "an object", "None", "a list", "too large"],
)
def test_values_that_are_not_numbers_are_left_out(value: Any) -> None:
    member = Member()
    member.step(odd=value, loss=0.5)
    assert [p[-1] for p in cast("Any", curve_to_json(member.state.curve))] == [{"loss": 0.5}]
    assert member.told(whole=True) == [(False, {0: {"loss": 0.5}})]


def test_a_step_keeps_at_most_32_names_and_the_backlog_at_most_20_000_steps() -> None:
    member = Member()
    member.step(**{f"n{n}": n for n in range(10_000)})
    ((_, points),) = member.told(whole=True)
    assert len(points[0]) == 32
    for n in range(50_000):
        member.step(n=n)
    assert len(member.reporter.curve.backlog) <= 20_000


def test_a_member_that_receives_the_state_receives_the_points_too() -> None:
    giver, taker = Member(), Member()
    for n in range(3):
        giver.step(loss=torch.tensor(float(n)), bad=math.nan)
    handed_on = json.loads(json.dumps(curve_to_json(giver.state.curve), allow_nan=False))
    taker.step(loss=9.0)
    taker.state.curve.replace(curve_from_json(handed_on))
    ((whole, points),) = taker.told(whole=True)
    assert {step: values["loss"] for step, values in points.items()} == {0: 0.0, 1: 1.0, 2: 2.0}
    assert all(math.isnan(values["bad"]) for values in points.values())
    assert not whole


@pytest.mark.parametrize(
    "document",
    [None, 3, "odd", [[1, 2]], [[0, "r", 1, 0.0, {"a": []}]]],
    ids=["None", "a number", "text", "too short", "no value"],
)
def test_a_malformed_document_gives_no_points_and_no_error(document: Any) -> None:
    assert list(curve_from_json(document)) == []
