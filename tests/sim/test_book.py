"""In every history each second of each wanted slot is accounted for once, across changes of leader,
and what the book says of each loss is what the history knows: its cause, last commit and length."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.book.accounting import TimeSpent
from elastic.core.book.book import Book, FirstStep
from elastic.core.book.incidents import MOST_INCIDENTS
from elastic.core.book.slot_accounts import Report
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.membership import Generation
from tests.sim.draw import plan
from tests.sim.journal import Commit, Journal
from tests.sim.stress import KINDS
from tests.sim.world import World

AHEAD_S = 1e6  # of Unix time
REPORTED_S = 1.5  # a coordinator knows the last commit from reports, which come every second


class Accountant:
    """Keeps accounts for the coordinator that leads at the time, and has workers report random
    figures of how they spent their time."""

    def __init__(self, seed: int, most: int) -> None:
        self.most = most
        self.random = random.Random(seed)
        self.book = Book(most, name_of=_name_of)
        self.machine: Coordinator | None = None
        self.spent: dict[str, tuple[float, TimeSpent]] = {}
        self.failed: set[str] = set()
        self.at = self.expected_s = 0.0
        self.heard = 0
        """Of the history's commits."""
        self.first_steps: dict[int, Commit] = {}
        """The first commit of each group."""
        self.generation: Generation | None = None
        """The newest one that was decided."""

    def observe(self, machine: Coordinator, now: float, event: Any, effects: Sequence[Any]) -> None:
        if not self.book.slots.ended:
            self.expected_s += (now - self.at) * self.book.slots.accounts(self.at).wanted
            self.at = now
        if machine is not self.machine:
            self._is_led_by(machine, now)
        if isinstance(event, ev.WorkerFailed) and machine.phase.value == "running":
            group = machine.current
            if group is not None and event.failure.worker in group.worker_ids:
                self.failed.add(_name_of(event.node))
        self._somebody_reports(now)
        self.book.observe(event, effects, machine, now)
        for effect in effects:
            if isinstance(effect, fx.PersistGeneration):
                self.generation = effect.generation

    def hear(self, commits: Sequence[Commit]) -> None:
        """Tell the book of the first steps of groups that were committed since."""
        for commit in commits[self.heard :]:
            if self.first_steps.setdefault(commit.generation, commit) is commit:
                step = FirstStep(
                    generation=commit.generation,
                    committed=commit.replica.committed - 1,
                    out_s=1e-3,
                )
                self.book.reformed(step, commit.at)
        self.heard = len(commits)

    def _is_led_by(self, machine: Coordinator, now: float) -> None:
        stored = json.loads(json.dumps(self.book.slots.to_document(now, AHEAD_S)))
        if self.machine is not None:
            incidents = self.book.slots.books.incidents.values()
            documents = json.loads(json.dumps([i.to_document(AHEAD_S) for i in incidents]))
            loss, newest = self.book.under_way, self.generation
            decided = (newest.number, loss.number) if loss and newest else (0, 0)
            self.book = Book(self.most, name_of=_name_of)
            found = {document["number"]: document for document in documents}
            self.book.resume(found, decided if loss and loss.followed_by else (0, 0), AHEAD_S)
            self.book.adopt(stored, now, AHEAD_S)
        self.machine = machine

    def _somebody_reports(self, now: float) -> None:
        group = self.machine.current if self.machine is not None else None
        if group is None or not group.members:
            return
        member = self.random.choice(group.members)
        since, spent = self.spent.get(member.worker, (now, TimeSpent()))
        parts = [self.random.random() * (now - since) for _ in range(3)]
        spent = replace(
            spent,
            steps=spent.steps + 1,
            steps_s=spent.steps_s + parts[0],
            data_s=spent.data_s + parts[0] / 2,
            given_up_s=spent.given_up_s + parts[1],
            regroup_s=spent.regroup_s + parts[2],
        )
        self.spent[member.worker] = (now, spent)
        report = Report(
            worker=member.worker, generation=group.number, committed=spent.steps, spent=spent
        )
        self.book.slots.spent(report, now)


def _name_of(node: str) -> str:
    return node.partition("@")[0]


def require_all_accounted(seed: int, stress: str) -> None:
    planned = plan(seed, stress=stress)
    accountant = Accountant(seed, planned.coordinator.formation.max_workers)

    def observe(now: float, name: str, event: Any, effects: Sequence[Any]) -> None:
        if name == "coordinator":
            accountant.hear(world.journal.commits)
            accountant.observe(world.leader.machine, now, event, effects)

    world = World(planned, observer=observe)
    journal = world.run()
    found = accountant.book.slots.accounts(world.clock.now)
    case = f"seed {seed} {stress}: {journal.outcome} {found}"
    assert found.wall_s == pytest.approx(accountant.expected_s, rel=1e-6, abs=1e-2), case
    assert sum(found.kinds.values()) == pytest.approx(found.wall_s, rel=1e-6, abs=1e-2), case
    assert min(found.kinds.values()) >= 0.0, case
    blamed = {node for incident in found.incidents for node in incident["nodes"]}
    assert accountant.failed <= blamed or len(found.incidents) == MOST_INCIDENTS, case
    accountant.hear(journal.commits)
    require_true(accountant, journal, case)
    world.take_apart()


def require_true(accountant: Accountant, journal: Journal, case: str) -> None:
    """What the book says of each loss is what the history knows."""
    documents = list(accountant.book.documents(0.0).values())
    struck_at = min((at for at, *_ in journal.struck), default=0.0)
    # A group that stands still has done so since its last commit.
    since = max((c.at for c in journal.commits if c.at <= struck_at), default=0.0)
    for document in documents:
        about = f"{document} {case}"
        assert document["unix_s"] >= since - REPORTED_S, about
        if document["outcome"] != "recovered":
            continue
        first = accountant.first_steps[document["recovery"]["generation"]]
        before = [
            c.replica.committed
            for c in journal.commits
            if c.at < first.at and c.generation < first.generation
        ]
        went_on_at, last = first.replica.committed - 1, max(before, default=0)
        assert document["recovery"]["committed"] == went_on_at, about
        assert went_on_at <= document["committed"] <= max(last, went_on_at), about
        assert document["unix_s"] + document["lasted_s"] == pytest.approx(first.at, abs=1e-3), about
        assert document["steps_lost"] == document["committed"] - went_on_at, about
    open_ones = [d for d in documents if d["outcome"] in ("under_way", "waiting")]
    assert len(open_ones) <= 1, case
    assert not {d["followed_by"] for d in open_ones} & accountant.first_steps.keys(), case
    assert [d["number"] for d in documents] == sorted(d["number"] for d in documents), case
    actions = {action for _, action, _ in journal.struck}
    if actions == {"KILL_WORKER"} and documents:
        assert {d["cause"] for d in documents} <= {"worker_failed", "save_failed"}, case


@pytest.mark.parametrize("stress", KINDS[::4])
def test_every_second_is_accounted_for(stress: str) -> None:
    require_all_accounted(KINDS.index(stress), stress)


@pytest.mark.long
def test_every_second_of_many_histories_is_accounted_for() -> None:
    for seed in range(1000):
        require_all_accounted(seed, KINDS[seed % len(KINDS)])
