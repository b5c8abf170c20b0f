"""An agent renews its node's lease by its last answered request, and ends a lapsed one for good."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import isolation
from elastic.agent.isolation import Isolation
from elastic.core.agent import events as ev
from elastic.runtime.training_lease import LAPSE_S, TrainingLease
from elastic.store.lease_keeper import boot_time_s
from elastic.v1 import job_pb2
from tests.unit.agent.unstarted import unstarted
from tests.unit.store.failing_store import Clock

TIMEOUT_S = 30.0


class Node:
    """A node whose clock and whose answers only the test moves."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answered_at = 0.0
        self.cut_off: list[float] = []
        self.asked: list[float] = []
        self.isolation = Isolation(
            timeout_s=TIMEOUT_S,
            answered_at=lambda: self.answered_at,
            ask=self.asked.append,
            cut_off=self.cut_off.append,
        )

    def answered(self, sent_at: float, now: float) -> None:
        self.answered_at = sent_at
        self.look(now)

    def look(self, now: float) -> float | None:
        """Look at this time; return until when the lease is valid then."""
        self.clock.now = now
        self.isolation.look()
        return self.isolation.lease.valid_until


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    clock = Clock()
    clock.now = 1000.0
    monkeypatch.setattr(isolation, "boot_time_s", clock)
    return Node(clock)


def test_a_node_that_nobody_has_answered_has_no_lease_and_is_not_cut_off(node: Node) -> None:
    assert node.look(1000.0) is None
    assert node.look(1000.0 + 9 * TIMEOUT_S) is None
    assert node.cut_off == []


def test_the_lease_counts_from_the_sending_of_the_request_that_was_answered(node: Node) -> None:
    node.answered(1001.0, now=1005.0)
    assert node.isolation.lease.valid_until == 1001.0 + TIMEOUT_S
    node.answered(1006.0, now=1006.1)
    node.answered(1004.0, now=1006.2)  # an older one, whose answer was late
    assert node.isolation.lease.valid_until == 1006.0 + TIMEOUT_S


def test_a_lease_that_lapsed_for_a_moment_is_renewed_by_an_answer(node: Node) -> None:
    node.answered(1001.0, now=1001.0)
    late = 1001.0 + TIMEOUT_S + LAPSE_S - 0.1
    node.answered(late - 0.1, now=late)
    assert node.isolation.lease.epoch == 1
    assert node.isolation.lease.valid_until == late - 0.1 + TIMEOUT_S
    assert node.cut_off == []


def test_an_answer_after_a_pause_does_not_renew_the_lease_of_before(node: Node) -> None:
    """The agent is stopped, and what wakes it up is the answer to a fresh request."""
    node.answered(1001.0, now=1001.0)
    own = node.isolation.lease.share()
    woken = 1001.0 + TIMEOUT_S + LAPSE_S
    node.answered(woken, now=woken)
    assert node.cut_off == [TIMEOUT_S + LAPSE_S]
    assert own.is_over()
    assert node.isolation.lease.valid_until == woken + TIMEOUT_S  # for workers of the next epoch
    node.look(woken + 1.0)
    assert len(node.cut_off) == 1


def test_a_node_is_cut_off_once_until_somebody_answers_again(node: Node) -> None:
    node.answered(1001.0, now=1001.0)
    over = 1001.0 + TIMEOUT_S + LAPSE_S
    assert node.look(over - 0.1) == 1001.0 + TIMEOUT_S
    for later in (0.0, 1.0, 9 * TIMEOUT_S):
        assert node.look(over + later) is None
    assert len(node.cut_off) == 1
    node.answered(2000.0, now=2000.0)
    node.look(2000.0 + TIMEOUT_S + LAPSE_S)
    assert len(node.cut_off) == 2


def test_an_adopted_lease_is_judged_as_the_earlier_agent_left_it(node: Node) -> None:
    """Otherwise the workers could train on for longer than others wait for them."""
    left = TrainingLease.new()
    left.grant(980.0 + TIMEOUT_S)
    node.clock.now = 980.0 + TIMEOUT_S + LAPSE_S
    node.answered_at = node.clock.now
    node.isolation.adopt(left)
    assert node.cut_off == [TIMEOUT_S + LAPSE_S]
    assert left.epoch == 2


def test_an_adopted_lease_that_holds_goes_on(node: Node) -> None:
    left = TrainingLease.new()
    left.grant(980.0 + TIMEOUT_S)
    own = left.share()
    node.isolation.adopt(left)
    node.answered(1001.0, now=1001.0)
    assert left.valid_until == 1001.0 + TIMEOUT_S
    assert not own.is_over()
    assert node.cut_off == []


def test_the_time_of_workers_of_a_version_without_leases_counts_from_their_adoption(
    node: Node,
) -> None:
    node.isolation.adopt(None)
    assert node.look(1000.0 + TIMEOUT_S + LAPSE_S - 0.1) == 1000.0 + TIMEOUT_S
    node.look(1000.0 + TIMEOUT_S + LAPSE_S)
    assert len(node.cut_off) == 1


async def test_the_coordinator_is_asked_only_while_nothing_else_answers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "LOOK_S", 0.001)
    running = asyncio.create_task(node.isolation.run())
    every_s = TIMEOUT_S / 20

    async def after(now: float, answered_at: float) -> list[float]:
        node.answered_at, node.clock.now = answered_at, now
        await asyncio.sleep(0.02)
        return node.asked

    await after(1000.0, 1000.0)
    assert await after(1000.0 + every_s - 0.1, 1000.0) == []
    assert await after(1000.0 + every_s, 1000.0) == [1000.0 + every_s]
    assert await after(1000.0 + 2 * every_s - 0.1, 1000.0) == [1000.0 + every_s]
    assert len(await after(1000.0 + 2 * every_s, 1000.0)) == 2
    assert len(await after(1000.0 + 3 * every_s, 1000.0 + 2.5 * every_s)) == 2
    running.cancel()


def test_a_node_that_is_alone_has_a_lease_without_an_end() -> None:
    alone = Isolation(
        timeout_s=0.0, answered_at=lambda: 0.0, ask=lambda _: None, cut_off=lambda _: None
    )
    alone.look()
    assert alone.lease.share().holds()


async def test_a_worker_that_the_keeper_ends_counts_as_cut_off_and_not_as_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end may be the first that a woken agent hears of."""
    daemon, entries = unstarted(tmp_path, isolation_timeout_s=TIMEOUT_S)
    failures: list[job_pb2.Failure] = []

    def send(**kind: Any) -> None:
        failures.extend(kind.values() if "failure" in kind else ())

    monkeypatch.setattr(daemon._link, "send", send)
    daemon._known.set()
    daemon._driver.post(ev.SearchStarted())
    daemon._driver.post(ev.NothingFound())
    daemon._driver.post(ev.Started())
    (worker,) = daemon._pids
    daemon._pids[worker] = os.getpid()
    daemon._isolation.lease.grant(boot_time_s() - LAPSE_S)
    daemon._exited(worker, 0, signal.SIGKILL)
    (failure,) = failures
    assert failure.kind == job_pb2.FAILURE_KIND_LEFT_OUT
    assert "cut_off" in [entry.name for entry in entries]
    await daemon.close()


async def test_a_new_stream_judges_the_lease_before_it_reports_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, entries = unstarted(tmp_path, isolation_timeout_s=TIMEOUT_S)
    daemon._known.set()
    own = daemon._isolation.lease.share()
    daemon._isolation.lease.grant(boot_time_s() - LAPSE_S)
    cut_off_first: list[bool] = []
    monkeypatch.setattr(
        daemon._link,
        "send",
        lambda **_: cut_off_first.append("cut_off" in [entry.name for entry in entries]),
    )
    daemon._report_again()
    assert cut_off_first == [True]
    assert own.is_over()


async def test_a_failure_tells_steps_that_no_worker_has_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, _ = unstarted(tmp_path)
    told: list[job_pb2.Failure] = []

    def send(**kind: Any) -> None:
        told.extend(kind.values() if "failure" in kind else ())

    monkeypatch.setattr(daemon._link, "send", send)
    daemon._driver.post(ev.Started())
    (worker,) = daemon._pids
    daemon._isolation.lease.share().note_commit(3, 77)
    daemon._exited(worker, 0, signal.SIGKILL)
    assert [(failure.committed_in, failure.committed) for failure in told] == [(3, 77)]
    await daemon.close()
