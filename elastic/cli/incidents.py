"""What has struck a job, for people and for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic.cli.formats import print_table, printable
from elastic.cli.report import duration
from elastic.core.legible import is_instant
from elastic.errors import ConfigurationError

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_PHASES = ("detect", "persist", "notify", "join", "sync", "first_step")
_OUTCOMES = {
    "under_way": "under way",
    "waiting": "workers wait until there are enough of them",
    "struck_again": "before a step was committed the next incident came",
    "trains_on": "the group trains on; no later checkpoint is whole yet",
    "saved_since": "the group trained on; a later checkpoint is whole",
    "job_ended": "the job ended with it",
    "unknown": "how it went on is not known: the leader changed before it was over",
}


def documents_of(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Raises ConfigurationError for what is no such document."""
    try:
        found = [json.loads(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise _unreadable() from error
    if not all(isinstance(document, dict) for document in found):
        raise _unreadable()
    return found


def print_incidents(documents: Sequence[Mapping[str, Any]]) -> None:
    """A line for each. Raises ConfigurationError for what is no such document."""
    try:
        rows = [_row(document) for document in documents]
    except _UNREADABLE as error:
        raise _unreadable() from error
    if rows:
        print_table(("incident", "at", "step", "took", "lost", "what"), rows)
    else:
        print("no incident has been recorded")


def print_explained(document: Mapping[str, Any]) -> None:
    """One page. Raises ConfigurationError for what is no such document."""
    try:
        lines = list(_page(document))
    except _UNREADABLE as error:
        raise _unreadable() from error
    for line in lines:
        print(printable(line))


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "the coordinator does not tell of incidents in a way that can be read here; ask it with "
        "the version of elastic that it has"
    )


def _row(document: Mapping[str, Any]) -> tuple[object, ...]:
    recovered = document["outcome"] == "recovered"
    took = duration(float(document["lasted_s"])) if recovered else _short(document["outcome"])
    return (
        int(document["number"]),
        _instant(document["unix_s"]),
        int(document["committed"]),
        took,
        duration(float(document["lost_s"])),
        str(document["summary"]),
    )


def _short(outcome: str) -> str:
    return str(outcome).replace("_", " ")


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"incident {int(document['number'])}, {_instant(document['unix_s'])}"
    yield f"what struck:  {document['summary']}"
    if document["noticed_by"]:
        yield f"noticed by:   {document['noticed_by']}"
    yield from _effect(document)
    yield from _signs(document["noticed"])
    shown = {s["worker"] for s in document["hang"]["stacks"]} if document["hang"] else set()
    for process in document["processes"]:
        yield from _process(process, with_log=process["worker"] not in shown)
    if document["further_processes"]:
        yield f"and {int(document['further_processes'])} more processes ended"
    if document["hang"] is not None:
        yield from _hang(document["hang"])


def _effect(document: Mapping[str, Any]) -> Iterator[str]:
    """What it has led to, and what it has cost."""
    yield f"outcome:      {_outcome(document)}"
    if document["verdict"]:
        yield f"              {document['verdict']}"
    if document["saves"] is None and document["generation"]:
        after = ""
        if document["followed_by"]:
            size, number = int(document["world_size_after"]), int(document["followed_by"])
            after = f", followed by generation {number} of {size}"
        group = f"generation {int(document['generation'])} of {int(document['world_size'])} workers"
        yield f"group:        {group}{after}"
    yield f"last commit:  step {int(document['committed'])}{_given_up(document)}"
    if document["saves_lost"]:
        steps = ", ".join(str(int(step)) for step in document["saves_lost"])
        yield f"saves:        those of step {steps} were given up for it"
    phases = [
        f"{name} {duration(float(document['recovery'][f'{name}_s']))}"
        for name in _PHASES
        if f"{name}_s" in document["recovery"]
    ]
    if phases:
        yield f"phases:       {', '.join(phases)}"
    if document["saves"] is not None:
        return  # it has held up nobody
    kinds = sorted(document["seconds"].items(), key=lambda pair: -float(pair[1]))
    parts = ", ".join(f"{kind} {duration(float(s))}" for kind, s in kinds)
    lost = duration(float(document["lost_s"]))
    yield f"lost:         {lost} of slot time{f' ({parts})' if parts else ''}"


def _outcome(document: Mapping[str, Any]) -> str:
    outcome = document["outcome"]
    if outcome == "recovered":
        took = duration(float(document["lasted_s"]))
        return f"trained on {took} after the first sign"
    return _OUTCOMES.get(outcome, str(outcome))


def _given_up(document: Mapping[str, Any]) -> str:
    again, lost = int(document["steps_again"]), int(document["steps_lost"])
    samples = document["samples_given_up"]
    count = f" ({int(samples)} samples)" if samples is not None else ""
    if lost:
        return f"; {lost} committed steps were lost{count} and are computed again"
    if again:
        return f"; {_steps(again)} begun and computed again{count}"
    return ""


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"


def _signs(signs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(signs) > 1:
        yield "signs, in their order:"
    for sign in signs if len(signs) > 1 else ():
        who = f"rank {sign['rank']}" if sign["rank"] is not None else str(sign["worker"])
        where = f"node {sign['node']}" if sign["node"] else "coordinator"
        detail = f": {sign['detail']}" if sign["detail"] else ""
        about = ", ".join(filter(None, (where, who)))
        yield f"  {float(sign['after_s']):+9.3f} s  {_short(sign['sign'])}, {about}{detail}"


def _process(process: Mapping[str, Any], *, with_log: bool) -> Iterator[str]:
    """with_log: else its stacks follow, which are also in its log."""
    rank = process["rank"] if process["rank"] is not None else "-"
    label = f"{process['node']}:{rank}"
    yield ""
    verb = "raised " if process["kind"] == "exception" else ""
    yield f"{label} (worker {process['worker']}) {verb}{process['message']}"
    if process["kernel"]:
        yield f"  the kernel's log: {process['kernel']}"
    if process["log"]:
        yield f"  its log on that node: {process['log']}"
    for title, name in (("traceback", "traceback"), ("the end of its log", "log_tail")):
        if process[name] and (with_log or name == "traceback"):
            yield f"  {title}:"
            for line in str(process[name]).splitlines():
                yield f"    {label}| {line}"


def _hang(hang: Mapping[str, Any]) -> Iterator[str]:
    for stacks in hang["stacks"]:
        label = f"{stacks['node']}:{int(stacks['rank'])}"
        yield ""
        yield f"{label} (worker {stacks['worker']}) {stacks['doing']}"
        for line in str(stacks["text"]).splitlines():
            yield f"    {label}| {line}"


def _instant(unix_s: Any) -> str:
    at = float(unix_s)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if is_instant(at) else "-"
