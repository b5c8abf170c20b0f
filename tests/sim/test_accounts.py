"""In every history each second of each wanted slot is accounted for once, across changes of leader,
and a member that fails has an incident that names its node."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.book.accounting import TimeSpent
from elastic.core.book.book import Book
from elastic.core.book.incidents import MOST_INCIDENTS
from elastic.core.book.slot_accounts import Report
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from tests.sim.draw import plan
from tests.sim.stress import KINDS
from tests.sim.world import World

AHEAD_S = 1e6  # of Unix time


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

    def _is_led_by(self, machine: Coordinator, now: float) -> None:
        stored = json.loads(json.dumps(self.book.slots.to_document(now, AHEAD_S)))
        if self.machine is not None:
            self.book = Book(self.most, name_of=_name_of)
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
    world.take_apart()


@pytest.mark.parametrize("stress", KINDS[::4])
def test_every_second_is_accounted_for(stress: str) -> None:
    require_all_accounted(KINDS.index(stress), stress)


@pytest.mark.long
def test_every_second_of_many_histories_is_accounted_for() -> None:
    for seed in range(1000):
        require_all_accounted(seed, KINDS[seed % len(KINDS)])
