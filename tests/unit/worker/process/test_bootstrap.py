"""How `run_script` reports the end of a script."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.core.membership import FailureKind
from elastic.errors import ExitCode
from elastic.rpc.codec import failure_from_pb
from elastic.worker.link import Link
from elastic.worker.process.zygote import run_script


class Sent:
    """A link that keeps the failures that are sent."""

    worker = "a0"

    def __init__(self) -> None:
        self.failures: list[Any] = []

    def hello(self) -> None:
        pass

    def send(self, *, failure: Any) -> None:
        self.failures.append(failure)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[int, Sent]]:
    """A function that runs the lines of a script; it returns the exit code and the link."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(script: str) -> tuple[int, Sent]:
        path, link = tmp_path / "train.py", Sent()
        path.write_text(script)
        return run_script(cast(Link, link), [str(path)]), link

    return run


@pytest.mark.parametrize(
    ("error", "kind"),
    [("ValueError", FailureKind.EXCEPTION), ("Stranded", FailureKind.LEFT_OUT)],
)
def test_only_the_scripts_own_errors_are_reported_as_exceptions(
    error: str, kind: FailureKind, run: Callable[[str], tuple[int, Sent]]
) -> None:
    code, link = run(f"from elastic.errors import *\nraise {error}('here')\n")
    assert code != 0
    (failure,) = link.failures
    assert failure_from_pb(failure).kind is kind


@pytest.mark.parametrize(
    ("way", "code"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("1 / 0", 1)],
)
def test_a_process_forked_by_a_script_ends_as_under_plain_python(
    way: str, code: int, run: Callable[[str], tuple[int, Sent]]
) -> None:
    """The forked process is not a worker: it reports nothing and waits for nobody."""
    before = os.getpid()
    script = f"import os, sys\nif child := os.fork():\n    raise ValueError(child)\n{way}\n"
    try:
        ended, link = run(script)
        if os.getpid() != before:
            os._exit(ended if not link.failures else 99)
    finally:
        if os.getpid() != before:
            os._exit(98)
    (failure,) = link.failures
    child = int(failure.message.rpartition(" ")[2])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


@pytest.mark.parametrize(
    ("last", "reason"),
    [("raise ValueError('my reason')", "ValueError: my reason"), ("sys.exit('mine')", "'mine'")],
)
def test_the_reason_of_a_failure_is_reported_even_if_stderr_is_closed(
    last: str, reason: str, run: Callable[[str], tuple[int, Sent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        code, link = run(f"import sys\nsys.stderr.close()\n{last}\n")
    assert code == 1
    (failure,) = link.failures
    assert reason in failure.message


_NOT_SHOWN = (
    "type('R', (), {'__repr__': lambda self: 1 / 0, '__eq__': lambda self, other: 1 / 0})()"
)


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ("2**40 + 3", 3, "sys.exit(1099511627779)"),
        ("-1", 255, "sys.exit(-1)"),
        ("True", 1, "sys.exit(True)"),
        ("0.0", 1, "sys.exit(0.0)"),
        ("__import__('torch').zeros(2)", 1, "sys.exit(tensor([0., 0.]))"),
        (_NOT_SHOWN, 1, "sys.exit(a R)"),
    ],
)
def test_any_argument_of_sys_exit_is_reported(
    given: str, code: int, told: str, run: Callable[[str], tuple[int, Sent]]
) -> None:
    """In `sys.exit(main())` the argument is what main() returns."""
    ended, link = run(f"import sys\nsys.exit({given})\n")
    assert ended == code
    (failure,) = link.failures
    assert failure.message == f"ended its script with {told}"
    assert failure.code == code


def test_sys_exit_with_different_texts_has_one_failure_signature(
    run: Callable[[str], tuple[int, Sent]],
) -> None:
    signatures = {
        run(f"import sys\nsys.exit('no file in {d}')")[1].failures[0].signature for d in "ab"
    }
    assert len(signatures) == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise ValueError('first\\nsecond')", "ValueError: first\nsecond"),
        ("def f(:", "SyntaxError: invalid syntax (train.py, line 1)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        pytest.param(
            "e = ValueError('no such corpus')\ne.add_note('in shard 3')\nraise e",
            "ValueError: no such corpus\nin shard 3",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are new in 3.11"),
        ),
    ],
)
def test_the_failure_message_is_the_text_of_the_exception(
    script: str, words: str, run: Callable[[str], tuple[int, Sent]]
) -> None:
    _, link = run(script)
    (failure,) = link.failures
    assert failure.message == words


def test_classes_of_a_script_can_be_pickled_after_its_end(
    run: Callable[[str], tuple[int, Sent]],
) -> None:
    """A thread may still write a checkpoint, for example."""
    run("class Options:\n    pass\nsys.exit(0)")
    options = sys.modules["__main__"].Options
    assert type(pickle.loads(pickle.dumps(options()))) is options


@pytest.mark.usefixtures("run")  # restores what a script changes
def test_a_script_may_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("raise ValueError(__name__)")
    link = Sent()
    run_script(cast(Link, link), [str(tmp_path)])
    assert link.failures[0].message == "ValueError: __main__"


@pytest.mark.usefixtures("run")
def test_a_script_run_with_help_fails_with_the_command_that_shows_it(tmp_path: Path) -> None:
    path, link = tmp_path / "train.py", Sent()
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    assert run_script(cast(Link, link), [str(path), "--help"]) == ExitCode.CONFIGURATION
    (failure,) = link.failures
    assert f"python {path} --help" in failure.message


@pytest.mark.usefixtures("run")
def test_a_module_run_with_help_fails_with_the_command_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, link = tmp_path / "shows_help.py", Sent()
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    argv = ["shows_help", "--help"]
    assert run_script(cast(Link, link), argv, module=True) == ExitCode.CONFIGURATION
    assert "python -m shows_help --help" in link.failures[0].message


# The second is what breakpoint() raises at the end of its input; pytest has replaced breakpoint().
@pytest.mark.parametrize("asks", ["input('go on? ')", "import bdb\nraise bdb.BdbQuit"])
def test_a_script_that_reads_its_input_fails_with_no_terminal(
    asks: str, run: Callable[[str], tuple[int, Sent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        _, link = run(asks)
    (failure,) = link.failures
    assert "no terminal" in failure.message


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_script_that_asks_the_environment_for_its_rank_is_told_where_it_is(
    name: str, run: Callable[[str], tuple[int, Sent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    _, link = run(f"import os\nint(os.environ['{name}'])")
    (failure,) = link.failures
    assert "session.rank" in failure.message
    assert "--launch torchrun" in failure.message


@pytest.mark.parametrize("end", ["pass", "1 / 0", "sys.exit(0)"])
def test_a_failure_is_reported_whatever_the_scripts_excepthook_does(
    end: str,
    run: Callable[[str], tuple[int, Sent]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.excepthook", sys.excepthook)  # restored afterwards
    code, link = run(
        f"""
import sys
def hook(kind, error, trace):
    with open({str(tmp_path / "heard")!r}, "w") as file:
        file.write(repr(error))
    {end}
sys.excepthook = hook
raise ValueError("my reason")
"""
    )
    assert code == 1
    assert (tmp_path / "heard").read_text() == "ValueError('my reason')"
    (failure,) = link.failures
    assert failure.message == "ValueError: my reason"
