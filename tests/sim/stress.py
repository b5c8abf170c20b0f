"""Kinds of stress: which faults strike, and the cluster and the job that they are for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from elastic.core.coordinator.machine import CoordinatorSettings
from tests.sim.chains import CHAINS, chain, chained
from tests.sim.plan import (
    ADD_NODE,
    BREAK_LINK,
    CUT_OFF_NODE,
    DRAIN_NODE,
    FREEZE_PROCESS,
    FREEZE_SCRIPT,
    KILL_LEADER,
    KILL_NODE,
    KILL_WORKER,
    LOSE_NODE_SILENTLY,
    PERSISTED,
    RAISE,
    RESTART_AGENT,
    SCRIPT_POINTS,
    STOP,
    STOP_AGENT,
    Fault,
    Plan,
)

STRESS = ("drain", "drain", "drains", "leaders", "persisted", "agents", "stop", "split")
# Kinds that ordinary histories do not mix in, because other faults would hide their effects.
_AWAY = ("return", "outage")
_ALONE = (
    "bug",
    "hopeless",
    "relay",
    "newcomers",
    "refused",
    "compiles",
    "pairs",
    "stops",
    "saves",
    "breaks",
    "script",
    "dissolved",
    "ending",
    "vacant",
    "absent",
    "overdue",
    "unlucky",
    "torn",
    "surplus",
    "hasty",
    "hangs",
    "calls",
    "closing",
    "comeback",
    "frozen",
    "amnesia",
    "heirs",
    "parting",
    "lastwords",
    "farewell",
    "dismissal",
    "astray",
    "detour",
    "strangers",
    "unheard",
    "late",
    "stopped",
    *_AWAY,
)
KINDS = ("", *sorted({*STRESS, *_ALONE, *CHAINS}))
QUEUED = "queued"
QUEUED_KINDS = tuple(f"{QUEUED} {kind}".strip() for kind in KINDS)
"""The same for jobs whose collectives are queued on a device."""

_UNPLANNED = (
    KILL_WORKER,
    KILL_NODE,
    LOSE_NODE_SILENTLY,
    FREEZE_PROCESS,
    BREAK_LINK,
    CUT_OFF_NODE,
    KILL_LEADER,
    RESTART_AGENT,
    ADD_NODE,
    DRAIN_NODE,
)


def stress_faults(rng: random.Random, kind: str) -> tuple[Fault, ...]:
    """Draw the faults of one kind of stress."""
    at_s = rng.uniform(0.5, 6.0)
    drain = Fault(DRAIN_NODE, at_s=at_s, returns_after_s=rng.uniform(0.1, 3.0))
    if kind == "drain":
        return (drain,)
    if kind == "drains":
        return (drain, replace(drain, at_s=at_s + rng.uniform(0.0, 2.0)))
    if kind in _ALONE:
        return tuple(_alone(rng, kind))
    if kind in CHAINS:
        return tuple(chain(rng, kind))
    if kind == "split":  # the group trains on where no leader sees it, and newcomers arrive
        cut = Fault(CUT_OFF_NODE, at_s=3.0, returns_after_s=rng.uniform(3.0, 8.0))
        newcomer = Fault(ADD_NODE, at_s=rng.uniform(3.1, 4.0))
        leader = Fault(KILL_LEADER, at_s=rng.uniform(3.5, 5.0), returns_after_s=0.2)
        return (*(replace(cut, worker=f"{node}-1") for node in "abcd"), newcomer, leader)
    if kind == "stop":
        action = rng.choice((RESTART_AGENT, CUT_OFF_NODE))
        away = Fault(action, at_s=at_s, returns_after_s=rng.uniform(0.2, 2.0))
        return (away, Fault(STOP, at_s=at_s + rng.uniform(0.0, 1.5)))
    if kind == "persisted":
        return tuple(
            Fault(
                KILL_LEADER,
                point=PERSISTED,
                nth=rng.randint(1, 5),
                returns_after_s=rng.uniform(0.05, 3.0),
            )
            for _ in range(2)
        )
    action = KILL_LEADER if kind == "leaders" else RESTART_AGENT
    faults = []
    for _ in range(3):
        faults.append(Fault(action, at_s=at_s, returns_after_s=rng.uniform(0.05, 0.6)))
        at_s += rng.uniform(0.1, 2.5)
    return tuple(faults)


def _alone(rng: random.Random, kind: str) -> Iterator[Fault]:
    at_s = rng.uniform(1.5, 5.0)
    nth = rng.randint(1, 40)
    match kind:
        case "stopped":  # workers train where no agent can end them, and newcomers arrive
            lasts_s = rng.choice((rng.uniform(0.5, 4.0), rng.uniform(5.0, 12.0)))
            for node in "abcd":
                if rng.random() < 0.9:
                    stop = Fault(STOP_AGENT, at_s=at_s, worker=f"{node}-1", only=True)
                    again_s = lasts_s + rng.choice((0.0, rng.uniform(0.0, 2.0)))
                    yield replace(stop, returns_after_s=again_s)
            yield Fault(ADD_NODE, at_s=at_s + rng.uniform(0.0, 1.0))
            other = rng.choice((KILL_LEADER, KILL_WORKER, CUT_OFF_NODE, RESTART_AGENT))
            yield Fault(
                other, at_s=at_s + rng.uniform(0.0, 8.0), returns_after_s=rng.uniform(0.2, 3.0)
            )
        case "bug":  # all members stumble over the same sample, once
            for member in range(rng.randint(2, 5)):
                yield Fault(RAISE, point="step", nth=nth + member, signature="bug", together=True)
        case "hopeless":
            yield Fault(RAISE, point="joined", nth=nth // 4 + 1, signature="bug", lasting=True)
        case "relay":  # every node leaves; its state goes to newcomers, or is saved
            others_come = rng.random() < 0.8
            for node in "abcd":
                yield Fault(
                    DRAIN_NODE,
                    at_s=at_s + rng.uniform(0.0, 1.0),
                    worker=f"{node}-1",
                    returns_after_s=rng.uniform(0.1, 3.0) if others_come else None,
                )
            for _ in range(rng.randint(1, 3) if others_come else 0):  # the first is about to start
                yield Fault(ADD_NODE, at_s=at_s + rng.choice((-0.3, 0.5, 2.0)))
            if rng.random() < 0.5:
                point = rng.choice(("join", "agree", "transfer", "joined"))
                yield Fault(KILL_WORKER, point=point, nth=rng.randint(2, 8))
        case "newcomers":  # newcomers die or get stuck, at any stage of their way in
            for _ in range(rng.randint(1, 3)):
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(-0.5, 0.5))
            stages = ("assigned", "prepared", "join", "agree", "transfer", "joined")
            for _ in range(rng.randint(1, 3)):
                yield Fault(
                    rng.choice((KILL_WORKER, FREEZE_PROCESS)),
                    point=rng.choice(stages),
                    nth=rng.randint(2, 8),
                    returns_after_s=1.0,
                )
        case "refused":  # no newcomer can join, whatever it does
            yield Fault(KILL_WORKER, at_s=rng.uniform(3.0, 6.0))
            yield Fault(
                RAISE,
                point=rng.choice(("agree", "transfer", "joined")),
                signature="no such key",
                newcomers=True,
            )
            yield Fault(ADD_NODE, at_s=rng.uniform(3.0, 9.0))
        case "compiles":  # steps last long, and nobody is stuck
            yield Fault(KILL_WORKER, at_s=rng.uniform(2.0, 20.0))
            yield Fault(ADD_NODE, at_s=rng.uniform(2.0, 9.0))
        case "pairs":  # the second fault strikes what the first has set in motion
            for delay_s in (0.0, rng.choice((0.01, 0.1, 0.4, 1.5, 2.5)) * rng.uniform(0.5, 1.5)):
                action = rng.choice(_UNPLANNED)
                returns_after_s = rng.uniform(0.1, 3.0)
                yield Fault(action, at_s=at_s + delay_s, returns_after_s=returns_after_s)
        case "stops":
            yield Fault(STOP, at_s=at_s)
            for _ in range(rng.randint(1, 2)):
                around_s = rng.choice((-2.0, -0.5, 0.05, 0.3)) * rng.uniform(0.5, 1.5)
                action = rng.choice(_UNPLANNED)
                returns_after_s = rng.uniform(0.1, 3.0)
                yield Fault(action, at_s=max(0.5, at_s + around_s), returns_after_s=returns_after_s)
        case "return":  # newcomers take over, or fail to, while all others are out of contact
            away_s = rng.uniform(1.0, 6.0)
            for node in "abcd":
                yield Fault(
                    CUT_OFF_NODE,
                    at_s=at_s + rng.uniform(0.0, 0.5),
                    worker=f"{node}-1",
                    returns_after_s=away_s,
                )
            for _ in range(rng.randint(1, 2)):
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(-2.0, 1.0))
            for _ in range(rng.randint(0, 2)):
                yield Fault(
                    rng.choice((KILL_WORKER, FREEZE_PROCESS)),
                    point=rng.choice(("join", "agree", "transfer", "joined")),
                    nth=rng.randint(3, 8),
                )
            if rng.random() < 0.3:
                yield Fault(KILL_LEADER, at_s=at_s + 1.0, returns_after_s=0.5)
        case "outage":  # the leader is cut off from every node
            for node in "abcd":
                yield Fault(CUT_OFF_NODE, at_s=at_s, worker=f"{node}-1", returns_after_s=nth / 10)
        case "dissolved":  # too few are left, and the holders of the state are hard to reach
            for _ in range(2):
                yield Fault(KILL_WORKER, at_s=at_s, returns_after_s=0.5)
            for _ in range(rng.randint(1, 3)):
                yield Fault(
                    rng.choice(
                        (CUT_OFF_NODE, RESTART_AGENT, KILL_LEADER, DRAIN_NODE, ADD_NODE, STOP)
                    ),
                    at_s=max(0.5, at_s + rng.uniform(-0.5, 1.0)),
                    returns_after_s=rng.uniform(0.1, 2.0),
                )
        case "ending":  # some members are done, and others are not
            for _ in range(rng.randint(1, 3)):
                yield Fault(
                    rng.choice(
                        (KILL_WORKER, KILL_WORKER, KILL_NODE, BREAK_LINK, CUT_OFF_NODE, KILL_LEADER)
                    ),
                    point=rng.choice(("meet", "met", "done", "saving")),
                    nth=rng.randint(1, 5),
                    returns_after_s=rng.uniform(0.1, 2.0),
                )
            if rng.random() < 0.5:
                yield Fault(ADD_NODE, at_s=at_s)
        case "saves":  # a member is lost while its group saves
            for _ in range(rng.randint(1, 3)):
                action = rng.choice((KILL_WORKER, KILL_NODE))
                nth = rng.randint(1, 12)
                yield Fault(action, point="saving", nth=nth, returns_after_s=0.5)
        case "script":  # faults where the script changes tracked state, or makes calls
            for _ in range(rng.randint(2, 7)):
                fault = script_fault(rng)
                points = ("transfer", "agree", "joined", fault.point, fault.point, fault.point)
                yield replace(fault, point=rng.choice(points))
        case "vacant":  # nobody trains, the first node holds the state, newcomers arrive
            for node in "bcd":
                yield Fault(
                    KILL_NODE,
                    at_s=at_s + rng.uniform(0.0, 0.3),
                    worker=f"{node}-1",
                    returns_after_s=rng.uniform(0.2, 2.5),
                )
            for _ in range(rng.randint(1, 4)):
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(-0.5, 2.0))
            for _ in range(rng.randint(1, 2)):
                yield Fault(
                    rng.choice(
                        (
                            CUT_OFF_NODE,
                            CUT_OFF_NODE,
                            DRAIN_NODE,
                            RESTART_AGENT,
                            KILL_LEADER,
                            KILL_LEADER,
                            STOP,
                        )
                    ),
                    at_s=at_s + rng.uniform(0.2, 2.5),
                    worker="a-1",
                    returns_after_s=rng.uniform(0.1, 2.5),
                )
        case "absent":  # nodes take long to find a new leader
            for _ in range(rng.randint(1, 2)):
                at_s += rng.uniform(0.0, 4.0)
                yield Fault(KILL_LEADER, at_s=at_s, returns_after_s=rng.uniform(0.1, 1.0))
        case "overdue":  # a stop has little time, and members do not do their part
            yield Fault(STOP, at_s=at_s)
            for _ in range(rng.randint(1, 4)):
                yield Fault(
                    rng.choice((FREEZE_SCRIPT, FREEZE_PROCESS)),
                    point=rng.choice(("step", "committed", "saving", "join", "agree")),
                    nth=rng.randint(5, 60),
                )
        case "unlucky":  # each newcomer fails in a way of its own
            yield Fault(RAISE, point=rng.choice(("agree", "transfer", "joined")), newcomers=True)
            for _ in range(rng.randint(1, 2)):
                yield Fault(ADD_NODE, at_s=rng.uniform(3.0, 9.0))
        case "torn":  # a member that sends or receives the state is lost meanwhile
            yield Fault(rng.choice((KILL_WORKER, BREAK_LINK)), point="reduced", nth=nth)
            for _ in range(rng.randint(1, 4)):
                yield Fault(
                    rng.choice((KILL_WORKER, KILL_WORKER, BREAK_LINK, KILL_NODE)),
                    point=rng.choice(("transfer", "transfer", "agree", "joined", "undone")),
                    nth=rng.randint(1, 10),
                    returns_after_s=0.5,
                )
        case "surplus":  # nodes leave that have no worker in the group, some agents restart
            for index in range(rng.randint(1, 3)):
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(-1.0, 1.0) + index)
            for _ in range(rng.randint(1, 3)):
                yield Fault(
                    rng.choice((DRAIN_NODE, DRAIN_NODE, RESTART_AGENT, KILL_WORKER)),
                    at_s=at_s + rng.uniform(0.5, 4.0),
                    returns_after_s=rng.uniform(0.1, 1.5),
                )
        case "hasty":  # nothing but planned changes
            for _ in range(rng.randint(1, 5)):
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(0.0, 4.0))
            for _ in range(rng.randint(0, 2)):
                yield Fault(
                    DRAIN_NODE,
                    at_s=at_s + rng.uniform(0.0, 4.0),
                    returns_after_s=rng.uniform(0.1, 1.0),
                )
        case "frozen":  # one member after the other gets stuck on its way in, early
            for _ in range(rng.randint(2, 5)):
                yield Fault(
                    rng.choice((FREEZE_PROCESS, FREEZE_SCRIPT)),
                    point=rng.choice(("join", "agree", "transfer", "step")),
                    nth=rng.randint(1, 15),
                )
            if rng.random() < 0.3:
                yield Fault(ADD_NODE, at_s=at_s)
        case "amnesia":
            for _ in range(rng.randint(2, 6)):
                yield Fault(
                    rng.choice((BREAK_LINK, BREAK_LINK, KILL_WORKER)),
                    point=rng.choice(("step", "reduced", "logged", "logged", "transfer")),
                    nth=rng.randint(1, 120),
                )
        case "hangs":  # scripts end well, and their processes do not
            for _ in range(rng.randint(1, 3)):
                yield Fault(
                    rng.choice((FREEZE_SCRIPT, FREEZE_PROCESS)),
                    point="finished",
                    nth=rng.randint(1, 3),
                )
            if rng.random() < 0.6:
                yield Fault(STOP, at_s=at_s)
        case "calls":
            for _ in range(rng.randint(2, 6)):
                yield Fault(
                    rng.choice((KILL_WORKER, BREAK_LINK, BREAK_LINK, KILL_NODE)),
                    point=rng.choice(
                        ("run", "below", "between", "reduced", "logged", "transfer", "loop ended")
                    ),
                    nth=rng.choice((1, 2, 3, 5, 8, 13, 21)),
                    returns_after_s=rng.uniform(0.2, 2.0),
                )
            if rng.random() < 0.5:
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(-1.0, 2.0))
        case "comeback":  # others begin again meanwhile, and get less far
            at_s = rng.uniform(3.5, 5.0)
            lost_at_s = at_s + rng.uniform(1.1, 1.6)
            yield Fault(
                CUT_OFF_NODE, at_s=at_s, worker="a-1", returns_after_s=rng.uniform(3.0, 5.0)
            )
            for worker in (f"{node}-{number}" for node in "bcd" for number in range(1, 6)):
                yield Fault(KILL_WORKER, at_s=lost_at_s, worker=worker, only=True)
            yield Fault(ADD_NODE, at_s=lost_at_s + rng.uniform(-0.6, 0.3))
        case "closing":  # the job stops while too few are left, and they are hard to reach
            for node in "bcd":
                yield Fault(
                    KILL_NODE, at_s=at_s, worker=f"{node}-1", returns_after_s=rng.uniform(1.0, 3.0)
                )
            for _ in range(rng.randint(1, 2)):
                yield Fault(
                    rng.choice((CUT_OFF_NODE, RESTART_AGENT, KILL_LEADER)),
                    at_s=at_s + rng.uniform(-0.2, 0.6),
                    worker=rng.choice(("a-1", "")),
                    returns_after_s=rng.uniform(0.1, 2.5),
                )
            yield Fault(STOP, at_s=at_s + rng.uniform(0.0, 1.0))
        case "heirs":  # nobody trains, the holder of the state leaves, enough others come
            for node in "bcd":
                yield Fault(
                    KILL_NODE, at_s=at_s, worker=f"{node}-1", returns_after_s=rng.uniform(0.2, 1.5)
                )
            for _ in range(rng.randint(2, 4)):
                yield Fault(ADD_NODE, at_s=at_s + rng.uniform(0.0, 1.5))
            actions = (DRAIN_NODE, DRAIN_NODE, CUT_OFF_NODE)
            yield Fault(
                rng.choice(actions),
                at_s=at_s + rng.uniform(0.2, 1.0),
                worker="a-1",
                returns_after_s=rng.uniform(1.0, 2.5),
            )
        case "parting":  # a member is lost as another one is about to leave with its node
            yield Fault(DRAIN_NODE, at_s=at_s, returns_after_s=rng.uniform(0.1, 2.0))
            for _ in range(rng.randint(1, 2)):
                yield Fault(
                    KILL_WORKER,
                    point=rng.choice(("reduced", "reduced", "reduced", "step", "logged")),
                    nth=rng.randint(1, 3),
                    since_s=at_s + rng.uniform(0.0, 0.3),
                )
        case "lastwords":  # too few are left, some with a step that others lack, and the job stops
            nth = rng.randint(1, 3)
            yield Fault(KILL_WORKER, point="reduced", nth=nth, since_s=at_s)
            if rng.random() < 0.2:
                yield Fault(KILL_WORKER, at_s=at_s + rng.uniform(0.0, 0.3))
            if rng.random() < 0.5:
                yield Fault(STOP, at_s=at_s + rng.uniform(-0.1, 0.9))
            else:
                away_s = rng.uniform(0.3, 2.0)
                drained_at_s = at_s + rng.uniform(0.1, 0.9)
                yield Fault(DRAIN_NODE, at_s=drained_at_s, returns_after_s=away_s)
        case "farewell":  # a member that saves before it leaves is lost
            yield Fault(STOP, at_s=at_s)
            for _ in range(rng.randint(1, 2)):
                yield Fault(
                    rng.choice((KILL_WORKER, KILL_NODE, KILL_LEADER)),
                    point="saving",
                    nth=rng.randint(1, 5),
                    since_s=at_s,
                    returns_after_s=rng.uniform(0.1, 1.0),
                )
        case "dismissal":  # too few members stay, the job stops, and one does not come
            yield Fault(DRAIN_NODE, at_s=at_s)
            yield Fault(
                rng.choice((KILL_WORKER, KILL_NODE)),
                point=rng.choice(("run", "below", "step", "reduced")),
                nth=rng.randint(1, 3),
                since_s=at_s + rng.uniform(-0.1, 0.2),
                returns_after_s=1.0,
            )
            yield Fault(STOP, at_s=at_s + rng.uniform(0.0, 0.6))
        case "astray":  # a member that was cut off comes back to others that began again
            at_s = rng.uniform(3.0, 5.0)
            ahead = rng.random() < 0.5
            lost_at_s = at_s + (rng.uniform(0.3, 0.9) if ahead else rng.uniform(0.9, 3.0))
            yield Fault(
                CUT_OFF_NODE,
                at_s=at_s,
                worker="a-1",
                returns_after_s=lost_at_s - at_s + rng.uniform(0.0, 1.5) + 1.5 * ahead,
            )
            if not ahead:
                yield Fault(
                    rng.choice((BREAK_LINK, KILL_WORKER)),
                    point="reduced",
                    since_s=at_s + rng.uniform(0.0, 0.9),
                )
            for worker in (f"{node}-{number}" for node in "bcd" for number in range(1, 6)):
                yield Fault(KILL_WORKER, at_s=lost_at_s, worker=worker, only=True)
            if rng.random() < 0.5:
                yield Fault(ADD_NODE, at_s=lost_at_s + rng.uniform(-0.6, 0.3))
        case "detour":  # groups break under newcomers whose scripts are on their way to later loops
            for _ in range(rng.randint(1, 2)):
                yield Fault(ADD_NODE, at_s=at_s)
            for _ in range(rng.randint(1, 2)):
                yield Fault(
                    rng.choice((BREAK_LINK, BREAK_LINK, KILL_WORKER)),
                    point=rng.choice(("joined", "joined", "set up", "transfer", "between")),
                    nth=rng.randint(1, 3),
                    since_s=at_s + rng.uniform(0.1, 1.0),
                )
        case "strangers":  # a holder of the state comes back to a group without it
            lost_at_s = at_s + rng.uniform(1.0, 1.5)
            back_at_s = lost_at_s + rng.uniform(0.8, 2.5)
            yield Fault(CUT_OFF_NODE, at_s=at_s, worker="a-1", returns_after_s=back_at_s - at_s)
            for worker in (f"{node}-{number}" for node in "bcd" for number in range(1, 6)):
                yield Fault(KILL_WORKER, at_s=lost_at_s, worker=worker, only=True)
            for _ in range(rng.randint(1, 3)):
                yield Fault(ADD_NODE, at_s=lost_at_s + rng.uniform(-1.0, 0.3))
            yield Fault(
                rng.choice((FREEZE_SCRIPT, FREEZE_PROCESS)),
                point=rng.choice(("join", "agree", "transfer")),
                nth=rng.randint(1, 2),
                since_s=lost_at_s,
            )
            if rng.random() < 0.6:
                yield Fault(STOP, at_s=back_at_s + rng.uniform(0.1, 1.5))
        case "unheard":  # a script hangs at its end, and its node misses the end of the job
            yield Fault(STOP, at_s=at_s)
            nth = rng.randint(1, 4)
            yield Fault(
                CUT_OFF_NODE, point="finished", nth=nth, returns_after_s=rng.uniform(0.5, 2.3)
            )
            yield Fault(FREEZE_SCRIPT, point="finished", nth=nth)
        case "late":  # workers that hold their interpreters find a new agent late
            for _ in range(rng.randint(1, 2)):
                away_s = rng.uniform(0.1, 1.0)
                yield Fault(RESTART_AGENT, at_s=at_s, returns_after_s=away_s)
                for _ in range(rng.randint(0, 2)):
                    yield Fault(
                        rng.choice((KILL_WORKER, BREAK_LINK, ADD_NODE, STOP)),
                        at_s=at_s + away_s + rng.uniform(-0.5, 4.0),
                    )
                at_s += rng.uniform(0.5, 8.0)
        case "breaks":  # the group breaks again and again, with steps in between
            for _ in range(8):
                yield Fault(BREAK_LINK, point="committed", nth=nth)
                nth += rng.randint(12, 24)


def script_fault(rng: random.Random) -> Fault:
    """Draw a fault at a point that only some scripts reach."""
    return Fault(
        rng.choice((KILL_WORKER, KILL_WORKER, KILL_NODE, BREAK_LINK)),
        point=rng.choice(SCRIPT_POINTS),
        nth=rng.choice((1, 1, 2, 3, 5, 8, 20)),
        returns_after_s=rng.uniform(0.5, 3.0),
    )


def for_stress(whole: Plan, stress: str) -> Plan:
    """The plan on the cluster, and with the job, that this kind of stress is for."""
    job, seed = whole.job, whole.seed
    slots = sum(n.slots for n in whole.nodes)
    # No calls delay anything: all that happens follows from these faults.
    style = job.style._replace(evaluates=False, between=0, uneven="")
    if stress == "calls":  # members are inside of calls, before them and past them
        style = job.style._replace(
            loops="per epoch", uneven="", misses_block=0.2, misses_gap=0.2, evaluates=True
        )
    if stress == "amnesia":  # what an undo misses is lost, and often nothing later was saved
        missed = (0.8, 0.0) if seed % 2 else (0.1, 0.8)
        style = style._replace(
            loops=job.style.loops, misses_block=missed[0], misses_gap=missed[1], logs=True
        )
        style = style._replace(scheduler=style.scheduler if seed % 2 else "below")
        job = job._replace(saves=seed % 3 > 0, save_every=job.save_every)
    if stress == "script":
        style = job.style._replace(uneven="", misses_block=0.3, misses_gap=0.3, logs=True)
    job = job._replace(style=style)
    whole = replace(whole, job=job, news_s=min(whole.news_s, 0.03))
    if stress == "dissolved" or (stress in ("relay", "stops") and seed % 2):
        whole = replace(
            whole, coordinator=_forming(whole.coordinator, min_workers=max(1, slots - 1))
        )
    if stress in ("drain", "drains", "relay"):  # so that there is time to leave
        job = job._replace(epochs=3 * job.epochs)
    if stress == "compiles":
        coordinator = _forming(whole.coordinator, busy_timeout_s=4.0)
        pace = replace(whole.pace, compile_s=(2.5, 6.0))
        return replace(whole, coordinator=coordinator, job=job, pace=pace)
    whole = _arranged(replace(whole, job=job), stress)
    if stress in CHAINS:
        return chained(whole, stress)
    job = whole.job
    if stress not in ("split", "refused", "unlucky", "comeback", "stopped", *_AWAY):
        return replace(whole, job=job)
    brief = stress == "stopped" or (stress == "return" and seed % 2)
    isolation_s = 2.5 if brief else 6.0
    waits = stress in _AWAY or (stress == "stopped" and seed % 2)
    grace_s = 3.0 if waits else 0.0
    coordinator = _forming(whole.coordinator, min_workers=1, agent_grace_s=grace_s)
    job = job._replace(epochs=30 if stress == "stopped" else 10)
    return replace(whole, coordinator=coordinator, job=job, isolation_s=isolation_s)


def _arranged(whole: Plan, stress: str) -> Plan:
    """Arrange timing, job and sizes for the kinds of stress that need it."""
    rng = random.Random(f"{stress} {whole.seed}")
    coordinator, pace, faults = whole.coordinator, whole.pace, whole.faults
    job, news_s = whole.job, whole.news_s
    slots = sum(n.slots for n in whole.nodes)
    if stress in ("vacant", "closing"):  # the first node alone is too small for a group
        least = whole.nodes[0].slots + 1
        least = min(least, slots) if stress == "closing" else least
        most = rng.choice((least, least, max(least, coordinator.formation.max_workers)))
        grace_s = rng.choice((0.0, 3.0)) if stress == "vacant" else 3.0
        coordinator = _forming(
            coordinator, min_workers=least, max_workers=most, agent_grace_s=grace_s
        )
    if stress == "late":
        pace = replace(pace, found_s=(0.0, 6.0))
        job = job._replace(epochs=3 * job.epochs)
    if stress == "absent":
        pace = replace(pace, return_s=(0.05, 1.6))
    if stress == "overdue":
        coordinator = replace(coordinator, stop_grace_s=rng.uniform(0.5, 4.0))
    if stress == "torn":  # not before the first group has agreed on a state
        first = 2 * (min(slots, coordinator.formation.max_workers) - 1)
        faults = tuple(
            replace(f, nth=f.nth + first) if f.point == "transfer" else f for f in faults
        )
        job = job._replace(save_every=rng.choice((5, 1000)))
    if stress == "surplus":  # the last node is not needed
        most = max(1, slots - whole.nodes[-1].slots)
        coordinator = _forming(coordinator, min_workers=1, max_workers=most)
        job = job._replace(epochs=3 * job.epochs)
    if stress == "hasty":  # boundaries are planned too early, and the news is slow
        coordinator = replace(coordinator, planned_notice_s=0.0)
        pace = replace(pace, step_s=(0.02, 0.05), reported_step_s=0.3)
        job, news_s = job._replace(epochs=3 * job.epochs), 0.12
    if stress == "calls":
        pace = replace(pace, evaluation_s=0.3)
    # The first node alone is too small for a group, or nobody waits for it.
    if stress in ("heirs", "strangers") or (stress == "astray" and whole.seed % 2):
        least = whole.nodes[0].slots + 1 if stress == "heirs" else 1
        most = rng.choice((least, least + 1)) if stress == "heirs" else slots
        grace_s = 3.0 if stress == "heirs" else 0.0
        coordinator = _forming(
            coordinator, min_workers=least, max_workers=most, agent_grace_s=grace_s
        )
        job = job._replace(epochs=3 * job.epochs)
    if stress in ("parting", "lastwords", "dismissal") and (stress != "parting" or whole.seed % 2):
        coordinator = _forming(coordinator, min_workers=slots, max_workers=slots)
        news_s = rng.choice((0.03, 0.12))
        news_s = rng.choice((0.12, 0.7)) if stress == "lastwords" else news_s
        job = job._replace(saves=True)
    if stress in ("parting", "dismissal", "astray", "detour"):
        job = job._replace(epochs=3 * job.epochs)
    if stress == "parting":
        coordinator = replace(coordinator, planned_notice_s=0.3)
    if stress == "farewell":
        job = job._replace(saves=True, save_every=1000)
    if stress == "dismissal":  # members are at calls
        job = job._replace(style=job.style._replace(loops="per epoch", evaluates=True))
        pace = replace(pace, evaluation_s=1.0)
    if stress == "astray":  # what an undo has missed makes a member go back, or ahead
        style = job.style._replace(scheduler="below", misses_block=rng.choice((0.0, 0.8)))
        job = job._replace(style=style, saves=True, save_every=20 if whole.seed % 2 else 5)
        whole = replace(whole, isolation_s=6.0)
    if stress == "detour":  # newcomers join in later loops, with calls on their way there
        job = job._replace(style=job.style._replace(loops="per epoch", between=2))
        pace = replace(pace, evaluation_s=0.5)
    whole = replace(whole, coordinator=coordinator, pace=pace, faults=faults)
    return replace(whole, job=job, news_s=news_s)


def _forming(coordinator: CoordinatorSettings, **changes: Any) -> CoordinatorSettings:
    return replace(coordinator, formation=replace(coordinator.formation, **changes))
