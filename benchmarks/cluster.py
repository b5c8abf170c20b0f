"""Measures what faults cost a job of three nodes, on network namespaces.

    python -m benchmarks.cluster                     # all, about 25 minutes
    python -m benchmarks.cluster --only kill cut     # some
    python -m benchmarks.cluster --repeat 2 --kills 2 --torchrun-kills 1 --outage-s 10 --flap-s 20

Three hosts have an agent and a worker each; three have etcd, and two of these a coordinator. A
fourth node joins from a seventh host. All hosts share the CPUs of this machine. torchrun trains the
same model on the same hosts and saves a checkpoint every 20 steps. Needs root, as the tests on
network namespaces do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.cluster_faults import Faults, Figures
from benchmarks.cluster_steps import MarkedSteps
from benchmarks.cluster_torchrun import kill_a_node, torchrun_job
from benchmarks.jobs import SCRIPTS
from benchmarks.report import command_line, save, show, spread
from benchmarks.scripts.mlp import SIZES
from examples.ledger_check import audit
from tests.cluster import NODES, Cluster, network_with_etcd
from tests.cluster_audit import check_nothing_lost, merged_ledger
from tests.hosts.ability import missing_requirement

_KINDS = ("kill", "cut", "leader", "store", "agent", "join", "flap")
_TITLES = {
    "kill": "a node's processes killed",
    "torchrun": "the same under torchrun",
    "torchrun-hurried": "the same under torchrun with time-outs of about 3 s",
    "cut": "link of a node cut, silently",
    "leader": "leader killed; then leader and worker at once",
    "store": "majority of etcd stopped, a node lost meanwhile",
    "agent": "agent killed and started again after 1 s",
    "join": "a fourth node joins",
    "flap-link": "link of a fourth node flaps",
    "flap-process": "process of a fourth node flaps",
}


_TORCHRUN = {
    "torchrun": "",
    "torchrun-hurried": "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
}
"""Options for torchrun's --rdzv-conf: its defaults, and time-outs too short for real use."""


def main() -> None:
    options = _parse()
    if lacking := missing_requirement():
        raise SystemExit(lacking)
    results: dict[str, list[Figures]] = {}
    for name, rendezvous in _TORCHRUN.items():
        if "kill" in options.only and options.torchrun_kills:
            results[name] = _torchrun(name, rendezvous, options)
    with _cluster(options.size) as cluster:
        faults = Faults(cluster, random.Random(options.seed))
        for name, times, fault in _plan(faults, options):
            for number in range(times):
                load = os.getloadavg()[0]
                results.setdefault(name, []).append(fault())
                _print_progress(name, number + 1, times, results[name][-1], load)
        problems = _audit(cluster, options.size)
        pauses = _pauses(cluster)
    _show(results)
    print("ledger:", problems or "good: every step once, no step lost")
    for side, found in pauses.items():
        longest = max(found, key=lambda pause: pause["pause_s"], default=None)
        told = f"{longest['pause_s']:.3f} s at most, at {longest['where']}" if longest else "none"
        print(f"pauses of {side}' loops above 0.05 s: {len(found)}; {told}")
    document = {"results": results, "problems": problems, "pauses": pauses}
    save("cluster", {"options": vars(options), **document})


def _pauses(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """Return the `loop_paused` events: when an event loop stood still, and where."""
    agents = [process for processes in cluster.agents.values() for process in processes]
    return {
        "coordinators": [dict(event) for event in cluster.events("loop_paused")],
        "agents": [dict(event) for agent in agents for event in agent.named("loop_paused")],
    }


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=_KINDS, default=_KINDS, help="faults (all)")
    parser.add_argument("--kills", type=int, default=10, help="node kills under elastic (10)")
    parser.add_argument(
        "--torchrun-kills", type=int, default=3, help="node kills under torchrun (3)"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=5,
        help="repetitions of each other fault, except those of the store and flapping (5)",
    )
    parser.add_argument(
        "--outage-s", type=float, default=30.0, help="length of the store's outage (30)"
    )
    parser.add_argument("--flap-s", type=float, default=60.0, help="duration of flapping (60)")
    parser.add_argument("--size", choices=SIZES, default="5m", help="size of the model (5m)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times (0)")
    return parser.parse_args()


def _plan(
    faults: Faults, options: argparse.Namespace
) -> Iterator[tuple[str, int, Callable[[], Figures]]]:
    everything: list[tuple[str, int, Callable[[], Figures]]] = [
        ("kill", options.kills, faults.node_killed),
        ("cut", options.repeat, faults.link_cut),
        ("leader", options.repeat, faults.leader_killed),
        ("store", 1, lambda: faults.store_stopped(options.outage_s)),
        ("agent", options.repeat, faults.agent_restarted),
        ("join", options.repeat, faults.node_joins),
        ("flap-link", 1, lambda: faults.flapping("link", options.flap_s)),
        ("flap-process", 1, lambda: faults.flapping("process", options.flap_s)),
    ]
    for name, times, fault in everything:
        if name.partition("-")[0] in options.only:
            yield name, times, fault


@contextlib.contextmanager
def _cluster(size: str) -> Iterator[Cluster]:
    """Start three nodes that train the benchmarks' model."""
    with tempfile.TemporaryDirectory() as scratch, network_with_etcd(durable=True) as (net, etcd):
        cluster = Cluster(net, etcd, Path(scratch))
        marks = Path(scratch) / "marks"
        marks.mkdir()

        def hosts() -> dict[int, str]:
            names = list(cluster.agents)
            return {pid: name for name in names for pid in cluster.worker_pids(name).values()}

        cluster.steps = MarkedSteps(marks, hosts)  # type: ignore[assignment]
        cluster.script = (SCRIPTS / "elastic_train.py", "--log-dir", marks, "--size", size)
        cluster.coordinator_options = ("--quarantine-after", "0")  # nodes fail again and again here
        cluster.settle(*NODES)
        yield cluster


def _torchrun(name: str, rendezvous: str, options: argparse.Namespace) -> list[Figures]:
    done: list[Figures] = []
    with network_with_etcd(durable=True) as (net, _), tempfile.TemporaryDirectory() as scratch:
        for number in range(options.torchrun_kills):
            files = Path(scratch) / str(number)
            load = os.getloadavg()[0]
            with torchrun_job(net, files, options.size, rendezvous) as log:
                done.append({"next_step_s": kill_a_node(net, log)})
            _print_progress(name, number + 1, options.torchrun_kills, done[-1], load)
    return done


def _audit(cluster: Cluster, size: str) -> list[str]:
    """Return the problems in the merged ledger of both coordinators, except samples that were never
    trained: the script drops the ends of epochs."""
    lines = merged_ledger(cluster)
    found = audit(lines, samples=SIZES[size].samples)
    problems = [p for p in found.problems if not p.endswith("samples missing")]
    try:
        check_nothing_lost(lines)
    except AssertionError as error:
        problems.append(str(error))
    return problems


def _print_progress(name: str, number: int, times: int, figures: Figures, load: float) -> None:
    said = ", ".join(
        f"{key} {_cell(value)}" for key, value in figures.items() if not key.startswith("phase_")
    )
    print(f"{name} {number} of {times} (load {load:.1f}): {said}", flush=True)


def _show(results: dict[str, list[Figures]]) -> None:
    for name, done in results.items():
        rows = []
        for key in done[0]:
            values = spread([figures[key] for figures in done])
            rows.append([key.replace("_", " "), *map(_cell, values.values())])
        show(f"{_TITLES[name]} ({len(done)} times)", ["", "median", "min", "max"], rows)
    medians = {
        side: statistics.median(figures["next_step_s"] for figures in results[side])
        for side in (*_TORCHRUN, "kill")
        if side in results
    }
    for side in medians.keys() - {"kill"}:
        ours, theirs = medians["kill"], medians[side]
        print(f"{side} takes {theirs / ours:.1f} times as long ({theirs:.2f} s, {ours:.3f} s)")


def _cell(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3f}"


if __name__ == "__main__":
    main()
