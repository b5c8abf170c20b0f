"""Compare the transcripts of the machines with the golden files in this directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.core.agent.machine import AgentSettings
from elastic.core.coordinator.machine import CoordinatorSettings
from elastic.core.coordinator.view import FormationPolicy
from tests.scenarios.transcript import transcript
from tests.sim.plan import Action, Fault, Plan
from tests.sim.replica import Job

HERE = Path(__file__).parent


def scenario(
    *faults: Fault,
    nodes: int = 1,
    slots: int = 3,
    spares: int = 0,
    min_workers: int = 1,
    length: int = 100,
) -> Plan:
    return Plan(
        seed=0,
        nodes=tuple(AgentSettings(node=name, slots=slots, spares=spares) for name in "abc"[:nodes]),
        coordinator=CoordinatorSettings(
            incarnation="x", formation=FormationPolicy(min_workers=min_workers, max_workers=4)
        ),
        job=Job(length=length, batch_size=2, epochs=1, save_every=1000),
        faults=faults,
    )


def raised(nth: int) -> Fault:
    return Fault(Action.RAISE, point="step", nth=nth, signature="ValueError train.py:7")


SCENARIOS = {
    "start_of_three": scenario(),
    "killed_and_replaced_from_a_spare": scenario(
        Fault(Action.KILL_WORKER, at_s=2.0, worker="a-2"), spares=1
    ),
    "below_minimum_and_back": scenario(
        Fault(Action.KILL_WORKER, at_s=2.0, worker="b-1"), nodes=2, slots=1, min_workers=2
    ),
    "stop_with_save": scenario(Fault(Action.STOP, at_s=2.0)),
    "same_exception_twice": scenario(raised(1), raised(2), slots=1),
    "planned_join": scenario(Fault(Action.ADD_NODE, at_s=1.7), slots=2, length=200),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_transcript_of_a_scenario_equals_its_golden_file(name: str) -> None:
    path = HERE / f"{name}.txt"
    actual = transcript(SCENARIOS[name])
    if os.environ.get("REWRITE") == "1":
        path.write_text(actual)
    assert actual == path.read_text()
