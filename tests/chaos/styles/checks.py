"""Checks a style's run; each check yields what is wrong, in words."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos import problem, records
from tests.chaos.styles import replay, tasks
from tests.chaos.styles.catalogue import Style, Truth
from tests.chaos.styles.running import Run

Record = dict[str, Any]
Records = dict[str, list[Record]]

CONFIGURATION = 78
_SHOWN = 4  # of many differences
_MOST_STUCK = 1
_LEAST_NORM = 1e-3  # of the largest norm: the scale for a small bias that passes through zero


def wrong_in(job: Run, one: Run) -> list[str]:
    """Everything wrong with the job; `one` is the same script, undisturbed, as a world of one."""
    if job.style.truth is Truth.REFUSED:
        return [*_refusal(job)]
    found = records.read(job.out)
    found = {f"pid {name.partition('-')[2]}": rows for name, rows in found.items()}
    counting = _counting(job, found)
    wrong = [*_end(job), *_losses(job), *_members_equal(job.style, counting)]
    if job.exit_code == 0 and not wrong:
        wrong += [*_nothing_lost(job, found), *_samples(job, one, counting)]
    if one.exit_code != 0:
        wrong.append(f"as a world of one it ends with {one.exit_code}")
    elif job.style.truth is Truth.ONE_PROCESS:
        wrong += _same_as_one_process(job, one, counting)
    elif job.style.truth is Truth.REPLAY and job.exit_code == 0:
        wrong += _same_as_replay(job, counting)
    return wrong


# ---- how it ended


def _end(job: Run) -> Iterator[str]:
    if job.exit_code is None:
        yield "it was still running after its deadline"
    elif job.exit_code != 0:
        ended = [e.get("message", "") for e in job.named("job_ended")]
        yield f"it ended with {job.exit_code}: {_short(' '.join(ended))}"
    if not job.complete:
        yield f"after {len(job.kills)} kills no full group trained any more"


def _losses(job: Run) -> Iterator[str]:
    """Only killed workers are lost, and at most one that gloo has left waiting for the rest of a
    message (worker/group/stuck.py). The state of that one must not be lost."""
    killed = {kill.worker for kill in job.kills}
    stuck = 0
    for event in job.named("worker_failed"):
        if event["worker"] not in killed and "in a lost group" in event.get("message", ""):
            stuck += 1
            if stuck > _MOST_STUCK:
                yield f"{stuck} workers hung in lost groups, not by a kill"
        elif event["worker"] not in killed:
            text = _short(str(event.get("message", "")))
            yield f"{event['worker']} was lost, not by a kill: {event['kind']}: {text}"


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


def _refusal(job: Run) -> Iterator[str]:
    if job.exit_code != CONFIGURATION:
        committed = max((e.get("committed", 0) for e in job.events), default=0)
        yield f"not refused: exit code {job.exit_code}, {committed} steps"
    elif not any(e.get("message") for e in job.named("job_ended")):
        yield "refused without a reason"


# ---- members


def _counting(job: Run, found: Records) -> Records:
    """The commits of each process, without the last one of a killed process if survivors of that
    step have recorded it too: they may have computed it again."""
    killed = {kill.worker for kill in job.kills}
    pids = {f"pid {e['pid']}" for e in job.named("worker_started") if e["worker"] in killed}
    commits = {
        process: [row for row in rows if row["kind"] == "commit"] for process, rows in found.items()
    }
    outlived = Counter(
        row["step"]
        for process, rows in commits.items()
        for row in (rows[:-1] if process in pids else rows)
    )
    return {
        process: rows[:-1] if process in pids and rows and outlived[rows[-1]["step"]] else rows
        for process, rows in commits.items()
    }


def _members_equal(style: Style, commits: Records) -> Iterator[str]:
    """The states of all members are equal bit for bit after every step."""
    digests: dict[tuple[int, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for process, rows in commits.items():
        for row in rows:
            for part, digest in row["digests"].items():
                if not (style.own_buffers and part.endswith("(buffers)")):
                    digests[row["step"], part][digest].append(f"rank {row['rank']} ({process})")
    differing = {key: found for key, found in digests.items() if len(found) > 1}
    for (step, part), holders in sorted(differing.items())[:_SHOWN]:
        yield f"members differ in {part} after step {step}: {dict(holders)}"
    if len(differing) > _SHOWN:
        yield f"... and at {len(differing) - _SHOWN} more"
    if not any(len(holders) > 1 for found in digests.values() for holders in found.values()):
        yield "no step was recorded by two members"


def _newest(commits: Records) -> dict[int, Record]:
    """Each step's record of the newest generation, which is the one that counts."""
    newest: dict[int, Record] = {}
    for rows in commits.values():
        for row in rows:
            known = newest.get(row["step"])
            if known is None or row["generation"] >= known["generation"]:
                newest[row["step"]] = row
    return newest


def _truth(one: Run) -> dict[int, Record]:
    return _newest(_counting(one, records.read(one.out)))


# ---- steps and samples


def _nothing_lost(job: Run, found: Records) -> Iterator[str]:
    try:
        records.check_nothing_lost(found, job.named("generation_formed"))
    except AssertionError as error:
        yield f"a step was lost or begun once too often: {error}"


def _samples(job: Run, one: Run, commits: Records) -> Iterator[str]:
    """The ledger has every sample once. If the batch is fixed its steps are those of a world of
    one."""
    taken = [[s["epoch"], s["start"], s["stop"]] for s in problem.lineage(job.ledger)]
    newest = _newest(commits)
    recorded = [newest[step]["samples"] for step in sorted(newest)]
    if job.style.truth is Truth.REPLAY:
        yield from _tiles(taken, job.epochs)
        return
    truth = _truth(one)
    expected = [truth[step]["samples"] for step in sorted(truth)]
    least, most = job.style.steps(job.epochs)
    if not least <= len(expected) <= most:
        yield f"a world of one takes {len(expected)} steps in {job.epochs} epochs, not {most}"
    if taken != expected:
        yield f"the ledger has {len(taken)} steps, not the {len(expected)} of a world of one"
    if recorded != expected:
        yield f"members recorded {len(recorded)} steps, a world of one {len(expected)}"


def _tiles(taken: list[list[int]], epochs: int) -> Iterator[str]:
    """The steps of each epoch follow each other without a gap."""
    ends: dict[int, int] = defaultdict(int)
    for epoch, start, stop in taken:
        if start != ends[epoch]:
            yield f"epoch {epoch}: a step begins at {start}, the one before ended at {ends[epoch]}"
        ends[epoch] = stop
    if [*ends] != [*range(epochs)] or set(ends.values()) != {tasks.SAMPLES}:
        yield f"not {epochs} epochs of {tasks.SAMPLES} samples: {dict(ends)}"


# ---- the trajectory


def _same_as_one_process(job: Run, one: Run, commits: Records) -> Iterator[str]:
    truth, newest = _truth(one), _newest(commits)
    for step in sorted(newest.keys() & truth.keys()):
        here = [*_different(job.style, newest[step]["figures"], truth[step]["figures"])]
        if here:
            yield f"not the undisturbed trajectory after step {step}: {'; '.join(here[:_SHOWN])}"
            return
    if not newest.keys() & truth.keys():
        yield "no step to compare with that of a world of one"


def _same_as_replay(job: Run, commits: Records) -> Iterator[str]:
    newest = _newest(commits)
    steps = problem.lineage(job.ledger)
    factors = {step: row["lr_factor"] for step, row in newest.items()}
    truth = replay.figures(job.style.name, steps, factors)
    here = [*_different(job.style, newest[len(steps) - 1]["figures"], truth)]
    if here:
        yield f"not what one process comes to with these steps: {'; '.join(here[:_SHOWN])}"


def _different(style: Style, mine: Record, theirs: Record) -> Iterator[str]:
    for part, expected in theirs.items():
        if style.own_buffers and part.endswith("(buffers)"):
            continue
        norms = [figure[1] for figure in expected.values() if isinstance(figure, list)]
        least = _LEAST_NORM * max(filter(math.isfinite, norms), default=0.0)
        for path in sorted(expected.keys() | mine[part].keys()):
            value, wanted = mine[part].get(path), expected.get(path)
            if not _close(value, wanted, style.tolerance, least):
                yield f"{path} is {json.dumps(value)}, not {json.dumps(wanted)}"


def _close(value: Any, wanted: Any, tolerance: float, least_norm: float) -> bool:
    """Whether two figures of `state.figures` are equal within the tolerance."""
    if isinstance(value, list) and isinstance(wanted, list):
        norm = max(wanted[1], least_norm) if math.isfinite(wanted[1]) else 1.0
        return all(_near(a, b, tolerance * norm) for a, b in zip(value, wanted, strict=True))
    if isinstance(value, float) and isinstance(wanted, float):
        return _near(value, wanted, tolerance * abs(wanted) if math.isfinite(wanted) else 0.0)
    return bool(value == wanted)


def _near(a: float, b: float, bound: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= bound
