"""Audits a ledger from outside the job: every sample in exactly one committed step per epoch?

    python -m examples.ledger_check ledger.jsonl --samples 1438
    python -m examples.ledger_check ledger.jsonl --samples 1438 --epochs 30    # and the job is done
    python -m examples.ledger_check ledger.jsonl --samples 1438 96 --epochs 30 2    # two loaders

A ledger, written by `elastic run --ledger FILE`, has one JSON object a line:

    {"incarnation": id}                        a coordinator of this run begins to write
    {"resume": s, "run": id, "generation": g}  the steps above from s on do not count
    {"step": 0, "epoch": 0, "run": id, "generation": 1, "world_size": 3, "start": 0, "stop": 48,
     "loader": 0}

A step consumed the positions [start, stop) of its epoch's order. Each loader of the script has
epochs of its own; loaders are numbered in the order of their first use. A run is one start of the
job and counts its generations from 1; a run that begins from a checkpoint repeats steps of the run
before.
This script needs only Python.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

_FIELDS = ("step", "epoch", "generation", "world_size", "start", "stop")
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Audit:
    """The result of an audit. The ledger is good if there are no problems."""

    steps: int
    epochs: int
    """Complete epochs: those with every sample exactly once."""
    generations: int
    resumed: int
    """How often committed steps were lost, whether or not others have taken their place yet."""
    problems: tuple[str, ...]


def audit(
    lines: Iterable[str], *, samples: int | Sequence[int], epochs: int | Sequence[int] | None = None
) -> Audit:
    """Check a ledger's lines against datasets of `samples`.

    samples: one number for all loaders, or one for each. epochs: how many must be complete, in the
    same way; None: the last one may be under way.
    """
    problems: list[str] = []
    lineage, resumed = surviving(_parsed(lines, problems))
    problems += _out_of_order(lineage)
    by_loader = _ranges_by_loader(lineage)
    several = max(by_loader, default=0) > 0
    complete = 0
    for loader in range(max([*by_loader, *range(_given(samples, epochs))], default=-1) + 1):
        length, wanted = _of_loader(samples, loader), _of_loader(epochs, loader)
        name = f"loader {loader}, " if several else ""
        if length is None:
            problems.append(f"loader {loader}: the number of its samples is not given (--samples)")
            continue
        found, wrong = _audit_epochs(by_loader.get(loader, {}), length, wanted, len(lineage))
        complete += found
        problems += [name + problem for problem in wrong]
    if not lineage:
        problems.append("there are no steps")
    generations = len({(record["run"], record["generation"]) for record in lineage})
    return Audit(len(lineage), complete, generations, resumed, tuple(problems))


def _given(*numbers: int | Sequence[int] | None) -> int:
    """For how many loaders something is given."""
    return max((len(each) for each in numbers if isinstance(each, Sequence)), default=0)


def _of_loader(numbers: int | Sequence[int] | None, loader: int) -> int | None:
    if not isinstance(numbers, Sequence):
        return numbers
    return numbers[loader] if loader < len(numbers) else None


def _audit_epochs(
    ranges: dict[int, list[tuple[int, int]]], samples: int, epochs: int | None, steps: int
) -> tuple[int, list[str]]:
    """The number of a loader's complete epochs, and its problems. steps: those of the job."""
    problems = []
    newest = max(ranges, default=-1)
    expected = newest + 1 if epochs is None else max(epochs, newest + 1)
    complete = 0
    # Epochs beyond the number of steps are incomplete; to report some of them is enough.
    for epoch in sorted({*ranges, *range(min(expected, steps + _MOST_SHOWN))}):
        repeated, missing, outside = cover(ranges.get(epoch, []), samples)
        under_way = epochs is None and epoch == newest
        if repeated:
            problems.append(f"epoch {epoch}: {repeated} samples more than once")
        if missing and not under_way:
            problems.append(f"epoch {epoch}: {missing} samples missing")
        if outside:
            problems.append(f"epoch {epoch}: {outside} positions outside the {samples} samples")
        complete += not (repeated or missing or outside)
    if epochs is not None and newest >= epochs:
        problems.append(f"epoch {newest} in a job of {epochs} epochs")
    return complete, problems


def surviving(records: Iterable[Record]) -> tuple[list[Record], int]:
    """The records of the steps that count, and how often steps were given up."""
    lineage: list[Record] = []
    taken_back: list[list[Record]] = []
    for record in records:
        if "resume" not in record:
            lineage.append(record)
            continue
        taken_back.append([r for r in lineage if r["step"] >= record["resume"]])
        lineage = [r for r in lineage if r["step"] < record["resume"]]
    counting = {record["step"]: record for record in lineage}
    # A new coordinator, or a run that begins from a checkpoint, may record some steps again.
    resumed = sum(any(counting.get(r["step"]) != r for r in steps) for steps in taken_back)
    return lineage, resumed


def cover(ranges: Iterable[tuple[int, int]], samples: int) -> tuple[int, int, int]:
    """How many positions the ranges [start, stop) repeat, miss, and have beyond [0, samples)."""
    repeated = missing = outside = reached = 0
    for start, stop in sorted(ranges):
        missing += max(0, min(start, samples) - reached)
        repeated += max(0, min(stop, reached) - start)
        outside += max(0, stop - max(samples, start))
        reached = max(reached, stop)
    return repeated, missing + max(0, samples - reached), outside


def _parsed(lines: Iterable[str], problems: list[str]) -> Iterator[Record]:
    """Step and resume records; lines that are neither become problems.

    Half a line before an "incarnation" is no problem: a crash left it. If its step is not recorded
    again, later checks miss it.
    """
    torn: list[str] = []
    incarnation = ""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            torn.append(f"line {number} is not JSON: {line.strip()[:60]!r}")
            continue
        if isinstance(record, dict) and "incarnation" in record:
            torn = torn[:-1]
            incarnation = str(record["incarnation"])
        problems += torn
        torn = []
        if not isinstance(record, dict):
            problems.append(f"line {number} is not an object")
        elif _is_record(record):
            yield {"run": incarnation, **record}  # older ledgers have no "run" in each line
        elif "incarnation" not in record:
            problems.append(f"line {number} is not the record of a step: {line.strip()[:60]!r}")
    problems += torn


def _is_record(record: Record) -> bool:
    counts = ("resume", "generation") if "resume" in record else _FIELDS
    if "loader" in record:  # older ledgers, of scripts with one, have none
        counts = (*counts, "loader")
    return _is_counts(record, counts) and isinstance(record.get("run", ""), str)


def _is_counts(record: Record, fields: Iterable[str]) -> bool:
    return all(type(record.get(field)) is int and record[field] >= 0 for field in fields)


def _out_of_order(lineage: list[Record]) -> Iterator[str]:
    """Problems unless steps count from 0 without a gap, no run comes back after another one, and a
    run's generations never decrease and keep their world size."""
    worlds: dict[tuple[str, int], int] = {}
    newest: dict[str, int] = {}
    present = None
    for number, record in enumerate(lineage):
        if record["step"] != number:
            yield f"found step {record['step']}, expected step {number}"
            return
        run, generation = record["run"], record["generation"]
        if run != present and run in newest:
            yield f"step {number}: run {run} comes back after run {present}"
        present = run
        if generation < newest.get(run, 0):
            yield f"step {number}: generation {generation} after {newest[run]}"
        newest[run] = max(generation, newest.get(run, 0))
        world = worlds.setdefault((run, generation), record["world_size"])
        if record["world_size"] != world:
            size = record["world_size"]
            yield f"step {number}: generation {generation} had world size {world}, now {size}"


def _ranges_by_loader(lineage: list[Record]) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """The ranges of each loader's epochs."""
    ranges: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for record in lineage:
        epochs = ranges.setdefault(record.get("loader", 0), defaultdict(list))
        epochs[record["epoch"]].append((record["start"], record["stop"]))
    return ranges


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ledger", help="file written by elastic run --ledger")
    several = "; several: of each loader, in the order of their first use"
    parser.add_argument(
        "--samples", type=int, nargs="+", required=True, help=f"length of the dataset{several}"
    )
    parser.add_argument(
        "--epochs", type=int, nargs="+", help=f"epochs that must be complete{several}"
    )
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a damaged ledger may hold odd text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with open(options.ledger, encoding="utf-8", errors="replace") as lines:
            epochs = _one_or(options.epochs) if options.epochs is not None else None
            result = audit(lines, samples=_one_or(options.samples), epochs=epochs)
    except OSError as error:
        parser.error(f"cannot read the ledger {options.ledger}: {error.strerror}")
    for problem in result.problems[:_MOST_SHOWN]:
        print(f"BAD   {problem}")
    if len(result.problems) > _MOST_SHOWN:
        print(f"BAD   and {len(result.problems) - _MOST_SHOWN} more")
    verdict = "BAD" if result.problems else "GOOD"
    print(
        f"{verdict:5} {result.steps} steps, {result.generations} generations, steps given up "
        f"{result.resumed} times; {result.epochs} epochs with each of "
        f"{' or '.join(map(str, options.samples))} samples exactly once"
    )
    return 1 if result.problems else 0


def _one_or(numbers: list[int]) -> int | list[int]:
    """One number counts for all loaders."""
    return numbers[0] if len(numbers) == 1 else numbers


if __name__ == "__main__":
    sys.exit(main())
