"""How the end of a script is reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.core.membership import FailureKind
from elastic.rpc.codec import failure_from_pb
from elastic.worker.link import Link
from elastic.worker.process.bootstrap import run_script


class Sent:
    """A link that keeps what is sent."""

    worker = "a0"

    def __init__(self) -> None:
        self.failures: list[Any] = []

    def hello(self) -> None:
        pass

    def send(self, *, failure: Any) -> None:
        self.failures.append(failure)


@pytest.mark.parametrize(
    ("error", "kind"),
    [("ValueError", FailureKind.EXCEPTION), ("Stranded", FailureKind.LEFT_OUT)],
)
def test_only_what_the_script_does_counts_against_it(
    error: str, kind: FailureKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.setattr("sys.argv", [])
    script = tmp_path / "train.py"
    script.write_text(f"from elastic.errors import *\nraise {error}('here')\n")
    link = Sent()
    assert run_script(cast(Link, link), [str(script)]) != 0
    (failure,) = link.failures
    assert failure_from_pb(failure).kind is kind
