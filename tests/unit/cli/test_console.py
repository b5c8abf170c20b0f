"""The displays of a run: which lines and events they show, and how often."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic
from elastic.cli import console
from elastic.cli.console import JsonDisplay, LiveDisplay, describe
from elastic.runtime import journal
from elastic.runtime.journal import Entry
from elastic.settings.shared import Console

# Recorded for programs: too frequent, or of no use to a person who watches.
FOR_PROGRAMS = {"progress", "node_connected", "worker_started"}
# Names that the code composes where it records them.
COMPOSED = {
    "f'node_{state}'": ("node_drained", "node_quarantined"),
    "f'registration_{state.name.lower()}'": (
        "registration_held",
        "registration_suspect",
        "registration_gone",
    ),
    "f'{self._name}_failed'": ("ledger_failed", "curve_failed"),
    "f'{self._name}_continued'": ("ledger_continued", "curve_continued"),
}
# Every field that an event's text form uses.
FIELDS = {
    **dict.fromkeys(("exit_code", "local_rank", "pid"), 1),
    "from_step": 7,
    "steps": [9, 12],
    "value": "nan",
    "number": 3,
    "summary": "rank 1 hangs",
    "explain": "elastic explain 3",
    "action": "replace",
    "command": "elastic agent train.py",
    "names": "model.weight",
    "rank": 2,
    "advice": "reduce first",
    "address": "h1:4000",
    "serves": "page, metrics and health checks",
    "after_step": 7,
    "bytes": 10,
    "checkpoint": 10,
    "certificate": "/tls/job.pem",
    "committed": 12,
    "copy_ms": "1.5",
    "directories": 3,
    "exit_code": 1,
    "expected": "job.job.elastic",
    "expires": "2030-01-01",
    "found": "other.job.elastic",
    "generation": 3,
    "goodput": 0.25,
    "grace_s": 60.0,
    "job": "digits",
    "kind": "signal",
    "lasted_s": 5.2,
    "lasts_s": 1.2,
    "verdict": "rank 2 (node b) has not entered the all-reduce of step 512",
    "leader": "h2:4000",
    "log_dir": "/logs",
    "machine": "m1",
    "meaning": "failed",
    "message": "was killed",
    "name": "something_new",
    "node": "n1",
    "owner": "an agent on host h2",
    "at_most_s": 11.0,
    "run_id": "default",
    "waits_for": "the end of that coordinator",
    "pause_s": 0.2,
    "stopped_s": 18.2,
    "where": "f.py:1 in f",
    "path": "/run/agent.sock",
    "peer": "ipv4:10.0.0.1:1",
    "reason": "member_lost",
    "silent_s": 31.5,
    "source": "initial",
    "step": 12,
    "stored": 2,
    "sync_s": 0.5,
    "total_s": 0.25,
    "usual_s": 0.05,
    "waited_s": 15.0,
    "worker": "local-1",
    "place": "train.py:9",
    "within": "the block of",
    "undone": "true",
    "world_size": 4,
}


def entry(name: str, /, **fields: object) -> Entry:
    return Entry(unix_s=1.0, name=name, fields=fields)


def recorded_names() -> Iterator[str]:
    """The names that the code gives to journal entries and to workers' notices."""
    for path in sorted(Path(elastic.__file__).parent.rglob("*.py")):
        for called, first in calls(ast.parse(path.read_text())):
            if called in ("record", "_notify", "notice", "Notice", "_report", "report"):
                yield from names_in(first)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The name and the first argument of each call of a function or method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (arguments := [*node.args, *by_name(node)]):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr, arguments[0]
            elif isinstance(node.func, ast.Name):
                yield node.func.id, arguments[0]


def by_name(call: ast.Call) -> Iterator[ast.expr]:
    yield from (keyword.value for keyword in call.keywords if keyword.arg == "name")


def names_in(name: ast.expr) -> Iterator[str]:
    if isinstance(name, ast.IfExp):
        yield from names_in(name.body)
        yield from names_in(name.orelse)
    elif isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield name.value
    elif isinstance(name, ast.JoinedStr):
        yield from COMPOSED[ast.unparse(name)]


@pytest.fixture(scope="module")
def names() -> set[str]:
    return set(recorded_names())


def test_recorded_names_include_known_events(names: set[str]) -> None:
    assert {"job_finished", "job_ended", "checkpoint_damaged", "generation_formed"} <= names


def test_every_event_has_a_text_form_unless_it_is_for_programs(names: set[str]) -> None:
    silent = {name for name in names if describe(entry(name, **FIELDS)) is None}
    assert silent == FOR_PROGRAMS


def test_every_event_is_documented(names: set[str]) -> None:
    document = (Path(__file__).parents[3] / "docs" / "EVENTS.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in document] == []


def test_no_text_form_exists_for_an_unrecorded_event(names: set[str]) -> None:
    assert set(console._FORMS) <= names


class Screen:
    """A display on text streams, with the clock `now` that the test sets."""

    def __init__(self, choice: Console = Console.RANK0) -> None:
        self.now = 0.0
        self.out, self.err = io.StringIO(), io.StringIO()
        self.display = JsonDisplay(choice, out=self.out, err=self.err, clock=lambda: self.now)

    def progress(self, step: int) -> None:
        self.display.entry(entry("progress", step=step))

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.err.getvalue().splitlines()]


def test_progress_is_shown_at_intervals_and_other_events_always() -> None:
    screen = Screen()
    for step in range(3):
        screen.progress(step)
    screen.display.entry(entry("recovered", total_s=0.1))
    screen.now = console.PROGRESS_EVERY_S - 0.1
    screen.progress(3)
    screen.now = console.PROGRESS_EVERY_S
    screen.progress(4)
    screen.now += 1.0
    screen.progress(5)
    assert [(e["event"], e.get("step")) for e in screen.events()] == [
        ("progress", 0),
        ("recovered", None),
        ("progress", 4),
    ]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        (Console.ALL, ["[rank 0] a", "[rank 1] b", "[local-1] c", "[local-2] d", "[local-11] e"]),
        (Console.RANK0, ["[rank 0] a", "[local-1] c"]),
        (Console.NONE, []),
    ],
)
def test_console_choice_decides_whose_lines_are_shown(choice: Console, shown: list[str]) -> None:
    """Before workers have ranks, the first worker stands for rank 0."""
    screen = Screen(choice)
    for rank, worker, line in (
        (0, "local-2", "a"),
        (1, "local-1", "b"),
        (None, "local-1", "c"),
        (None, "local-2", "d"),
        (None, "local-11", "e"),
    ):
        screen.display.output(rank, worker, line)
    assert screen.out.getvalue().splitlines() == shown


def test_worker_lines_keep_colours_but_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "\x1b[31mloss\x1b[0m \x1b]0;title\x07"
    screen = Screen()
    screen.display.output(0, "local-1", line)
    assert screen.out.getvalue() == "[rank 0] \x1b[31mloss\x1b[0m \\x1b]0;title\\x07\n"
    live = LiveDisplay(Console.RANK0)
    live.output(0, "local-1", line)
    live.entry(entry("worker_failed", worker="local-1", message="\x1b[2J"))
    live.close()
    shown = capsys.readouterr().err
    assert "[rank 0] loss \\x1b]0;title\\x07" in shown
    assert "worker local-1 \\x1b[2J" in shown


def test_a_flood_of_lines_shows_the_newest_and_counts_those_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = LiveDisplay(Console.RANK0)
    for number in range(100_000):
        display.output(0, "local-1", f"line {number}.")
    display.close()
    shown = capsys.readouterr().err
    assert "line 99999." in shown
    assert shown.count("[rank 0]") < 50_000
    passed_over = sum(map(int, re.findall(r"\[(\d+) lines are only in the logs\]", shown)))
    assert passed_over + shown.count("[rank 0]") == 100_000


def test_the_live_display_shows_progress_in_its_status_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.closing(LiveDisplay(Console.RANK0)) as display:
        assert str(display._line()) == "starting..."
        facts = {"step": 7, "epoch": 1, "generation": 2, "world_size": 3, "step_s": 0.1}
        display.entry(entry("progress", **facts, samples_per_s=640.4, reported={"loss": 0.123456}))
        display.entry(entry("recovered", total_s=0.25, committed=7))
        display.entry(entry("worker_failed", worker="local-2", message="[bold]was killed"))
        display.output(0, "local-1", "loss [red] 0.5")
        display.output(1, "local-2", "not shown")
        assert str(display._line()) == (
            "step 7 | epoch 1 | loss 0.1235 | 640 samples/s | world 3 | generation 2 | "
            "last recovery 250 ms"
        )
    shown = capsys.readouterr().err
    for part in ("recovered in 250 ms", "worker local-2 [bold]was killed", "[rank 0] loss [red]"):
        assert part in shown
    assert "not shown" not in shown


def test_the_live_display_ends_with_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    display = LiveDisplay(Console.RANK0)
    spent = {"productive": 30.0, "start_up": 600.0}
    display.entry(entry("job_finished", committed=7, goodput=0.047619, slot_seconds=spent))
    display.entry(entry("job_ended", committed=7, goodput=None, slot_seconds={}))
    display.close()
    shown = capsys.readouterr().err.splitlines()
    assert [" ".join(line.split()) for line in shown if line.strip()] == [
        "finished after 7 steps, goodput 4.8%",
        "productive 30.0 s 4.8%",
        "start_up 10.0 min 95.2%",
        "ended after 7 steps",
    ]


def test_worker_lines_as_json_name_job_run_node_worker_and_rank() -> None:
    out, err = io.StringIO(), io.StringIO()
    origin = {"job": "digits", "run": "default", "node": "n1"}
    display = JsonDisplay(Console.JSON, origin=origin, out=out, err=err)
    display.output(1, "n1-2", 'a "line"\x1b[31m')
    display.output(None, "n1-3", "of a spare")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert time.time() - first.pop("time") < 60.0
    assert first == {
        "event": "worker_output",
        "severity": "info",
        **origin,
        "worker": "n1-2",
        "rank": 1,
        "stream": "output",
        "line": 'a "line"\x1b[31m',
    }
    assert (second["rank"], second["worker"]) == (None, "n1-3")
    assert not err.getvalue()


def test_every_event_with_a_raised_severity_exists() -> None:
    assert console._FORMS.keys() | {"events_lost"} >= journal._ERRORS | journal._WARNINGS
