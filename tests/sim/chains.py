"""Chains of faults, on clusters made for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.sim.plan import (
    ADD_NODE,
    BREAK_LINK,
    CUT_OFF_NODE,
    DRAIN_NODE,
    EVALUATED,
    FREEZE_PROCESS,
    FREEZE_SCRIPT,
    GIVES,
    KILL_LEADER,
    KILL_NODE,
    KILL_WORKER,
    LAST_REDUCED,
    LOSE_NODE_SILENTLY,
    PERSISTED,
    RESTART_AGENT,
    STOP,
    Fault,
    Plan,
    agent_settings,
)

# Kinds of stress that need several faults, each at the right moment.
CHAINS = (
    "pretender",
    "curtain",
    "overtaken",
    "disowned",
    "numb",
    "bereft",
    "aloof",
    "handover",
    "laggard",
    "outsider",
    "unhurried",
    "outlived",
)


def chain(rng: random.Random, kind: str) -> Iterator[Fault]:
    at_s = rng.uniform(2.5, 4.0)
    match kind:
        case "pretender":  # a member comes back with more steps, of a lineage that others left
            at_s += 2.5
            lost_at_s = at_s + rng.uniform(1.1, 1.6)
            alone_at_s = lost_at_s + rng.uniform(1.8, 3.0)
            back_at_s = alone_at_s + rng.uniform(0.3, 1.0)
            yield Fault(CUT_OFF_NODE, at_s=at_s, worker="a-1", returns_after_s=back_at_s - at_s)
            for worker in (f"{node}-{number}" for node in "bc" for number in range(1, 4)):
                yield Fault(KILL_WORKER, at_s=lost_at_s, worker=worker, only=True)
            yield Fault(
                KILL_NODE, at_s=alone_at_s, worker="c-", returns_after_s=rng.uniform(0.02, 0.15)
            )
            yield Fault(DRAIN_NODE, at_s=alone_at_s + 0.25, worker="b-")
        case "curtain":  # the job ends without a leader, and a newcomer that was let in is gone
            yield Fault(ADD_NODE, at_s=rng.uniform(2.0, 2.5))
            yield Fault(KILL_LEADER, point=PERSISTED, nth=2, returns_after_s=rng.uniform(5.0, 8.0))
            yield Fault(KILL_NODE, at_s=5.0, worker="x2-1", only=True)
        case "overtaken":  # others make a call below the step whose end a member has missed
            away_s = rng.uniform(0.8, 2.5)
            for action in (BREAK_LINK, CUT_OFF_NODE):
                yield Fault(action, point=LAST_REDUCED, other=True, returns_after_s=away_s)
            yield Fault(KILL_WORKER, point=EVALUATED, nth=rng.randint(1, 2))
            if rng.random() < 0.5:
                yield Fault(ADD_NODE, at_s=at_s)
        case "disowned":  # a member is taken for lost while it gives its state to another
            if rng.random() < 0.6:
                yield Fault(KILL_WORKER, point="reduced", since_s=at_s)
            else:
                yield Fault(ADD_NODE, at_s=at_s)
            yield Fault(
                RESTART_AGENT, point=GIVES, since_s=at_s, returns_after_s=rng.uniform(1.0, 3.0)
            )
        case "bereft":  # a member that saves dies while its agent is away, unseen by the next
            nth, away_s = rng.randint(1, 6), rng.uniform(0.05, 0.4)
            for action in (RESTART_AGENT, KILL_WORKER):
                yield Fault(action, point="saving", nth=nth, returns_after_s=away_s)
        case "aloof":  # the member with the last step loses contact, the others are enough
            yield Fault(KILL_WORKER, point="reduced", since_s=at_s)
            yield Fault(
                CUT_OFF_NODE, point="committed", since_s=at_s, returns_after_s=rng.uniform(1.0, 2.5)
            )
            yield Fault(ADD_NODE, at_s=at_s - rng.uniform(0.0, 1.0))
        case "handover":  # a member is lost right before another one leaves with the last step
            yield Fault(DRAIN_NODE, at_s=at_s, worker="c-1", returns_after_s=3.0)
            yield Fault(KILL_WORKER, point="reduced", since_s=at_s + rng.uniform(0.1, 0.5))
        case "laggard":  # the job stops without a group while the member ahead is in a step
            at_s += 1.0  # when all have started
            yield Fault(KILL_WORKER, point="reduced", since_s=at_s)
            yield Fault(STOP, at_s=at_s + rng.uniform(0.4, 0.9))
        case "outsider":  # a holder of the state comes back while others are stuck on their way in
            lost_at_s = at_s + rng.uniform(1.2, 1.6)
            back_s = lost_at_s - at_s + rng.uniform(0.5, 2.0)
            cut = Fault(CUT_OFF_NODE, at_s=at_s, worker="a-1", returns_after_s=back_s)
            yield cut
            for worker in ("b-1", "c-1"):
                yield Fault(KILL_WORKER, at_s=lost_at_s, worker=worker, only=True)
            yield Fault(
                rng.choice((FREEZE_SCRIPT, FREEZE_PROCESS)),
                point=rng.choice(("join", "agree")),
                since_s=lost_at_s,
            )
        case "outlived":  # those that went on without a member and saved are lost before it returns
            yield Fault(CUT_OFF_NODE, at_s=at_s, worker="a-1", returns_after_s=3.5)
            for worker in ("b-1", "c-1"):
                yield Fault(
                    rng.choice((KILL_NODE, LOSE_NODE_SILENTLY)),
                    at_s=at_s + rng.uniform(1.5, 3.0),
                    worker=worker,
                    returns_after_s=rng.uniform(2.0, 6.0),
                )
        case "unhurried":  # the step before a planned change lasts longer than members may be late
            yield Fault(DRAIN_NODE, at_s=at_s + rng.uniform(5.0, 15.0), worker="b-1")
        case "numb":  # one member after the other freezes before the first step is done
            point = rng.choice(("join", "agree", "joined", "step"))
            for nth in range(1, rng.randint(3, 5)):
                yield Fault(FREEZE_PROCESS, point=point, nth=nth)


def chained(whole: Plan, kind: str) -> Plan:
    """Return the plan with the cluster and the job that this chain needs."""
    rng = random.Random(f"{kind} {whole.seed}")
    job, pace, policy = whole.job, whole.pace, whole.coordinator.formation
    style, isolation_s, news_s = job.style, whole.isolation_s, whole.news_s
    few = rng.randint(0, 1)
    match kind:
        case "pretender":
            nodes = [(1, few), (1, 1), (1, 1)]
            job = job._replace(epochs=9, saves=False, style=style._replace(loops="one"))
            policy = replace(policy, min_workers=2, max_workers=3, agent_grace_s=0.0)
            isolation_s = 12.0
        case "curtain":
            nodes = [(1, 0), (rng.randint(1, 2), few)]
            job = job._replace(length=100, batch_size=2, epochs=2, saves=False)
            policy = replace(policy, min_workers=1, max_workers=4, agent_grace_s=3.0)
            isolation_s = 12.0
        case "overtaken":
            nodes = [(rng.randint(1, 2), few) for _ in range(3)]
            slots = sum(slots for slots, _ in nodes)
            least = rng.choice((1, 2, slots - 1))
            style = style._replace(loops="one", evaluates=True)
            policy = replace(policy, min_workers=least, max_workers=slots, agent_grace_s=0.0)
        case "disowned":
            nodes = [(1, few), (1, 0), (1, 0)]
            pace = replace(pace, transfer_s=0.2)
            job = job._replace(in_place=rng.random() < 0.3, epochs=3 * job.epochs)
            style = style._replace(loops=rng.choice(("one", "per epoch")), logs=False)
            policy = replace(policy, min_workers=2, max_workers=4, agent_grace_s=0.0)
        case "bereft":
            nodes = [(1, 0) for _ in range(rng.randint(2, 4))]
            job = job._replace(epochs=1, saves=True, save_every=3)
            pace = replace(pace, step_s=(0.4, 0.8), reported_step_s=0.8)
            policy = replace(
                policy, min_workers=1, max_workers=4, agent_grace_s=3.0, broken_grace_s=0.25
            )
        case "aloof":
            nodes = [(1, few), (1, 1), (1, 1)]
            job = job._replace(epochs=3 * job.epochs, saves=False)
            style = style._replace(logs=False)
            policy = replace(policy, min_workers=3, max_workers=3, agent_grace_s=3.0)
            isolation_s = 12.0
        case "handover":
            nodes = [(1, 1), (1, 1), (1, few)]
            job = job._replace(epochs=min(2, job.epochs), saves=False)
            style = style._replace(logs=False)
            pace = replace(pace, step_s=(0.4, 0.8), reported_step_s=0.8)
            policy = replace(policy, min_workers=1, max_workers=3)
        case "laggard":
            nodes = [(2, few), (2, few), (1, few)]
            job = job._replace(epochs=min(2, job.epochs), saves=False)
            style = style._replace(logs=False)
            pace = replace(pace, step_s=(0.4, 0.8), reported_step_s=0.8)
            policy = replace(policy, min_workers=5, max_workers=5)
        case "outsider":
            nodes = [(1, 0), (1, 1), (1, 1)]
            job = job._replace(epochs=3 * job.epochs, saves=False)
            policy = replace(policy, min_workers=1, max_workers=3, agent_grace_s=0.0)
            isolation_s = 12.0
        case "outlived":
            nodes = [(1, few), (1, 0), (1, 0)]
            job = job._replace(epochs=3 * job.epochs, saves=True, save_every=rng.randint(2, 5))
            policy = replace(policy, min_workers=1, max_workers=3, agent_grace_s=0.0)
            isolation_s = 12.0
        case "unhurried":
            nodes = [(rng.randint(1, 2), few), (1, few)]
            job = job._replace(length=12 * job.batch_size, epochs=1)
            pace = replace(pace, step_s=(4.5, 6.0), reported_step_s=6.0)
            policy = replace(policy, min_workers=1, max_workers=3, busy_timeout_s=3.0)
            policy = replace(policy, gather_timeout_s=6.0)  # nobody joins later
        case _:
            nodes = [(1, few)]
            pace = replace(pace, silence_s=(2.0, 2.01))
            policy = replace(policy, min_workers=1, max_workers=1)
    settings = tuple(
        agent_settings("abcd"[index], slots=slots, spares=spares)
        for index, (slots, spares) in enumerate(nodes)
    )
    return replace(
        whole,
        nodes=settings,
        coordinator=replace(whole.coordinator, formation=policy),
        job=job._replace(style=style),
        pace=pace,
        news_s=news_s,
        isolation_s=isolation_s,
    )
