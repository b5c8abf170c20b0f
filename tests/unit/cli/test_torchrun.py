"""What `elastic torchrun` prints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.torchrun import Display
from elastic.runtime.journal import Entry


class Shown:
    """A display, and what it has printed."""

    def __init__(self, level: str = "") -> None:
        self.err = io.StringIO()
        self.display = Display("train.py", level, self.err)

    def happens(self, name: str, **fields: Any) -> None:
        self.display.entry(Entry(unix_s=0.0, name=name, fields=fields))

    def fails(self, rank: int, code: int, *, asked: bool = False, error_file: str = "") -> None:
        details = {"worker": f"w{rank}", "rank": rank, "local_rank": rank, "exit_code": code}
        details |= {"pid": 40 + rank, "asked": str(asked).lower(), "error_file": error_file}
        details["host"] = "node7"
        self.happens("script_ended", node="local", details=details)

    def ends(self, code: int) -> str:
        self.happens("job_ended", exit_code=code, committed=0, message="it failed")
        self.display.end(code)
        return self.err.getvalue()


def test_the_root_cause_is_the_first_script_that_nobody_asked_to_end() -> None:
    shown = Shown()
    shown.fails(1, -15, asked=True)
    shown.fails(0, 3)
    shown.fails(2, 4)
    causes = shown.ends(1).partition("Root Cause")
    assert "rank      : 0 (local_rank: 0)" in causes[2]
    assert "host      : node7" in causes[2]
    assert "exitcode  : 3 (pid: 40)" in causes[2]
    assert [f"rank      : {rank} " in causes[0] for rank in range(3)] == [False, True, True]
    assert causes[0].count("elastic: failed (exitcode") == 1


def test_a_script_that_was_asked_to_end_is_never_the_cause() -> None:
    shown = Shown()
    shown.happens("worker_failed", worker="w0", message="found no free port", kind="exception")
    shown.fails(1, -15, asked=True)
    text = shown.ends(1)
    assert "Root Cause" not in text
    assert "elastic: worker w0 found no free port" in text


def test_only_the_last_attempt_is_in_the_table() -> None:
    shown = Shown()
    shown.fails(0, 3)
    shown.happens("generation_formed", generation=2, reason="started", world_size=2)
    shown.fails(1, 5)
    table = shown.ends(1).partition("FAILED\n---")[2]
    assert "exitcode  : 5" in table
    assert "exitcode  : 3" not in table


@pytest.mark.parametrize("code", [0, 1])
def test_there_is_no_table_after_success_or_a_signal(code: int) -> None:
    shown = Shown()
    if code:
        shown.display.told_to_end("SIGTERM")
    shown.fails(0, -15, asked=True)
    assert "FAILED" not in shown.ends(code)


def test_the_error_file_gives_the_traceback_and_is_handed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "own.json", tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    message = {"message": "no corpus", "extraInfo": {"py_callstack": "line 1\nline 2"}}
    other.write_text(json.dumps({"message": message}))
    shown = Shown()
    shown.fails(0, 1, error_file=str(other))
    assert "traceback : line 1\n  line 2\n" in shown.ends(1)
    assert json.loads(own.read_text()) == {"message": {**message, "errorCode": 1}}


def test_a_damaged_error_file_does_not_matter(tmp_path: Path) -> None:
    for content in ("", "[]", '{"message": 3}', '{"message": {"extraInfo": 1}}'):
        path = tmp_path / "error.json"
        path.write_text(content)
        shown = Shown()
        shown.fails(0, 1, error_file=str(path))
        assert "Root Cause" in shown.ends(1)


def test_loglevel_chooses_what_is_shown() -> None:
    texts = {}
    for level in ("", "INFO", "ERROR"):
        shown = Shown(level)
        shown.happens("generation_formed", generation=1, reason="started", world_size=2)
        shown.happens("warning", source="logs", message="no space")
        texts[level] = shown.err.getvalue()
    assert "generation 1" in texts["INFO"]
    assert "generation 1" not in texts[""]
    assert "no space" in texts[""]
    assert texts["ERROR"] == ""
