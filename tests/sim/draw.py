"""Draws the plan that a seed stands for: the cluster, the job, its settings, and the faults."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from elastic.core.agent.machine import AgentSettings
from elastic.core.coordinator.machine import CoordinatorSettings
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.learning_rate import LinearScaling
from tests.sim.plan import (
    ADD_NODE,
    BREAK_LINK,
    CUT_OFF_NODE,
    CUT_PEERS,
    FREEZABLE,
    FREEZE_PROCESS,
    FREEZE_SCRIPT,
    KILL_LEADER,
    KILL_NODE,
    KILL_WORKER,
    LOSE_NODE_SILENTLY,
    POINTS,
    RAISE,
    RESTART_AGENT,
    STOP,
    STOP_IN_STEP,
    Fault,
    Pace,
    Plan,
    agent_settings,
)
from tests.sim.replica import Job, Style
from tests.sim.stress import QUEUED, STRESS, for_stress, script_fault, stress_faults


def plan(seed: int, stress: str = "") -> Plan:
    """The plan that `seed` stands for; with faults of only one kind if `stress` names it."""
    if stress.startswith(QUEUED):
        queued = plan(seed, stress.removeprefix(QUEUED).strip())
        return replace(queued, job=queued.job._replace(queues=True))
    rng = random.Random(f"plan {seed}")
    nodes = tuple(_node(rng, index) for index in range(rng.choice((1, 2, 2, 3, 3, 4))))
    slots = sum(n.slots for n in nodes)
    minimum = rng.randint(1, max(1, slots - 1))
    maximum = rng.choice((slots, slots, slots + 2, max(minimum, slots - 1)))
    world = min(maximum, slots)
    job = Job(
        length=rng.randint(10, 40) * world,
        batch_size=rng.randint(2, 4),
        epochs=rng.randint(1, 3),
        save_every=rng.choice((5, 10, 1000)),
        saves=random.Random(f"end {seed}").random() < 0.7,
    )
    faults = tuple(_fault(rng, len(nodes)) for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 6))))
    if not any(f.action is STOP for f in faults) and rng.random() < 0.15:
        faults += (Fault(STOP, at_s=rng.uniform(0.5, 6.0)),)
    news = random.Random(f"news {seed}")
    control = random.Random(f"control {seed}")
    faults += tuple(_control_fault(control) for _ in range(control.choice((0, 0, 0, 1, 1, 2))))
    written = random.Random(f"style {seed}")
    job = job._replace(style=_style(written))
    faults += _script_faults(written)
    hard = random.Random(f"stress {seed}")
    if stress:
        faults = stress_faults(hard, stress)
    elif hard.random() < 0.4:
        faults += stress_faults(hard, hard.choice(STRESS))
    faults += _cuts(random.Random(f"cuts {seed}"), [node.node for node in nodes])
    slow = random.Random(f"slow {seed}")
    settings = _coordinator(rng, minimum, maximum, agent_grace_s=control.choice((0.0, 3.0)))
    if not stress and slow.random() < 0.1:
        faults += (_stop_in_step(slow),)
        settings = replace(settings, stall=replace(settings.stall, floor_s=100.0))
    whole = Plan(
        seed=seed,
        nodes=nodes,
        coordinator=settings,
        job=job,
        pace=Pace(
            evaluation_s=rng.choice((0.5, 1.0, 5.0)), reported_step_s=news.choice((0.06, 0.3))
        ),
        faults=tuple(f for n, f in enumerate(faults) if not _ends_the_job(f, faults[:n])),
        news_s=news.choice((0.005, 0.03, 0.12, 0.12, 0.7)),
        isolation_s=hard.choice((4.0, 4.0, 2.5)),
    )
    return for_stress(whole, stress) if stress else whole


def _ends_the_job(fault: Fault, earlier: tuple[Fault, ...]) -> bool:
    """True for a second script that never gets to a group: two in a row rightly end a job."""
    return _never_ready(fault) and any(map(_never_ready, earlier))


def _never_ready(fault: Fault) -> bool:
    return fault.action is FREEZE_SCRIPT and fault.point in ("attached", "assigned")


def _fault(rng: random.Random, nodes: int) -> Fault:
    action = rng.choices(
        (
            KILL_WORKER,
            KILL_NODE,
            LOSE_NODE_SILENTLY,
            FREEZE_SCRIPT,
            FREEZE_PROCESS,
            RAISE,
            BREAK_LINK,
            CUT_OFF_NODE,
            ADD_NODE,
        ),
        weights=(10, 3, 2, 3, 2, 3, 2, 0 if nodes == 1 else 2, 2),
    )[0]
    returns_after_s = rng.uniform(0.5, 3.0)
    if action is ADD_NODE or (action is not RAISE and rng.random() < 0.4):
        timed = action if action is not FREEZE_SCRIPT else KILL_WORKER
        return Fault(timed, at_s=rng.uniform(0.2, 7.0), returns_after_s=returns_after_s)
    points = FREEZABLE if action is FREEZE_SCRIPT else POINTS
    return Fault(
        action,
        point=rng.choice(points),
        nth=rng.choice((1, 1, 2, 3, 5, 8, 20, 60)),
        returns_after_s=returns_after_s,
    )


def _control_fault(rng: random.Random) -> Fault:
    """A fault of the control plane alone: the workers train on."""
    action = rng.choice((KILL_LEADER, RESTART_AGENT, CUT_OFF_NODE))
    returns_after_s = rng.choice((rng.uniform(0.2, 2.0), rng.uniform(2.0, 8.0)))
    return Fault(action, at_s=rng.uniform(0.2, 7.0), returns_after_s=returns_after_s)


def _cuts(rng: random.Random, nodes: list[str]) -> tuple[Fault, ...]:
    """Some nodes lose packets to each other, and reach the leader."""
    directed = list(itertools.permutations(nodes, 2))
    if not directed or rng.random() < 0.75:
        return ()
    pairs = rng.sample(directed, rng.randint(1, min(4, len(directed))))
    lasts_s = rng.choice((rng.uniform(0.1, 1.0), rng.uniform(1.0, 8.0)))
    return (
        Fault(CUT_PEERS, at_s=rng.uniform(0.3, 6.0), pairs=tuple(pairs), returns_after_s=lasts_s),
    )


def _stop_in_step(rng: random.Random) -> Fault:
    """A step of one member, or of each from then on, outlasts the grace of a stop."""
    return Fault(
        STOP_IN_STEP,
        point="top",
        nth=rng.choice((1, 3, 8, 20, 60)),
        lasting=rng.random() < 0.4,
        returns_after_s=rng.uniform(0.0, 0.5),
    )


def _script_faults(rng: random.Random) -> tuple[Fault, ...]:
    return tuple(script_fault(rng) for _ in range(rng.choice((0, 0, 1, 1, 2))))


def _node(rng: random.Random, index: int) -> AgentSettings:
    name = "abcdefgh"[index]
    return agent_settings(name, slots=rng.choice((1, 1, 2, 2, 3)), spares=rng.choice((0, 1, 1, 2)))


def _style(rng: random.Random) -> Style:
    loops = rng.choice(("one", "one", "per epoch", "per epoch", "phases"))
    misses = rng.random() < 0.2
    return Style(
        loops=loops,
        scheduler=rng.choice(("top", "bottom", "below", "guarded")),
        average=rng.choice(("bottom", "below", "guarded")),
        early=rng.random() < 0.3,
        logs=rng.random() < 0.5,
        evaluates=rng.random() < 0.5,
        between=rng.choice((0, 1, 2)) if loops != "one" else 0,
        turns=rng.random() < 0.5,
        scaling=rng.choice((None, LinearScaling(warmup_steps=0), LinearScaling(warmup_steps=7))),
        misses_block=rng.choice((0.0, 0.02, 0.2)) if misses else 0.0,
        misses_gap=rng.choice((0.0, 0.02)) if misses else 0.0,
        uneven=rng.choice(("skipped", "other")) if rng.random() < 0.02 else "",
    )


def _coordinator(
    rng: random.Random, minimum: int, maximum: int, *, agent_grace_s: float
) -> CoordinatorSettings:
    return CoordinatorSettings(
        incarnation="sim",
        formation=FormationPolicy(
            min_workers=minimum,
            max_workers=maximum,
            gather_timeout_s=rng.choice((0.5, 3.0)),
            join_timeout_s=2.0,
            busy_timeout_s=8.0,
            first_step_s=12.0,
            agent_grace_s=agent_grace_s,
            broken_grace_s=rng.choice((0.02, 0.25)),
            planned_interval_s=rng.choice((0.0, 0.5)),
            probe_s=0.5,
        ),
        stall=StallPolicy(floor_s=2.0, first_step_s=12.0),
        max_restarts=1000,
        planned_notice_s=rng.choice((0.0, 0.05, 0.3)),
        stop_grace_s=30.0,
    )
