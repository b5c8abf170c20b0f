"""A job's status as its coordinator tells it, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from google.protobuf.json_format import MessageToDict

from elastic.cli.formats import print_table, printable
from elastic.cli.report import accounts_of, goodput_line
from elastic.core.legible import is_instant
from elastic.core.membership import WorkerPhase
from elastic.errors import meaning_of
from elastic.store.job_runs import RunEnd
from elastic.v1 import control_pb2 as pb

_LONG_S, _LONG_FACTOR = 1.0, 5.0  # of a step that is worth a line
_NO_STEP = "step not known: no member has reported to this coordinator yet"


def to_document(reply: pb.JobStatus) -> dict[str, Any]:
    """The status as JSON, with the recoveries unpacked."""
    document = MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_numbers(document, reply.DESCRIPTOR)
    document["recoveries"] = [_recovery(r) for r in document.pop("recoveries_json")]
    del document["accounts_json"]
    document["accounts"] = accounts_of(reply)
    return document


def _restore_numbers(document: dict[str, Any], kind: Any) -> None:
    """Protobuf's JSON has 64-bit integers as text, which no reader of a count expects."""
    for field in kind.fields:
        value = document.get(field.name)
        if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            document[field.name] = (
                [int(n) for n in value] if isinstance(value, list) else int(value or 0)
            )
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if isinstance(value, list) else filter(None, [value]):
                _restore_numbers(part, field.message_type)


def end_to_document(job: str, end: RunEnd) -> dict[str, Any]:
    """The same of a run that has ended: no group, no workers."""
    document = dataclasses.asdict(end)
    phase = "left" if document.pop("left") else "ended"
    return {"job": job, "phase": phase, "meaning": meaning_of(end.exit_code), **document}


def print_end(job: str, end: RunEnd) -> None:
    """For people."""
    phase, meaning = "left" if end.left else "ended", meaning_of(end.exit_code)
    print(printable(f"job {job}: {phase}, run {end.run_id}: {meaning} (exit code {end.exit_code})"))
    instant = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.ended_unix_s))
    print(f"step {end.committed}, at {instant}")
    if end.message:
        print(printable(end.message))
    print(printable(end.how_to_go_on(job)))


def print_status(reply: pb.JobStatus) -> None:
    """For people."""
    progress, generation = reply.progress, reply.generation
    figures = "".join(f", {name} {value:.4g}" for name, value in progress.reported.items())
    least = f" (at least {reply.min_workers})" if reply.min_workers > 1 else ""
    count = f"{len(generation.members)} of {reply.wanted_workers} workers{least}"
    print(printable(f"job {reply.job}: {reply.phase}, {count}"))
    if progress.generation or not generation.number:
        print(printable(f"step {progress.committed}, epoch {progress.epoch}{figures}"))
        print(f"{progress.samples_per_s:.0f} samples/s, {progress.step_s * 1000:.1f} ms a step")
    else:  # rank 0 has not reported to this leader
        print(f"step {progress.committed}" if progress.committed else _NO_STEP)
    if progress.in_step_s > max(_LONG_S, _LONG_FACTOR * progress.step_s):
        print(f"the step under way lasts for {progress.in_step_s:.1f} s so far")
    print(f"generation {generation.number}, restarts {reply.restarts} of {reply.max_restarts}")
    if line := goodput_line(reply):
        print(printable(line))
    if reply.coordinator:
        doubt = "" if reply.in_office else " (in doubt: the store does not answer)"
        print(printable(f"coordinator {reply.coordinator}{doubt}"))
    if reply.verdict and is_instant(reply.verdict_unix_s):
        at = time.strftime("%H:%M:%S", time.localtime(reply.verdict_unix_s))
        print(printable(f"held up at {at}: {reply.verdict}"))
    for slow in reply.slow:
        print(printable(f"slow: {slow.verdict}"))
    for line in _pauses(reply):
        print(printable(line))
    if reply.checkpoint_dir:
        where = printable(reply.checkpoint_dir)
        print(f"last checkpoint: step {reply.checkpoint_step} in {where}")
    ranks = {member.worker: rank for rank, member in enumerate(generation.members)}
    rows = [
        (w.worker, node.node, ranks.get(w.worker, "-"), _phase(w.phase), w.committed, w.pid)
        for node in reply.nodes
        for w in node.workers
    ]
    print_table(("worker", "node", "rank", "phase", "step", "pid"), rows)
    for text in reply.recoveries_json[-3:]:
        recovery = _recovery(text)
        number, reason = recovery.get("generation"), recovery.get("reason")
        total_s = recovery.get("total_s")
        took = f"{total_s * 1000:.0f} ms" if isinstance(total_s, float) else "unknown"
        print(printable(f"recovery to generation {number} ({reason}): {took}"))


def _recovery(text: str) -> dict[str, Any]:
    """Empty if another version has written what this one cannot read."""
    try:
        recovery = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return recovery if isinstance(recovery, dict) else {}


def _pauses(reply: pb.JobStatus) -> list[str]:
    """What has held up daemons so far, if anything has."""
    nodes = [(f"the agent of {node.node}", node.longest_pause_s) for node in reply.nodes]
    found = [("the coordinator", reply.longest_pause_s), *nodes]
    return [
        f"longest pause of {who}: {pause_s * 1000:.0f} ms (events loop_paused)"
        for who, pause_s in found
        if pause_s > 0.0
    ]


def _phase(number: int) -> str:
    """A newer version may have more of them."""
    try:
        return WorkerPhase(number).name.lower()
    except ValueError:
        return f"phase {number}"
