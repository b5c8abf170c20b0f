"""Any arguments on the command line give work, or a message with its exit code, no traceback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastic.agent.registration import StartToken
from elastic.cli import agent, coordinator, main, operator, run
from elastic.cli.launch import worker_environment
from elastic.errors import TransientError
from elastic.rpc.control_client import ControlClient
from elastic.settings.commands import every_option
from elastic.v1 import local_pb2 as pb

_COMMANDS = (
    "run",
    "coordinator",
    "agent",
    "status",
    "nodes",
    "stacks",
    "incidents",
    "explain",
    "trace",
    "drain",
    "stop",
    "events",
    "jobs",
    "forget",
)
_FLAGS = [option.flag for option in every_option().values()]
_OTHERS = ["--config", "--address", "--output", "--reason", "--clear", "--follow", "--step", "--"]
_ETCD = ("--etcd", "127.0.0.1:1", "--insecure")
_PLAIN = "".join(map(chr, range(32, 127))).replace("/", "").replace("~", "")
_VALUES = st.sampled_from(
    [
        *("", "0", "1", "-1", "2", "1.5", "nan", "inf", "1e400", "auto", "gpu", "cpu", "x", "job"),
        *("9" * 5000, "1" + "0" * 30, str(2**31 - 1), str(2**32), "1:2", "true", "live", "json"),
        *("\udcff", "\udcff.py", "a\nb", "\x1b[2J", "127.0.0.1:1", "[::1]:0", "h:99999"),
        *("0.0.0.0:1", "unix:x", "unix:", "http://h:1", "https://127.0.0.1:1", "memory://x"),
        *(
            "nosuch://x",
            "://",
            "file://",
            "script.py",
            "folder",
            "folder/x",
            "nothing.py",
            "..",
            ".",
        ),
        *("torchrun", "elastic", "'", '"', "table", "٣", "a" * 300, "-", "--", "=", "[a]", "{}"),
    ]
) | st.text(st.sampled_from(_PLAIN + "é\u2028\udc80"), max_size=5)
_WORDS = st.one_of(
    st.tuples(st.sampled_from(_FLAGS + _OTHERS), _VALUES),
    st.builds("{}={}".format, st.sampled_from(_FLAGS + _OTHERS), _VALUES).map(lambda word: (word,)),
    _VALUES.map(lambda word: (word,)),
    st.sampled_from([("script.py",), _ETCD]),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which commands run up to where they would start processes or ask others."""
    root = tmp_path_factory.mktemp("place")
    (root / "script.py").write_text("import elastic")
    (root / "folder").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        patched.setenv("XDG_STATE_HOME", str(root / "state"))
        patched.setattr(main, "never_blocking", contextlib.nullcontext)  # writes past the runner
        patched.setattr(run, "adopt_orphans", lambda: None)
        patched.setattr(agent, "adopt_orphans", lambda: None)
        for command in (run, agent, coordinator):
            patched.setattr(command, "set_title", lambda *_: None)
        patched.setattr(run, "_run", _run)
        patched.setattr(agent, "_attend", _attend)
        patched.setattr(coordinator, "_coordinate", _coordinate)
        patched.setattr(operator, "ControlClient", _Unanswered)
        patched.setattr(operator, "find_leader", _nobody)
        patched.setenv("ELASTIC_TIMEOUT_S", "0.1")  # no leader appears within it
        yield root


async def _run(command: run.Command, checkpoints: Any, logs: Path, _display: Any) -> int:
    run._job_options(command, checkpoints)
    options = run.node_options(command, Path("run"), logs)
    options.hello.SerializeToString()
    return _build_messages(options)


async def _attend(
    command: agent.NodeCommand,
    directory: Any,
    logs: Path,
    *_: Any,
    unsure: str,
) -> int:
    del unsure
    workers = command.settings.nproc_per_node
    options = agent._options(
        command,
        directory,
        logs,
        host="h",
        environment=worker_environment(workers, "h", classic=command.classic),
        token=StartToken("0" * 64, "1" * 64),
        start="1",
    )
    options.hello.SerializeToString()
    agent._document(command, "h", "0" * 32)
    return _build_messages(options)


def _build_messages(options: Any) -> int:
    """Build the messages that the workers would get; return exit code 0."""
    pb.SpawnRequest(argv=options.argv, log_path=str(options.log_directory)).SerializeToString()
    assignment = pb.Assignment(
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.settings.checkpoint_every,
        local_world_size=options.machine.slots,
        join_timeout_s=options.settings.join_timeout_s,
    )
    assignment.SerializeToString()
    return 0


async def _coordinate(settings: Any, checkpoints: Any, *_: Any) -> int:
    coordinator._job_options(settings, checkpoints, coordinator._advertised(settings))
    return 0


async def _nobody(*_: Any, **__: Any) -> None:
    return None


class _Unanswered(ControlClient):
    async def _ask(self, method: str, request: Any, timeout_s: float) -> Any:
        request.SerializeToString()
        raise TransientError(f"{method}: nobody answers within {timeout_s} s")

    async def events(self, *, follow: bool) -> AsyncIterator[str]:
        del follow
        raise TransientError("nobody answers")
        yield ""


def _check(arguments: list[str]) -> None:
    result = CliRunner().invoke(main.app, arguments)
    said = f"{arguments}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    assert isinstance(result.exception, SystemExit | None), said
    assert result.exit_code in (0, 2, 75, 78), said
    assert "Traceback" not in result.output, said
    assert result.output.strip() or result.exit_code == 0, said


@pytest.mark.parametrize("command", _COMMANDS)
@example(words=[("\udc80",)], etcd=False)
@given(words=st.lists(_WORDS, max_size=5), etcd=st.booleans())
def test_a_command_with_any_arguments_works_or_says_why_not(
    place: Path, command: str, words: list[tuple[str, ...]], etcd: bool
) -> None:
    del place
    given_etcd = _ETCD if etcd and command not in ("run",) else ()
    _check([command, *given_etcd, *(word for pair in words for word in pair)])


@given(words=st.lists(st.sampled_from(["checkpoint", "ls", "verify", *_COMMANDS]) | _VALUES))
def test_any_words_work_or_are_refused_with_a_message(place: Path, words: list[str]) -> None:
    del place
    _check(words)


@given(
    action=st.sampled_from(["ls", "verify"]), words=st.lists(_WORDS, max_size=3), directory=_VALUES
)
def test_checkpoint_commands_with_any_arguments_work_or_say_why_not(
    place: Path, action: str, words: list[tuple[str, ...]], directory: str
) -> None:
    del place
    _check(["checkpoint", action, directory, *(word for pair in words for word in pair)])
