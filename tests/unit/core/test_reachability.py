"""Who can work together, when workers probe each other, and what a cut does to the group."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.connections import Findings, largest_group
from elastic.core.coordinator.formation import decide
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.phases import JobPhase
from elastic.core.coordinator.reachability import LeftOut, Probing
from elastic.core.coordinator.view import FormationPolicy, ObservedWorker
from elastic.core.membership import ChangeReason, WorkerStatus
from elastic.core.restarts import Backoff
from tests.unit.core.cluster_views import JOINING, READY, TRAINING, generation, status, view
from tests.unit.core.test_coordinator import of, persisted, report
from tests.unit.core.test_formation import short

POLICY = FormationPolicy(min_workers=1, max_workers=4, probe_s=0.5, planned_interval_s=0.0)
SETTINGS = CoordinatorSettings(incarnation="x", formation=POLICY)
NAMES = ("a0", "b0", "c0", "d0")
GROUP = generation(3, *NAMES)


def missing(*pairs: str) -> dict[str, frozenset[str]]:
    """`ab`: a0 and b0 have no connection."""
    found: dict[str, set[str]] = {}
    for a, b in pairs:
        found.setdefault(f"{a}0", set()).add(f"{b}0")
        found.setdefault(f"{b}0", set()).add(f"{a}0")
    return {name: frozenset(others) for name, others in found.items()}


def findings(*pairs: str, at: float = 5.0, certain: bool = True) -> Findings:
    return Findings(asked_at=at, probed=frozenset(NAMES), missing=missing(*pairs), certain=certain)


def members(phase: object = TRAINING, **fields: object) -> list[WorkerStatus]:
    return [status(name, phase, 3, **fields) for name in NAMES]  # type: ignore[arg-type]


# ---- the largest group


def test_without_a_missing_connection_all_work_together() -> None:
    assert largest_group(NAMES, {}) == set(NAMES)


@pytest.mark.parametrize(
    ("pairs", "kept"),
    [
        (("ad", "bd", "cd"), "abc"),
        (("cd",), "abc"),
        (("ab", "bc", "cd"), "ac"),
        (("ab", "bc", "cd", "ad"), "ac"),
        (("ab", "ac", "ad", "bc", "bd", "cd"), "a"),
    ],
)
def test_the_largest_group_has_all_its_connections(pairs: tuple[str, ...], kept: str) -> None:
    assert largest_group(NAMES, missing(*pairs)) == {f"{name}0" for name in kept}


def test_a_smaller_group_with_the_newest_state_wins() -> None:
    cut = missing("ad", "bd", "cd")
    assert largest_group(NAMES, cut, newest=["d0"]) == {"d0"}
    assert largest_group(NAMES, cut, newest=["d0", "b0"]) == {"a0", "b0", "c0"}


def test_no_larger_group_of_up_to_five_workers_exists() -> None:
    draw = random.Random(7)
    for _ in range(1500):
        names = [f"{n}0" for n in "abcde"[: draw.randint(2, 5)]]
        pairs = [a[0] + b[0] for a, b in itertools.combinations(names, 2) if draw.random() < 0.5]
        newest = draw.sample(names, draw.randint(0, len(names)))
        cut = missing(*pairs)
        best = max(
            size
            for size in range(1, len(names) + 1)
            for group in map(set, itertools.combinations(names, size))
            if not any(cut.get(w, frozenset()) & group for w in group)
            and (not newest or group & set(newest))
        )
        kept = largest_group(names, cut, newest)
        assert not any(cut.get(w, frozenset()) & kept for w in kept)
        assert len(kept) == best, (pairs, newest)
        assert not newest or kept & set(newest)


def test_newcomers_without_a_member_or_each_other_stay_away() -> None:
    found = findings("ac", "bd")
    assert found.unable(["a0"], ["b0", "c0", "d0"]) == {"c0", "d0"}
    assert found.admit(["a0"], ["b0"])
    assert not found.admit(["a0"], ["c0"])
    assert not found.admit(["a0"], ["e0"])  # it has not taken part


# ---- rounds


def workers(*names: str) -> list[ObservedWorker]:
    return [ObservedWorker(node=n[0], status=status(n, TRAINING, 3)) for n in names]


def test_each_node_probes_the_workers_of_the_others() -> None:
    probing = Probing(0.5)
    asked = probing.begin(workers("a0", "a1", "b0"), ["a0", "a1", "b0"], 1.0)
    assert {node: [p.worker for p in peers] for node, peers in asked.items()} == {
        "a": ["b0"],
        "b": ["a0", "a1"],
    }


def test_many_workers_probe_rank_zero_their_neighbours_and_some_others() -> None:
    names = [f"n{i}" for i in range(200)]
    there = [
        ObservedWorker(node=n, status=replace(status("a0", TRAINING, 3), worker=n)) for n in names
    ]
    asked = Probing(0.5).begin(there, names, 1.0)
    assert all(3 <= len(peers) <= 12 for peers in asked.values())
    probed = {p.worker for p in asked["n7"]}
    assert {"n0", "n6", "n8"} <= probed
    assert "n7" not in probed


def test_a_connection_is_certainly_missing_if_both_ends_say_so() -> None:
    probing = Probing(0.5)
    probing.begin(workers("a0", "b0", "c0"), [], 1.0)
    assert not probing.heard("a", 1, {"b0": "no answer"})
    assert not probing.heard("c", 1, {})
    assert probing.heard("b", 1, {"a0": "no answer"})
    assert probing.findings.certain
    assert probing.findings.divide(["a0", "b0"])
    assert not probing.findings.divide(["a0", "c0"])


def test_one_end_alone_is_believed_in_the_second_round() -> None:
    probing = Probing(0.5)
    for number, certain in ((1, False), (2, True)):
        probing.begin(workers("a0", "b0"), [], float(number))
        probing.heard("a", number, {"b0": "no answer"})
        probing.heard("b", number, {})
        assert probing.findings.divide(["a0", "b0"])
        assert probing.findings.certain is certain


def test_a_node_that_does_not_answer_in_time_is_no_evidence() -> None:
    probing = Probing(0.5)
    probing.begin(workers("a0", "b0"), [], 1.0)
    probing.heard("a", 1, {})
    assert not probing.is_over(1.9)
    assert probing.is_over(2.0)
    assert not probing.findings.missing
    assert not probing.heard("b", 1, {"a0": "no answer"})  # too late


def test_each_time_in_a_row_a_node_stays_away_longer() -> None:
    left = LeftOut(Backoff(base_s=2.0, cap_s=300.0))
    now, delays = 0.0, []
    for _ in range(5):
        delays.append(left.again("d", now))
        now = left.until("d")
    assert delays == sorted(delays)
    assert delays[-1] > 8 * delays[0]
    assert left.again("d", now + 1000.0) == delays[0]
    left.gone("d")
    assert left.until("d") < 0.0


# ---- the decision


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"broken_since": 4.9}, findings("ad"), "GROUP_BROKEN []"),
        ({"quiet_since": 3.0}, findings("ad"), "GROUP_BROKEN []"),
        ({"quiet_since": 3.0}, findings("ad", certain=False), "STEADY"),
        ({"quiet_since": 5.5}, findings("ad"), "STEADY"),  # found before it stood still
        ({}, findings("ad"), "STEADY"),  # it trains: connections that exist may go on
    ],
)
def test_a_group_that_does_not_work_parts_if_members_do_not_reach_each_other(
    changes: dict[str, float], found: Findings, expected: str
) -> None:
    seen = view(GROUP, *members(), formed_at=1.0, findings=found, **changes)
    decision = short(decide(seen, POLICY, 5.6))
    assert getattr(decision, "name", decision) == expected


def test_a_group_that_does_not_assemble_parts_too() -> None:
    seen = view(
        GROUP, *members(JOINING), formed_at=1.0, assembling_since=1.0, findings=findings("ad")
    )
    decision = decide(seen, POLICY, 5.6)
    assert short(decision) == "GROUP_BROKEN []"
    assert decision.unreachable == {"d0"}  # type: ignore[union-attr]


def test_too_few_that_reach_each_other_wait_and_do_not_end_the_job() -> None:
    policy = replace(POLICY, min_workers=4)
    seen = view(GROUP, *members(), formed_at=1.0, quiet_since=3.0, findings=findings("ad"))
    assert short(decide(seen, policy, 5.6)) == "BELOW_MINIMUM []"
    freed = view(generation(4), *members(READY), findings=findings("ad"))
    assert short(decide(freed, policy, 5.7)).name == "BELOW_MINIMUM"  # type: ignore[attr-defined]
    healed = replace(freed, findings=findings(at=9.0))
    assert short(decide(healed, policy, 9.1)) == "STARTED [a0 b0 c0 d0]"


def test_the_newest_state_decides_who_goes_on_once_all_are_free() -> None:
    parted = generation(4, reason=ChangeReason.GROUP_BROKEN)
    ahead = [*members(READY, committed=7)[:3], status("d0", READY, 3, committed=8)]
    cut = findings("ad", "bd", "cd")
    assert short(decide(view(parted, *ahead, findings=cut), POLICY, 5.7)) == "GROUP_BROKEN [d0]"
    even = view(parted, *members(READY, committed=7), findings=cut)
    assert short(decide(even, POLICY, 5.7)) == "GROUP_BROKEN [a0 b0 c0]"


# ---- the machine


def training() -> Coordinator:
    """Generation 1 of a0 and b0 trains."""
    machine = Coordinator(SETTINGS)
    ready = tuple(report(name[0], status(name, READY), slots=1) for name in ("a0", "b0"))
    machine.handle(ev.NodesReported(reports=ready), 0.0)
    machine.handle(ev.GenerationPersisted(number=1), 0.1)
    for name in ("a0", "b0"):
        machine.handle(report(name[0], status(name, TRAINING, 1), slots=1), 0.2)
    assert machine.phase is JobPhase.RUNNING
    return machine


def probed(machine: Coordinator, effects: list[fx.Effect], now: float, **unreached: str) -> list:
    """All nodes answer; `c="a0"`: c does not reach a0."""
    (asked,) = of(fx.ProbePeers, effects)
    effects = []
    for node in asked.peers:  # type: ignore[attr-defined]
        why = {unreached[node]: "no answer"} if node in unreached else {}
        told = ev.PeersProbed(node=node, number=asked.number, unreached=why)  # type: ignore[attr-defined]
        effects += machine.handle(told, now)
    return effects


def test_a_newcomer_joins_once_it_and_the_members_have_reached_each_other() -> None:
    machine = training()
    effects = machine.handle(report("c", status("c0", READY), slots=1), 1.0)
    assert not of(fx.PersistGeneration, effects)
    probed(machine, effects, 1.05)
    effects = machine.handle(ev.TimerFired(), 1.2)
    assert persisted(effects).generation.worker_ids == {"a0", "b0", "c0"}


@pytest.mark.parametrize("side", [{"c": "a0"}, {"a": "c0"}], ids=["from it", "to it"])
def test_a_newcomer_that_does_not_reach_all_is_told_and_tried_again_later(
    side: dict[str, str],
) -> None:
    machine = training()
    effects = machine.handle(report("c", status("c0", READY), slots=1), 1.0)
    (told,) = of(fx.PeersUnreachable, probed(machine, effects, 1.5, **side))
    assert told.left_out == ("c",)  # type: ignore[attr-defined]
    assert {(u.by, u.peer.node) for u in told.unreached} == {  # type: ignore[attr-defined]
        (by, peer[0]) for by, peer in side.items()
    }
    again_at = 1.5 + told.retry_s  # type: ignore[attr-defined]
    assert not of(fx.ProbePeers, machine.handle(ev.TimerFired(), again_at - 0.1))
    effects = machine.handle(ev.TimerFired(), again_at + 0.1)
    effects = probed(machine, effects, again_at + 0.2)
    assert "c0" in persisted(effects).generation.worker_ids


def test_members_are_freed_and_those_that_reach_each_other_go_on() -> None:
    machine = training()
    broken = status("a0", READY, 1, broken=True, detail="reset")
    effects = machine.handle(report("a", broken, slots=1), 5.0)
    effects = probed(machine, effects, 5.5, a="b0", b="a0")
    assert persisted(effects).generation.members == ()
    (told,) = of(fx.PeersUnreachable, effects)
    assert told.parted  # type: ignore[attr-defined]
    (lost,) = of(fx.Lost, effects)
    assert lost.workers == ()  # type: ignore[attr-defined]
    assert machine.phase is JobPhase.FORMING
    machine.handle(ev.GenerationPersisted(number=2), 5.6)
    machine.handle(report("a", replace(broken, acknowledged=2), slots=1), 5.7)
    ahead = status("b0", READY, 1, committed=1, acknowledged=2)
    effects = machine.handle(report("b", ahead, slots=1), 5.8)
    assert persisted(effects).generation.worker_ids == {"b0"}
    (told,) = of(fx.PeersUnreachable, effects)
    assert told.left_out == ("a",)  # type: ignore[attr-defined]
    (lost,) = of(fx.Lost, effects)
    assert lost.workers == ("a0",)  # type: ignore[attr-defined]


def test_a_break_among_members_that_reach_each_other_forms_the_same_group() -> None:
    machine = training()
    broken = status("a0", READY, 1, broken=True, detail="reset")
    effects = machine.handle(report("a", broken, slots=1), 5.0)
    probed(machine, effects, 5.01)
    effects = machine.handle(ev.TimerFired(), 5.3)
    assert persisted(effects).generation.worker_ids == {"a0", "b0"}


def test_an_operator_lets_a_node_that_was_left_out_join_at_once() -> None:
    machine = training()
    effects = machine.handle(report("c", status("c0", READY), slots=1), 1.0)
    probed(machine, effects, 1.5, c="a0")
    effects = machine.handle(ev.NodeWelcomed(node="c"), 1.6)
    assert of(fx.PersistGeneration, probed(machine, effects, 1.7))


# ---- a firewall by port


def behind_a_firewall(probing: Probing, **by_port: str) -> Findings:
    """a0, b0 and c0 probe each other; `a="bc"`: a reaches only the stores' ports of b0 and c0."""
    probing.begin(workers("a0", "b0", "c0"), [], 1.0)
    for node in "abc":
        found = {f"{peer}0": "no answer" for peer in by_port.get(node, "")}
        probing.heard(node, probing.round, found, frozenset(found))
    return probing.findings


def test_a_port_that_does_not_answer_counts_if_those_of_other_nodes_do() -> None:
    found = behind_a_firewall(Probing(0.5), a="c", b="c", c="ab")
    assert largest_group(["a0", "b0", "c0"], found.missing) == {"a0", "b0"}
    assert all(u.by_port for u in found.unreached)


def test_ports_that_answer_nowhere_are_no_evidence() -> None:
    assert not behind_a_firewall(Probing(0.5), a="bc", b="ac", c="ab").missing


def test_a_job_of_one_node_goes_on_when_a_firewall_by_port_parts_it_from_a_newcomer() -> None:
    """No port answers anywhere. That counts when the group breaks a second time."""
    machine, now = Coordinator(SETTINGS), 1.0
    machine.handle(report("a", status("a0", READY), slots=1), 0.0)
    machine.handle(ev.GenerationPersisted(number=1), 0.1)
    machine.handle(report("a", status("a0", TRAINING, 1), slots=1), 0.2)
    machine.handle(ev.GroupBegan(generation=1, step=0), 0.5)
    effects = machine.handle(report("b", status("b0", READY), slots=1), now)
    probed(machine, effects, now + 0.1)
    machine.handle(ev.TimerFired(), now + 0.2)
    for number in (2, 3):
        assert machine.handle(ev.GenerationPersisted(number=number), now + 0.3)
        assert machine.current is not None
        assert machine.current.world_size == 2
        now += 5.0
        effects = []
        for phase, is_broken in ((JOINING, False), (READY, True)):
            for name in ("a0", "b0"):
                told = status(name, phase, number, broken=is_broken, detail="did not assemble")
                effects += machine.handle(report(name[0], told, slots=1), now)
        for later_s in (0.2, 0.4, 0.6, 0.8, 1.0):
            effects += _answer_in_vain(machine, effects, now + later_s)
            if of(fx.PersistGeneration, effects):
                break
            effects = machine.handle(ev.TimerFired(), now + later_s + 0.1)
        world = persisted(effects).generation.world_size
        assert world == (2 if number == 2 else 0), "its members are freed, to go on by themselves"


def _answer_in_vain(machine: Coordinator, effects: list[fx.Effect], now: float) -> list[fx.Effect]:
    """Both nodes reach each other's stores, and no port that the kernel chose."""
    answered: list[fx.Effect] = []
    for asked in of(fx.ProbePeers, effects):
        for node, peer in (("a", "b0"), ("b", "a0")):
            told = ev.PeersProbed(
                node=node,
                number=asked.number,  # type: ignore[attr-defined]
                unreached={peer: "no answer"},
                by_port=frozenset({peer}),
            )
            answered += machine.handle(told, now)
    return answered


def test_a_node_that_does_not_answer_does_not_count_as_reached() -> None:
    probing = Probing(0.5)
    probing.begin(workers("a0", "b0"), [], 1.0)
    probing.heard("a", 1, {"b0": "no answer"}, {"b0"})
    assert probing.is_over(2.0)
    assert not probing.findings.missing


def test_all_ports_are_probed_while_a_group_does_not_assemble_and_before_its_node_returns() -> None:
    machine = training()
    machine.handle(ev.GroupBegan(generation=1, step=0), 0.5)
    effects = machine.handle(report("c", status("c0", READY), slots=1), 1.0)
    (asked,) = of(fx.ProbePeers, effects)
    assert not asked.all_ports  # type: ignore[attr-defined]
    probed(machine, effects, 1.05)
    machine.handle(ev.TimerFired(), 1.2)
    machine.handle(ev.GenerationPersisted(number=2), 1.3)
    for name in ("a0", "b0", "c0"):
        effects = machine.handle(report(name[0], status(name, JOINING, 2), slots=1), 1.4)
    broken = {n: status(n, READY, 2, broken=True, detail="did not assemble") for n in ("a0", "b0")}
    effects = machine.handle(report("a", broken["a0"], slots=1), 5.0)
    (asked,) = of(fx.ProbePeers, effects)
    assert asked.all_ports  # type: ignore[attr-defined]
    closed = {"a": {"c0": "no answer"}, "b": {"c0": "no answer"}}
    closed["c"] = {"a0": "no answer", "b0": "no answer"}
    for node, found in closed.items():
        told = ev.PeersProbed(
            node=node,
            number=asked.number,  # type: ignore[attr-defined]
            unreached=found,
            by_port=frozenset(found),
        )
        effects = machine.handle(told, 5.5)
    assert persisted(effects).generation.members == ()
    machine.handle(ev.GenerationPersisted(number=3), 5.6)
    for name in ("a0", "b0", "c0"):
        freed = status(name, READY, 1, acknowledged=3)
        effects = machine.handle(report(name[0], freed, slots=1), 5.7)
    assert persisted(effects).generation.worker_ids == {"a0", "b0"}
    (left,) = of(fx.PeersUnreachable, effects)
    assert left.left_out == ("c",)  # type: ignore[attr-defined]
    machine.handle(ev.GenerationPersisted(number=4), 5.8)
    for name in ("a0", "b0"):
        machine.handle(report(name[0], status(name, TRAINING, 4), slots=1), 5.9)
    machine.handle(ev.GroupBegan(generation=4, step=0), 5.9)
    (asked,) = of(fx.ProbePeers, machine.handle(ev.TimerFired(), 5.9 + left.retry_s))  # type: ignore[attr-defined]
    assert asked.all_ports  # type: ignore[attr-defined]
